"""Blocking waits for other ranks: counted, reported by the watcher, and ended with a `StallError`.

Before each blocking wait a wire stores one object, `Watch.current`. Nothing else happens in a step; see `watcher`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import StallError
from .inflight import Counters

STALL_S = 30.0
"""For wires that are opened before an engine's settings are known."""

SLOW_FACTOR = 20
"""Multiple of `stall_s` that ranks get if they may still continue: a rank that waits for no other or does not answer, and ranks
that all wait for the same (a long transfer). Meanwhile waiting ranks log which ranks they wait for. With the default `stall_s`
it is NCCL's own limit, 10 minutes."""

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


class Wait:
    """A blocking call whose time is counted and which the watch reports."""

    __slots__ = ("_call", "_count", "_watch", "kind", "started", "tag")

    def __init__(self, call: Callable[[], object], counters: Counters, watch: Watch, kind: str, tag: int) -> None:
        self._call = call
        self._count = counters.kinds[kind]
        self._watch = watch
        self.kind = kind
        self.tag = tag
        self.started = 0.0

    def wait(self) -> None:
        """Make the call.

        Raises:
            StallError: this rank waits for one that will not arrive, or has ended.
        """
        watch = self._watch
        if watch.verdict is not None:
            raise watch.error()
        before = watch.current  # waits nest, in one thread: two would restore ended waits
        watch.last = self.started = time.perf_counter()
        watch.current = self
        try:
            self._call()
        except RuntimeError as error:
            explained = watch.explained(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            watch.current = before
            watch.done += 1
            self._count.wait_s += (
                time.perf_counter() - self.started
            )  # without a lock: two threads at once lose one of the times


class Watch:
    """The waits of one wire.

    Attributes:
        current: the current wait, if any. Stored by the wire, read by the watch thread.
        done: waits that have ended.
        last: when the last wait began.
        step: optimizer steps made.
        gathers: a hash of the gathers so far, in order, for wires whose messages have no tags.
        phase: of the engine.
        units: names of units by message tag.
        engine: number of the engine that the wire is for, the same on every rank; 0: none.
        groups: by kind of wait, text that names the participating ranks if these are not all.
        verdict: why this rank cannot continue. Every wait that begins or breaks afterwards raises it.
        interrupts: functions that together break every wait of the wire, from another thread.
        explain: set by the watcher; called after a wait failed, with True if the connection to another rank has broken.
            Returns within seconds why this rank cannot continue, if known.
    """

    def __init__(self, *interrupts: Callable[[], None]) -> None:
        self.current: Wait | None = None
        self.done = 0
        self.last = 0.0
        self.step = self.gathers = 0
        self.phase = "the start"
        self.units: dict[int, str] = {}
        self.groups: dict[str, str] = {}
        self.engine = 0
        self.verdict: str | None = None
        self.operations: list[str] = []
        self.interrupts = [*interrupts]
        self.explain: Callable[[bool], str | None] | None = None

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Report this call of user code, which needs all ranks, while it runs."""
        self.operations.append(what)
        try:
            yield
        finally:
            self.operations.pop()

    def interrupt(self) -> None:
        for each in self.interrupts:
            each()

    def error(self) -> StallError:
        return StallError(self.verdict or "")

    def explained(self, error: RuntimeError) -> Exception:
        """Return the exception to raise for an error that ended a wait."""
        if self.verdict is None and self.explain is not None:
            self.verdict = self.explain(any(word in str(error) for word in _BROKEN))
        return error if self.verdict is None else self.error()
