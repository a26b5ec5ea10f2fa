"""What an engine has from outside: what bytes move with, how much at a time, what is free, who decides what rests where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm.group_wire import open_wire
from ..comm.wire import SoloWire, host_names
from ..core.units import LIMITS, Limits
from ..plan.machine import free_host_bytes
from ..plan.plan import Plan, plan
from ..plan.solve import PlanInputs
from ..tiers.host import Link
from ..tiers.pool import Storage
from ..tiers.tier import SIZES, Meter, Sizes


@dataclass(frozen=True)
class Roads:
    """What an engine moves bytes with. Another transport, or one that watches, is given to `shard` as its `roads`.

    Attributes:
        wire: between ranks, for buffers on a device.
        link: between host memory and a device; counts into the meter.
        sizes: of the blocks and records that offloaded state is updated and moved in.
        limits: of units.
        storage: what allocates, and holds what the tiers of the engine share.
        plan: what is to rest in which tier; the same spans in the same units as it was asked for.
        free_host_bytes: what the monitor of `auto` finds free in host memory, by the number of ranks that share it.
        node_names: of the machine that each rank runs on, the same on every rank; those with the same name share one, see
            `comm.hybrid`. A collective, which is asked for where the answer matters.
    """

    wire: Callable[[torch.device], SoloWire] = open_wire
    link: Callable[[torch.device, Meter], Link] = Link
    sizes: Sizes = SIZES
    limits: Limits = LIMITS
    storage: type[Storage] = Storage
    plan: Callable[[PlanInputs], Plan] = plan
    free_host_bytes: Callable[[int], int] = free_host_bytes
    node_names: Callable[[SoloWire], Sequence[str]] = host_names
