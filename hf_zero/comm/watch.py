"""Waits for other ranks that will not come: noticed by a thread, named, and ended on every rank.

Before each blocking wait a wire stores one object, `Watch.at`; nothing else happens in a step. One daemon thread per process
group, the `Watcher`, looks at the watches of all wires once a tick. Where a wait gets long, its rank asks through the process
group's store; then every rank's thread publishes what its rank waits for, where its program stands, and whether it makes
progress. A rank makes progress while its waits end, while it or its children use the processor or a disk, and while a debugger
has stopped it. Where all wait for others, and none has made any for `stall_s`, the ranks have diverged: the first rank to find
that publishes a verdict, and every rank raises it as a `StallError`.

Waits are told apart by the thread that makes them, for a program's thread is in one place at a time: those of all wires over
the program's process group are one *lane*, and what writes a checkpoint behind training has a lane, and a group, of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from ..errors import StallError
from .inflight import Counters
from .places import SAME_STEPS, Place, Work, explain, is_debugged, last_error, torch_wait, user_code

STALL_S = 30.0
"""For wires that are opened before an engine's settings are known."""

SLOW = 10
"""A rank that waits for no other or does not answer, and a wait in which all ranks stand together (a long transfer), are given
this many times `stall_s`: they may get further by themselves. The others say on stderr for whom they wait."""

_TICKS = 12
"""Looks per `stall_s`."""
_ENDED_S = 3.0
"""A wait this long asks where the others are. What a rank sent before it ended has arrived by then."""
_BROKEN = ("closed by peer", "reset by peer", "pair closure", "Broken pipe", "Connection refused", "Socket closed")
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "across": "the gradients of {}",
    "node": "the parameters of {}",
    "agree": "the agreement on which units take part in a backward",
}
_LOST = "That rank's process has ended, or raised an error before this one: its own output, further up or in its log, says why"


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
        self.lane: _Lane | None = None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around a collective that a program calls by itself: named to those that wait, and to those that do not come."""
        self.purposes.append(what)
        try:
            yield
        finally:
            self.purposes.pop()

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
        return StallError(
            f"rank {here.rank}, {here}: the connection to another rank has broken. "
            + (f"{who}. {SAME_STEPS}" if who else _LOST)
        )


class Watcher:
    """Looks at all watches of this process over one process group and those beside it, until that is gone.

    Args:
        owner: the process group.
        store: its `torch.distributed.Store`. The thread has a connection of its own: a call of the main thread would block the
            other.
        prefix: of keys in the store.

    Attributes:
        fault: why this rank cannot be watched.
        groups: process groups of some ranks that were opened for engines, by these ranks; this rank's own one of each kind.
    """

    def __init__(self, owner: object, store: Any, prefix: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.stall_s = STALL_S
        self.asked = 0
        self.fault: str | None = None
        self.groups: dict[str, Any] = {}
        self.prefix = prefix
        self.lanes: dict[str, _Lane] = {}
        self.stop = Event()
        self._thread: threading.Thread | None = None
        try:
            # A store may outlive a process group; then keys of an earlier one are in it.
            self.prefix = f"{prefix}/{store.add(f'{prefix}/{rank}', 1)}"
            self.store = store.clone()
        except RuntimeError as error:  # a file that may not grow, a server that takes no more connections
            self.fault = f"rank {rank}: {error}"
            return
        self._thread = threading.Thread(target=self._run, name="hf_zero watch", daemon=True)
        self._thread.start()
        # Also at exit: a daemon thread that is in the store's C++ code while Python ends would abort the process.
        weakref.finalize(owner, self._end, os.getpid())

    def join(self, watch: Watch, lane: str) -> None:
        """Look at this one, too, as long as it is there.

        Args:
            lane: the same on every rank; one per thread and process group.
        """
        if lane not in self.lanes:
            self.lanes = {**self.lanes, lane: _Lane(self, lane)}
        self.lanes[lane].join(watch)

    def settle(self, stall_s: float, prefix: str, faults: Sequence[str]) -> None:
        """What the ranks have agreed on. One rank alone without a watch would look like one that has ended.

        Args:
            stall_s: seconds after which ranks that make no progress have diverged; 0: waits are not watched.
            prefix: rank 0's.
            faults: of ranks that cannot be watched.
        """
        self.stall_s = stall_s
        if faults:
            self.stop.set()
        elif prefix != self.prefix:
            self.prefix, self.asked = prefix, 0

    def key(self, *names: object) -> str:
        return "/".join((self.prefix, *(str(name) for name in names)))

    @property
    def tick_s(self) -> float:
        return min(1.0, max(0.05, (self.stall_s or STALL_S) / _TICKS))

    # In the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.stop.wait(self.tick_s):
            try:
                if self.stall_s > 0 and self._look():
                    return
            except RuntimeError:  # the store is gone with its process: the process group notices that for itself
                return
            except (
                Exception
            ):  # what a look needs fails (descriptors, /proc): without this thread the rank would seem dead
                continue

    def _look(self) -> bool:
        """Returns:
        Whether the main thread's lane has come to its end.
        """
        lanes = list(self.lanes.values())
        asks = any(lane.waited_s() > min(self.stall_s / 3, _ENDED_S) for lane in lanes if lane.verdict is None)
        key = self.key("asks")
        if not asks and not self.store.check([key]):
            return False
        # Who does not ask writes nothing: a store that is a file would grow.
        asked = self.store.add(key, 1) if asks else int(self.store.get(key))
        if asked == self.asked:  # this question has been answered; the next tick of who waits makes another one
            return False
        self.asked = asked
        work = Work.now()
        for lane in lanes:
            if lane.verdict is None:
                lane.look(work)
        return any(lane.verdict is not None for lane in lanes if not lane.name)

    def _end(self, process: int) -> None:
        if os.getpid() != process:  # a fork has neither the thread nor a right to the connection
            return
        self.stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)
        with suppress(RuntimeError):
            for lane in self.lanes.values():
                lane.publish(lane.place(ended=True))


class _Lane:
    """The waits of one thread of the program, by any number of wires.

    Args:
        name: in keys; empty: the main thread's.
    """

    def __init__(self, watcher: Watcher, name: str) -> None:
        self.name = name
        self.verdict: str | None = None
        self._watcher = watcher
        self._watches: tuple[weakref.ref[Watch], ...] = ()
        self._purposes: list[str] = []
        self._newest = 0
        self._heard: dict[int, _Heard] = {}
        self._progress = 0
        self._before: tuple[int, object, Work | None] = (0, None, None)
        self._told_s = 0.0

    def join(self, watch: Watch) -> None:
        self._watches = (*(each for each in self._watches if each() is not None), weakref.ref(watch))
        watch.lane, watch.verdict, watch.purposes = self, self.verdict, self._purposes

    def _open(self) -> list[Watch]:
        return [watch for each in self._watches if (watch := each()) is not None]

    def _current(self) -> Watch | None:
        """The one that waits; else, that waited last."""
        watches = self._open()
        waiting = [watch for watch in watches if watch.at is not None]
        return max(waiting or watches, key=lambda watch: watch.last, default=None)

    def waited_s(self) -> float:
        watch = self._current()
        at = None if watch is None else watch.at
        return 0.0 if at is None else time.perf_counter() - at.started

    def place(self, *, ended: bool = False) -> Place:
        watch = self._current() or Watch()
        at = watch.at
        waits_for = "" if ended or self.name else torch_wait()
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(watch.units.get(at.tag, "a unit"))
        engines = tuple(each.engine for each in self._open() if each.engine)
        self._newest = max((self._newest, *engines))
        return Place(
            rank=self._watcher.rank,
            step=watch.step,
            phase=watch.phase,
            waits_for=waits_for,
            among="" if at is None else watch.among.get(at.kind, ""),
            purpose=self._purposes[-1] if self._purposes else "",
            code=last_error() if ended else user_code(),
            progress=self._progress,
            ended=ended,
            answers=self._watcher.asked,
            engine=watch.engine,
            newest=self._newest,
            engines=engines,
        )

    # In the thread --------------------------------------------------------------------------------------------------

    def look(self, work: Work) -> None:
        """Somebody has asked: answer, and judge if this rank waits."""
        verdict = self._posted_verdict()
        if verdict is None:
            self._note_progress(work)
            self.publish(self.place())
            waited_s, stall_s = self.waited_s(), self._watcher.stall_s
            if waited_s <= min(stall_s / 3, _ENDED_S):
                self._heard.clear()
                self._told_s = stall_s
                return
            verdict = self._judge(waited_s, stall_s)
        if verdict is None:
            return
        self.verdict = verdict
        # On all wires of the lane before one wait is broken: the error of that wait, and of any that begins next, is this one.
        for watch in self._open():
            watch.verdict = verdict
        waiting = [watch for watch in self._open() if watch.at is not None]
        if waiting:  # others read the verdict before this rank's connections break
            self._watcher.stop.wait(2 * self._watcher.tick_s)
        for watch in waiting:
            for interrupt in watch.interrupts:
                interrupt()

    def _note_progress(self, work: Work) -> None:
        watches = self._open()
        at = next((watch.at for watch in watches if watch.at is not None), None)
        done = sum(watch.done for watch in watches)
        before_done, before_at, before = self._before
        works = at is None and ((before is not None and work.goes_on(before, self._watcher.tick_s)) or is_debugged())
        if done != before_done or at is not before_at or works:
            self._progress += 1
        self._before = (done, at, work)

    def publish(self, place: Place) -> None:
        self._watcher.store.set(self._key(place.rank), place.to_json())

    def _judge(self, waited_s: float, stall_s: float) -> str | None:
        """Why no rank will get further; None while one may."""
        now = time.perf_counter()
        watch = self._current()
        engine = 0 if watch is None else watch.engine
        places = self._places()
        late = []
        for rank, found in enumerate(places):
            if rank not in self._heard:
                self._heard[rank] = _Heard(found, now, now)
            place = places[rank] = self._heard[rank].hear(found, now, 3 * self._watcher.tick_s)
            if place is not None and place.has_let_go(engine):
                places[rank] = replace(place, ended=True)
            elif rank != self._watcher.rank and now - self._heard[rank].moved <= stall_s * _patience(place, places):
                late.append(rank)
        ended = any(place is not None and place.ended for place in places)
        if waited_s <= (min(_ENDED_S, stall_s) if ended else stall_s):
            return None
        if late and not ended:
            if waited_s > self._told_s:
                self._told_s = 2 * waited_s
                self._tell(waited_s, [(rank, places[rank]) for rank in late])
            return None
        verdict = explain(places, waited_s)
        # Two ranks may come to different ones at once: the first that is there is everyone's.
        return self._watcher.store.compare_set(self._key("verdict"), "", verdict).decode()

    def _tell(self, waited_s: float, late: list[tuple[int, Place | None]]) -> None:
        here = self.place()
        what = f"in {here.purpose}" if here.purpose else f"for {here.waits_for}"
        for_whom = "; ".join(f"rank {rank}: {place or 'nothing heard of it yet'}" for rank, place in late)
        with suppress(OSError, ValueError):  # stderr is closed
            print(
                f"hf_zero: rank {here.rank} has waited {waited_s:.0f} s {what}{here.among}, for {for_whom}",
                file=sys.stderr,
                flush=True,
            )

    # In any thread --------------------------------------------------------------------------------------------------

    def ask_for_verdict(self) -> str | None:
        """A connection broke: perhaps because another rank has just raised the verdict."""
        if self._watcher.fault is None:
            with suppress(RuntimeError):
                for _ in range(4):
                    verdict = self._posted_verdict()
                    if verdict is not None:
                        return verdict
                    time.sleep(0.05)
        return None

    def ended(self, engine: int) -> list[Place]:
        if self._watcher.fault is None:
            with suppress(RuntimeError):
                return [replace(p, ended=True) for p in self._places() if p is not None and p.has_let_go(engine)]
        return []

    def _key(self, name: object) -> str:
        return self._watcher.key(self.name, name)

    def _posted_verdict(self) -> str | None:
        key = self._key("verdict")
        store = self._watcher.store
        return store.get(key).decode() if store.check([key]) else None

    def _places(self) -> list[Place | None]:
        keys, store = [self._key(rank) for rank in range(self._watcher.size)], self._watcher.store
        if store.check(keys):
            return [Place.of_json(text) for text in store.multi_get(keys)]
        return [Place.of_json(store.get(key)) if store.check([key]) else None for key in keys]


@dataclass
class _Heard:
    """What one rank has heard of another.

    Attributes:
        moved: when that last got further.
        answered: when it last answered.
    """

    place: Place | None
    moved: float
    answered: float

    def hear(self, place: Place | None, now: float, silent_after_s: float) -> Place | None:
        before, self.place = self.place, place
        if place is None or before is None:
            if place is not before:
                self.moved = self.answered = now
            return place
        if place.progress != before.progress:
            self.moved = now
        if place.answers != before.answers:
            self.answered = now
        silent_s = now - self.answered
        return replace(place, silent_s=silent_s) if silent_s > silent_after_s else place


def _patience(place: Place | None, places: Sequence[Place | None]) -> float:
    """How long a rank may stand still before it counts as stuck, in `stall_s`."""
    # Nothing was ever heard of it; it is stopped; its program does something else: it may read, load, or talk to a server.
    if place is None or place.silent_s or not place.waits_for:
        return SLOW
    together = all(
        other is not None
        and (other.waits_for, other.engine, other.step, other.purpose)
        == (place.waits_for, place.engine, place.step, place.purpose)
        for other in places
    )
    # Ranks are looked at from a third of `stall_s` on, and at first each seems to have moved.
    return SLOW if together else 0.5
