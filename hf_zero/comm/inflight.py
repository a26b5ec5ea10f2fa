"""Transfers under way: the awaitable that every transfer returns, and counters of calls, bytes and waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol


class Work(Protocol):
    """An asynchronous operation of a process group."""

    def wait(self) -> object: ...


class Latch:
    """A flag that another thread sets once. A wait for it can be interrupted (Ctrl-C) and leaves it intact.

    `threading.Event` and `Future` wait in Python code: a signal there can leave a lock taken forever, or raise "release
    unlocked lock".

    Attributes:
        is_set: never becomes False again.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag. May be called again."""
        self.is_set = True
        with contextlib.suppress(RuntimeError):  # already released
            self._lock.release()

    def wait(self) -> None:
        while not self.is_set:
            self._lock.acquire(timeout=0.1)  # one of several waiting threads gets it; the others check `is_set` again


class Call:
    """A call that another thread makes.

    Attributes:
        ended: set when the call has ended.
        result, error: what it returned or raised.
    """

    __slots__ = ("_call", "ended", "error", "result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.ended = Latch()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Make the call: the target of the other thread."""
        try:
            if self._call is not None:
                self.result = self._call()
        except BaseException as error:
            self.error = error
        # Must precede `ended`: a waiting thread may close a file next, and an idle thread must hold no buffer.
        self._call = None
        self.ended.set()


class Inflight:
    """A transfer under way. It must not be dropped before `close`: its buffers are still read or written.

    `wait` returns when the *result* may be used. `close` returns when the buffers that were *sent* may be written again, too.
    On a fast rank that can be later: an early `close` would make this rank wait for the slowest peer.

    Args:
        receives: waited for by `wait`.
        sends: waited for by `close`.
        finish: called once after the receives.
        ready: returns True if `close` would return at once.
    """

    __slots__ = ("_finish", "_ready", "_receives", "_sends")

    def __init__(
        self,
        receives: Sequence[Work] = (),
        sends: Sequence[Work] = (),
        finish: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self._receives = receives
        self._sends = sends
        self._finish = finish
        self._ready = ready

    @property
    def ready(self) -> bool:
        """Return True if the transfer is known to have ended: `close` returns at once."""
        if not self._receives and not self._sends and self._finish is None:
            return True
        return self._ready is not None and self._ready()

    def wait(self) -> None:
        for work in self._receives:
            work.wait()
        self._receives = ()
        finish, self._finish = self._finish, None  # before the call: a partial sum must not be repeated
        if finish is not None:
            finish()

    def close(self) -> None:
        if self._receives or self._finish is not None:
            self.wait()
        for work in self._sends:
            work.wait()
        self._sends = ()


DONE = Inflight()
"""A transfer with nothing to wait for: one rank, or one owner of everything."""


def join_transfers(transfers: Sequence[Inflight]) -> Inflight:
    """Join transfers into one. Waiting waits for all, so that no buffer is in use after an error; raises the first one."""

    def wait() -> None:
        failure: Exception | None = None
        for transfer in transfers:
            try:
                transfer.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    return Inflight((), (), wait, ready=lambda: all(transfer.ready for transfer in transfers))


# Counting -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Count:
    """Transfers of one kind since the last reset: calls, payload bytes, and the time that threads waited for them."""

    calls: int = 0
    bytes: int = 0
    wait_s: float = 0.0


class Counters:
    """One `Count` for each of `KINDS`. Any thread may count, under `lock`."""

    KINDS: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.kinds = {kind: Count() for kind in self.KINDS}
        self.lock = threading.Lock()

    def __getitem__(self, kind: str) -> Count:
        return self.kinds[kind]

    def moved(self, kind: str, bytes_: int) -> None:
        with self.lock:
            count = self.kinds[kind]
            count.calls += 1
            count.bytes += bytes_

    def waited(self, kind: str, wait_s: float) -> None:
        with self.lock:
            self.kinds[kind].wait_s += wait_s

    def reset(self) -> None:
        with self.lock:
            for count in self.kinds.values():
                count.calls = count.bytes = 0
                count.wait_s = 0.0

    def to_dict(self) -> Mapping[str, Mapping[str, float]]:
        with self.lock:
            return {kind: asdict(count) for kind, count in self.kinds.items()}


class TimedWait:
    """A wait whose time is counted.

    Args:
        wait: blocks until the transfer has ended.
        counters: count the time.
        kind: of the transfer.
        kept: memory that must outlive the transfer.
    """

    __slots__ = ("_counters", "_kept", "_kind", "_wait")

    def __init__(self, wait: Callable[[], object], counters: Counters, kind: str, *kept: object) -> None:
        self._wait = wait
        self._counters = counters
        self._kind = kind
        self._kept = kept

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self._wait()
        finally:
            self._counters.waited(self._kind, time.perf_counter() - start)
