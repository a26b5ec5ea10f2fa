"""Asynchronous saves: a thread writes the checkpoint while training continues, one at a time per engine."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from threading import Thread

from torch import Tensor

from ..comm.inflight import Call
from ..comm.wire import Wire
from ..errors import CheckpointError, ZeroError
from .save import CheckpointWriter

logger = logging.getLogger(__name__)


class AsyncSaves:
    """Commits the saves of one engine, in a background thread on request."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._background_wire: Wire | None = None
        self._buffer: Tensor | None = None  # host memory of the snapshot, reused
        self._target = ""
        self._running: Call | None = None
        self._on_complete: Callable[[], None] | None = None

    def background_wire(self) -> Wire:
        """Return the wire of the background thread. The first call is a collective."""
        if self._background_wire is None:
            self._background_wire = self._wire.background_wire()
        return self._background_wire

    def commit(
        self, saving: CheckpointWriter, *, in_background: bool, on_complete: Callable[[], None] | None = None
    ) -> None:
        """Commit a save whose parts have all been added. A collective.

        Args:
            in_background: take a snapshot of its values, and write them in a thread.
            on_complete: called on every rank once the checkpoint is complete; for a background save, by `wait`.
        """
        if not in_background:
            saving.commit()
            if on_complete is not None:
                on_complete()
            return
        self.wait()  # the previous save still reads the buffer and uses the background wire
        self._buffer = saving.snapshot(self.background_wire(), self._buffer)
        self._target, self._on_complete = str(saving.target), on_complete
        running = Call(saving.commit)
        # Not a daemon: the interpreter waits for it at exit, and `_at_exit` then reports.
        Thread(target=running.run, name=f"hf_zero save {self._target}", daemon=False).start()
        self._running = running
        _UNREPORTED.append(self)

    def wait(self) -> None:
        """Wait for the running save, if any. A collective.

        Raises:
            CheckpointError: the save failed on any rank; raised once.
        """
        if self._running is None:
            return
        with self._wire.watch.operation(f"waiting for the save to {self._target}"):
            self._running.ended.wait()
        failure = self._running.error
        self._running = None
        _UNREPORTED.remove(self)
        if failure is not None:
            if isinstance(failure, ZeroError):
                raise failure
            raise CheckpointError(f"the save to {self._target}, written behind, failed: {failure}") from failure
        on_complete, self._on_complete = self._on_complete, None
        if on_complete is not None:
            on_complete()


_UNREPORTED: list[AsyncSaves] = []
"""Engines whose last save has not been waited for: if it failed, the process must not exit with status 0."""


@atexit.register
def _at_exit() -> None:
    failed = False
    for saves in list(_UNREPORTED):
        saves._on_complete = None  # it is a collective
        try:
            saves.wait()
        except ZeroError as error:
            failed = True
            logger.error("hf_zero: %s", error)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in an exit handler would leave the exit status 0
