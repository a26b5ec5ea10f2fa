"""Blocking waits for other ranks: counted, seen by the watcher, and ended with a `StallError` on every rank.

Before each blocking wait a wire stores one object, `Watch.at`; nothing else happens in a step. The rest is in `watcher`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..errors import StallError
from .inflight import Counters
from .places import NETWORK, SAME_STEPS, Place

STALL_S = 30.0
"""For wires that are opened before an engine's settings are known."""

SLOW = 10
"""A rank that waits for no other or does not answer, and a wait in which all ranks stand together (a long transfer), are given
this many times `stall_s`: they may get further by themselves. The others say on stderr for whom they wait."""

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
_LOST = "That rank's process has ended, or raised an error before this one: its own output, further up or in its log, says why"


class Lane(Protocol):
    """All waits of one thread of the program. Each call returns within seconds, also where nothing can be reached."""

    def ask_for_verdict(self) -> str | None:
        """Return why this rank cannot continue, if that is known."""

    def place(self) -> Place: ...

    def ended(self, engine: int) -> Sequence[Place]:
        """Return ranks that have released an engine."""

    def unreachable(self) -> str:
        """Return which hosts cannot be reached; empty: none is known."""


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
        """Raises:
        StallError: this rank waits for one that will not come, or has ended.
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
        at: the wait under way, if any. Stored by the wire, read by the thread.
        done: waits that have ended.
        last: when the last wait began.
        step: optimizer steps made.
        phase: what the engine is doing.
        units: names of units by message tag.
        engine: the number of the engine that the wire is for, the same on every rank; 0: it is for none.
        among: by kind of wait, for which of the ranks, where these are not all; words that follow what is waited for.
        verdict: why this rank cannot go on. Every wait that begins or breaks afterwards raises it.
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
        """Together they break every wait of the wire; called in another thread."""
        self.lane: Lane | None = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around a collective that a program calls by itself: named to those that wait, and to those that do not come."""
        self.purposes.append(what)
        try:
            yield
        finally:
            self.purposes.pop()

    def interrupt(self) -> None:
        for each in self.interrupts:
            each()

    def error(self) -> StallError:
        return StallError(self.verdict or "")

    def explained(self, error: RuntimeError) -> Exception:
        """What to raise for an error that a wait ended with."""
        lane = self.lane
        if self.verdict is None and lane is not None:
            self.verdict = lane.ask_for_verdict()
        if self.verdict is not None:
            return self.error()
        if lane is None or not any(word in str(error) for word in _BROKEN):
            return error
        here = lane.place()
        who = "; ".join(f"rank {place.rank} {place}" for place in lane.ended(self.engine))
        lost = lane.unreachable()
        return StallError(
            f"rank {here.rank}, {here}: the connection to another rank has broken. "
            + (f"{lost}. {NETWORK}" if lost else f"{who}. {SAME_STEPS}" if who else _LOST)
        )
