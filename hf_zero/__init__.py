"""hf_zero: native ZeRO sharding (stages 0 to 3) for PyTorch and Hugging Face training loops."""

import importlib
from typing import TYPE_CHECKING, Any

from . import integrations  # noqa: F401  (registers what knows transformers, and imports none of it yet)
from .access import (
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
)
from .config import ZeroConfig
from .engine import Engine, engine_of, shard
from .errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    OutOfMemoryError,
    RankMismatchError,
    StateError,
    TierError,
    UnsupportedOptimizerError,
    ZeroError,
)
from .export import card_for, export
from .init import Init
from .report import Report
from .staging import verify
from .version import __version__

if TYPE_CHECKING:
    from .integrations.accelerate import ZeroAccelerator, ZeroPlugin
    from .integrations.transformers import ZeroCallback, ZeroTrainer, ZeroTrainingArguments, zero_trainer_cls

# Loaded at first use: the engine works where accelerate and transformers are not installed.
_WIRING = {
    "ZeroAccelerator": "accelerate",
    "ZeroPlugin": "accelerate",
    "ZeroCallback": "transformers",
    "ZeroTrainer": "transformers",
    "ZeroTrainingArguments": "transformers",
    "zero_trainer_cls": "transformers",
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
    "verify",
    "zero_trainer_cls",
]


def __getattr__(name: str) -> Any:
    if name not in _WIRING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".integrations.{_WIRING[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
