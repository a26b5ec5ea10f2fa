"""Where bytes rest: device, host memory, disk; in which portions they move, and counters of those that do.

`host` copies between host and device, `disk` moves to and from one file of this rank, `array` is what rests in files.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from ..comm.inflight import Counters

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
        slab_numel: elements of each array on disk that are read, updated and written at a time: a slab.
        slabs: slabs in host memory at once: one is read, one updated, one written.
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


class Meter(Counters):
    """Counters of one engine: `down` (device to host), `up` (host to device), `read` and `write` (disk)."""

    KINDS = ("down", "up", "read", "write")

    def __init__(self) -> None:
        super().__init__()
        self.stepper_thread: int | None = None
        """The identifier of the thread that steps over offloaded state."""
        self.stepper_wait_s = dict.fromkeys(self.KINDS, 0.0)
        """Of the time waited, what that thread has, beside training."""

    def waited(self, kind: str, wait_s: float) -> None:
        super().waited(kind, wait_s)
        if threading.get_ident() == self.stepper_thread:
            self.stepper_wait_s[kind] += wait_s
