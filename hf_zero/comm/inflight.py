"""Bytes on the move: the one awaitable, returned by everything that transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Work(Protocol):
    """What a process group returns for an asynchronous operation."""

    def wait(self) -> object: ...


class Inflight:
    """A transfer under way. Dropping it before `close` would free buffers that are still being read or written.

    `wait` returns when the *result* may be used here. `close` returns when also the buffers that were *sent* may be
    written again; on a fast rank that can be later, and waiting for it early would tie this rank to the slowest peer.

    Args:
        ready: whether `close` would return at once; without, nobody can tell.
    """

    __slots__ = ("_finish", "_ready", "_receives", "_sends")

    def __init__(
        self,
        receives: Sequence[Work] = (),
        sends: Sequence[Work] = (),
        finish: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self._receives = receives
        self._sends = sends
        self._finish = finish
        self._ready = ready

    @property
    def ready(self) -> bool:
        """Whether it is known to be over: `close` returns at once."""
        if not self._receives and not self._sends and self._finish is None:
            return True
        return self._ready is not None and self._ready()

    def wait(self) -> None:
        for work in self._receives:
            work.wait()
        self._receives = ()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def close(self) -> None:
        self.wait()
        for work in self._sends:
            work.wait()
        self._sends = ()


DONE = Inflight()
"""A transfer with nothing to wait for: one rank, or one owner of everything."""
