"""The links between ranks, and the time of collectives over them: an alpha-beta model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .machine import Machine
from .work import Collective


@dataclass(frozen=True, slots=True)
class Link:
    """`latency_s` before a message's first byte, then `bandwidth` bytes per second in each direction, of one adapter.

    Attributes:
        all_reduce: bytes per second of an all-reduce; None: `bandwidth`.
    """

    latency_s: float
    bandwidth: float
    source: str
    all_reduce: float | None = None

    def bytes_per_s(self, collective: Collective) -> float:
        return (self.all_reduce or self.bandwidth) if collective.is_all_reduce else self.bandwidth


# A latency is one hop of a ring with the protocol for large messages: row Ring, column Simple of the table `hwLatencies` in
# NCCL's tuner. Bandwidths are nominal, for one direction: real ones are lower.
_HOP = "NCCL's tuner, hwLatencies, Ring, Simple"
LINKS = {
    "nvlink": Link(3.4e-6, 450e9, f"NVLink 4: 900 GB/s both ways together (NVIDIA H100 datasheet); latency: {_HOP}"),
    "infiniband": Link(14e-6, 50e9, f"InfiniBand NDR: 400 Gb/s per adapter, per adapter; latency: {_HOP}"),
    "ethernet": Link(14e-6, 12.5e9, f"100 Gb/s Ethernet (IEEE 802.3ba), per adapter; latency: {_HOP}"),
}


@dataclass(frozen=True, slots=True)
class Network:
    """The links between `ranks` ranks on `nodes` machines: `near` within a machine, `far` between machines.

    Ring collectives (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): a
    gather, a reduce-scatter or an exchange has N - 1 hops, an all-reduce 2 (N - 1), each as slow as the slowest link. As in
    NCCL, each adapter has a ring. Groups that work at the same time share the adapters.

    Attributes:
        adapters: adapters from one machine to the others; 0: one per rank.
    """

    ranks: int
    nodes: int
    near: Link
    far: Link
    adapters: int = 0

    @staticmethod
    def of(machine: Machine, ranks: int) -> Network | None:
        """Return equal links between all ranks, as a probe measured them; None without measurements."""
        if machine.collective is None:
            return None
        link = Link(machine.latency or 0.0, machine.collective, "", machine.all_reduce)
        return Network(ranks, 1, link, link)

    def time_s(self, collective: Collective) -> float:
        """Return the seconds of one of the collectives."""
        ranks, stride = collective.ranks, collective.stride
        if ranks == 1:
            return 0.0
        each = self.ranks // self.nodes
        nodes = min(ranks, -(-ranks * stride // each))
        near_s = collective.nbytes / self.near.bytes_per_s(collective)
        turns = 2 if collective.is_all_reduce else 1
        if nodes == 1:
            return turns * (ranks - 1) * self.near.latency_s + near_s
        hops_s = turns * (nodes * self.far.latency_s + (ranks - nodes) * self.near.latency_s)
        share = min(1.0, max(1, each // stride) / each)  # of a machine's ranks: the others are in other groups
        far_s = collective.nbytes / self.far.bytes_per_s(collective) / ((self.adapters or each) * share)
        return hops_s * (ranks - 1) / ranks + max(near_s, far_s)

    def seconds(self, collectives: Iterable[Collective]) -> dict[tuple[str, str], float]:
        """Return the seconds of all collectives, by phase and road, as keys of `work.Work`."""
        out: dict[tuple[str, str], float] = {}
        for each in collectives:
            key = each.phase, each.road
            out[key] = out.get(key, 0.0) + each.count * self.time_s(each)
        return out
