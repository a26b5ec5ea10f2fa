"""Where bytes rest, and counting those that move: device, host memory, disk.

The roads are `host` (copies between host and device) and `disk` (one file of this rank); what rests on disk is `array` and
`records`. Every road counts into a `Meter`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum

ALIGN_BYTES = 4096
"""O_DIRECT asks for file offsets, lengths and addresses that are multiples of the disk's block; this serves all of them."""
PIECE_BYTES = 4 << 20
"""A longer transfer is cut into pieces of this size, which move at the same time."""
THREADS = 4
"""Pieces under way at once. Unaligned ones go through memory of their own, so that takes `THREADS * PIECE_BYTES` at most."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved and updated at a time, on every rank alike. An engine's are in its `Storage`; its plan has them, too.

    Attributes:
        block_numel: elements that the host optimizer updates at a time in mixed precision, so that they stay in the processor's
            cache; the plan cuts long spans between tiers at multiples of it.
        loop_numel: the same where the update is a loop of operators: what they allocate in between stays in the cache, and in
            malloc's heap. At most `block_numel`.
        plain_numel: elements between two looks at what else is to do, where nothing is cast and a cache therefore saves
            nothing.
        slab_numel: elements of one record of the disk tier: what is read, updated and written at a time.
        slabs: records in host memory at once: one is read, one updated, one written.
        lanes: blocks through which parameters that are cast on the host go up to the device.
    """

    block_numel: int = 1 << 19
    loop_numel: int = 1 << 17
    plain_numel: int = 1 << 20
    slab_numel: int = 1 << 20
    slabs: int = 3
    lanes: int = 2


SIZES = Sizes()
"""Where nobody asks for others."""


def padded(nbytes: int) -> int:
    """The next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


# Counting -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Count:
    """One road since the last reset: transfers asked for, their bytes, and how long the host stood waiting for them; of that,
    how long the thread that steps over offloaded state did, beside training.
    """

    calls: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    stepper_wait_s: float = 0.0


class Meter:
    """Counters by road: `down` (device to host), `up` (host to device), `read` and `write` (disk). Any thread may count."""

    def __init__(self) -> None:
        self.kinds = {kind: Count() for kind in ("down", "up", "read", "write")}
        self._lock = threading.Lock()
        self.stepper_thread: int | None = None
        """The identifier of the thread that steps over offloaded state."""

    def __getitem__(self, kind: str) -> Count:
        return self.kinds[kind]

    def moved(self, kind: str, bytes_: int) -> None:
        with self._lock:
            self.kinds[kind].calls += 1
            self.kinds[kind].bytes += bytes_

    def waited(self, kind: str, wait_s: float) -> None:
        with self._lock:
            self.kinds[kind].wait_s += wait_s
            if threading.get_ident() == self.stepper_thread:
                self.kinds[kind].stepper_wait_s += wait_s

    def reset(self) -> None:
        with self._lock:
            for count in self.kinds.values():
                count.calls = count.bytes = 0
                count.wait_s = count.stepper_wait_s = 0.0

    def to_dict(self) -> dict[str, dict[str, float]]:
        with self._lock:
            return {kind: asdict(count) for kind, count in self.kinds.items()}


class Waiting:
    """`wait` of anything, its time counted."""

    def __init__(self, wait: Callable[[], object], meter: Meter | None, kind: str, *kept: object) -> None:
        self._wait = wait
        self._meter = meter
        self._kind = kind
        self._kept = kept  # memory that must outlive the transfer

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self._wait()
        finally:
            if self._meter is not None:
                self._meter.waited(self._kind, time.perf_counter() - start)
