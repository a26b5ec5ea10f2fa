"""Observers that watch an engine: checks, records and memory reports. Each attaches to the engine through `Observer` alone."""

from __future__ import annotations

from ..config import ZeroConfig
from ..engine.observer import Observer
from .equal import SameValues
from .finite import Finite
from .options import SameOptions
from .recorder import Records
from .rounded import Rounded


def observers(config: ZeroConfig) -> list[Observer]:
    """Return new observers for one engine."""
    found: list[Observer] = [SameOptions(), Records(), Rounded()]
    if config.debug:
        found += [SameValues(), Finite()]
    return found
