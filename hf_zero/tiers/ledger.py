"""The byte ledger: what one engine has allocated, by tier and kind, now and at its highest.

Whoever allocates or frees adds to it: the storage of gathered spans, buckets and gradients (`runtime/flat_param.py`,
`runtime/state_shard.py`), host buffers (`tiers/pool.py`, `runtime/host_step.py`). What rests for long (parameters, optimizer
state) is not here: nothing of it comes and goes within a step, and torch's optimizers allocate their state themselves.
"""

from __future__ import annotations

import threading

KINDS = ("gathered", "communication", "gradients", "staging")
"""What a ledger counts."""


class Account:
    """Bytes in one tier.

    Any thread may `add`. To the device's account only the thread that trains adds: it may write to `now` itself, and must then
    `look` before it frees anything, since peaks are those of the moments that were looked at.

    Attributes:
        now: by kind, what is there.
        peak: by kind, the highest since `begin_step`.
        peak_total: the same of all kinds together.
    """

    __slots__ = ("_lock", "now", "peak", "peak_total")

    def __init__(self) -> None:
        self.now, self.peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self.peak_total = 0
        self._lock = threading.Lock()

    def add(self, kind: str, nbytes: int) -> None:
        """`nbytes` of `kind` were allocated; negative: freed."""
        with self._lock:
            self.now[kind] += nbytes
            self.look()

    def look(self) -> None:
        """`now` may be the highest."""
        total, peak = 0, self.peak
        for kind in KINDS:
            value = self.now[kind]
            total += value
            if value > peak[kind]:
                peak[kind] = value
        if total > self.peak_total:
            self.peak_total = total

    def begin_step(self) -> None:
        """Peaks are those from now on."""
        with self._lock:
            self.peak, self.peak_total = dict(self.now), sum(self.now.values())


class Ledger:
    """The accounts of one engine.

    Attributes:
        device, host: what is allocated there by the engine itself, beside what rests.
        places: grows whenever parameters or optimizer state come to rest elsewhere, so that who knows their bytes looks again.
    """

    def __init__(self) -> None:
        self.device, self.host = Account(), Account()
        self.places = 0

    def begin_step(self) -> None:
        """Peaks are those from now on."""
        self.device.begin_step()
        self.host.begin_step()
