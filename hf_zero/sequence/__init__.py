"""Observers for long sequences. They attach to the engine only through `Observer`."""

from __future__ import annotations

from ..config import ZeroConfig
from ..engine.observer import Observer
from . import activation_offload, chunked_loss
from .parallel import SequenceParallel


def observers(config: ZeroConfig) -> list[Observer]:
    """Return new observers for one engine."""
    return [SequenceParallel(config), *activation_offload.observers(config), *chunked_loss.observers(config)]
