"""What watches an engine: checks, records and memory reports. Each attaches to the engine through `Observer` alone."""

from __future__ import annotations

from ..engine.observer import Observer


def observers() -> list[Observer]:
    """Return a new observer of each kind, for one engine."""
    return []
