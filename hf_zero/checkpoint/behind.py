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


class Behind:
    """A save whose values are copied, and which a thread writes.

    Args:
        wire: for this thread alone.
        slab: host memory of the save before, which must be complete.

    Attributes:
        slab: host memory that has the copies. The next save uses it again.
    """

    def __init__(self, saving: Saving, wire: SoloWire, slab: Tensor | None) -> None:
        self.slab = saving.freeze(wire, slab)
        self.target = saving.target
        self._saving = saving
        self._failure: BaseException | None = None
        # Not a daemon: the interpreter waits for it at exit, and `_at_exit` then reports.
        self._thread = threading.Thread(target=self._run, name=f"hf_zero save {saving.target}")
        self._thread.start()
        _UNREPORTED.append(self)

    def _run(self) -> None:
        try:
            self._saving.commit()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            CheckpointError: it failed, on this or any other rank; raised once.
        """
        self._thread.join()
        if self in _UNREPORTED:
            _UNREPORTED.remove(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            if isinstance(failure, ZeroError):
                raise failure
            raise CheckpointError(f"the save to {self.target}, written behind, failed: {failure}") from failure


class Saves:
    """The saves of one engine that are written behind training.

    Attributes:
        pending: the one under way.
    """

    def __init__(self, wire: SoloWire) -> None:
        self._wire = wire
        self._side: SoloWire | None = None
        self._slab: Tensor | None = None
        self.pending: Behind | None = None

    def side_wire(self) -> SoloWire:
        """Return the wire for a thread that communicates while training continues. A collective the first time."""
        if self._side is None:
            self._side = self._wire.side()
        return self._side

    def write_behind(self, saving: Saving) -> None:
        """Commit a save that has all its parts. A collective."""
        self.wait()  # it still reads the slab, and communicates over the side wire
        self.pending = Behind(saving, self.side_wire(), self._slab)
        self._slab = self.pending.slab

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            CheckpointError: it failed.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._wire.watch.doing(f"waiting for the save to {pending.target}"):
                pending.wait()


_UNREPORTED: list[Behind] = []
"""Saves whose outcome was not asked for: the process must not end as if they had succeeded."""


@atexit.register
def _at_exit() -> None:
    failed = False
    for behind in list(_UNREPORTED):
        try:
            behind.wait()
        except ZeroError as error:
            failed = True
            logger.error("hf_zero: %s", error)
    if failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in an exit handler would leave the exit status 0
