"""Checkpoints that a thread writes while training continues, one at a time for each engine."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

from torch import Tensor

from ..comm.wire import SoloWire
from ..errors import CheckpointError, ZeroError
from .save import Saving

logger = logging.getLogger(__name__)


class Saves:
    """The saves of one engine that are written behind training."""

    def __init__(self, wire: SoloWire) -> None:
        self._wire = wire
        self._side: SoloWire | None = None
        self._slab: Tensor | None = None  # host memory of the copies, used again
        self._target = ""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def side_wire(self) -> SoloWire:
        """Return the wire for a thread that communicates while training continues. A collective the first time."""
        if self._side is None:
            self._side = self._wire.side()
        return self._side

    def write_behind(self, saving: Saving) -> None:
        """Copy the values of a save that has all its parts, and commit it in a thread. A collective."""
        self.wait()  # the save before still reads the slab, and communicates over the side wire
        self._slab = saving.freeze(self.side_wire(), self._slab)
        self._target = str(saving.target)
        # Not a daemon: the interpreter waits for it at exit, and `_at_exit` then reports.
        self._thread = threading.Thread(target=self._commit, args=(saving,), name=f"hf_zero save {self._target}")
        self._thread.start()
        _UNREPORTED.append(self)

    def _commit(self, saving: Saving) -> None:
        try:
            saving.commit()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            CheckpointError: it failed, on this or any other rank; raised once.
        """
        if self._thread is None:
            return
        with self._wire.watch.doing(f"waiting for the save to {self._target}"):
            self._thread.join()
        self._thread = None
        _UNREPORTED.remove(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            if isinstance(failure, ZeroError):
                raise failure
            raise CheckpointError(f"the save to {self._target}, written behind, failed: {failure}") from failure


_UNREPORTED: list[Saves] = []
"""Engines whose last save was not waited for: the process must not end as if it had succeeded."""


@atexit.register
def _at_exit() -> None:
    failed = False
    for saves in list(_UNREPORTED):
        try:
            saves.wait()
        except ZeroError as error:
            failed = True
            logger.error("hf_zero: %s", error)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in an exit handler would leave the exit status 0
