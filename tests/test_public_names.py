"""The names that users type, and the settings: few, fixed, and the same in all places."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import hf_zero

PUBLIC = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "GatheredParameters",
    "Init",
    "LayoutError",
    "NumericsError",
    "OutOfMemoryError",
    "RankMismatchError",
    "Report",
    "StallError",
    "StateError",
    "TierError",
    "UnsupportedOptimizerError",
    "ZeroAccelerator",
    "ZeroCallback",
    "ZeroConfig",
    "ZeroError",
    "ZeroPlugin",
    "ZeroTrainer",
    "ZeroTrainingArguments",
    "__version__",
    "card_for",
    "engine_of",
    "export",
    "full_gradient",
    "full_optimizer_state",
    "full_parameter",
    "latest_checkpoint",
    "local_gradient",
    "local_optimizer_state",
    "local_parameter",
    "on_preemption",
    "prune_checkpoints",
    "register_optimizer",
    "set_full_gradient",
    "set_full_optimizer_state",
    "set_full_parameter",
    "set_local_gradient",
    "set_local_optimizer_state",
    "set_local_parameter",
    "shard",
    "unsharded",
    "verify",
    "zero_trainer_cls",
]
SETTINGS = (
    "stage",
    "reduce_dtype",
    "full_precision",
    "units",
    "async_save",
    "offload_optimizer",
    "offload_params",
    "offload_activations",
    "offload_dir",
    "device_memory",
    "keep_gathered",
    "host_memory",
    "replicas",
    "chunked_loss",
    "sp_size",
    "wire",
    "step_in_backward",
    "stall_s",
    "debug",
)


def test_public_names() -> None:
    assert sorted(hf_zero.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(hf_zero, name) is not None


def test_settings() -> None:
    """The fields of ZeroConfig are what people type: few, fixed, and the same in all three places."""
    fields = tuple(field.name for field in dataclasses.fields(hf_zero.ZeroConfig))
    assert fields == SETTINGS
    flags = {
        field.name for field in dataclasses.fields(hf_zero.ZeroTrainingArguments) if field.name.startswith("zero_")
    }
    assert flags == {f"zero_{name}" for name in SETTINGS}
    plugin = {field.name for field in dataclasses.fields(hf_zero.ZeroPlugin)}
    assert plugin >= set(SETTINGS)
    hints, plugged, typed = map(get_type_hints, (hf_zero.ZeroConfig, hf_zero.ZeroPlugin, hf_zero.ZeroTrainingArguments))
    for field in dataclasses.fields(hf_zero.ZeroConfig):
        name = field.name
        assert field.metadata["help"]
        for cls, other in ((hf_zero.ZeroPlugin, name), (hf_zero.ZeroTrainingArguments, f"zero_{name}")):
            again = cls.__dataclass_fields__[other]
            assert (again.default, again.metadata) == (field.default, field.metadata), other
        assert plugged[name] == hints[name], name
        # On a command line, what may be text is text.
        plain = {kind for kind in get_args(hints[name]) if kind in (str, type(None))} or {hints[name]}
        assert set(get_args(typed[f"zero_{name}"]) or [typed[f"zero_{name}"]]) == plain, name
