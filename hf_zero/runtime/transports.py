"""What an engine has from outside: its roads (what bytes move with), how much goes at a time, what memory is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..comm.wire import SoloWire, open_wire
from ..plan.machine import free_host_bytes
from ..tiers.host import Link
from ..tiers.tier import SIZES, Meter, Sizes


@dataclass(frozen=True)
class Roads:
    """What an engine moves bytes with. Another transport, or one that watches, is given to `shard` as its `roads`.

    Attributes:
        wire: between ranks, for buffers on a device.
        link: between host memory and a device; counts into the meter.
        sizes: of the blocks and records that offloaded state is updated and moved in.
        free_host_bytes: what the monitor of `auto` finds free in host memory, by the number of ranks that share it.
    """

    wire: Callable[[torch.device], SoloWire] = open_wire
    link: Callable[[torch.device, Meter], Link] = Link
    sizes: Sizes = SIZES
    free_host_bytes: Callable[[int], int] = free_host_bytes
