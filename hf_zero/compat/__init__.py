"""Unusual programs made right, one kind of program per file. Each attaches to the engine through `Observer` alone.

Delete a file and its line in `observers`, and exactly the programs of its kind stop working.
"""

from __future__ import annotations

from ..engine.observer import Observer
from .buffers import Buffers
from .compiling import Compiling
from .copies import Copies
from .generation import Generation
from .gradients import Gradients
from .methods import Methods
from .preemption import Preemptions
from .state_dicts import StateDicts
from .writes import Writes


def observers() -> list[Observer]:
    """Return a new observer of each kind, for one engine."""
    return [
        Buffers(),
        Compiling(),
        Copies(),
        Generation(),
        Gradients(),
        Methods(),
        Preemptions(),
        StateDicts(),
        Writes(),
    ]
