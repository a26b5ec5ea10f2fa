"""The checkpoints of one run, `<folder>/<prefix><number>`: find the newest complete one, remove old ones.

A job that is restarted automatically, on any number of ranks, resumes from `latest_checkpoint`.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..comm.agreement import on_all_ranks
from ..comm.group_wire import open_wire
from ..comm.process_group import home_device
from ..comm.wire import Wire
from ..errors import CheckpointError
from .folder import is_being_saved
from .manifest import MANIFEST, Manifest, check_segments, check_sizes, share
from .save import is_hf_zero_checkpoint

PREFIX = "checkpoint-"
"""The Trainer's: `checkpoint-40`."""


@dataclass(frozen=True)
class CheckpointSeries:
    """The checkpoints of one run: `<folder>/<prefix><number>`.

    Attributes:
        folder: holds the checkpoints.
        prefix: of their names.
        last_written: the file that plain data parallel writes last; a folder without manifest is complete if it has that
            file. None: a folder without manifest is never complete.
    """

    folder: Path
    prefix: str
    last_written: str | None = None

    def folders(self) -> list[Path]:
        """Return the existing checkpoints, by number."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(re.escape(self.prefix) + r"(\d+)", path.name)
            if match is not None and path.is_dir():
                found.append((int(match[1]), path))
        return [path for _, path in sorted(found)]

    def next_number(self) -> int:
        """Return the number after the highest existing one."""
        return max((int(path.name.removeprefix(self.prefix)) + 1 for path in self.folders()), default=0)

    def newest_complete(self, wire: Wire) -> Path | None:
        """Return the newest complete checkpoint that rank 0 sees; None if there are no checkpoints. A collective.

        The ranks check every byte together. A warning names the checkpoints that were skipped, and why.

        Raises:
            CheckpointError: on every rank: there are checkpoints, and none is complete.
        """
        with on_all_ranks(wire, "looking for checkpoints") as report:
            report.local = self.folders()
        # Rank 0's list on every rank: a rank with a newer listing would check another folder.
        names: list[Path] = report.by_rank[0]
        skipped: list[str] = []
        for folder in reversed(names):
            reason = self.find_damage(wire, folder)
            if reason is None:
                if skipped and wire.rank == 0:
                    warnings.warn(f"resuming from {folder}. Passed over: " + "; ".join(skipped), stacklevel=3)
                return folder
            skipped.append(f"{folder.name}: {reason}")
        if not names:
            return None
        raise CheckpointError(
            f"{self.folder} holds {len(names)} checkpoint folders and none is complete: {'; '.join(skipped)}. Restore one "
            "from a copy, or remove them to start from the beginning"
        )

    def find_damage(self, wire: Wire, folder: Path) -> str | None:
        """Check every byte of a checkpoint, shared by the ranks. Returns what is wrong, or None. A collective."""
        with on_all_ranks(wire, f"checking {folder}") as report:
            try:
                manifest = self._check_sizes(folder)
                if manifest is not None:
                    for name, segments in share(manifest, wire.rank, wire.size).items():
                        check_segments(folder / name, segments)
            except CheckpointError as error:
                report.local = str(error)
        return next((reason for reason in report.by_rank if reason is not None), None)

    def rotate(self, folders: Sequence[Path], limit: int | None, keep: Collection[Path]) -> None:
        """Remove checkpoints until `limit` are left: incomplete ones first, then the oldest. Runs on one rank.

        The newest complete one is always kept, also those in `keep` and any that another job is writing.

        Args:
            folders: the checkpoints, the oldest first.
            limit: number of checkpoints to keep; None or 0 removes none.
            keep: checkpoints to keep.
        """
        if limit is None or limit <= 0 or len(folders) <= limit:
            return
        complete = []
        for path in folders:
            with suppress(CheckpointError):
                self._check_sizes(path)
                complete.append(path)
        busy = [path for path in folders if is_being_saved(path)]
        kept = {os.path.realpath(path) for path in (*keep, *complete[-1:], *busy)}
        candidates = [*(path for path in folders if path not in complete), *complete]
        removable = [path for path in candidates if os.path.realpath(path) not in kept]
        for path in removable[: len(folders) - limit]:
            shutil.rmtree(path, ignore_errors=True)

    def _check_sizes(self, folder: Path) -> Manifest | None:
        """Check names and sizes of a checkpoint. Returns None for a folder of plain data parallel.

        Raises:
            CheckpointError: a file is missing or has another size.
        """
        if is_hf_zero_checkpoint(folder):
            return check_sizes(folder)
        if self.last_written is None or not (folder / self.last_written).is_file():
            names = MANIFEST if self.last_written is None else f"{MANIFEST} and {self.last_written}"
            raise CheckpointError(f"{folder} lacks {names}: the save did not finish")
        return None


def latest_checkpoint(folder: str | os.PathLike[str], prefix: str = PREFIX) -> Path | None:
    """Return the newest complete checkpoint `<folder>/<prefix><number>`; None if there are none. A collective.

    Call it on every rank, after the process group was created. All ranks get the same answer. They check
    every byte together. Damaged checkpoints are skipped with a warning. The next save removes what killed saves left.

    Args:
        folder: holds the checkpoints.
        prefix: of their names.

    Raises:
        CheckpointError: on every rank: there are checkpoints, and none is complete.

    Example:
        >>> start = zero.latest_checkpoint("runs/mine")  # saved as engine.save(f"runs/mine/checkpoint-{step}")
        >>> if start is not None:
        ...     engine.load(start, objects={"progress": progress})
    """
    return CheckpointSeries(Path(folder), prefix).newest_complete(open_wire(home_device()))


def prune_checkpoints(folder: str | os.PathLike[str], keep: int, prefix: str = PREFIX) -> None:
    """Remove checkpoints `<folder>/<prefix><number>` until `keep` are left. A collective.

    Incomplete ones are removed first, then the oldest. The newest complete one is always kept.

    Args:
        folder: holds the checkpoints.
        keep: number of checkpoints to keep, at least 1.
        prefix: of their names.

    Raises:
        CheckpointError: on every rank: `keep` is below 1.
    """
    wire, series = open_wire(home_device()), CheckpointSeries(Path(folder), prefix)
    with on_all_ranks(wire, f"pruning {folder}"):
        if keep < 1:
            raise CheckpointError(f"prune_checkpoints: expected to keep at least 1 checkpoint, found keep={keep}")
        if wire.rank == 0:
            series.rotate(series.folders(), keep, ())
