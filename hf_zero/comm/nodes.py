"""Ranks that share a machine: what a gather costs among them is not what it costs across machines.

A unit whose gathered values are cut among the ranks of each node needs no other node to be whole again: Wang et al., "ZeRO++"
(arXiv 2306.10209), section 3.2, hierarchical weight partition for backward.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import cast

from .group_wire import GroupWire
from .hybrid import HybridWire
from .inflight import Count
from .wire import SoloWire


def host_names(wire: SoloWire) -> list[str]:
    """Of each rank's machine. A collective."""
    names: list[str] = wire.exchange(socket.gethostname())
    return names


def open_node(wire: SoloWire, names: Sequence[str]) -> None:
    """`wire.node` is the wire within this rank's node afterwards. A collective.

    It stays None unless all nodes have the same number of ranks, more than one, which divides the ranks that parameters are
    sharded among and is less than these, and the ranks of a node are neighbours.

    Args:
        names: of each rank's node; the same on every rank, and so is what follows from them.
    """
    shards = wire.size if wire.shard_group is None else wire.shard_group.size
    count = names.count(names[0])
    first_of = [names[rank - rank % count] for rank in range(wire.size)]
    if not 1 < count < shards or shards % count or [*names] != first_of or len({*names}) * count != wire.size:
        return
    world = cast(GroupWire, wire.world if isinstance(wire, HybridWire) else wire)
    ranks = range(wire.size)
    within = world.among([ranks[at : at + count] for at in ranks[::count]])
    within.gather_kind = "node"
    wire.traffic.kinds.setdefault("node", Count())
    interrupts = wire.watch.interrupt, within.interrupt()

    def interrupt() -> None:
        for each in interrupts:
            each()

    wire.watch.interrupt = interrupt
    first = wire.rank - wire.rank % count
    wire.watch.among["node"] = f" within the node (ranks {', '.join(map(str, ranks[first : first + count]))})"
    wire.node = within
