"""hf_zero: native ZeRO sharding (stages 0 to 3) for PyTorch and Hugging Face training loops."""

from typing import TYPE_CHECKING, Any

from .config import ZeroConfig
from .engine import Engine, engine_of, shard
from .errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    RankMismatchError,
    StateError,
    UnsupportedOptimizerError,
    ZeroError,
)
from .report import Report
from .version import __version__

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "LayoutError",
    "RankMismatchError",
    "Report",
    "StateError",
    "UnsupportedOptimizerError",
    "ZeroConfig",
    "ZeroError",
    "__version__",
    "engine_of",
    "shard",
]
