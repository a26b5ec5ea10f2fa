"""Blocking waits for other ranks: counted, seen by the stall watch, and ended with a `StallError`.

Before each blocking wait a wire stores one object, `Watch.at`. Nothing else happens in a step. `stall` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import StallError
from .inflight import Counters

STALL_S = 30.0
"""For wires that are opened before an engine's settings are known."""
NO_GRAD = "a forward without gradients"
AFTER_STEP = "what follows the step"
"""Values of `Watch.phase`."""

_BROKEN = (
    "closed by peer",
    "reset by peer",
    "pair closure",
    "Broken pipe",
    "Connection refused",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Socket closed",
)


Explain = Callable[[], tuple[str, bool]]
"""Returns why this rank cannot continue after a connection has broken, and whether that is the verdict of all ranks."""


class Wait:
    """A blocking call whose waiting is counted, and seen by the watch."""

    __slots__ = ("_call", "_count", "_watch", "kind", "started", "tag")

    def __init__(self, call: Callable[[], object], counters: Counters, watch: Watch, kind: str, tag: int) -> None:
        self._call = call
        self._count = counters.kinds[kind]
        self._watch = watch
        self.kind = kind
        self.tag = tag
        self.started = 0.0

    def wait(self) -> None:
        """Wait for the call.

        Raises:
            StallError: this rank waits for one that will not come, or that has ended.
        """
        watch = self._watch
        if watch.verdict is not None:
            raise watch.error()
        before = watch.at  # a call may wait for another; one thread at a time, or an ended wait would be put back here
        watch.last = self.started = time.perf_counter()
        watch.at = self
        try:
            self._call()
        except RuntimeError as error:
            explained = watch.explained(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            watch.at = before
            watch.done += 1
            self._count.wait_s += time.perf_counter() - self.started  # no lock: two threads at once lose a timing


class Watch:
    """What one wire waits for.

    Attributes:
        at: the current wait, if any. Stored by the wire, read by the watch thread.
        done: waits that have ended.
        last: when the last wait began.
        step: optimizer steps made.
        phase: what the engine does.
        units: names of units by message tag.
        engine: number of the engine that the wire is for, the same on every rank; 0: none.
        among: by kind of wait, the ranks that take part where these are not all; follows what is waited for.
        verdict: why this rank cannot continue. Every wait that begins or breaks afterwards raises it.
        explain: set by the stall watch.
        interrupts: calls that together break every wait of the wire, from another thread.
    """

    def __init__(self, *interrupts: Callable[[], None]) -> None:
        self.at: Wait | None = None
        self.done = 0
        self.last = 0.0
        self.step = 0
        self.phase = "the start"
        self.units: dict[int, str] = {}
        self.among: dict[str, str] = {}
        self.engine = 0
        self.verdict: str | None = None
        self.purposes: list[str] = []
        self.interrupts = [*interrupts]
        self.explain: Explain | None = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name a call of user code that needs all ranks, while it runs."""
        self.purposes.append(what)
        try:
            yield
        finally:
            self.purposes.pop()

    def error(self) -> StallError:
        return StallError(self.verdict or "")

    def explained(self, error: RuntimeError) -> Exception:
        """Return what to raise for an error that a wait ended with."""
        if self.verdict is None and self.explain is not None:
            reason, is_verdict = self.explain()
            if is_verdict:
                self.verdict = reason
            elif any(word in str(error) for word in _BROKEN):
                return StallError(reason)
        return error if self.verdict is None else self.error()
