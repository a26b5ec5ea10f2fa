"""`hf-zero migrate`: translate a DeepSpeed JSON, or an accelerate or FSDP YAML, to settings of hf_zero.

One table per source translates each key. The row of the key itself decides, else the first pattern that matches.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from ..config import STAGES, ZeroConfig
from ..errors import ConfigError
from . import OK, WRONG
from .files import read_settings
from .show import as_command, as_flags, as_plugin, as_training_arguments, print_json, print_to_copy, table, text

Verdict = Literal["same", "trainer", "not needed", "to do", "lost", "stays"]
"""same: a setting of hf_zero. trainer: an argument of the Trainer or Accelerator. not needed: the
engine does it, or has no such thing. to do: a setting whose value the file does not contain. lost:
no equivalent. stays: belongs to the launcher."""
UNKNOWN = "unknown"
ATTENTION = (UNKNOWN, "lost", "to do")
"""Verdicts with which the command ends with status 1."""


@dataclass(frozen=True, slots=True)
class Row:
    """The translation of one key.

    Attributes:
        key: dotted; `*` matches anything.
        target: the setting or Trainer argument that takes the value.
        values: value there (lower case) to value here; None: unchanged; empty: `target` is only named.
    """

    key: str
    verdict: Verdict
    target: str = ""
    values: Mapping[str, Any] | None = None
    why: str = ""


def _rows(verdict: Verdict, prefix: str, keys_of: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows with one verdict; `keys_of`: reason -> keys."""
    for why, keys in keys_of.items():
        for key in keys.split():
            yield Row(prefix + key, verdict, why=why)


_ZERO = "zero_optimization."
_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "disk"}
_SWITCH = {"true": True, "false": False}
_TO_HOST = {"true": "cpu", "false": "none"}
_BOTH_TO_HOST = {"true": ["cpu", "cpu"], "false": ["none", "none"]}
_INT8 = {"true": "int8", "false": None}
_WHOLE = "every checkpoint has full weights, written by all ranks; from_pretrained loads it"
_DATA_PARALLEL = "every rank is a data parallel rank"
_ONE_FORMAT = "one format for weights and gradients"

DEEPSPEED = (
    Row(_ZERO + "stage", "same", "stage"),
    Row(_ZERO + "offload_optimizer.device", "same", "offload_optimizer", _DEVICES),
    Row(_ZERO + "offload_param.device", "same", "offload_params", _DEVICES),
    Row(_ZERO + "offload_*.nvme_path", "same", "offload_dir"),
    Row(_ZERO + "cpu_offload", "same", "offload_optimizer", _TO_HOST),
    Row(_ZERO + "cpu_offload_params", "same", "offload_params", _TO_HOST),
    Row(_ZERO + "zero_quantized_weights", "same", "wire", _INT8, _ONE_FORMAT),
    Row(_ZERO + "zero_quantized_gradients", "same", "wire", _INT8, _ONE_FORMAT),
    Row(_ZERO + "mics_shard_size", "to do", "replicas"),
    Row(_ZERO + "leaf_module.*", "same", "units", {}, "names and classes, such as units='*.experts,MoeBlock'"),
    *_rows("lost", _ZERO, {
        "no fixed split: offload_optimizer='auto' finds one": "offload_optimizer.ratio",
        "one replica per node (replicas=NODES) keeps gathers on a node": "zero_hpz_partition_size",
        "wire='int8' compresses weights and gradients only": "zero_quantized_*",
    }),
    *_rows("not needed", _ZERO, {
        "host buffers are pinned where there is a GPU, and sized by the plan": "offload_*.* cpu_offload_use_pin_memory",
        "no buckets to size: a unit is gathered, reduced and prefetched as one":
            "allgather_bucket_size reduce_bucket_size allgather_partitions reduce_scatter contiguous_gradients "
            "sub_group_size stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
            "prefetch_bucket_size max_live_parameters max_reuse_distance use_multi_rank_bucket_allreduce "
            "stage3_module_granularity_threshold module_granularity_threshold",
        "small parameters move with their block":
            "stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold "
            "model_persistence_threshold",
        "communication always overlaps with computation": "overlap_comm",
        "each rank copies only its own part to the host": "round_robin_gradients",
        _WHOLE: "*gather_16bit_weights_on_model_save *gather_fp16_weights_on_model_save",
        "checkpoints resume on any number of ranks": "elastic_checkpoint",
        "masters are float32 and in the checkpoint": "load_from_fp32_weights",
        "unused parameters are handled as under DDP": "ignore_unused_parameters",
        "one implementation": "legacy_stage1 memory_efficient_linear",
        "zero.Init handles initialisation by apply()": "override_module_apply",
        "no trace cache": "log_trace_cache_warnings",
        "gathers stay within a replica": "mics_*",
    }),
    Row("bf16.enabled", "trainer", "bf16", _SWITCH),
    Row("bfloat16.enabled", "trainer", "bf16", _SWITCH),
    Row("fp16.enabled", "trainer", "fp16", _SWITCH),
    Row("communication_data_type", "same", "reduce_dtype"),
    Row("train_micro_batch_size_per_gpu", "trainer", "per_device_train_batch_size"),
    Row("gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("gradient_clipping", "trainer", "max_grad_norm"),
    Row("steps_per_print", "trainer", "logging_steps"),
    Row("optimizer.type", "trainer", "optim", {
        "adamw": "adamw_torch", "adam": "adamw_torch", "adagrad": "adagrad", "sgd": "sgd", "lion": "lion_32bit",
        "fusedadam": "adamw_torch", "cpuadam": "adamw_torch", "deepspeedcpuadam": "adamw_torch",
    }, "any other torch optimizer is passed to the Trainer as an object"),
    Row("optimizer.params.lr", "trainer", "learning_rate"),
    Row("optimizer.params.betas", "trainer", "adam_beta1, adam_beta2"),
    Row("optimizer.params.eps", "trainer", "adam_epsilon"),
    Row("optimizer.params.weight_decay", "trainer", "weight_decay"),
    Row("optimizer.params.adam_w_mode", "trainer", "", {"true": None}, "pass torch.optim.Adam to the Trainer as an object"),
    Row("scheduler.type", "trainer", "lr_scheduler_type", {
        "warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine",
    }, "another schedule is passed to the Trainer as an object"),
    Row("scheduler.params.warmup_type", "trainer", "", {"linear": None}, "the Trainer's warm-up is linear"),
    Row("scheduler.params.warmup_max_lr", "trainer", "learning_rate"),
    Row("scheduler.params.warmup_num_steps", "trainer", "warmup_steps"),
    Row("scheduler.params.total_num_steps", "trainer", "max_steps"),
    *(Row(f"{name}*", "trainer", "report_to", {}, "the Trainer's own trackers")
      for name in ("tensorboard", "wandb", "csv_monitor", "comet")),
    *_rows("lost", "", {
        "no fixed loss scale: torch's GradScaler adapts it": "fp16.loss_scale",
        "no NVIDIA apex: use bf16 or fp16 of the Trainer": "amp.enabled",
        "gradients have one reduce_dtype": "seq_parallel_communication_data_type",
        "gradients of sparse embeddings are not supported": "sparse_gradients",
        "the Trainer's warm-up starts at 0": "scheduler.params.warmup_min_lr",
        "activations stay on their rank": "activation_checkpointing.partition_activations",
        "set offload_activations to cpu": "activation_checkpointing.cpu_checkpointing",
        "the number of ranks is fixed within a run; a checkpoint resumes on any number": "elasticity.*",
        _DATA_PARALLEL: "tensor_parallel.* pipeline.*",
        "only DeepSpeed has it":
            "sparse_attention* compression_training* data_efficiency* curriculum_learning* eigenvalue* "
            "progressive_layer_drop* quantize_training* hybrid_engine*",
    }),
    Row("activation_checkpointing.*", "trainer", "gradient_checkpointing", {}, "the model's own checkpointing"),
    *_rows("not needed", "", {
        "masters, gradients and sums are float32": "bf16.*",
        "torch's GradScaler scales the loss with its own defaults": "fp16.*",
        "belongs to NVIDIA apex": "amp.*",
        "gradients are accumulated in float32": "data_types.grad_accum_dtype",
        "gradients are averaged in float32": "prescale_gradients gradient_predivide_factor",
        "follows from rows per rank, accumulation and ranks": "train_batch_size",
        "torch's own AdamW": "optimizer.params.torch_adam optimizer.legacy_fusion",
        "the disk tier chooses its requests itself": "aio.*",
        _WHOLE: "checkpoint.*",
        "hf-zero report shows it": "wall_clock_breakdown memory_breakdown comms_logger.*",
        "the plan is printed at the start": "dump_state",
        "use torch's profiler; hf-zero report has times by part of the step": "flops_profiler.*",
        "hf-zero plan says what fits before anything runs": "autotuning.*",
        "an unsuitable optimizer raises an error": "zero_allow_untested_optimizer",
        "torch's own optimizer updates offloaded state": "zero_force_ds_cpu_optimizer",
    }),
)  # fmt: skip

FSDP = (
    Row("sharding_strategy", "same", "stage", {
        "full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0, "hybrid_shard": 3, "4": 3,
        "hybrid_shard_zero2": 2, "hybrid_shard_zero_2": 2, "5": 2,
    }),
    Row("reshard_after_forward", "same", "stage", {
        "true": 3, "false": 2, "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3,
        "hybrid_shard_zero2": 2,
    }),
    Row("offload_params", "same", "offload_params, offload_optimizer", _BOTH_TO_HOST, "both, as FSDP does"),
    Row("cpu_offload", "same", "offload_params, offload_optimizer", _BOTH_TO_HOST, "both, as FSDP does"),
    Row("mixed_precision_policy.reduce_dtype", "same", "reduce_dtype"),
    Row("activation_checkpointing", "trainer", "gradient_checkpointing", _SWITCH),
    *_rows("not needed", "", {
        "the Trainer's bf16 or fp16, with float32 masters": "mixed_precision_policy.*",
        "one engine": "version",
        "units are found in the model: blocks, embeddings, head":
            "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params use_orig_params wrap_policy",
        "communication overlaps with computation, one unit ahead":
            "backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers",
        "all ranks start from rank 0's values": "sync_module_states",
        "with zero.Init() each rank reads only its own bytes": "cpu_ram_efficient_loading",
        _WHOLE: "state_dict_type",
    }),
    *_rows("lost", "", {
        "set bf16 or fp16 of the Trainer; masters and sums are float32": "mixed_precision_policy",
        "set offload_activations to cpu": "activation_cpu_offload",
        "nothing is left out: freeze it": "ignored_modules ignored_params",
        "no TPUs": "xla*",
        _DATA_PARALLEL: "tp_size",
    }),
)  # fmt: skip

ACCELERATE = (
    Row("distributed_type", "stays", why="set MULTI_GPU (MULTI_CPU without GPUs): accelerate must not start another engine"),
    Row("mixed_precision", "trainer", "mixed_precision", {"no": "no", "bf16": "bf16", "fp16": "fp16"}),
    Row("gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("deepspeed_config.zero_stage", "same", "stage"),
    Row("deepspeed_config.offload_optimizer_device", "same", "offload_optimizer", _DEVICES),
    Row("deepspeed_config.offload_param_device", "same", "offload_params", _DEVICES),
    Row("deepspeed_config.offload_*_nvme_path", "same", "offload_dir"),
    Row("deepspeed_config.gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("deepspeed_config.gradient_clipping", "trainer", "max_grad_norm"),
    Row("deepspeed_config.deepspeed_moe_layer_cls_names", "same", "units"),
    *_rows("not needed", "deepspeed_config.", {
        "with zero.Init(): each rank reads only its own bytes": "zero3_init_flag", _WHOLE: "zero3_save_16bit_model",
    }),
    *_rows("lost", "", {
        "DeepSpeed's launcher: use torchrun --nnodes, or accelerate's machine_rank":
            "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile "
            "deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_inclusion_filter",
        _DATA_PARALLEL: "megatron_lm_config* tp_config* parallelism_config*",
        "no fp8": "fp8_config*",
    }),
    *_rows("stays", "", {"accelerate launch keeps it":
        "compute_environment debug use_cpu num_processes num_machines machine_rank main_process_ip "
        "main_process_port main_training_function rdzv_backend same_network gpu_ids downcast_bf16 tpu_* "
        "enable_cpu_affinity dynamo_config* dynamo_backend ipex_config* mpirun_config* env commands command_file "
        "max_restarts monitor_interval rdzv_conf* log_dir",
    }),
)  # fmt: skip

_DEEPSPEED_KEYS = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16", "optimizer",
)  # fmt: skip
_ACCELERATE_KEYS = {"distributed_type", "compute_environment", "deepspeed_config", "num_processes"}
_NOTHING: tuple[Any, ...] = (None, "", "none", False, 0, 1, -1, [], {})
"""Values with which a setting asks for nothing, so that nothing is lost."""
_SIMILARITY = 0.9
_NOTHING_ASKED: tuple[str, str, str] = ("not needed", "", "its value is off, or the default")
_HYBRID_NUMBERS = {("sharding_strategy", "4"), ("sharding_strategy", "5")}


@dataclass(frozen=True)
class Finding:
    """One setting of the file and its translation."""

    key: str
    value: Any
    verdict: str
    becomes: str
    why: str


@dataclass
class Migration:
    """A file in terms of hf_zero: fields of `ZeroConfig`, arguments of the Trainer, and all findings."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    ranks: int | None = None
    machines: int | None = None

    @property
    def command_line(self) -> str:
        return as_flags(self.settings, self.trainer)


def run(file: str, as_json: bool) -> int:
    """Print the translation; return status 1 if a setting needs attention."""
    made = migrate(Path(file))
    if as_json:
        values = {"kind": made.kind, "settings": made.settings, "trainer": made.trainer}
        values |= {"command_line": made.command_line, "plugin": as_plugin(made.settings)}
        print_json({**values, "findings": [asdict(found) for found in made.findings]})
    else:
        _show(made, file)
    return WRONG if any(found.verdict in ATTENTION for found in made.findings) else OK


def migrate(path: Path) -> Migration:
    """Translate one file.

    Raises:
        ConfigError: the file cannot be read, or is of another kind.
    """
    values = read_settings(path)
    keys = set(values)
    is_deepspeed = any(difflib.get_close_matches(key, _DEEPSPEED_KEYS, 1, 0.8) for key in keys)
    is_fsdp = bool({name.removeprefix("fsdp_") for name in keys} & {row.key for row in FSDP})
    if keys & _ACCELERATE_KEYS:
        made = Migration(f"accelerate, {values.get('distributed_type', 'NO')}")
        _accelerate(made, values, path)
    elif is_fsdp and not is_deepspeed:
        made = Migration("the Trainer's FSDP")
        _apply(made, _unprefixed(values), FSDP, "fsdp_")
        made.settings.setdefault("stage", max(STAGES))  # FSDP's own default: full_shard
    elif is_deepspeed:
        made = Migration("DeepSpeed")
        _apply(made, values, DEEPSPEED)
    else:
        raise ConfigError(
            f"{path} is neither a DeepSpeed config (zero_optimization, …), nor an accelerate config "
            f"(distributed_type, …), nor one of FSDP (fsdp_sharding_strategy, …). Its keys: "
            f"{', '.join(sorted(map(str, keys))[:8]) or 'none'}."
        )
    _finish(made)
    return made


def _accelerate(made: Migration, values: dict[str, Any], path: Path) -> None:
    """Translate accelerate's own keys, and those of the engine that it configures."""
    values = dict(values)
    ranks, machines = values.get("num_processes"), values.get("num_machines")
    made.ranks = ranks if isinstance(ranks, int) and ranks > 0 else None
    made.machines = machines if isinstance(machines, int) and machines > 0 else None
    fsdp, engine = (_object(values, name, path) for name in ("fsdp_config", "deepspeed_config"))
    values.pop("fsdp_config", None)
    file = engine.pop("deepspeed_config_file", None)
    if engine or file:
        values["deepspeed_config"] = engine
    _apply(made, values, ACCELERATE)
    if fsdp or values.get("distributed_type") == "FSDP":
        _apply(made, _unprefixed(fsdp), FSDP, "fsdp_config.fsdp_")
        made.settings.setdefault("stage", max(STAGES))  # accelerate's own default: full_shard, reshard_after_forward
    if file:
        inner = path.parent / str(file)  # an absolute name replaces the folder
        _apply(made, read_settings(inner), DEEPSPEED, f"{inner.name}: ")


def _object(values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected names with settings under {name}, found {type(found).__name__}")
    return dict(found)


def _unprefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in values.items()}


def _apply(made: Migration, values: Mapping[str, Any], rows: tuple[Row, ...], prefix: str = "") -> None:
    for key, value in _flat(values, rows):
        matches = sorted((row for row in rows if fnmatchcase(key, row.key)), key=lambda row: row.key != key)
        row = next(iter(matches), None)
        if row is not None and "*" in row.key:  # a misspelt setting must not pass as one of many ignored keys
            exact = [each.key for each in rows if each.verdict in ("same", "trainer") and "*" not in each.key]
            if difflib.get_close_matches(key, exact, 1, _SIMILARITY):
                row = None
        if row is None and value == {} and any(row.key.startswith(f"{key}.") for row in rows):
            found = _NOTHING_ASKED
        elif row is None:
            found = (UNKNOWN, "", _suggestion(key, [row.key for row in rows if "*" not in row.key]))
        else:
            found = _translate(made, value, row)
        made.findings.append(Finding(prefix + key, value, *found))


def _suggestion(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), 1, 0.8)
    return f"not known. Did you mean {close[0]}?" if close else "not known to hf_zero: look it up before dropping it"


def _flat(values: Mapping[str, Any], rows: tuple[Row, ...], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value and not any(row.key in (key, f"{key}*") for row in rows):
            yield from _flat(value, rows, f"{key}.")
        else:
            yield key, value


def _translate(made: Migration, value: Any, row: Row) -> tuple[str, str, str]:
    """Record what a key sets in `made`; return its verdict, what it becomes, and why."""
    if value == "auto":
        return "not needed", "", "auto: it comes from the Trainer's arguments or the model"
    if row.verdict in ("lost", "to do") and value is not True and value in _NOTHING:
        return _NOTHING_ASKED
    if row.verdict == "to do":
        try:
            size = int(str(value))
        except ValueError:
            return "lost", "", "expected a whole number of ranks"
        if size < 1:
            return _NOTHING_ASKED
        return _replicas(made, None if made.ranks is None else made.ranks / size, f"ranks divided by {size}")
    if row.verdict not in ("same", "trainer"):
        return row.verdict, "", row.why
    if row.values == {}:
        return row.verdict, row.target, row.why
    here = value if row.values is None else row.values.get(str(value).lower(), KeyError)
    if here is KeyError:
        return "lost", "", row.why or f"expected one of {', '.join(row.values or ())}"
    if here is None:
        return _NOTHING_ASKED
    chosen = made.settings if row.verdict == "same" else made.trainer
    names = row.target.split(", ")
    parts = dict(zip(names, here if len(names) > 1 and isinstance(here, list) else [here]))
    for name, part in parts.items():
        if chosen.setdefault(name, part) != part:
            return "lost", "", f"{name} is {chosen[name]!r} already: here it is one setting"
    becomes = ", ".join(f"{name}={part}" for name, part in parts.items())
    if str(value).lower().startswith("hybrid") or (row.key, str(value)) in _HYBRID_NUMBERS:
        verdict, replicas, why = _replicas(made, made.machines, "number of machines")
        return verdict, f"{becomes}, {replicas}", why
    return row.verdict, becomes, row.why


def _replicas(made: Migration, count: float | None, what: str) -> tuple[str, str, str]:
    """Translate hybrid sharding: each replica is one group of ranks that shards the state."""
    why = "each group of neighbouring ranks shards one copy"
    if count is None or count < 1 or count != int(count):
        return "to do", "replicas", f"set replicas to the {what}: {why}"
    if count > 1:
        made.settings["replicas"] = int(count)
    return "same", f"replicas={int(count)}", why


def _finish(made: Migration) -> None:
    """Apply what settings mean together; the result is a valid `ZeroConfig`."""
    settings = made.settings
    precision = made.trainer.pop("mixed_precision", "no")
    if precision != "no":
        made.trainer[precision] = True
    made.trainer = {name: value for name, value in made.trainer.items() if value is not False}
    stage = settings.setdefault("stage", 0 if made.kind == "DeepSpeed" else ZeroConfig().stage)
    policy = STAGES.get(stage) if isinstance(stage, int) else None  # ZeroConfig refuses others below
    unused: list[tuple[str, str]] = []
    if policy is not None and policy.keep_full and settings.get("offload_params", "none") != "none":
        unused.append(("offload_params", f"stage {stage} keeps full parameters on the device"))
    if policy is not None and not policy.shard:
        several = ("wire", "replicas", "offload_optimizer")  # refused on several ranks
        unused += [(name, f"stage {stage} shards nothing") for name in several if name in settings]
    for name, why in unused:
        made.findings.append(Finding(name, settings.pop(name), "not needed", "", why))
    if "disk" not in (settings.get("offload_optimizer"), settings.get("offload_params")):
        settings.pop("offload_dir", None)
    made.settings = {name: settings[name] for name in ZeroConfig(**settings).changed() if name in settings}


_ORDER = (*ATTENTION, "same", "trainer", "stays", "not needed")
_STYLES = {"lost": "bold red", UNKNOWN: "bold red", "to do": "yellow", "same": "green", "trainer": "green"}
_LONG = 44
"""Characters of a key with its value from which on the value is not shown."""


def _show(made: Migration, file: str) -> None:
    """Print the command, the same as code, and one table of all settings: those that need attention first."""
    console = Console()
    text(console, "Run your script (with zero.ZeroTrainingArguments) as:", "bold")
    print_to_copy(console, as_command(made.ranks, made.settings, made.trainer, made.machines))
    text(console, "Or in Python (for an Accelerator, the last argument alone):", "bold")
    for line in as_training_arguments(made.settings, made.trainer):
        print_to_copy(console, line)
    text(console, "Remove the DeepSpeed or FSDP settings from the script and from accelerate's configuration.")
    if count := sum(found.verdict in ATTENTION for found in made.findings):
        text(
            console,
            f"The command lacks {count} of {len(made.findings)} settings: the first rows of the table.",
            "bold red",
        )
    alike: dict[tuple[str, str], list[str]] = {}
    for found in sorted(made.findings, key=lambda found: _ORDER.index(found.verdict)):
        value = json.dumps(found.value)
        key = found.key.removeprefix(_ZERO)
        key += "" if found.value is None or len(key) + len(value) > _LONG else f": {value}"
        here = "; ".join(filter(None, (found.becomes, found.why)))
        alike.setdefault((found.verdict, here), []).append(key)
    rows = [
        (Text("\n".join(keys)), Text.assemble((verdict, _STYLES.get(verdict, "bold")), f": {here}"))
        for (verdict, here), keys in alike.items()
    ]
    table(console, f"{file} ({made.kind})", ("setting", "becomes"), rows, left=2, whole=1)
