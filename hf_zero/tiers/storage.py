"""State that the tiers of one engine share: link, file, scratch memory, and a ledger of allocated bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.inflight import DONE, Inflight
from ..errors import OutOfMemoryError
from .array import DiskArray, OnDisk, Values
from .disk import Disk
from .host import HUGE_BYTES, Link, use_huge_pages
from .tier import SIZES, Meter, Sizes, Tier

T = TypeVar("T", bound=Tensor | torch.UntypedStorage)

KEPT_BUFFERS = 2
"""Number of scratch buffers that are kept: the largest."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for a failed allocation of torch, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


KINDS = ("gathered", "communication", "gradients", "staging", "activations")
"""Kinds of bytes in a ledger."""


class Account:
    """Bytes of one tier in a `Ledger`.

    Any thread may `add`. Only the training thread writes the device's account: it may write to `now` directly, and must then
    call `record_peak` before it frees memory.

    Attributes:
        now: by kind, the bytes allocated.
        peak: by kind, the highest since `begin_step`.
        peak_total: the highest of all kinds together.
    """

    __slots__ = ("_lock", "now", "peak", "peak_total")

    def __init__(self) -> None:
        self.now, self.peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self.peak_total = 0
        self._lock = threading.Lock()

    def add(self, kind: str, nbytes: int) -> None:
        """Count `nbytes` of `kind` as allocated; negative: freed."""
        with self._lock:
            self.now[kind] += nbytes
            self.record_peak()

    def record_peak(self) -> None:
        """Update the peaks from `now`."""
        total, peak = 0, self.peak
        for kind in KINDS:
            value = self.now[kind]
            total += value
            if value > peak[kind]:
                peak[kind] = value
        if total > self.peak_total:
            self.peak_total = total

    def begin_step(self) -> None:
        """Start new peaks from the current bytes."""
        with self._lock:
            self.peak, self.peak_total = dict(self.now), sum(self.now.values())


class Ledger:
    """Bytes that one engine has allocated, by tier and kind, now and at their peak.

    Code that allocates or frees updates it: gathered spans, buckets and gradients (`engine/span.py`, `engine/bucket.py`), host
    buffers (here, `engine/ring.py`). Parameters and optimizer state are not counted: they stay allocated through a step, and
    torch's optimizers allocate their own state.

    Attributes:
        device, host: the account of each tier.
    """

    def __init__(self) -> None:
        self.device, self.host = Account(), Account()

    def begin_step(self) -> None:
        """Start new peaks from the current bytes."""
        self.device.begin_step()
        self.host.begin_step()


class Storage:
    """State that the tiers of one engine share: the link to the device, the file on disk, scratch memory.

    Attributes:
        meter: bytes moved and time waited, by direction.
        ledger: allocated bytes, by tier and kind.
        sizes: of blocks and slabs, the same on all ranks.
        uses_disk: some rank may store values on disk; the same on all ranks.
        transient: gradients are consumed in backward (`step_in_backward`): all shards share their memory.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        offload_dir: str | None,
        open_link: Callable[[torch.device, Meter], Link] = Link,
        sizes: Sizes = SIZES,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.meter = Meter()
        self.ledger = Ledger()
        self.link = open_link(device, self.meter)
        self.uses_disk = False
        self.transient = False
        self._rank = rank
        self._folder = offload_dir
        self._disk: Disk | None = None
        self._wait_for_gradient: Callable[[], None] | None = None
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    @property
    def disk(self) -> Disk:
        """Return the file, created at the first call.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._disk is None:
            self._disk = Disk(self._folder, self._rank, self.meter)
        return self._disk

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def allocate(self, kind: str, what: str, bytes_: int, make: Callable[[], T]) -> T:
        """Return `make()`, which allocates `bytes_` of device memory. The ledger counts them as `kind` until they are freed.

        Raises:
            OutOfMemoryError: the device has too little memory.
        """
        try:
            made = make()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"{what} needs {bytes_} bytes, and {self.device} has no memory for them. Use a smaller batch, gradient "
                "checkpointing, a higher stage or an offload; `hf-zero plan` shows what each takes"
            ) from error
        if bytes_ >= HUGE_BYTES and self.device.type == "cpu":
            use_huge_pages(made.data_ptr(), bytes_)
        account = self.ledger.device
        account.now[kind] += bytes_
        account.record_peak()
        return made

    def limit_gradient_copies(self, wait: Callable[[], None]) -> None:
        """Wait until the previous gradient is stored: one is copied at a time. `wait` waits for the current one."""
        before, self._wait_for_gradient = self._wait_for_gradient, wait
        if before is not None and before != wait:  # the same bucket has already waited
            before()

    def empty(self, tier: Tier, numel: int, dtype: torch.dtype) -> Values:
        """Return new 1-D values in host memory or on disk, undefined."""
        return OnDisk(DiskArray(self.disk, numel, dtype)) if tier is Tier.DISK else self.link.empty(numel, dtype)

    def store(self, tier: Tier, values: Tensor) -> Values:
        """Return a copy of 1-D `values` (any device) in host memory or on disk."""
        return self.empty(tier, values.numel(), values.dtype).copy_(values)

    def load(self, source: Values, target: Tensor) -> Inflight:
        """Start to copy `source`, in host memory or on disk, to `target` on the device; same dtype and length.

        Raises:
            TierError: while waiting: the read failed.
        """
        if isinstance(source, Tensor):
            return self.link.copy_to_device(source, target)
        if self.link.shares_memory:
            return source.begin_read(target)
        memory, up = self.scratch(source.numel(), source.dtype), DONE

        def send_up() -> None:
            nonlocal up
            up = self.link.copy_to_device(memory, target)
            up.wait()

        def release() -> None:
            up.close()
            self.release_scratch(memory)

        return Inflight((source.begin_read(memory),), (Inflight(finish=release),), send_up)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return temporary host memory. The caller must pass it to `release_scratch`."""
        needed = numel * dtype.itemsize
        with self._lock:
            fitting = [memory for memory in self._free if memory.numel() >= needed]
            memory = min(fitting, key=Tensor.numel) if fitting else None
            if memory is not None:
                self._free = [other for other in self._free if other is not memory]
        if memory is None:
            memory = self.link.empty(needed, torch.uint8)
            self.ledger.host.add("staging", needed)
        return memory[:needed].view(dtype)

    def release_scratch(self, memory: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.untyped_storage())
        with self._lock:  # keeps the largest: they fit most requests
            free = sorted([whole, *self._free], key=Tensor.numel, reverse=True)
            self._free = free[:KEPT_BUFFERS]
        for memory in free[KEPT_BUFFERS:]:
            self.ledger.host.add("staging", -memory.numel())

    def close(self) -> None:
        """Close the file. Its content is lost."""
        self._wait_for_gradient = None
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        for memory in self._free:
            self.ledger.host.add("staging", -memory.numel())
        self._free.clear()
