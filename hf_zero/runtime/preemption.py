"""A signal that asks a run to end, answered by every rank after the same step.

A signal arrives on the ranks at different moments, or on one of them alone. What a rank has received travels with what ranks
tell each other at the end of each backward anyway (`backward_order`): there is no collective for it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType

from ..errors import ConfigError


class Preemption:
    """Whether this run is to end. `engine.on_preemption` makes it.

    Attributes:
        signalled: this rank has received one of the signals.
        agreed: some rank had when the last backward that reduces ended. The same on every rank.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signalled = self.agreed = False
        try:
            self._before = {number: signal.signal(number, self._note) for number in signals}
        except ValueError as error:
            raise ConfigError(
                f"on_preemption: {error}; call it in the main thread, with signals of this system"
            ) from None

    def __call__(self) -> bool:
        return self.agreed

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        self.close()  # a second one does what it would do without us: it ends a process that does not get to its next step

    def close(self) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}
