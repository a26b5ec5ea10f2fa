"""The time of a recorded step: computing on one stream, communication on another, each wait where the engine waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, as it is issued on one rank.

    Attributes:
        number: of this collective in the record, from 0.
        kind: one of `Traffic.KINDS`.
        bytes: this rank sends.
        unit: whose elements move; empty where they are no unit's.
        phase: what the engine is doing.
        ranks: that take part; 0: all there are.
        stride: they are so many ranks apart.
        is_all_reduce: every rank gets all of the result: a reduce-scatter and a gather after it.
    """

    number: int
    kind: str
    bytes: int
    unit: str
    phase: str
    ranks: int = 0
    stride: int = 1
    is_all_reduce: bool = False


@dataclass(frozen=True, slots=True)
class Waited:
    """The result of an operation is needed from here on."""

    number: int


@dataclass(frozen=True, slots=True)
class Computed:
    """Work between two operations.

    Attributes:
        flops: of matrix products.
        bytes: that all else reads and writes.
    """

    flops: int = 0
    bytes: int = 0


Event = Operation | Waited | Computed


@dataclass(frozen=True, slots=True)
class Link:
    """`latency_s` before a message's first byte, then `bandwidth` bytes a second in each direction, of one adapter.

    Attributes:
        all_reduce: bytes a second in an all-reduce, where these go another way; None: `bandwidth`.
    """

    latency_s: float
    bandwidth: float
    source: str
    all_reduce: float | None = None

    def seconds_per_byte(self, operation: Operation) -> float:
        return 1 / (self.all_reduce or self.bandwidth) if operation.is_all_reduce else 1 / self.bandwidth


# A latency is the length of one hop of a ring with the protocol for large messages: row Ring, column Simple of the table
# `hwLatencies` in NCCL's tuner. Bandwidths are nominal, of one direction: what is reached is less.
_HOP = "NCCL's tuner, hwLatencies, Ring, Simple"
LINKS = {
    "nvlink": Link(3.4e-6, 450e9, f"NVLink 4: 900 GB/s both ways together (NVIDIA H100 datasheet); latency: {_HOP}"),
    "infiniband": Link(14e-6, 50e9, f"InfiniBand NDR: 400 Gb/s per adapter, per adapter; latency: {_HOP}"),
    "ethernet": Link(14e-6, 12.5e9, f"100 Gb/s Ethernet (IEEE 802.3ba), per adapter; latency: {_HOP}"),
}


@dataclass(frozen=True, slots=True)
class Network:
    """What a collective takes on `ranks` ranks on `nodes` machines: within a machine over `near`, between them over `far`.

    Ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): N - 1 hops for a
    gather or a reduce-scatter, as slow as the slowest link. A collective has a ring per adapter (as NCCL does), so a
    machine's adapters carry its bytes together; where several groups are at work at a time, each has its share of them. An
    all-reduce has 2 (N - 1) hops.

    Attributes:
        adapters: of each machine to the others; 0: one for each of its ranks.
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
        share = min(1.0, max(1, each // operation.stride) / each)  # of a machine's ranks: others are in other groups
        far_s = operation.bytes * self.far.seconds_per_byte(operation) / ((self.adapters or each) * share)
        return hops_s * (ranks - 1) / ranks + max(near_s, far_s)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        total_s: until both streams are done.
        compute_s: the computing stream works, were it alone.
        communication_s: the communication stream works.
        exposed_s: the computing stream waits for the other, is slowed by it, or is over before it.
    """

    total_s: float
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Processor:
    """What a rank computes with.

    Attributes:
        flops: operations a second of matrix products.
        memory: bytes a second, read and written, of all other work; None: it takes no time.
        overlap: how fast it computes, 0 to 1, while messages move. 1: a card moves them. 0: it moves them itself, so that
            nothing is hidden, and a step takes the sum of both. In between: each message takes `1 - overlap` of its time
            from it.
    """

    flops: float
    memory: float | None = None
    overlap: float = 1.0

    def time_s(self, work: Computed) -> float:
        return work.flops / self.flops + (0.0 if self.memory is None else work.bytes / self.memory)


def replay(events: Iterable[Event], time_s: Callable[[Operation], float], processor: Processor) -> StepTime:
    """Run a record on two streams: an operation begins once it is issued and those issued before are done."""
    now_s = free_s = compute_s = communication_s = 0.0
    done_s: dict[int, float] = {}
    for event in events:
        match event:
            case Computed():
                work_s = processor.time_s(event)
                compute_s += work_s
                beside_s = max(0.0, free_s - now_s) * processor.overlap  # done until all that is issued has arrived
                now_s = (
                    now_s + work_s / processor.overlap if work_s < beside_s else max(now_s, free_s) + work_s - beside_s
                )
            case Waited(number):
                now_s = max(now_s, done_s.get(number, 0.0))  # issued before the record began: done by then
            case Operation():
                taken_s = time_s(event)
                free_s = max(free_s, now_s) + taken_s
                communication_s += taken_s
                done_s[event.number] = free_s
    total_s = max(now_s, free_s)
    return StepTime(total_s, compute_s, communication_s, total_s - compute_s)
