"""`hf-zero migrate`: a DeepSpeed JSON, or an accelerate or FSDP YAML, as settings of ours. What becomes of a key is a row of
the table: what it is here, why it is not needed, or that it is lost.
"""

from __future__ import annotations

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
from .commands import OK, WRONG, MigrateOptions, as_flags, as_plugin, print_json
from .files import read_settings
from .show import pasted, table, text

Verdict = Literal["same", "trainer", "not needed", "lost", "stays"]
"""same: a setting of ours. trainer: an argument of the Trainer (or of Accelerator). not needed: the engine does it, or has no
such thing. lost: no equivalent, and it mattered. stays: of the launcher, as it was."""


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one key.

    Attributes:
        key: dotted, `*` for any rest.
        into: the setting, or the Trainer's argument, that takes the value.
        values: by the value there, in lower case, the value here, or several settings; None: as it is.
        why: for people.
    """

    key: str
    verdict: Verdict
    into: str = ""
    values: Mapping[str, Any] | None = None
    why: str = ""


_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "disk"}
_SWITCH = {"true": True, "false": False}
_UNITS = "units are found in the model: blocks, embeddings, head"
_BUFFERS = "there are no buckets to size: a unit is gathered, reduced and prefetched as a whole"
_PINNED = "host buffers are page-locked where there is a GPU, and sized by the plan"
_SCALER = "the loss is scaled by torch's GradScaler, with its own defaults"
_WHOLE = "every checkpoint has whole weights, written by all ranks; from_pretrained loads it"

DEEPSPEED = (
    Row("zero_optimization.stage", "same", "stage"),
    Row("zero_optimization.offload_optimizer.device", "same", "offload_optimizer", _DEVICES),
    Row("zero_optimization.offload_param.device", "same", "offload_params", _DEVICES),
    Row("zero_optimization.offload_*.nvme_path", "same", "offload_dir"),
    Row("zero_optimization.offload_optimizer.ratio", "lost", why="no fixed split: offload_optimizer='auto' finds one"),
    Row("zero_optimization.offload_*.*", "not needed", why=_PINNED),
    Row("zero_optimization.cpu_offload", "same", "offload_optimizer", {"true": "cpu", "false": "none"}),
    Row("zero_optimization.cpu_offload_params", "same", "offload_params", {"true": "cpu", "false": "none"}),
    Row("zero_optimization.cpu_offload_use_pin_memory", "not needed", why=_PINNED),
    *(Row(f"zero_optimization.{key}", "not needed", why=_BUFFERS) for key in (
        "allgather_bucket_size", "reduce_bucket_size", "allgather_partitions", "reduce_scatter", "contiguous_gradients",
        "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "use_multi_rank_bucket_allreduce",
        "stage3_module_granularity_threshold", "module_granularity_threshold",
    )),
    *(Row(f"zero_optimization.{key}", "not needed", why="small parameters move with their block") for key in (
        "stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold",
        "model_persistence_threshold",
    )),
    Row("zero_optimization.overlap_comm", "not needed", why="communication always runs beside the computation"),
    Row("zero_optimization.round_robin_gradients", "not needed", why="each rank copies only its own part to the host"),
    Row("zero_optimization.*gather_16bit_weights_on_model_save", "not needed", why=_WHOLE),
    Row("zero_optimization.*gather_fp16_weights_on_model_save", "not needed", why=_WHOLE),
    Row("zero_optimization.elastic_checkpoint", "not needed", why="checkpoints resume on any number of ranks"),
    Row("zero_optimization.load_from_fp32_weights", "not needed", why="masters are float32 and in the checkpoint"),
    Row("zero_optimization.ignore_unused_parameters", "not needed", why="unused parameters are handled as under DDP"),
    Row("zero_optimization.legacy_stage1", "not needed", why="there is one stage 1"),
    Row("zero_optimization.memory_efficient_linear", "not needed", why="linear layers are torch's own"),
    Row("zero_optimization.override_module_apply", "not needed", why="zero.Init handles initialisation by apply()"),
    Row("zero_optimization.log_trace_cache_warnings", "not needed", why="there is no trace to go wrong"),
    Row("zero_optimization.zero_hpz_partition_size", "lost", why="no copy for backward alone; replicas keep gathers on a node"),
    Row("zero_optimization.zero_quantized_*", "lost", why="set wire='int8': gradients and weights travel as codes"),
    Row("zero_optimization.mics_*", "lost", why="here replicas is set: the number of ranks divided by mics_shard_size"),
    Row("zero_optimization.leaf_module.*", "same", "units", {}, "names and classes alike, such as units='*.experts,MoeBlock'"),
    Row("bf16.enabled", "trainer", "bf16", _SWITCH),
    Row("bfloat16.enabled", "trainer", "bf16", _SWITCH),
    Row("bf16.*", "not needed", why="masters, gradients and sums are float32"),
    Row("fp16.enabled", "trainer", "fp16", _SWITCH),
    Row("fp16.loss_scale", "lost", why="no fixed loss scale: torch's GradScaler moves it"),
    Row("fp16.*", "not needed", why=_SCALER),
    Row("amp.enabled", "lost", why="no NVIDIA apex: bf16 or fp16 of the Trainer is autocast with float32 masters"),
    Row("amp.*", "not needed", why="of NVIDIA apex"),
    Row("communication_data_type", "same", "reduce_dtype"),
    Row("seq_parallel_communication_data_type", "lost", why="no sequence parallelism"),
    Row("data_types.grad_accum_dtype", "not needed", why="gradients add up in float32"),
    Row("prescale_gradients", "not needed", why="gradients are averaged in float32 by default"),
    Row("gradient_predivide_factor", "not needed", why="gradients are averaged in float32 by default"),
    Row("sparse_gradients", "lost", why="gradients of sparse embeddings are not supported"),
    Row("train_batch_size", "not needed", why="it follows from rows per rank, accumulation and ranks"),
    Row("train_micro_batch_size_per_gpu", "trainer", "per_device_train_batch_size"),
    Row("gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("gradient_clipping", "trainer", "max_grad_norm"),
    Row("steps_per_print", "trainer", "logging_steps"),
    Row("optimizer.type", "trainer", "optim", {
        "adamw": "adamw_torch", "adam": "adamw_torch", "adagrad": "adagrad", "sgd": "sgd", "lion": "lion_32bit",
        "fusedadam": "adamw_torch", "cpuadam": "adamw_torch", "deepspeedcpuadam": "adamw_torch",
    }, why="any other element-wise torch optimizer is passed to the Trainer as an object"),
    Row("optimizer.params.lr", "trainer", "learning_rate"),
    Row("optimizer.params.betas", "trainer", "adam_beta1, adam_beta2"),
    Row("optimizer.params.eps", "trainer", "adam_epsilon"),
    Row("optimizer.params.weight_decay", "trainer", "weight_decay"),
    Row("optimizer.params.torch_adam", "not needed", why="it is torch's own"),
    Row("optimizer.params.adam_w_mode", "not needed", why="adamw_torch decouples weight decay"),
    Row("optimizer.legacy_fusion", "not needed", why="it is torch's own"),
    Row("scheduler.type", "trainer", "lr_scheduler_type", {
        "warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine",
    }, why="another schedule is passed to the Trainer as an object"),
    Row("scheduler.params.warmup_max_lr", "trainer", "learning_rate"),
    Row("scheduler.params.warmup_num_steps", "trainer", "warmup_steps"),
    Row("scheduler.params.total_num_steps", "trainer", "max_steps"),
    Row("scheduler.params.warmup_min_lr", "lost", why="the Trainer's warm-up starts at 0"),
    Row("scheduler.params.warmup_type", "not needed", why="the Trainer's warm-up is linear"),
    Row("activation_checkpointing.partition_activations", "lost", why="checkpointed activations are not divided among ranks"),
    Row("activation_checkpointing.cpu_checkpointing", "lost", why="checkpointed activations stay on the device"),
    Row("activation_checkpointing.*", "trainer", "gradient_checkpointing", {}, "the model's own gradient checkpointing"),
    Row("aio.*", "not needed", why="the disk tier chooses its requests itself (O_DIRECT, several threads)"),
    Row("checkpoint.*", "not needed", why=_WHOLE),
    Row("wall_clock_breakdown", "not needed", why="zero.ZeroCallback() records every step; hf-zero report shows it"),
    Row("memory_breakdown", "not needed", why="the report has memory by tier and kind"),
    Row("dump_state", "not needed", why="the plan is printed at the start"),
    *(Row(f"{key}*", "trainer", "report_to", {}, "the Trainer's own trackers")
      for key in ("tensorboard", "wandb", "csv_monitor", "comet")),
    Row("comms_logger.*", "not needed", why="the report has bytes and waits per step"),
    Row("flops_profiler.*", "not needed", why="torch's profiler; hf-zero report has times by part of the step"),
    Row("autotuning.*", "not needed", why="hf-zero plan says what fits before anything runs"),
    Row("zero_allow_untested_optimizer", "not needed", why="every optimizer is tried, or refused by name"),
    Row("zero_force_ds_cpu_optimizer", "not needed", why="offloaded state is updated by torch's own optimizer"),
    Row("elasticity.*", "lost", why="the number of ranks is fixed within a run; a checkpoint resumes on any other number"),
    Row("tensor_parallel.*", "lost", why="every rank is a data parallel rank"),
    Row("pipeline.*", "lost", why="every rank is a data parallel rank"),
    *(Row(f"{key}*", "lost", why="of DeepSpeed alone") for key in (
        "sparse_attention", "compression_training", "data_efficiency", "curriculum_learning", "eigenvalue",
        "progressive_layer_drop", "quantize_training", "hybrid_engine",
    )),
)  # fmt: skip

FSDP = (
    Row("sharding_strategy", "same", "stage", {
        "full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0, "hybrid_shard": 3, "4": 3,
        "hybrid_shard_zero2": 2, "hybrid_shard_zero_2": 2, "5": 2,
    }),
    Row("reshard_after_forward", "same", "stage", {
        "true": 3, "false": 2, "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3,
    }),
    Row("offload_params", "same", "offload_params", {"true": "cpu", "false": "none"},
        "FSDP offloads parameters, gradients and optimizer together; here offload_optimizer is a setting of its own"),
    Row("cpu_offload", "same", "offload_params", {"true": "cpu", "false": "none"}),
    Row("mixed_precision_policy.reduce_dtype", "same", "reduce_dtype"),
    Row("mixed_precision_policy.*", "not needed", why="gathered in the Trainer's bf16 or fp16, masters float32"),
    Row("mixed_precision_policy", "lost", why="bf16 or fp16 is the Trainer's own; masters are float32, sums too"),
    Row("version", "not needed", why="one engine"),
    *(Row(key, "not needed", why=_UNITS) for key in (
        "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "use_orig_params", "wrap_policy",
    )),
    *(Row(key, "not needed", why="communication runs beside the computation, one unit ahead") for key in (
        "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers",
    )),
    Row("sync_module_states", "not needed", why="differing starts are found, and rank 0's values used"),
    Row("cpu_ram_efficient_loading", "not needed", why="with zero.Init() each rank reads only its own bytes"),
    Row("state_dict_type", "not needed", why=_WHOLE),
    Row("activation_checkpointing", "trainer", "gradient_checkpointing", _SWITCH),
    Row("activation_cpu_offload", "lost", why="checkpointed activations stay on the device"),
    Row("ignored_modules", "lost", why="no module is left out: freeze it, or shard the others"),
    Row("ignored_params", "lost", why="no parameter is left out: freeze it"),
    Row("xla*", "lost", why="no TPUs"),
    Row("tp_size", "lost", why="every rank is a data parallel rank"),
)  # fmt: skip

_LAUNCHER = "of accelerate launch, as it was"
ACCELERATE = (
    Row("distributed_type", "stays", why="MULTI_GPU (MULTI_CPU without GPUs): accelerate must not set up another engine"),
    Row("mixed_precision", "trainer", "mixed_precision", {"no": "no", "bf16": "bf16", "fp16": "fp16"}),
    Row("gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("deepspeed_config.zero_stage", "same", "stage"),
    Row("deepspeed_config.offload_optimizer_device", "same", "offload_optimizer", _DEVICES),
    Row("deepspeed_config.offload_param_device", "same", "offload_params", _DEVICES),
    Row("deepspeed_config.offload_*_nvme_path", "same", "offload_dir"),
    Row("deepspeed_config.gradient_accumulation_steps", "trainer", "gradient_accumulation_steps"),
    Row("deepspeed_config.gradient_clipping", "trainer", "max_grad_norm"),
    Row("deepspeed_config.zero3_init_flag", "not needed", why="with zero.Init(): from_pretrained creates the model in parts"),
    Row("deepspeed_config.zero3_save_16bit_model", "not needed", why=_WHOLE),
    Row("deepspeed_config.deepspeed_moe_layer_cls_names", "same", "units"),
    *(Row(f"deepspeed_config.{key}", "lost", why="of DeepSpeed's launcher: torchrun --nnodes, or accelerate's machine_rank")
      for key in (
          "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
      )),
    *(Row(f"{key}*", "lost", why="every rank is a data parallel rank") for key in (
        "megatron_lm_config", "tp_config", "parallelism_config",
    )),
    Row("fp8_config*", "lost", why="no fp8"),
    *(Row(key, "stays", why=_LAUNCHER) for key in (
        "compute_environment", "debug", "use_cpu", "num_processes", "num_machines", "machine_rank", "main_process_ip",
        "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids", "downcast_bf16", "tpu_*",
        "enable_cpu_affinity", "dynamo_config*", "dynamo_backend", "ipex_config*", "mpirun_config*", "env", "commands",
        "command_file", "max_restarts", "monitor_interval", "rdzv_conf*", "log_dir",
    )),
)  # fmt: skip


# The table ------------------------------------------------------------------------------------------------------------


_DEEPSPEED_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "fp16",
    "bf16",
    "optimizer",
}
_ACCELERATE_KEYS = {"distributed_type", "compute_environment", "deepspeed_config", "num_processes"}
_NOTHING: tuple[Any, ...] = (None, "", "none", False, 0, 1, [], {})
"""Values with which a setting asks for nothing, so that nothing is lost."""
_STYLES = {"lost": "bold red", "unknown": "bold red", "same": "green", "trainer": "green"}
_ORDER = ("unknown", "lost", "same", "trainer", "stays", "not needed")
_SHARDED = max(STAGES)
_UNKNOWN = "not known to hf_zero: look it up before you drop it"
_HYBRID_NUMBERS = {("sharding_strategy", "4"), ("sharding_strategy", "5")}


@dataclass(frozen=True)
class Finding:
    """One setting of the file, and what becomes of it."""

    key: str
    value: Any
    verdict: str
    becomes: str
    why: str


@dataclass
class Migration:
    """What a file says in our words."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `ZeroConfig`."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer (`TrainingArguments`)."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def lost(self) -> list[Finding]:
        return [found for found in self.findings if found.verdict in ("lost", "unknown")]

    @property
    def command_line(self) -> str:
        return as_flags({**{f"zero_{name}": value for name, value in self.settings.items()}, **self.trainer})


def run(options: MigrateOptions) -> int:
    """Prints it; status 1 where something that mattered has no equivalent, or is not known."""
    made = migrate(Path(options.file))
    if options.json:
        values = {"kind": made.kind, "settings": made.settings, "trainer": made.trainer}
        values |= {"command_line": made.command_line, "plugin": as_plugin(made.settings)}
        print_json({**values, "findings": [asdict(found) for found in made.findings]})
    else:
        _show(made, options.file)
    return WRONG if made.lost else OK


def migrate(path: Path) -> Migration:
    """Raises:
    ConfigError: no file that can be read, or none of these.
    """
    values = read_settings(path)
    keys = set(values)
    fsdp = {name.removeprefix("fsdp_") for name in keys} & {row.key for row in FSDP}
    if keys & _ACCELERATE_KEYS:
        made = Migration(f"accelerate, {values.get('distributed_type', 'NO')}")
        _accelerate(made, values, path)
    elif "fsdp" in keys or "fsdp_config" in keys or (fsdp and not keys & _DEEPSPEED_KEYS):
        made = Migration("the Trainer's FSDP")
        _trainer(made, values)
    elif keys & _DEEPSPEED_KEYS:
        made = Migration("DeepSpeed")
        _apply(made, values, DEEPSPEED)
    else:
        raise ConfigError(
            f"{path} is neither a DeepSpeed config (zero_optimization, …), nor an accelerate config (distributed_type, …), nor "
            f"one of FSDP (fsdp_sharding_strategy, …); it has {', '.join(sorted(map(str, keys))[:8]) or 'nothing'}"
        )
    _settle(made)
    return made


def _accelerate(made: Migration, values: dict[str, Any], path: Path) -> None:
    """Its own keys, and those of the engine that it sets up."""
    values = dict(values)
    fsdp, engine = (_object(values, name, path) for name in ("fsdp_config", "deepspeed_config"))
    values.pop("fsdp_config", None)
    file = engine.pop("deepspeed_config_file", None)
    if engine or file:
        values["deepspeed_config"] = engine
    _apply(made, values, ACCELERATE)
    if fsdp:
        _apply(made, _unprefixed(fsdp), FSDP, "fsdp_config.fsdp_")
    if file:
        inner = path.parent / str(file)  # or where it says, if that is absolute
        _apply(made, read_settings(inner), DEEPSPEED, f"{inner.name}: ")


def _object(values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected settings by name under {name}, found {type(found).__name__}")
    return dict(found)


def _trainer(made: Migration, values: dict[str, Any]) -> None:
    """`TrainingArguments(fsdp=…, fsdp_config=…)`, or the file that fsdp_config names."""
    asked = values.get("fsdp", [])
    words = (
        asked.split() if isinstance(asked, str) else [str(word) for word in asked] if isinstance(asked, list) else []
    )
    inner = values.get("fsdp_config", {key: value for key, value in values.items() if key != "fsdp"})
    strategies = {row for of in FSDP if of.key == "sharding_strategy" for row in of.values or {}}
    meant: dict[str, dict[str, Any]] = {word: {"sharding_strategy": word} for word in strategies}
    meant |= {"offload": {"offload_params": True}, "auto_wrap": {"auto_wrap_policy": "auto_wrap"}}
    for word in words:
        if word in meant:
            _apply(made, meant[word], FSDP, "fsdp: ")
        else:
            made.findings.append(Finding("fsdp", word, "unknown", "", _UNKNOWN))
    if asked is True and not made.settings:
        made.settings["stage"] = _SHARDED
    if isinstance(inner, Mapping):
        _apply(made, _unprefixed(inner), FSDP, "fsdp_")
    elif inner:
        why = "a file of its own: hf-zero migrate that file, too"
        made.findings.append(Finding("fsdp_config", inner, "unknown", "", why))
    made.settings.setdefault("stage", _SHARDED)  # FSDP's own default: full_shard


def _unprefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).removeprefix("fsdp_"): value for key, value in values.items()}


def _apply(made: Migration, values: Mapping[str, Any], rows: tuple[Row, ...], prefix: str = "") -> None:
    for key, value in _flat(values, rows):
        row = next((row for row in rows if fnmatchcase(key, row.key)), None)
        made.findings.append(Finding(prefix + key, value, *_become(made, value, row)))


def _flat(values: Mapping[str, Any], rows: tuple[Row, ...], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value and not any(row.key in (key, f"{key}*") for row in rows):
            yield from _flat(value, rows, f"{key}.")
        else:
            yield key, value


def _become(made: Migration, value: Any, row: Row | None) -> tuple[str, str, str]:
    """Verdict, what it becomes, why; what it sets is in `made` then."""
    if row is None:
        return "unknown", "", _UNKNOWN
    if value == "auto":
        return "not needed", "", "auto: it comes from the Trainer's arguments, as before"
    if row.verdict == "lost" and value is not True and value in _NOTHING:
        return "not needed", "", "asks for nothing"
    if row.verdict not in ("same", "trainer"):
        return row.verdict, "", row.why
    target = made.settings if row.verdict == "same" else made.trainer
    if row.values == {}:  # the argument is named, and nothing is set
        return row.verdict, row.into, row.why
    here = value if row.values is None else row.values.get(str(value).lower(), KeyError)
    if here is KeyError:
        return "lost", "", row.why or f"expected one of {', '.join(row.values or ())}"
    if value is None:
        return "not needed", "", "asks for nothing"
    names = [name.strip() for name in row.into.split(",")]
    for name, part in zip(names, here if len(names) > 1 and isinstance(here, list) else [here]):
        if target.setdefault(name, part) != part:
            return "lost", "", f"{name} is {target[name]!r} already: here it is one setting"
    if row.values is not None and str(value).lower().startswith("hybrid") or (row.key, str(value)) in _HYBRID_NUMBERS:
        return "lost", f"{row.into}={here}", "over all ranks; replicas=NODES makes copies across nodes"
    return row.verdict, f"{row.into}={here}", row.why


def _settle(made: Migration) -> None:
    """What settings mean together; the result is one that `ZeroConfig` takes."""
    settings = made.settings
    precision = made.trainer.pop("mixed_precision", "no")
    if precision != "no":
        made.trainer[precision] = True
    made.trainer = {name: value for name, value in made.trainer.items() if value is not False}
    is_fsdp = any(found.key.endswith(("fsdp_offload_params", "fsdp: offload_params")) for found in made.findings)
    if is_fsdp and settings.get("offload_params") == "cpu":
        settings["offload_optimizer"] = "cpu"
    stage = settings.get("stage", 0 if made.kind == "DeepSpeed" else ZeroConfig().stage)
    settings["stage"] = stage
    policy = STAGES.get(stage) if isinstance(stage, int) else None  # None: ZeroConfig refuses it below
    if policy is not None and policy.keep_full and settings.get("offload_params", "none") != "none":
        why = f"stage {stage} keeps whole parameters on the device"
        made.findings.append(Finding("offload_params", settings.pop("offload_params"), "not needed", "", why))
    for name in ("offload_optimizer", "offload_params"):
        if settings.get(name) == "none":
            del settings[name]
    if "disk" not in (settings.get("offload_optimizer"), settings.get("offload_params")):
        settings.pop("offload_dir", None)
    order = [name for name in ZeroConfig.__dataclass_fields__ if name in settings]
    made.settings = {name: settings[name] for name in order}
    ZeroConfig(**made.settings)


def _show(made: Migration, file: str) -> None:
    console = Console()
    alike: dict[tuple[str, str, str], list[str]] = {}
    for found in sorted(made.findings, key=lambda found: _ORDER.index(found.verdict)):
        name = found.key if found.value is None else f"{found.key}: {json.dumps(found.value)}"
        alike.setdefault((found.verdict, found.becomes, found.why), []).append(name)
    rows: list[list[str | Text]] = [
        [Text(verdict, style=_STYLES.get(verdict, "")), "\n".join(names), "\n".join(filter(None, (becomes, why)))]
        for (verdict, becomes, why), names in alike.items()
    ]
    table(console, f"{file} ({made.kind})", ("", "there", "here"), rows, left=3)
    text(console, "")
    text(console, "As flags of a script with zero.ZeroTrainingArguments:", "bold")
    pasted(console, made.command_line)
    text(console, "As an argument of TrainingArguments or Accelerator (parallelism_config=…):", "bold")
    pasted(console, as_plugin(made.settings))
    text(console, "Take the DeepSpeed or FSDP settings themselves out of the script and of accelerate's configuration.")
    for found in made.lost:
        text(console, f"! {found.key}: {found.why}", "bold red")
