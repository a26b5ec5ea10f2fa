"""Waits for other ranks that will not come: noticed by a thread, named, and ended on every rank.

Before each blocking wait the wire stores one object, `Watch.at`; nothing else happens in a step. A daemon thread looks at it
once a tick. Where a wait gets long, its rank asks through the process group's store; then every rank's thread publishes what
its rank waits for, where its program stands, and whether it makes progress. A rank makes progress while its waits end, while
it or its children use the processor, and while a debugger has stopped it. Where all wait for others, and none has made any
for `stall_s`, the ranks have diverged: the first rank to find that publishes a verdict, and every rank raises it as a
`StallError`.

What the verdict says of user code comes from the stack of the main thread: the innermost frame outside of this package,
PyTorch, and what is built on them.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from threading import Event
from types import FrameType
from typing import Any, Protocol

import psutil

from ..errors import StallError

SLOW = 10
"""A rank that waits for no other, and a wait in which all ranks stand together (a long transfer), are given this many times
`stall_s`: they may get further by themselves. The others say on stderr for whom they wait."""

_TICKS = 12
"""Looks per `stall_s`."""
_ENDED_S = 3.0
"""A wait this long asks where the others are. What a rank sent before it ended has arrived by then."""
_LIBRARIES = ("torch", "hf_zero", "accelerate", "transformers", "peft", "trl")
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
_BROKEN = ("closed by peer", "reset by peer", "pair closure", "Broken pipe", "Connection refused", "Socket closed")
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "agree": "the agreement on which units take part in a backward",
}


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Waiting(Protocol):
    """A wait under way."""

    kind: str
    tag: int
    started: float


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as it publishes it."""

    rank: int
    step: int
    phase: str
    waits_for: str
    """Empty: it waits for no rank."""
    purpose: str
    """What it has called: `state_dict()`, `saving to …`; empty within a step."""
    code: str
    """File, line and function of the user's program; once it has ended, the error that ended it."""
    progress: int
    """Counts looks between which the rank got further."""
    ended: bool = False

    def __str__(self) -> str:
        if self.ended:
            return f"has ended, or let go of the model, after {self.step} steps" + (
                f": {self.code}" if self.code else ""
            )
        doing = f"in {self.purpose}" if self.purpose else f"in {self.phase} of step {self.step}"
        waits = f"waits for {self.waits_for}" if self.waits_for else "waits for no other rank"
        return f"{doing}, {waits}; its program is at {self.code}"


class Watch:
    """What one wire waits for, and what is known of it.

    Attributes:
        at: the wait under way, if any. Stored by the wire, read by the thread.
        done: waits that have ended.
        step: optimizer steps made.
        phase: what the engine is doing.
        units: names of units by message tag.
        verdict: why this rank cannot go on. Every wait that begins or breaks afterwards raises it.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.at: Waiting | None = None
        self.done = 0
        self.step = 0
        self.phase = "the start"
        self.units: dict[int, str] = {}
        self.verdict: str | None = None
        self._purposes: list[str] = []
        self._thread: _Thread | None = None

    def start(self, owner: object, store: Store, prefix: str, stall_s: float, interrupt: Callable[[], None]) -> None:
        """Look from now on, until `owner` is gone.

        Args:
            prefix: of keys in the store; the same on every rank, and no other watch's.
            stall_s: seconds after which ranks that make no progress have diverged.
            interrupt: breaks every wait of this rank; called in another thread. Must not hold `owner`.
        """
        self._thread = _Thread(self, store, prefix, stall_s, interrupt)
        # Also at exit: a daemon thread that is in the store's C++ code while Python ends would abort the process.
        weakref.finalize(owner, self._thread.end, os.getpid())

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around a collective that a program calls by itself: named to those that wait, and to those that do not come."""
        self._purposes.append(what)
        try:
            yield
        finally:
            self._purposes.pop()

    def place(self, *, progress: int = 0, ended: bool = False) -> Place:
        at = self.at
        waits_for = "" if ended else _torch_wait()
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(self.units.get(at.tag, "a unit"))
        purpose = self._purposes[-1] if self._purposes else ""
        code = _last_error() if ended else user_code()
        return Place(self.rank, self.step, self.phase, waits_for, purpose, code, progress, ended)

    def error(self) -> StallError:
        return StallError(self.verdict or "")

    def explained(self, error: RuntimeError) -> Exception:
        """What to raise for an error that a wait ended with."""
        if self.verdict is None and self._thread is not None:
            self._thread.ask_for_verdict()
        if self.verdict is not None:
            return self.error()
        if not any(word in str(error) for word in _BROKEN):
            return error
        here = self.place()
        lost = self._thread.ended() if self._thread is not None else []
        who = "; ".join(f"rank {place.rank} {place}" for place in lost)
        return StallError(
            f"rank {self.rank}, {here}: the connection to another rank has broken. "
            + (f"{who}. {_SAME_STEPS}" if who else _LOST)
        )


_SAME_STEPS = "Every rank needs the same number of batches, and an exception on one rank ends all"
_LOST = "That rank's process has ended, or raised an error before this one: its own output, further up or in its log, says why"


class _Thread:
    """The thread of one watch."""

    def __init__(self, watch: Watch, store: Store, prefix: str, stall_s: float, interrupt: Callable[[], None]) -> None:
        self._watch = watch
        self._store = store
        self._prefix = prefix
        self._stall_s = stall_s
        self._interrupt = interrupt
        self._tick_s = min(2.0, max(0.05, stall_s / _TICKS))
        self._rank, self._size = watch.rank, watch.size
        self._seen: dict[int, tuple[Place | None, float]] = {}
        """By rank, where it was, and when that last changed."""
        self._asked = 0
        self._progress = 0
        self._before: tuple[int, object, float] = (0, None, 0.0)
        self._told_s = stall_s
        self._stop = Event()
        self._thread = threading.Thread(target=self._run, name="hf_zero watch", daemon=True)
        self._thread.start()

    # In the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._watch.verdict is None and not self._stop.wait(self._tick_s):
            try:
                self._look()
            except RuntimeError:  # the store is gone with its process: the process group notices that for itself
                return

    def _look(self) -> None:
        watch = self._watch
        at = watch.at
        waited_s = 0.0 if at is None else time.perf_counter() - at.started
        asks = waited_s > min(self._stall_s / 3, _ENDED_S)
        key = self._key("asks")
        if not asks and not self._store.check([key]):
            return
        # Who does not ask writes nothing: a store that is a file would grow.
        asked = self._store.add(key, 1) if asks else int(self._store.get(key))
        if asked == self._asked:
            return
        self._asked = asked
        verdict = self._posted_verdict()
        if verdict is None:
            self._publish()
            if not asks:
                self._seen.clear()
                self._told_s = self._stall_s
                return
            verdict = self._judge(waited_s)
        if verdict is not None:
            watch.verdict = verdict
            if watch.at is not None:
                self._stop.wait(2 * self._tick_s)  # others read the verdict before their connections break
                self._interrupt()

    def _publish(self) -> None:
        watch = self._watch
        at = watch.at
        now = (watch.done, at, _processor_s())
        used_s = now[2] - self._before[2]
        works = at is None and (used_s > 0.05 * self._tick_s or _is_debugged())
        if now[0] != self._before[0] or at is not self._before[1] or works:
            self._progress += 1
        self._before = now
        place = watch.place(progress=self._progress)
        self._store.set(self._key(self._rank), json.dumps(asdict(place)))

    def _judge(self, waited_s: float) -> str | None:
        """Why no rank will get further; None while one may."""
        now = time.perf_counter()
        places = self._places()
        late = []
        for rank, place in enumerate(places):
            before, since = self._seen.get(rank, (None, now))
            if rank not in self._seen or _moved(before, place):
                self._seen[rank] = (place, now)
                since = now
            if rank != self._rank and now - since <= self._limit_s(place, places):
                late.append(rank)
        ended = any(place is not None and place.ended for place in places)
        if waited_s <= (min(_ENDED_S, self._stall_s) if ended else self._stall_s):
            return None
        if late and not ended:
            if waited_s > self._told_s:
                self._told_s = 2 * waited_s
                self._tell(waited_s, [(rank, places[rank]) for rank in late])
            return None
        verdict = explain(places, waited_s)
        return self._store.compare_set(self._key("verdict"), "", verdict).decode()

    def _limit_s(self, place: Place | None, places: Sequence[Place | None]) -> float:
        """How long a rank may stand still before it counts as stuck."""
        if place is None:
            return SLOW * self._stall_s if self._watch.step == 0 else self._stall_s
        if place.ended:
            return 0.0
        together = all(
            other is not None
            and (other.waits_for, other.step, other.purpose) == (place.waits_for, place.step, place.purpose)
            for other in places
        )
        may_be_slow = not place.waits_for  # its program does something else: it may read, load, or talk to a server
        # Ranks are looked at from a third of `stall_s` on, and at first each seems to have moved.
        return (SLOW if together or may_be_slow else 0.5) * self._stall_s

    def _tell(self, waited_s: float, late: list[tuple[int, Place | None]]) -> None:
        here = self._watch.place()
        what = f"in {here.purpose}" if here.purpose else f"for {here.waits_for}"
        for_whom = "; ".join(f"rank {rank}: {place or 'nothing heard of it yet'}" for rank, place in late)
        print(
            f"hf_zero: rank {self._rank} has waited {waited_s:.0f} s {what}, for {for_whom}",
            file=sys.stderr,
            flush=True,
        )

    # In any thread --------------------------------------------------------------------------------------------------

    def ask_for_verdict(self) -> None:
        """A connection broke: perhaps because another rank has just raised the verdict."""
        with suppress(RuntimeError):
            for _ in range(4):
                self._watch.verdict = self._posted_verdict()
                if self._watch.verdict is not None:
                    return
                time.sleep(0.05)

    def ended(self) -> list[Place]:
        with suppress(RuntimeError):
            return [place for place in self._places() if place is not None and place.ended]
        return []

    def end(self, process: int) -> None:
        if os.getpid() != process:  # a fork has neither the thread nor a right to the connection
            return
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), json.dumps(asdict(self._watch.place(ended=True))))

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _posted_verdict(self) -> str | None:
        key = self._key("verdict")
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _places(self) -> list[Place | None]:
        keys = [self._key(rank) for rank in range(self._size)]
        if self._store.check(keys):
            return [_place(text) for text in self._store.multi_get(keys)]
        return [_place(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def explain(places: Sequence[Place | None], waited_s: float) -> str:
    """The verdict: where each rank stands, what is the likely cause, and what to do.

    Args:
        places: by rank; None: nothing was ever heard of it.
    """
    groups: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault("has not come this far" if place is None else str(place), []).append(rank)
    lines = [f"{_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    return (
        f"ranks have diverged: for {waited_s:.0f} s no rank got further.\n  "
        + "\n  ".join(lines)
        + f"\n{_cause(places)}"
    )


def _cause(places: Sequence[Place | None]) -> str:
    known = [place for place in places if place is not None]
    silent = [rank for rank, place in enumerate(places) if place is None]
    if silent:
        return (
            f"{_ranks(silent)} has not called what the others have: every rank makes the same calls in the same order"
        )
    ended = [place.rank for place in known if place.ended]
    if ended:
        return f"{_ranks(ended)} has ended before the others. {_SAME_STEPS}"
    purposes = {place.purpose for place in known}
    if len(purposes) > 1:
        by = {purpose: [place.rank for place in known if place.purpose == purpose] for purpose in purposes if purpose}
        called = " and ".join(f"{_ranks(ranks)} called {purpose}" for purpose, ranks in by.items())
        return (
            f"{called}, the others did not: it is a collective. Call it on every rank, outside of `if rank == 0` and "
            "`if trainer.is_world_process_zero()`"
        )
    steps = {place.step for place in known}
    if len(steps) > 1:
        least = min(steps)
        behind = [place.rank for place in known if place.step == least]
        return (
            f"{_ranks(behind)} has made {max(steps) - least} optimizer steps fewer: fewer batches, or a batch left out after "
            "an exception or a `continue`. Give every rank the same number, and leave one out on all or on none"
        )
    idle = [place.rank for place in known if not place.waits_for]
    if idle:
        return f"{_ranks(idle)} stands still at the line above, where the others wait for it"
    phases = {place.phase for place in known}
    if len(phases) > 1:
        return (
            "ranks are in different parts of one step: one may have left a pass by an exception, clipped or stepped alone, "
            "or disagree in no_sync. Every rank makes the same calls in the same order"
        )
    if len({place.waits_for for place in known if place.waits_for}) > 1:
        return (
            "ranks run different parts of the model in one pass; with stage 3 every rank runs the same units in the same order "
            "(stages 1 and 2 have no such limit)"
        )
    return "every rank makes the same calls in the same order"


def user_code() -> str:
    """File, line and function of the main thread's innermost frame that is the user's."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    frame, innermost = main, main
    while frame is not None:
        if _is_users(frame):
            innermost = frame
            break
        frame = frame.f_back
    if innermost is None:
        return "an unknown place"
    code = innermost.f_code
    return f"{code.co_filename}:{innermost.f_lineno} in {code.co_name}"


def _torch_wait() -> str:
    """The call of torch.distributed that the main thread is in, if it is the program's own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.distributed")
    return f"torch.distributed, in {frame.f_code.co_name}" if frame is not None and inside else ""


def _last_error() -> str:
    """What ended this program, where an exception did."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}"


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith((_STANDARD, "<"))


_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def _is_debugged() -> bool:
    """Whether a debugger holds the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _processor_s() -> float:
    """Processor time of this process and its children: data loaders and compilers work there."""
    used_s = time.process_time()
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = child.cpu_times()
                used_s += times.user + times.system
    return used_s


def _moved(before: Place | None, now: Place | None) -> bool:
    if before is None or now is None:
        return before is not now
    return (before.progress, before.ended) != (now.progress, now.ended)


def _place(text: bytes) -> Place:
    found: dict[str, Any] = json.loads(text)
    return Place(**found)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
