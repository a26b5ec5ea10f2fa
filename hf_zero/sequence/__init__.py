"""Long sequences: one sample divided among ranks. Attaches to the engine through `Observer` alone."""

from __future__ import annotations

from ..config import ZeroConfig
from ..engine.observer import Observer
from . import activations, loss
from .parallel import SequenceParallel


def observers(config: ZeroConfig) -> list[Observer]:
    """Return new observers for one engine."""
    return [SequenceParallel(config), *activations.observers(config), *loss.observers(config)]
