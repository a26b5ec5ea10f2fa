"""Find waits for other ranks that will not end, and end them on every rank with the same error.

One daemon thread per process group, the `Watcher`, checks the watches of all wires once a tick. A rank that waits for long asks
for positions through the process group's store (`mail`). Then every rank publishes what it waits for, where user code is, and
whether it makes progress: its waits end, it or its children use the processor or a disk, or a debugger has stopped it. If all
ranks wait for others and none has made progress for `stall_s`, the ranks have diverged. The first rank to find that posts a
verdict, and every rank raises it as a `StallError`.

The watcher's thread never calls the store, which may be behind a cut link. Connections of its own (`links`) show which hosts
can be reached. If a host does not answer for most of `stall_s`, waits of `stall_s` end on both sides.

Waits of one thread are one *lane*, because a thread is at one position at a time: the training loop's, over all wires of the
process group, and that of each wire that saves a checkpoint behind training.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from ..errors import StallError
from .links import Link, Links
from .mail import FIRST_S, Box, Mail
from .position import (
    DIVERGED,
    NETWORK,
    SILENT,
    Position,
    Work,
    explain,
    is_debugged,
    last_error,
    ranks_text,
    torch_wait,
    user_code,
)
from .watch import SLOW, STALL_S, Watch

_TICKS = 12
"""Checks per `stall_s`."""
_ENDED_S = 3.0
"""A wait this long asks for positions. Messages that a rank sent before it ended have arrived by then."""
_CARDS_S = 1.0
"""Wait for the ranks' cards, before the store's connections are used."""
_SILENT = 0.7
"""A host without an answer for this part of `stall_s` cannot be reached."""
_POST_S = 2.0
"""Time that a verdict waits for the store. Every rank raises the first one that is posted."""
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "across": "the gradients of {}",
    "agree": "the agreement on which units take part in a backward",
}


class Watcher:
    """Checks all watches of this process over one process group and its side groups, until the group is freed.

    Args:
        owner: the process group.
        store: its `torch.distributed.Store`.
        endpoint: host name and port of the store, if it has them.
        prefix: of keys in the store.
        rank, size: of this process.
        stall_s: limit of waits; 0: not watched.

    Attributes:
        engines: number of engines so far.
        groups: process groups of some ranks, by all groups of their kind: this rank's one of each.
    """

    def __init__(
        self,
        owner: object,
        store: Any,
        endpoint: tuple[str, int] | None,
        prefix: str,
        rank: int,
        size: int,
        stall_s: float | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.stall_s = STALL_S if stall_s is None else stall_s
        self.engines = 0
        self.groups: dict[str, Any] = {}
        self.lanes: dict[str, _Lane] = {}
        self.stop = Event()
        self.links = Links()
        self.endpoint = endpoint
        self._store_link: Link | None = None
        self._store_address: Any = None
        self._began = time.perf_counter()
        self.mail = Mail(store, prefix, rank, size, lambda: list(self.lanes.values()), self._mail_tick_s)
        self._thread = threading.Thread(target=self._run, name="hf_zero watch", daemon=True)
        self.mail.start()
        self._thread.start()
        # Runs at exit too: a daemon thread inside the store's C++ code would abort the process when Python ends.
        weakref.finalize(owner, self._end, os.getpid())

    @property
    def fault(self) -> str | None:
        """Return why a rank cannot be watched; None: all are."""
        return self.mail.fault

    def open(self, stall_s: float) -> None:
        """Wait for the store's first answer.

        Raises:
            StallError: it does not come.
        """
        self.stall_s = stall_s
        limit_s = stall_s or STALL_S
        if not self.mail.opened.wait(limit_s):
            what = self.unreachable(0) or f"the process group's store{self.at} has not answered for {limit_s:.0f} s"
            self.mail.close(0)
            raise StallError(f"rank {self.rank} on {socket.gethostname()}, in zero.shard: {what}. {NETWORK}")

    def join(self, watch: Watch, lane: str) -> None:
        """Check this watch too, until it is freed.

        Args:
            lane: the same on every rank; one per thread and process group.
        """
        if lane not in self.lanes:
            self.lanes = {**self.lanes, lane: _Lane(self, lane)}
        self.lanes[lane].join(watch)

    def agree(self, stall_s: float, prefix: str, faults: Sequence[str]) -> None:
        """Use the values that the ranks have agreed on. A single rank without a watch would seem to have ended.

        Args:
            stall_s: seconds without progress after which ranks have diverged; 0: waits are not watched.
            prefix: rank 0's.
            faults: of ranks that cannot be watched.
        """
        self.stall_s = stall_s
        if faults:
            self.mail.fault = faults[0]
            self.stop.set()
        else:
            self.mail.adopt(prefix)

    @property
    def tick_s(self) -> float:
        return min(1.0, max(0.05, (self.stall_s or STALL_S) / _TICKS))

    def _mail_tick_s(self) -> float:
        return self.tick_s if self.stall_s > 0 and self.fault is None else 0.0

    @property
    def at(self) -> str:
        return f" at {self.endpoint[0]}:{self.endpoint[1]}" if self.endpoint else ""

    def unreachable(self, at_least_s: float) -> str:
        """Return which hosts have not answered for `at_least_s`; empty: none is known."""
        now = time.perf_counter()
        lost = self.links.lost(now)
        store_s = 0.0 if self._store_link is None else self._store_link.silent_s(now)
        longest_s = max((store_s, *(silent_s for _, _, silent_s in lost)))
        if longest_s == 0 or longest_s < at_least_s:
            return ""
        hosts = ", ".join(f"{host} ({ranks_text(ranks)})" if ranks else host for host, ranks, _ in lost)
        hosts = hosts or f"the host of the process group's store{self.at}"
        return f"{hosts} cannot be reached from {socket.gethostname()}: no answer for {longest_s:.0f} s"

    # In the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.mail.card = self.links.listen(self.endpoint)
        if self.endpoint is not None:
            with suppress(OSError):  # resolved now, while the network works
                self._store_address = socket.getaddrinfo(*self.endpoint, type=socket.SOCK_STREAM)[0][4][:2]
        while not self.stop.wait(FIRST_S if self._is_starting() else self.tick_s):
            try:
                if self.stall_s > 0 and self.fault is None:
                    self._check(time.perf_counter())
            except Exception:  # such as no descriptors; must continue: without this thread no wait would end
                continue
        self.links.close()
        if self._store_link is not None:
            self._store_link.close()

    def store_silent_s(self, now: float) -> float:
        silent_s = now - self.mail.answered
        return silent_s if silent_s > max(1.0, 3 * self.tick_s) else 0.0

    def _is_starting(self) -> bool:
        """Return True until all hosts have been reached, for `STALL_S` at most."""
        return not self.links.are_known and time.perf_counter() - self._began < STALL_S

    def _check(self, now: float) -> None:
        if self.mail.cards and not self.links.hosts:
            self.links.connect(self.mail.cards, self.rank)
        elif not (self.mail.cards or self.links.has_clients) and self.endpoint and now - self._began > _CARDS_S:
            self.links.connect_to_clients(self.endpoint[1])
        self.links.check(now, self.stall_s)
        if self.store_silent_s(now) == 0 or self._store_address is None:
            if self._store_link is not None:
                self._store_link.close()
            self._store_link = None
        else:
            if self._store_link is None:
                self._store_link = Link(*self._store_address, is_known=True)
            self._store_link.check(now, self.stall_s)
        for lane in list(self.lanes.values()):
            if lane.verdict is None:
                lane.check(now)
            else:
                lane.end_torch_wait(now)

    def finish(self, verdict: str, lanes: Sequence[_Lane], *, is_cut: bool = False) -> None:
        """Raise `verdict` in the threads that wait.

        Args:
            is_cut: other ranks or the store cannot be reached.
        """
        # Must reach all wires before one wait is broken: that wait, and any that begins next, raises the verdict.
        for lane in lanes:
            lane.adopt(verdict)
        if is_cut:
            self.mail.close(2 * self.tick_s)  # other ranks on this side of the cut raise the same verdict
        elif any(lane.waited_s() for lane in lanes):
            self.stop.wait(2 * self.tick_s)  # other ranks must read the verdict before this rank's connections break
        for lane in lanes:
            lane.interrupt()

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # a forked child does not have the thread and must not use the connection
            return
        is_silent = self.store_silent_s(time.perf_counter()) > _ENDED_S
        self.stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)
        self.mail.close(0.1 if is_silent and self._mail_tick_s() else 10)


class _Lane:
    """The waits of one thread, over any number of wires.

    Args:
        watcher: of the process group.
        name: in keys; empty: the main thread's.
    """

    def __init__(self, watcher: Watcher, name: str) -> None:
        self.name = name
        self.box = Box()
        self.verdict: str | None = None
        self._watcher = watcher
        self._watches: tuple[weakref.ref[Watch], ...] = ()
        self._purposes: list[str] = []
        self._newest = 0
        self._heard: dict[int, _Heard] = {}
        self._progress = 0
        self._before: tuple[int, object, Work | None] = (0, None, None)
        self._in_torch: tuple[str, int, float] = ("", 0, 0.0)
        self._has_ended_torch = False
        self._reported_s = self._proposed = 0.0

    def join(self, watch: Watch) -> None:
        self._watches = (*(each for each in self._watches if each() is not None), weakref.ref(watch))
        watch.lane, watch.verdict, watch.purposes = self, self.verdict, self._purposes

    def _open(self) -> list[Watch]:
        return [watch for each in self._watches if (watch := each()) is not None]

    def _current(self) -> Watch | None:
        """Return the watch that waits, else the one that waited last."""
        watches = self._open()
        waiting = [watch for watch in watches if watch.at is not None]
        return max(waiting or watches, key=lambda watch: watch.last, default=None)

    def waited_s(self) -> float:
        watch = self._current()
        at = None if watch is None else watch.at
        return 0.0 if at is None else time.perf_counter() - at.started

    def position(self, *, ended: bool = False) -> Position:
        watch = self._current() or Watch()
        at = watch.at
        waits_for = "" if ended or self.name else torch_wait()
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(watch.units.get(at.tag, "a unit"))
        engines = tuple(each.engine for each in self._open() if each.engine)
        self._newest = max((self._newest, *engines))
        return Position(
            rank=self._watcher.rank,
            step=watch.step,
            phase=watch.phase,
            waits_for=waits_for,
            among="" if at is None else watch.among.get(at.kind, ""),
            purpose=self._purposes[-1] if self._purposes else "",
            code=last_error() if ended else user_code(),
            progress=self._progress,
            ended=ended,
            answers=self._watcher.mail.asked,
            engine=watch.engine,
            newest=self._newest,
            engines=engines,
        )

    # In the store's thread ------------------------------------------------------------------------------------------

    def asks(self) -> bool:
        return self.verdict is None and self.waited_s() > min(self._watcher.stall_s / 3, _ENDED_S)

    def answer(self, work: Work) -> Position:
        watches = self._open()
        at = next((watch.at for watch in watches if watch.at is not None), None)
        done = sum(watch.done for watch in watches)
        before_done, before_at, before = self._before
        works = at is None and ((before is not None and work.has_grown(before, self._watcher.tick_s)) or is_debugged())
        if done != before_done or at is not before_at or works:
            self._progress += 1
        self._before = (done, at, work)
        return self.position()

    # In the watcher's thread ----------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End this rank's wait if no rank can continue."""
        if self.box.posted is not None:
            self._watcher.finish(self.box.posted, [self])
            return
        waited_s, stall_s = self.waited_s(), self._watcher.stall_s
        blocked_s = max(waited_s, self._in_torch_s(now))
        if blocked_s > stall_s and (unreachable := self._watcher.unreachable(_SILENT * stall_s)):
            lanes = [lane for lane in self._watcher.lanes.values() if lane.verdict is None]
            self._watcher.finish(self.explain(unreachable, NETWORK), lanes, is_cut=True)
        elif waited_s <= min(stall_s / 3, _ENDED_S):
            self._heard.clear()
            self._reported_s = stall_s
            self.box.proposal = None
        elif self.box.proposal is None:
            self.box.proposal, self._proposed = self._judge(now, waited_s, stall_s), now
        elif now - self._proposed > _POST_S:  # the store does not answer
            self._watcher.finish(self.box.proposal, [self], is_cut=True)

    def adopt(self, verdict: str) -> None:
        self.verdict = self.box.proposal = verdict
        for watch in self._open():
            watch.verdict = verdict

    def interrupt(self) -> None:
        """End the waits with an error, whose reason is the verdict."""
        for watch in self._open():
            if watch.at is not None:
                watch.interrupt()

    def end_torch_wait(self, now: float) -> None:
        """End a wait of user code in torch.distributed, after the verdict. It raises torch's error: print the verdict."""
        if self._has_ended_torch or self._in_torch_s(now) <= _ENDED_S:
            return
        self._has_ended_torch = True
        _print(f"hf_zero: {self.verdict}")
        for watch in self._open():
            watch.interrupt()

    def _in_torch_s(self, now: float) -> float:
        """Return for how long the main thread has been in a collective of torch that user code called."""
        call = "" if self.name else torch_wait()
        done = sum(watch.done for watch in self._open())
        if not call or (call, done) != self._in_torch[:2]:
            self._in_torch = (call, done, now)
        return now - self._in_torch[2] if call else 0.0

    def _judge(self, now: float, waited_s: float, stall_s: float) -> str | None:
        """Return why no rank can continue; None while one may."""
        watch = self._current()
        at = None if watch is None else watch.at
        if watch is None or at is None:  # it has ended just now
            return None
        positions = [*self.box.positions] if self.box.fetched > at.started else [None] * self._watcher.size
        late = []
        for rank, found in enumerate(positions):
            if rank not in self._heard:
                self._heard[rank] = _Heard(found, now, now)
            position = positions[rank] = self._heard[rank].hear(found, now, 3 * self._watcher.tick_s)
            if position is not None and position.has_released(watch.engine):
                positions[rank] = replace(position, ended=True)
            elif rank != self._watcher.rank and now - self._heard[rank].moved <= stall_s * _patience(
                position, positions
            ):
                late.append(rank)
        ended = any(position is not None and position.ended for position in positions)
        if waited_s <= (min(_ENDED_S, stall_s) if ended else stall_s):
            return None
        links = self._watcher.links
        if waited_s < SLOW * stall_s and (self._watcher.unreachable(0) or now - links.healed < stall_s):
            # TCP sends lost bytes again within the length of the cut.
            late = late or [rank for rank in range(len(positions)) if rank != self._watcher.rank]
        if late and not ended:
            if waited_s > self._reported_s:
                self._reported_s = 2 * waited_s
                self._report(waited_s, [(rank, positions[rank]) for rank in late])
            return None
        if (silent_s := self._watcher.store_silent_s(now)) > stall_s:
            what = f"the process group's store{self._watcher.at} has not answered for {silent_s:.0f} s"
            return self.explain(f"{what}, and this rank waits for {waited_s:.0f} s", SILENT, positions)
        return self.explain(f"ranks have diverged: no rank has made progress for {waited_s:.0f} s", DIVERGED, positions)

    def explain(self, what: str, advice: str, positions: Sequence[Position | None] = ()) -> str:
        """Return a verdict: what happened, the position of each rank, and what to do."""
        watcher = self._watcher
        found = [*(positions or self.box.positions or [None] * watcher.size)]
        found[watcher.rank] = self.position()
        silent = {rank: s for _, ranks, s in watcher.links.lost(time.perf_counter()) for rank in ranks}
        return explain(what, found, advice, watcher.links.hosts, silent)

    def _report(self, waited_s: float, late: list[tuple[int, Position | None]]) -> None:
        here = self.position()
        what = f"in {here.purpose}" if here.purpose else f"for {here.waits_for}"
        for_whom = "; ".join(f"rank {rank}: {position or 'no answer so far'}" for rank, position in late)
        lost = self._watcher.unreachable(0)
        if not lost and (silent_s := self._watcher.store_silent_s(time.perf_counter())):
            lost = f"the process group's store{self._watcher.at} has not answered for {silent_s:.0f} s"
        _print(
            f"hf_zero: rank {here.rank} has waited {waited_s:.0f} s {what}{here.among}, for {for_whom}"
            + (f"; {lost}" if lost else "")
        )

    # In any thread --------------------------------------------------------------------------------------------------

    def ask_for_verdict(self) -> str | None:
        """Return the verdict after a connection broke: another rank may just have raised it."""
        for _ in range(4 if self._watcher.fault is None else 0):
            self._watcher.mail.fresh()
            if self.verdict is not None or self.box.posted is not None or self._watcher.unreachable(0):
                break
            time.sleep(0.05)
        return self.verdict or self.box.posted

    def unreachable(self) -> str:
        return self._watcher.unreachable(0)

    def ended(self, engine: int) -> list[Position]:
        if self._watcher.fault is not None:
            return []
        return [replace(p, ended=True) for p in self.box.positions if p is not None and p.has_released(engine)]


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)


@dataclass
class _Heard:
    """One rank's knowledge of another.

    Attributes:
        position: the last one.
        moved: time of its last progress.
        answered: time of its last answer.
    """

    position: Position | None
    moved: float
    answered: float

    def hear(self, position: Position | None, now: float, silent_after_s: float) -> Position | None:
        before, self.position = self.position, position
        if position is None or before is None:
            if position is not before:
                self.moved = self.answered = now
            return position
        if position.progress != before.progress:
            self.moved = now
        if position.answers != before.answers:
            self.answered = now
        silent_s = now - self.answered
        return replace(position, silent_s=silent_s) if silent_s > silent_after_s else position


def _patience(position: Position | None, positions: Sequence[Position | None]) -> float:
    """Return how long a rank may make no progress, as a multiple of `stall_s`."""
    # It has never answered, does not answer now, or waits for no other rank: it may read, load, or call a server.
    if position is None or position.silent_s or not position.waits_for:
        return SLOW
    together = all(
        other is not None
        and (other.waits_for, other.engine, other.step, other.purpose)
        == (position.waits_for, position.engine, position.step, position.purpose)
        for other in positions
    )
    # Positions are known from a third of `stall_s` on, and at first each rank seems to have moved.
    return SLOW if together else 0.5
