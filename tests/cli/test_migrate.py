"""hf-zero migrate: files as people have them, and what becomes of each setting."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

import hf_zero as zero
from hf_zero.cli.main import main
from hf_zero.cli.migrate import DEEPSPEED, FSDP
from tests.cli.test_hostile_input import refused

# transformers' documentation, "ZeRO-3 with CPU offload", and what its parts become.
ZERO3: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {"type": "FusedAdam", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 500, "warmup_num_steps": 50, "warmup_min_lr": 0},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
        "offload_param": {"device": "cpu"},  # DeepSpeed ignores it at this stage
    },
    "communication_data_type": "bf16",
}
NVME = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4, "fast_init": False},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e8, "max_in_cpu": 1e9},
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "fp16": {"enabled": True, "loss_scale": 128},
}
TWO_FOLDERS = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
        "offload_param": {"device": "nvme", "nvme_path": "/b"},
    }
}
ZERO1 = {"train_batch_size": 8, "zero_optimization": {"stage": 1, "cpu_offload": True}, "fp16": {"enabled": True}}
PLUS = {
    "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8, "zero_turbo": 1}
}
QUIET = {"zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}}
MICS = {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}}
MICS_OFF = {"zero_optimization": {"stage": 3, "mics_shard_size": -1, "mics_hierarchical_params_gather": False}}
WIRE_0 = {"zero_optimization": {"stage": 0, "zero_quantized_gradients": True}}
ACCELERATE_HYBRID = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
num_machines: 2
num_processes: 16
"""
ACCELERATE_FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
ACCELERATE_FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 100000000
  fsdp_reshard_after_forward: false
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: FULL_STATE_DICT
mixed_precision: fp16
num_processes: 4
"""
ACCELERATE_FSDP_DEFAULT = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
ACCELERATE_DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /nvme
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
mixed_precision: 'no'
num_processes: 8
"""
HYBRID = {"sharding_strategy": "hybrid_shard", "limit_all_gathers": True, "xla": False}
NO_SHARD = {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": True}
L2_ADAM = {
    "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}},
    "zero_optimization": {"stage": 1},
}
FSDP_CONFIG = {
    "version": 2,
    "reshard_after_forward": True,
    "activation_checkpointing": True,
    "cpu_ram_efficient_loading": True,
}

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], set[str]]] = {
    # file: settings of ours, arguments of the Trainer, keys that are lost or unknown
    "zero3": (
        ZERO3,
        {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        {"optim": "adamw_torch", "lr_scheduler_type": "constant_with_warmup", "logging_steps": 2000},
        set(),
    ),
    "zero2": (
        ZERO2,
        {"stage": 2, "reduce_dtype": "bf16"},
        {
            "bf16": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
            "optim": "adamw_torch", "learning_rate": 3e-5, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8,
            "weight_decay": 0.1, "lr_scheduler_type": "linear", "max_steps": 500, "warmup_steps": 50,
        },
        set(),
    ),
    "nvme": (
        NVME,
        {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk", "offload_dir": "/local_nvme"},
        {"fp16": True},
        {"fp16.loss_scale"},
    ),
    "two folders": (
        TWO_FOLDERS,
        {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk", "offload_dir": "/a"},
        {},
        {"zero_optimization.offload_param.nvme_path"},
    ),
    "zero1": (ZERO1, {"stage": 1, "offload_optimizer": "cpu"}, {"fp16": True}, set()),
    "plus": (
        PLUS,
        {"stage": 3, "wire": "int8"},
        {},
        {f"zero_optimization.{key}" for key in ("zero_hpz_partition_size", "zero_turbo")},
    ),
    "mics": (MICS, {"stage": 3}, {}, {"zero_optimization.mics_shard_size"}),
    "mics off": (MICS_OFF, {"stage": 3}, {}, set()),
    "wire at stage 0": (WIRE_0, {"stage": 0}, {}, set()),
    "hybrid on two machines": (ACCELERATE_HYBRID, {"stage": 3, "replicas": 2}, {}, set()),
    "no shard": (NO_SHARD, {"stage": 0}, {}, set()),
    "other numbers": (
        L2_ADAM,
        {"stage": 1},
        {"optim": "adamw_torch", "lr_scheduler_type": "constant_with_warmup"},
        {"optimizer.params.adam_w_mode", "scheduler.params.warmup_type"},
    ),
    "quiet": (QUIET, {"stage": 3}, {}, set()),
    "fsdp1": (
        ACCELERATE_FSDP1,
        {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        {"bf16": True},
        set(),
    ),
    "fsdp2": (ACCELERATE_FSDP2, {"stage": 2}, {"fp16": True, "gradient_checkpointing": True}, set()),
    "fsdp by default": (
        ACCELERATE_FSDP_DEFAULT, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}, {}, set(),
    ),
    "accelerate": (
        ACCELERATE_DEEPSPEED,
        {"stage": 3, "offload_optimizer": "disk", "offload_dir": "/nvme"},
        {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0},
        {"deepspeed_config.deepspeed_multinode_launcher"},
    ),
    "hybrid": (HYBRID, {"stage": 3}, {}, {"fsdp_sharding_strategy"}),
    "fsdp_config": (FSDP_CONFIG, {"stage": 3}, {"gradient_checkpointing": True}, set()),
}  # fmt: skip


def written(folder: Path, content: Any, name: str = "config") -> Path:
    path = folder / (name + (".yaml" if isinstance(content, str) else ".json"))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def found(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, dict[str, Any]]:
    status = main(["migrate", str(path), "--json"])
    return status, json.loads(capsys.readouterr().out)


def keys_of(values: Any, above: str = "") -> set[str]:
    if isinstance(values, dict) and values:
        return {key for name, value in values.items() for key in keys_of(value, f"{above}{name}.")}
    return {above.removesuffix(".")}


@pytest.mark.parametrize("name", CASES)
def test_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, settings, trainer, lost = CASES[name]
    status, values = found(capsys, written(tmp_path, content))
    assert values["settings"] == settings
    assert values["trainer"] == trainer
    findings = values["findings"]
    assert {each["key"] for each in findings if each["verdict"] in ("lost", "unknown", "to do")} == lost
    assert status == (1 if lost else 0)
    assert all(each["becomes"] or each["why"] for each in findings)
    # The parser of a Trainer's arguments takes the line to paste, and the plugin is the same.
    assert eval(values["plugin"], {"zero": zero}).config == zero.ZeroConfig(**settings)
    parser = HfArgumentParser(zero.ZeroTrainingArguments)
    words = values["command_line"].split()
    given, unknown = parser.parse_known_args(["--output_dir", str(tmp_path), *words])
    assert unknown == []
    for name_, value in trainer.items():
        assert getattr(given, name_) == value or str(getattr(given, name_)) == str(value), name_
    for name_, value in settings.items():
        assert getattr(given, f"zero_{name_}") == value
    # Every setting of the file is named.
    loaded = yaml.safe_load(content) if isinstance(content, str) else content
    named = " ".join(each["key"] for each in findings)
    for key in keys_of(loaded):
        assert key.rpartition(".")[2].removeprefix("fsdp_") in named, key


def test_a_file_that_a_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, ZERO2, "ds")
    content = (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n"
    )
    status, values = found(capsys, written(tmp_path, content))
    assert status == 0
    assert values["settings"] == {"stage": 2, "reduce_dtype": "bf16"}
    assert any(each["key"] == "ds.json: gradient_clipping" for each in values["findings"])


def test_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["migrate", str(written(tmp_path, PLUS))]) == 1
    out = capsys.readouterr().out
    command = out.index("    torchrun --nproc-per-node RANKS train.py --output-dir out --zero-stage 3")
    code = out.index("    TrainingArguments(\n        output_dir='out',\n")
    plugin = out.index("        parallelism_config=zero.ZeroPlugin(stage=3, wire='int8'),\n    )\n")
    rows = [out.index(start) for start in ("│ zero_turbo: 1", "│ zero_hpz_partition_size: 8", "│ stage: 3")]
    assert [command, code, plugin, *rows] == sorted([command, code, plugin, *rows]), "attention first"
    assert "unknown: not known to hf_zero" in out
    assert "The command lacks 2 of " in out
    assert out.count("┏") == 1, "one table"
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("    "))


def test_keys_are_not_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["migrate", str(written(tmp_path, ZERO3))]) == 0
    out = capsys.readouterr().out
    for key in keys_of(ZERO3["zero_optimization"]):
        assert key in out


@pytest.mark.parametrize(
    ("content", "key", "meant"),
    [
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "zero_optimization.stage"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation.stage", "zero_optimization.stage"),
        ({"fp16": {"enabeld": True}, "zero_optimization": {}}, "fp16.enabeld", "fp16.enabled"),
        ({"gradient_cliping": 1.0, "bf16": {}}, "gradient_cliping", "gradient_clipping"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_ofload_params: true\n",
            "fsdp_config.fsdp_ofload_params",
            "offload_params",
        ),
    ],
)
def test_a_typo_is_found(
    content: Any, key: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, values = found(capsys, written(tmp_path, content))
    (finding,) = (each for each in values["findings"] if each["verdict"] == "unknown")
    assert status == 1
    assert finding["key"] == key
    assert finding["why"] == f"not known. Did you mean {meant}?"


@pytest.mark.parametrize(("size", "replicas"), [(4, 2), ("4", 2), ("four", None), ("0", None)])
def test_the_number_of_replicas_follows_from_the_ranks(
    size: Any, replicas: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, {"zero_optimization": {"stage": 3, "mics_shard_size": size}}, "ds")
    content = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    status, values = found(capsys, written(tmp_path, content))
    assert values["settings"] == {"stage": 3, **({"replicas": replicas} if replicas else {})}
    assert status == (1 if size == "four" else 0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [1", "is not valid YAML"), ("[1, 2]", "expected names with settings"),
        ({"model_type": "gpt2"}, "is neither a DeepSpeed config"),
        ({"zero_optimization": {"stage": 7}}, "stage must be 0, 1, 2 or 3"),
    ],
)  # fmt: skip
def test_what_is_no_such_file(content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, "migrate", written(tmp_path, content))


# The documentation ----------------------------------------------------------------------------------------------------

SAID = {"nothing": "not needed", "not there": "lost"}
"""How docs/migration.md begins about a key, by what the command's table says of it."""


def documented() -> list[tuple[str, str]]:
    """(key, what is said of it) for the settings in docs/migration.md; calls have tables of their own."""
    text = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    tables = re.findall(
        r"^\| (?:DeepSpeed JSON|accelerate or Trainer setting) \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.M
    )
    rows = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]
    return [
        (key, said)
        for keys, said in rows
        for key in re.findall(r"`([a-z][a-z0-9_.*]+)(?:: [^`]*)?`", keys)
        if not key.endswith(".py")
    ]


def test_the_documentation_says_what_the_command_says() -> None:
    checked = 0
    for key, said in documented():
        short = key.removeprefix("fsdp_")
        found = [
            row
            for row in (FSDP if key.startswith("fsdp_") else DEEPSPEED)
            if any(
                fnmatch(f"{short}{rest}", pattern)
                for rest in ("", ".x")
                for pattern in (row.key, row.key.removeprefix("zero_optimization."))
            )
        ]
        verdict = next((verdict for start, verdict in SAID.items() if said.startswith(start)), None)
        assert found or (verdict is None and not key.startswith("fsdp_")), f"{key}: not in the command's table"
        if verdict is not None:
            assert found[0].verdict == verdict, key
        elif found and found[0].verdict == "same":
            assert all(name in said for name in found[0].target.split(", ")), key
        checked += bool(found)
    assert checked > 25
