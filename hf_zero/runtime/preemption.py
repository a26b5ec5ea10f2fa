"""A signal that asks a run to end, answered by every rank after the same step.

A signal arrives on the ranks at different moments, or on one of them alone. What a rank has received travels with what ranks
tell each other at the end of each backward anyway (`backward_order`): there is no collective for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ..errors import ConfigError

Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Whether this run is to end. `engine.on_preemption` makes it.

    Attributes:
        signalled: this rank has received one of the signals.
        agreed: some rank had when the last backward that reduces ended. The same on every rank.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signalled = self.agreed = False
        self._pid, self._before = os.getpid(), dict[signal.Signals, Handler]()
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._note)
            except (ValueError, OSError) as error:  # another thread; SIGKILL, SIGSTOP, numbers that are none
                self.close()
                raise ConfigError(
                    f"on_preemption: signal {number!r} cannot be heard here: {error}; call it in the main thread, with signals "
                    "that a process may handle (SIGTERM, SIGUSR1)"
                ) from None

    def __call__(self) -> bool:
        return self.agreed

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.close()  # a second one does what it would do without us: it ends a process that does not get to its next step
        if os.getpid() == self._pid:
            self.signalled = True
        else:  # a child that was forked has this handler, but no step at whose end it would look
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
