"""The two roads that bytes take out of a tensor's own memory, who opens them for an engine, and how much goes at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .comm import SoloWire, open_wire
from .link import Link
from .tiers import SIZES, Meter, Sizes


@dataclass(frozen=True)
class Roads:
    """What an engine moves bytes with. Another transport, or one that watches, is given to `shard` as its `roads`.

    Attributes:
        wire: between ranks, for buffers on a device.
        link: between host memory and a device; counts into the meter.
        sizes: of the blocks and records that offloaded state is updated and moved in.
    """

    wire: Callable[[torch.device], SoloWire] = open_wire
    link: Callable[[torch.device, Meter], Link] = Link
    sizes: Sizes = SIZES
