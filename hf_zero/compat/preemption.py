"""Ends a run after the same step on every rank when a rank receives a signal.

A signal arrives on the ranks at different times, or on one rank only. Each rank's flag is part of the agreement that the ranks
make at the end of each backward anyway.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import nn

from ..engine.engine import Engine, engine_of
from ..engine.observer import Observer
from ..errors import ConfigError

Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """A flag that asks this run to end. `on_preemption` creates it.

    Attributes:
        signalled: this rank has received one of the signals.
        agreed: a rank had received one when the last backward that reduces ended. The same on every rank.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signalled = self.agreed = False
        self._pid, self._before = os.getpid(), dict[signal.Signals, Handler]()
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._receive)
            except (ValueError, OSError) as error:  # another thread; SIGKILL, SIGSTOP, numbers that are none
                self.close()
                raise ConfigError(
                    f"on_preemption: signal {number!r} cannot be handled here: {error}. Call it in the main thread, with "
                    "signals that a process may handle (SIGTERM, SIGUSR1)"
                ) from None

    def __call__(self) -> bool:
        return self.agreed

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.close()  # a second signal ends a process that does not reach its next step
        if os.getpid() == self._pid:
            self.signalled = True
        else:  # a forked child inherits this handler, but never runs a step that would check the flag
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restore the former signal handlers."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}


class Preemptions(Observer):
    """Sends this rank's signals to the other ranks.

    Attributes:
        current: the last result of `on_preemption`, if any.
    """

    current: Preemption | None = None

    def detach(self) -> None:
        if self.current is not None:
            self.current.close()

    def values_for_max(self) -> list[int]:
        return [int(self.current is not None and self.current.signalled)]

    def check_max_values(self, highest: list[int]) -> None:
        if self.current is not None:
            self.current.agreed = bool(highest[0])


def on_preemption(
    model: nn.Module | Engine, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Preemption:
    """Let these signals end the run after a whole step, on every rank, whichever rank receives one.

    The flag is set within one step and the code between two steps. A second signal runs its former handler. Call it in the main
    thread of every rank that may receive signals; `close()` restores the former handlers.

    Args:
        model: a sharded model, or its engine.
        signals: which ones.

    Returns:
        A function without arguments: whether the run is to end, as of the last backward that reduces. The same on every rank.

    Raises:
        ConfigError: the model is not sharded, or this is not the main thread.

    Example:
        >>> ends = zero.on_preemption(model)
        >>> for batch in loader:
        ...     train(batch)
        ...     if ends():
        ...         engine.save("ckpt")
        ...         break
    """
    engine = model if isinstance(model, Engine) else engine_of(model)
    if engine is None:
        raise ConfigError(f"on_preemption: this {type(model).__name__} is not sharded. Call zero.shard first")
    observer = engine.observer(Preemptions)
    if observer.current is not None:
        observer.current.close()
    observer.current = Preemption(signals)
    return observer.current
