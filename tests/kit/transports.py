"""What an engine moves bytes with, for tests: another wire or link, blocks of other sizes, units of other sizes.

Other tests that need a part of it take it from here: no other module of the kit or of tests/engine imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_zero.comm.group_wire import CollectiveWire, P2PWire, open_wire
from hf_zero.comm.inflight import DONE, Inflight
from hf_zero.comm.wire import Wire
from hf_zero.core.units import LIMITS, Limits
from hf_zero.tiers.host import Link
from hf_zero.tiers.storage import Storage
from hf_zero.tiers.tier import SIZES, Meter, Sizes, Tier

__all__ = [
    "DONE",
    "LIMITS",
    "ROADS",
    "SIZES",
    "SMALL",
    "CollectiveWire",
    "Inflight",
    "Limits",
    "Link",
    "Meter",
    "P2PWire",
    "Roads",
    "Sizes",
    "Sockets",
    "Storage",
    "Tier",
    "Wire",
    "open_wire",
]  # fmt: skip


class Sockets(P2PWire):
    """As between machines."""

    is_direct = False


@dataclass(frozen=True)
class Roads:
    """Arguments of `zero.shard`.

    Attributes:
        wire: between ranks, for buffers on a device.
        link: between host memory and a device; counts into the meter.
        sizes: of the blocks and slabs that offloaded state is updated and moved in.
        limits: of units.
        storage: what allocates, and holds what the tiers of the engine share.
    """

    wire: Callable[[torch.device], Wire] = open_wire
    link: Callable[[torch.device, Meter], Link] = Link
    sizes: Sizes = SIZES
    limits: Limits = LIMITS
    storage: type[Storage] = Storage

    @property
    def given(self) -> dict[str, Any]:
        """Pass it as `zero.shard(..., **roads.given)`."""
        storage = partial(self.storage, open_link=self.link, sizes=self.sizes)
        return {"open_wire": self.wire, "open_storage": storage, "limits": self.limits}


class LinkApart(Link):
    """A link that copies, as to a device with memory of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shares_memory = False


SMALL = Sizes(block_numel=1536, loop_numel=512, slab_numel=2048)
"""So small that the spans of tiny models make several blocks and records, with shorter ones at the end."""
ROADS = {
    "": Roads(),
    "small units": Roads(limits=Limits(unit_bytes=600, run_bytes=300)),
    "small blocks": Roads(sizes=SMALL),
    "small blocks, copied": Roads(sizes=SMALL, link=LinkApart),
    "collectives": Roads(wire=CollectiveWire),
}
"""By the name that a row of tests/settings.py has."""
