"""hf_zero: native ZeRO sharding (stages 0 to 3) for PyTorch and Hugging Face training loops."""

import importlib
from typing import TYPE_CHECKING, Any

from . import huggingface  # noqa: F401  (registers what knows transformers, and imports none of it yet)
from .checkpoint.export import card_for, export
from .checkpoint.folder import verify
from .config import ZeroConfig
from .errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    OutOfMemoryError,
    RankMismatchError,
    StallError,
    StateError,
    TierError,
    UnsupportedOptimizerError,
    ZeroError,
)
from .params.access import (
    GatheredParameters,
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
    unsharded,
)
from .params.init import Init
from .plan.report import Report
from .runtime.engine import Engine, engine_of, shard
from .version import __version__

if TYPE_CHECKING:
    from .huggingface.callback import ZeroCallback
    from .huggingface.plugin import ZeroAccelerator, ZeroPlugin
    from .huggingface.trainer import ZeroTrainer, zero_trainer_cls
    from .huggingface.training_arguments import ZeroTrainingArguments

# Loaded at first use: the engine works where accelerate and transformers are not installed.
_WIRING = {
    "ZeroAccelerator": "plugin",
    "ZeroPlugin": "plugin",
    "ZeroCallback": "callback",
    "ZeroTrainer": "trainer",
    "ZeroTrainingArguments": "training_arguments",
    "zero_trainer_cls": "trainer",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "GatheredParameters",
    "Init",
    "LayoutError",
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
    "local_gradient",
    "local_optimizer_state",
    "local_parameter",
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
    if name not in _WIRING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".huggingface.{_WIRING[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
