"""hf_zero: native ZeRO sharding (stages 0 to 3) for PyTorch and Hugging Face training loops."""

import importlib
from typing import TYPE_CHECKING, Any

from . import config, errors  # noqa: F401  (neither loads torch)
from .version import __version__ as __version__

if TYPE_CHECKING:  # `as`: type checkers take these for names of this package
    from .checkpoint.cards import card_for as card_for
    from .checkpoint.export import export as export
    from .checkpoint.folder import verify as verify
    from .checkpoint.series import latest_checkpoint as latest_checkpoint
    from .checkpoint.series import prune_checkpoints as prune_checkpoints
    from .compat.preemption import on_preemption as on_preemption
    from .config import ZeroConfig as ZeroConfig
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import LayoutError as LayoutError
    from .errors import NumericsError as NumericsError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import RankMismatchError as RankMismatchError
    from .errors import StallError as StallError
    from .errors import StateError as StateError
    from .errors import TierError as TierError
    from .errors import UnsupportedOptimizerError as UnsupportedOptimizerError
    from .errors import ZeroError as ZeroError
    from .huggingface.callback import ZeroCallback as ZeroCallback
    from .huggingface.plugin import ZeroAccelerator as ZeroAccelerator
    from .huggingface.plugin import ZeroPlugin as ZeroPlugin
    from .huggingface.trainer import ZeroTrainer as ZeroTrainer
    from .huggingface.trainer import zero_trainer_cls as zero_trainer_cls
    from .huggingface.training_arguments import ZeroTrainingArguments as ZeroTrainingArguments
    from .optimizers.kinds import register_optimizer as register_optimizer
    from .params.access import full_gradient as full_gradient
    from .params.access import full_optimizer_state as full_optimizer_state
    from .params.access import full_parameter as full_parameter
    from .params.access import local_gradient as local_gradient
    from .params.access import local_optimizer_state as local_optimizer_state
    from .params.access import local_parameter as local_parameter
    from .params.access import set_full_gradient as set_full_gradient
    from .params.access import set_full_optimizer_state as set_full_optimizer_state
    from .params.access import set_full_parameter as set_full_parameter
    from .params.access import set_local_gradient as set_local_gradient
    from .params.access import set_local_optimizer_state as set_local_optimizer_state
    from .params.access import set_local_parameter as set_local_parameter
    from .params.engine import Engine as Engine
    from .params.engine import engine_of as engine_of
    from .params.gathered import GatheredParameters as GatheredParameters
    from .params.gathered import unsharded as unsharded
    from .params.init import Init as Init
    from .params.shard import shard as shard
    from .plan.report import Report as Report

# Loaded at first use: the command line answers without torch, the engine works without accelerate and transformers.
_NAMES = {
    "checkpoint.cards": ("card_for",),
    "checkpoint.export": ("export",),
    "checkpoint.folder": ("verify",),
    "checkpoint.series": ("latest_checkpoint", "prune_checkpoints"),
    "compat.preemption": ("on_preemption",),
    "config": ("ZeroConfig",),
    "optimizers.kinds": ("register_optimizer",),
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
    "params.engine": ("Engine", "engine_of"),
    "params.gathered": ("GatheredParameters", "unsharded"),
    "params.init": ("Init",),
    "params.shard": ("shard",),
    "plan.report": ("Report",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
