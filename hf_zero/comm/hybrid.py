"""Hybrid sharding: R replicas of what a stage shards, each cut among the S ranks of its own group; N = R x S.

Ranks of a replica are neighbours: rank r is in replica r // S and has slice r % S. Gathers stay within a replica. Gradients are
reduced within each replica to slices, and then the R equal slices are averaged across replicas: reduce-scatter and all-gather
among the R ranks that have the same slice, 2 (R-1)/R of a slice sent. gloo's sums are taken in rank order, so results do not
depend on the network; all replicas get the same bits in any case: their masters stay equal without ever being compared.

Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (arXiv 2205.00119), section 3; PyTorch's
HYBRID_SHARD (Zhao et al., arXiv 2304.11277, section 3.2.2).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..errors import StateError
from .codec import Codec, fits
from .group_wire import GroupWire
from .inflight import Count, Inflight
from .wire import Cuts, SoloWire


def in_replicas(wire: SoloWire, replicas: int) -> SoloWire:
    """`wire` of an engine with so many replicas; without communication, see `SoloWire.open_groups`.

    Args:
        replicas: divides the number of ranks.
    """
    return wire if replicas == 1 else HybridWire(cast(GroupWire, wire), replicas)


class HybridWire(SoloWire):
    """A wire of all ranks whose gathers and reduces know of replicas. What ranks agree on they agree on all together.

    `traffic` counts as `gather` and `reduce` what stays within a replica, and as `across` what goes to other replicas.

    Args:
        world: of all ranks, started.
    """

    ends_alone = False  # the replicas' means are averaged where a reduce ends

    def __init__(self, world: GroupWire, replicas: int) -> None:
        self.world, self.replicas = world, replicas
        self.rank, self.size, self.ragged = world.rank, world.size, world.ragged
        self.device, self.watch, self.traffic = world.device, world.watch, world.traffic
        self.shards = self.size // replicas
        """Ranks of a replica."""
        self.replica = self.rank // self.shards
        # Which slice this rank has: all there is where a replica is one rank, and before groups are open.
        self.shard_group: SoloWire = SoloWire()
        self.shard_group.rank, self.shard_group.size = self.rank % self.shards, self.shards
        self._replicate_group: GroupWire | None = None
        self.traffic.kinds.setdefault("across", Count())
        for name in ("carry", "side", "sum_scalar", "max_scalar", "start_maximum", "broadcast", "exchange", "barrier"):
            setattr(self, name, getattr(world, name))  # what goes on among all ranks is theirs

    def open_groups(self) -> None:
        ranks = range(self.size)
        if self.shards > 1:
            self.shard_group = self.world.among([ranks[at : at + self.shards] for at in ranks[:: self.shards]])
        across = self._replicate_group = self.world.among([ranks[at :: self.shards] for at in ranks[: self.shards]])
        across.gather_kind = across.reduce_kind = "across"
        mine = ", ".join(map(str, ranks[self.replica * self.shards :][: self.shards]))
        peers = ", ".join(map(str, ranks[self.rank % self.shards :: self.shards]))
        here = f" within replica {self.replica} (ranks {mine})"
        self.watch.among = {"gather": here, "reduce": here, "across": f" from the other replicas (ranks {peers})"}

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        return self.shard_group.gather(full, own, tag, cuts)

    def gather_coded(self, full: Tensor, own: Tensor, codec: Codec, tag: int) -> Inflight:
        return self.shard_group.gather_coded(full, own, codec, tag)

    def reduce(self, source: Tensor, out: Tensor, tag: int, cuts: Cuts = ()) -> Inflight:
        within = self.shard_group.reduce(source, out, tag, cuts)
        sent_as = source.dtype

        def finish() -> None:
            within.close()
            self._average_across(out, sent_as, tag)

        return Inflight((), (), finish)

    def average(self, source: Tensor, out: Tensor, tag: int) -> Inflight:
        """Where a replica is one rank: what plain data parallel does, over all of them."""
        across = self._across()
        if not fits(across.codec, -(-out.numel() // self.replicas), source.dtype):
            return across.average(source, out, tag)

        def finish() -> None:
            out[: source.numel()].copy_(source)
            out[source.numel() :].zero_()
            self._average_across(out, source.dtype, tag)

        return Inflight((), (), finish)

    def _average_across(self, out: Tensor, sent_as: torch.dtype, tag: int) -> None:
        """The mean of the replicas' `out` in its place, the same bits in all of them.

        Each of the R ranks sums a part. What is sent is of the type that gradients travel in, also by the rank that keeps it.
        """
        across, numel = self._across(), out.numel()
        if not numel:
            return
        part = -(-numel // self.replicas)
        codec = across.codec if fits(across.codec, part, sent_as) else None
        if codec is not None:
            sent_as = out.dtype  # what is coded
        total = out
        if sent_as != out.dtype or part * self.replicas != numel:
            total = out.new_zeros(part * self.replicas, dtype=sent_as)
            total[:numel].copy_(out)
        mine = out.new_empty(part)
        # Closed, not only waited for: the gather writes into `total`, of which other replicas may still be reading their parts.
        across.reduce(total, mine, tag).close()
        if codec is not None:
            across.gather_coded(total, mine, codec, tag).close()
        else:
            # Rounded for itself as well: kept exact, this replica's part would have other bits than the others' copies of it.
            across.gather(total, mine.to(sent_as), tag).close()
        if total is not out:
            out.copy_(total[:numel])

    def _across(self) -> GroupWire:
        if self._replicate_group is None:
            raise StateError("the groups of this engine's replicas are not open yet")
        return self._replicate_group

    def collect(self, own: Tensor, full: Tensor | None, tag: int, cuts: Cuts = ()) -> None:
        if self.replica == 0:  # the others have the same
            self.shard_group.collect(own, full, tag, cuts)
