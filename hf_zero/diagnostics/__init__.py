"""Observers that watch an engine: checks, records and memory reports. Each attaches to the engine through `Observer` alone."""

from __future__ import annotations

from ..config import ZeroConfig
from ..engine.observer import Observer
from .debug import Debug
from .optimizer_options import OptimizerOptionsCheck
from .recorder import RecorderObserver


def observers(config: ZeroConfig) -> list[Observer]:
    """Return new observers for one engine."""
    return [OptimizerOptionsCheck(), RecorderObserver(), *([Debug()] if config.debug else [])]
