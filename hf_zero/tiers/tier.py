"""The three tiers: device, host memory, disk. Sizes of transfers, and counters of them.

`host` copies between host and device, `disk` accesses the file of this rank, `array` holds arrays in files.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from ..comm.inflight import Counters

ALIGN_BYTES = 4096
"""Alignment for O_DIRECT: file offsets, lengths and addresses must be multiples of the disk's block, and this covers all."""
PIECE_BYTES = 4 << 20
"""Longer transfers are split into pieces of this size, which move concurrently."""
THREADS = 4
"""Pieces in transfer at once. Unaligned ones need a buffer each: `THREADS * PIECE_BYTES` at most."""

WRITTEN_INPUTS = 4
"""Checkpointed inputs that wait in host memory for their write to disk. The last ones stay there for the backward."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements moved and updated at a time, the same on every rank. An engine and its plan share them.

    Attributes:
        block_numel: elements that the host optimizer updates at a time in mixed precision: they stay in the processor's cache.
        loop_numel: the same for an update that is a loop of operators: their temporary buffers stay in the cache and in
            malloc's heap. At most `block_numel`.
        slab_numel: elements of each array on disk that are read, updated and written at a time: a slab.
        slabs: slabs in host memory at once: one is read, one updated, one written.
        lanes: blocks through which parameters that are cast on the host are copied to the device.
    """

    block_numel: int = 1 << 19
    loop_numel: int = 1 << 17
    slab_numel: int = 1 << 20
    slabs: int = 3
    lanes: int = 2


SIZES = Sizes()
"""The default sizes."""


def padded(nbytes: int) -> int:
    """Return the next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Meter(Counters):
    """Counters of one engine: `down` (device to host), `up` (host to device), `read` and `write` (disk).

    Attributes:
        stepper_thread: identifier of the thread that steps over offloaded state.
        stepper_wait_s: the time that this thread has waited, concurrently with training.
    """

    KINDS = ("down", "up", "read", "write")

    def __init__(self) -> None:
        super().__init__()
        self.stepper_thread: int | None = None
        self.stepper_wait_s = dict.fromkeys(self.KINDS, 0.0)

    def waited(self, kind: str, wait_s: float) -> None:
        super().waited(kind, wait_s)
        if threading.get_ident() == self.stepper_thread:
            self.stepper_wait_s[kind] += wait_s
