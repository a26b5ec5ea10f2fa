"""Hybrid sharding: R replicas of the sharded state, each partitioned over the S ranks of its group; N = R x S.

Ranks of a replica are neighbours: rank r is in replica r // S and owns slice r % S. Gathers stay within a replica. Gradients
are reduced to slices within each replica, then averaged across the R ranks that own the same slice: a reduce-scatter and an
all-gather, which send 2 (R-1)/R of a slice. All replicas get the same bits, so their masters stay equal.

Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud" (arXiv 2205.00119), section 3; PyTorch's
HYBRID_SHARD (Zhao et al., arXiv 2304.11277, section 3.2.2).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .codec import Codec, fits
from .group_wire import GroupWire
from .inflight import Count, Inflight
from .wire import Cuts, Wire


def in_replicas(wire: Wire, replicas: int) -> Wire:
    """Return the wire of an engine with `replicas` copies. Does not communicate; see `Wire.open_groups`."""
    return wire if replicas == 1 else HybridWire(cast(GroupWire, wire), replicas)


class HybridWire(Wire):
    """A wire of all ranks whose gathers stay within a replica and whose reduces average across replicas.

    `traffic` counts messages within a replica as `gather` and `reduce`, and those between replicas as `across`.

    Args:
        world: the wire of all ranks, started.

    Attributes:
        shards: number of ranks in a replica.
        replica: number of this rank's replica.
    """

    waits_in_any_order = False  # a reduce ends with messages between replicas

    def __init__(self, world: GroupWire, replicas: int) -> None:
        self.world, self.replicas = world, replicas
        self.rank, self.size, self.ragged = world.rank, world.size, world.ragged
        self.device, self.watch, self.traffic = world.device, world.watch, world.traffic
        self.shards = self.size // replicas
        self.replica = self.rank // self.shards
        # A one-rank wire: final for replicas of one rank, and a placeholder until `open_groups` for others.
        self.shard_group: Wire = Wire()
        self.shard_group.rank, self.shard_group.size = self.rank % self.shards, self.shards
        self._across: GroupWire  # from `open_groups` on
        self.traffic.kinds.setdefault("across", Count())
        for name in (
            "send_to_rank_0",
            "background_wire",
            "sum_scalar",
            "max_scalar",
            "start_maximum",
            "broadcast",
            "exchange",
            "exchange_statuses",
            "barrier",
        ):
            setattr(self, name, getattr(world, name))

    def open_groups(self) -> None:
        self.world.open_groups()
        ranks = range(self.size)
        if self.shards > 1:
            self.shard_group = self.world.subgroup([ranks[at : at + self.shards] for at in ranks[:: self.shards]])
        across = self._across = self.world.subgroup([ranks[at :: self.shards] for at in ranks[: self.shards]])
        across.gather_kind = across.reduce_kind = "across"
        mine = ", ".join(map(str, ranks[self.replica * self.shards :][: self.shards]))
        peers = ", ".join(map(str, ranks[self.rank % self.shards :: self.shards]))
        here = f" within replica {self.replica} (ranks {mine})"
        self.watch.groups = {"gather": here, "reduce": here, "across": f" from the other replicas (ranks {peers})"}

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
        """Average `source` over all ranks; a replica is one rank."""
        across = self._across
        if not fits(across.codec, -(-out.numel() // self.replicas), source.dtype):
            return across.average(source, out, tag)

        def finish() -> None:
            out[: source.numel()].copy_(source)
            out[source.numel() :].zero_()
            self._average_across(out, source.dtype, tag)

        return Inflight((), (), finish)

    def _average_across(self, out: Tensor, sent_as: torch.dtype, tag: int) -> None:
        """Replace `out` by its mean over the replicas, with the same bits in all of them.

        Each of the R ranks sums one part. Values are sent in the dtype of the gradients.
        """
        across, numel = self._across, out.numel()
        if not numel:
            return
        part = -(-numel // self.replicas)
        codec = across.codec if fits(across.codec, part, sent_as) else None
        if codec is not None:
            sent_as = out.dtype  # the codec encodes it
        total = out
        if sent_as != out.dtype or part * self.replicas != numel:
            total = out.new_zeros(part * self.replicas, dtype=sent_as)
            total[:numel].copy_(out)
        mine = out.new_empty(part)
        # Must be closed, not only waited for: the gather writes into `total`, which other replicas may still read.
        across.reduce(total, mine, tag).close()
        if codec is not None:
            across.gather_coded(total, mine, codec, tag).close()
        else:
            # Must be rounded on this rank as well: other ranks receive rounded values, and replicas must stay equal.
            across.gather(total, mine.to(sent_as), tag).close()
        if total is not out:
            out.copy_(total[:numel])
