"""The time of recorded collectives: an alpha-beta model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, as one rank issues it.

    Attributes:
        kind: one of `Traffic.KINDS`.
        bytes: bytes that this rank sends.
        unit: the unit whose elements are sent; empty for others.
        phase: the engine's phase.
        ranks: number of ranks that take part; 0: all.
        stride: distance between these ranks.
        is_all_reduce: every rank gets the full result: a reduce-scatter, then a gather.
    """

    kind: str
    bytes: int
    unit: str
    phase: str
    ranks: int = 0
    stride: int = 1
    is_all_reduce: bool = False


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

    def seconds_per_byte(self, operation: Operation) -> float:
        return 1 / (self.all_reduce or self.bandwidth) if operation.is_all_reduce else 1 / self.bandwidth


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
    gather or a reduce-scatter has N - 1 hops, an all-reduce 2 (N - 1), each as slow as the slowest link. As in NCCL, each
    adapter has a ring. Groups that work at the same time share the adapters.

    Attributes:
        adapters: adapters from one machine to the others; 0: one per rank.
    """

    ranks: int
    nodes: int
    near: Link
    far: Link
    adapters: int = 0

    def time_s(self, operation: Operation) -> float:
        ranks = operation.ranks or self.ranks
        if ranks == 1:
            return 0.0
        each = self.ranks // self.nodes
        nodes = min(ranks, -(-ranks * operation.stride // each))
        near_s = operation.bytes * self.near.seconds_per_byte(operation)
        turns = 2 if operation.is_all_reduce else 1
        if nodes == 1:
            return turns * (ranks - 1) * self.near.latency_s + near_s
        hops_s = turns * (nodes * self.far.latency_s + (ranks - nodes) * self.near.latency_s)
        share = min(
            1.0, max(1, each // operation.stride) / each
        )  # of a machine's ranks: the others are in other groups
        far_s = operation.bytes * self.far.seconds_per_byte(operation) / ((self.adapters or each) * share)
        return hops_s * (ranks - 1) / ranks + max(near_s, far_s)
