"""The links between ranks, and the time of collectives over them: an alpha-beta model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .machine import Machine
from .traffic import Collective


@dataclass(frozen=True, slots=True)
class Link:
    """`latency_s` before a message's first byte, then `bandwidth` bytes per second in each direction, of one adapter."""

    latency_s: float
    bandwidth: float


# A latency is one hop of a ring with the protocol for large messages: row Ring, column Simple of the table `hwLatencies` in
# NCCL's tuner. Bandwidths are nominal, for one direction: real ones are lower.
LINKS = {
    "nvlink": Link(3.4e-6, 450e9),  # NVLink 4: 900 GB/s both ways together (NVIDIA H100 datasheet)
    "infiniband": Link(14e-6, 50e9),  # InfiniBand NDR: 400 Gb/s
    "ethernet": Link(14e-6, 12.5e9),  # 100 Gb/s (IEEE 802.3ba)
}


@dataclass(frozen=True, slots=True)
class Network:
    """`ranks` ranks on `nodes` machines. The links within a machine are those of `Machine`, `far` is between machines.

    Ring collectives (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): a
    gather, a reduce-scatter or an exchange has N - 1 hops, an all-reduce 2 (N - 1), each as slow as the slowest link. As in
    NCCL, each adapter has a ring; a machine has one adapter per rank. Groups that work at the same time share the adapters.
    """

    ranks: int
    nodes: int = 1
    far: Link = LINKS["infiniband"]

    def time_s(self, collective: Collective, machine: Machine) -> float:
        """Return the seconds of one of the collectives. The machine's `collective` is known."""
        ranks, stride = collective.ranks, collective.stride
        if ranks == 1:
            return 0.0
        each, near_latency_s = self.ranks // self.nodes, machine.latency or 0.0
        nodes = min(ranks, -(-ranks * stride // each))
        turns = 2 if collective.is_all_reduce else 1
        near_s = collective.nbytes / (machine.collective or 1.0)
        if nodes == 1:
            return turns * (ranks - 1) * near_latency_s + near_s
        hops_s = turns * (nodes * self.far.latency_s + (ranks - nodes) * near_latency_s)
        share = min(1.0, max(1, each // stride) / each)  # of a machine's ranks: the others are in other groups
        far_s = collective.nbytes / self.far.bandwidth / (each * share)
        return hops_s * (ranks - 1) / ranks + max(near_s, far_s)

    def seconds(self, collectives: Iterable[Collective], machine: Machine) -> dict[tuple[str, str], float]:
        """Return the seconds of all collectives by keys of `traffic.PhaseTraffic`; empty if no speed is known."""
        out: dict[tuple[str, str], float] = {}
        for each in collectives if machine.collective is not None else ():
            key = each.phase, each.channel
            out[key] = out.get(key, 0.0) + each.count * self.time_s(each, machine)
        return out
