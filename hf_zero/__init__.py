"""hf_zero: native ZeRO sharding (stages 0 to 3) for PyTorch and Hugging Face training loops."""

import importlib
from typing import TYPE_CHECKING, Any

from . import (  # noqa: F401  (`huggingface` registers what knows transformers; none loads torch)
    config,
    errors,
    huggingface,
)
from .version import __version__

if TYPE_CHECKING:
    from .checkpoint.export import card_for, export
    from .checkpoint.folder import verify
    from .checkpoint.series import latest_checkpoint, prune_checkpoints
    from .config import ZeroConfig
    from .errors import (
        CheckpointError,
        ConfigError,
        LayoutError,
        NumericsError,
        OutOfMemoryError,
        RankMismatchError,
        StallError,
        StateError,
        TierError,
        UnsupportedOptimizerError,
        ZeroError,
    )
    from .huggingface.callback import ZeroCallback
    from .huggingface.plugin import ZeroAccelerator, ZeroPlugin
    from .huggingface.trainer import ZeroTrainer, zero_trainer_cls
    from .huggingface.training_arguments import ZeroTrainingArguments
    from .params.access import (
        full_gradient,
        full_optimizer_state,
        full_parameter,
        local_gradient,
        local_optimizer_state,
        local_parameter,
        set_full_gradient,
        set_full_optimizer_state,
        set_full_parameter,
        set_local_gradient,
        set_local_optimizer_state,
        set_local_parameter,
    )
    from .params.gathered import GatheredParameters, unsharded
    from .params.init import Init
    from .plan.report import Report
    from .runtime.engine import Engine, engine_of, on_preemption
    from .runtime.shard import shard

# Loaded at first use: the command line answers without torch, the engine works without accelerate and transformers.
_NAMES = {
    "checkpoint.export": ("card_for", "export"),
    "checkpoint.folder": ("verify",),
    "checkpoint.series": ("latest_checkpoint", "prune_checkpoints"),
    "config": ("ZeroConfig",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "LayoutError",
        "NumericsError",
        "OutOfMemoryError",
        "RankMismatchError",
        "StallError",
        "StateError",
        "TierError",
        "UnsupportedOptimizerError",
        "ZeroError",
    ),
    "huggingface.callback": ("ZeroCallback",),
    "huggingface.plugin": ("ZeroAccelerator", "ZeroPlugin"),
    "huggingface.trainer": ("ZeroTrainer", "zero_trainer_cls"),
    "huggingface.training_arguments": ("ZeroTrainingArguments",),
    "params.access": (
        "full_gradient",
        "full_optimizer_state",
        "full_parameter",
        "local_gradient",
        "local_optimizer_state",
        "local_parameter",
        "set_full_gradient",
        "set_full_optimizer_state",
        "set_full_parameter",
        "set_local_gradient",
        "set_local_optimizer_state",
        "set_local_parameter",
    ),
    "params.gathered": ("GatheredParameters", "unsharded"),
    "params.init": ("Init",),
    "plan.report": ("Report",),
    "runtime.engine": ("Engine", "engine_of", "on_preemption"),
    "runtime.shard": ("shard",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
