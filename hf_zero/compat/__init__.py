"""Support for unusual user programs, one kind of program per file. Each file attaches to the engine only as an `Observer`.

If a file and its line in `observers` are deleted, only programs of its kind stop working.
"""

from __future__ import annotations

from ..engine.observer import Observer
from .buffers import Buffers
from .compiling import Compiling
from .copies import Copies
from .distributed_checkpoint import DistributedCheckpoint
from .evaluation import OtherDtype
from .freezing import Freezing
from .generation import Generation
from .gradients import Gradients
from .group_gradients import GroupGradients
from .methods import Methods
from .on_demand import OnDemand
from .preemption import Preemptions
from .registration import Registration
from .saved_tensors import SavedTensors
from .shared_memory import SharedMemory
from .state_dicts import StateDicts
from .transforms import Transforms
from .unbound import Unbound
from .writes import Writes


def observers() -> list[Observer]:
    """Return a new observer of each kind, for one engine."""
    return [
        Transforms(),
        SharedMemory(),
        OnDemand(),
        OtherDtype(),
        SavedTensors(),
        Freezing(),
        Buffers(),
        Compiling(),
        Copies(),
        DistributedCheckpoint(),
        Generation(),
        Gradients(),
        Methods(),
        GroupGradients(),
        Preemptions(),
        StateDicts(),
        Writes(),
        Registration(),
        Unbound(),
    ]
