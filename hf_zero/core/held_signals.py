"""Defers signals until a step is complete, so that all ranks stop at the same step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
_HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
"""Signals whose handlers raise in practice: Ctrl-C, an orderly end, a time limit."""


class HeldSignals:
    """`with held:` defers Python handlers of signals to the end of the block, in order of arrival.

    A second signal of the same kind is handled at once, to end a block that hangs. Does nothing outside the main thread, the
    only one that runs handlers.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[int] = []
        self._pid = os.getpid()

    def __enter__(self) -> None:
        if self._depth == 0:
            try:
                for number in _HELD:
                    handler: Any = signal.getsignal(number)
                    if handler is not None and not isinstance(handler, signal.Handlers):
                        self._handlers[number] = handler
                        signal.signal(number, self._hold)
            except ValueError:  # not the main thread
                self._handlers.clear()
            except BaseException:  # a handler raised, before its signal was held
                self._restore()
                raise
        self._depth += 1  # last: a handler that raises earlier must leave the depth as it was

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or not self._handlers:
            return
        try:
            self._restore()
        finally:
            arrived, self._arrived = self._arrived, []
            _raise_all(arrived)

    def _restore(self) -> None:
        try:
            for number in [*self._handlers]:
                current = signal.signal(number, self._handlers[number])
                if current != self._hold:  # user code has set another one meanwhile
                    signal.signal(number, current)
                del self._handlers[number]
        finally:
            if self._handlers:  # a restored handler raised
                self._restore()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._arrived or os.getpid() != self._pid:  # a forked child never leaves the block
            self._handlers[number](number, frame)
        else:
            self._arrived.append(number)


def _raise_all(numbers: Sequence[int]) -> None:
    """Raise each signal, also if the handler of an earlier one raises an exception."""
    try:
        if numbers:
            signal.raise_signal(numbers[0])
    finally:
        if numbers:
            _raise_all(numbers[1:])
