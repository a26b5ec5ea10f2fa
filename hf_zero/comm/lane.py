"""The waits of one thread: which wire waits, for what, and how a verdict ends them."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from .position import Position, torch_wait, user_code
from .watch import Explain, Wait, Watch

ENDED_S = 3.0
"""A wait this long asks where the others are. What a rank sent before it ended has arrived by then."""
_WORDS = {
    "gather": "the parameters of {}",
    "reduce": "the gradients of {}",
    "scalar": "a sum over all ranks",
    "across": "the gradients of {}",
    "node": "the parameters of {}",
    "agree": "the agreement on which units take part in a backward",
}


class Lane:
    """The waits of one thread, over any number of wires.

    Args:
        name: empty for the training loop's.
        explain: see `Watch.explain`.
        interrupt_home: breaks user code's own waits over the default process group.

    Attributes:
        steps: optimizer steps that this rank has made.
        verdict: see `Watch.verdict`.
    """

    def __init__(self, name: str, explain: Explain, interrupt_home: Callable[[], None]) -> None:
        self.name = name
        self.verdict: str | None = None
        self.steps = 0
        self._explain, self._interrupt_home = explain, interrupt_home
        self._watches: tuple[weakref.ref[Watch], ...] = ()
        self._purposes: list[str] = []
        self._state: object = None
        self._moved = time.perf_counter()
        self._torch: tuple[str, int, float] = ("", 0, 0.0)

    def join(self, watch: Watch) -> None:
        self._watches = (*(each for each in self._watches if each() is not None), weakref.ref(watch))
        watch.explain, watch.verdict, watch.purposes = self._explain, self.verdict, self._purposes

    def _open(self) -> list[Watch]:
        return [watch for each in self._watches if (watch := each()) is not None]

    def _current(self) -> tuple[Watch, Wait | None]:
        """Return the watch that waits, else the one that waited last."""
        watches = self._open()
        waiting = [watch for watch in watches if watch.at is not None]
        watch = max(waiting or watches, key=lambda watch: watch.last, default=None) or Watch()
        self.steps = max(self.steps, watch.step)
        return watch, watch.at

    def waited_s(self, now: float) -> float:
        """Return the seconds in the current wait of a wire."""
        _, at = self._current()
        return 0.0 if at is None else now - at.started

    def blocked_s(self, now: float) -> float:
        """Return the seconds in the current wait, torch's own collectives included."""
        return self.waited_s(now) or self._torch_s(now)[1]

    def _torch_s(self, now: float) -> tuple[str, float]:
        call = "" if self.name else torch_wait()
        done = sum(watch.done for watch in self._open())
        if not call or (call, done) != self._torch[:2]:
            self._torch = (call, done, now)
        return call, now - self._torch[2]

    def position(self, now: float, works: bool = False) -> Position:
        """Return where the thread stands.

        Args:
            works: the process has used the processor or a disk since the last call.
        """
        watch, at = self._current()
        waits_for, waited_s = self._torch_s(now) if at is None else ("", now - at.started)
        if at is not None:
            waits_for = _WORDS.get(at.kind, "all ranks").format(watch.units.get(at.tag, "a unit"))
            waits_for += watch.among.get(at.kind, "")
        state = sum(each.done for each in self._open()), at
        if state != self._state or (works and at is None):
            self._state, self._moved = state, now
        return Position(
            step=watch.step,
            phase=watch.phase,
            waits_for=waits_for,
            purpose=self._purposes[-1] if self._purposes else "",
            code=user_code(),
            waited_s=waited_s,
            still_s=waited_s if waits_for else now - self._moved,
            engine=watch.engine,
        )

    def adopt(self, verdict: str) -> None:
        self.verdict = verdict
        for watch in self._open():
            watch.verdict = verdict

    def interrupt(self) -> None:
        """End the waits with an error, whose reason is the verdict."""
        ended = [watch for watch in self._open() if watch.at is not None]
        call, _, since = self._torch
        if not ended and call and time.perf_counter() - since > ENDED_S:
            report(f"hf_zero: {self.verdict}")  # torch's own error ends the wait, which is one of the user's calls
            ended = self._open()
            self._interrupt_home()
        for watch in ended:
            for interrupt in watch.interrupts:
                interrupt()


def report(text: str) -> None:
    """Write a line to stderr."""
    with suppress(OSError, ValueError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)
