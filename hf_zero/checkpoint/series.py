"""The checkpoints that one run leaves, one after the other: which is the newest whole one, which may go.

A job that is started again by itself, on as many ranks as are left, goes on from `latest_checkpoint`.
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

from ..comm.agree import on_all_ranks
from ..comm.group_wire import home_device, open_wire
from ..comm.wire import SoloWire
from ..errors import CheckpointError
from .folder import is_being_saved, remove_left_overs
from .manifest import MANIFEST, Manifest, check_segments, check_sizes, share
from .save import OPTIMIZER_FOLDER, OPTIMIZER_INDEX

PREFIX = "checkpoint-"
"""As the Trainer names them: `checkpoint-40`."""


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether it was saved with a manifest, or should have been."""
    return any((Path(folder) / name).exists() for name in (MANIFEST, f"{OPTIMIZER_FOLDER}/{OPTIMIZER_INDEX}"))


@dataclass(frozen=True)
class CheckpointSeries:
    """The checkpoints that one run leaves in one folder: `<folder>/<prefix><number>`.

    Args:
        last_written: the file that plain data parallel writes last, and without which its folder is not complete; None:
            without a manifest none is.
    """

    folder: Path
    prefix: str
    last_written: str | None = None

    def folders(self) -> list[Path]:
        """Those that are there, by number."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(re.escape(self.prefix) + r"(\d+)", path.name)
            if match is not None and path.is_dir():
                found.append((int(match[1]), path))
        return [path for _, path in sorted(found)]

    def tidy(self, wire: SoloWire) -> None:
        """Rank 0 removes what killed saves have left. A collective."""
        with on_all_ranks(wire, f"tidying {self.folder}"):
            if wire.rank == 0:
                remove_left_overs(self.folder)

    def newest_whole(self, wire: SoloWire) -> Path | None:
        """The newest that is complete, every byte checked; None where there is no checkpoint at all, as rank 0 sees it.

        A collective; the ranks share the work. Says which ones it passed over, and why.

        Raises:
            CheckpointError: on every rank: there are folders, and none is complete.
        """
        with on_all_ranks(wire, "looking for checkpoints") as report:
            report.mine = self.folders()
        # Rank 0's, on every rank: a listing that is newer elsewhere would have ranks check different folders together.
        names: list[Path] = report.everyone[0]
        passed: list[str] = []
        for folder in reversed(names):
            reason = self.why_broken(wire, folder)
            if reason is None:
                if passed and wire.rank == 0:
                    warnings.warn(f"resuming from {folder}. Passed over: " + "; ".join(passed), stacklevel=3)
                return folder
            passed.append(f"{folder.name}: {reason}")
        if not names:
            return None
        raise CheckpointError(
            f"{self.folder} holds {len(names)} checkpoint folders and none is complete: {'; '.join(passed)}. Restore one "
            "from a copy, or remove them to start anew"
        )

    def why_broken(self, wire: SoloWire, folder: Path) -> str | None:
        """What is wrong with a checkpoint, every byte checked, the ranks sharing the work; None if nothing. A collective."""
        what = f"checking {folder}"
        with on_all_ranks(wire, what) as report:
            try:
                manifest = self._check_names(folder)
                if manifest is not None:
                    for name, segments in share(manifest, wire.rank, wire.size).items():
                        check_segments(folder / name, segments)
            except CheckpointError as error:
                report.mine = str(error)
        return next((reason for reason in report.everyone if reason is not None), None)

    def rotate(self, folders: Sequence[Path], limit: int | None, keep: Collection[Path]) -> None:
        """Remove checkpoints until `limit` are left: incomplete ones first, then the oldest. On one rank.

        The newest complete one always stays, those of `keep` too, and any that another job is writing.

        Args:
            folders: of this series, the oldest first.
        """
        if limit is None or limit <= 0 or len(folders) <= limit:
            return
        whole = []
        for path in folders:
            with suppress(CheckpointError):
                self._check_names(path)
                whole.append(path)
        busy = [path for path in folders if is_being_saved(path)]
        kept = {os.path.realpath(path) for path in (*keep, *whole[-1:], *busy)}
        goes = [
            path for path in (*(f for f in folders if f not in whole), *whole) if os.path.realpath(path) not in kept
        ]
        for path in goes[: len(folders) - limit]:
            shutil.rmtree(path, ignore_errors=True)

    def _check_names(self, folder: Path) -> Manifest | None:
        """Names and sizes, without reading what is in the files; None for a folder of plain data parallel.

        Raises:
            CheckpointError: something is missing.
        """
        if is_ours(folder):
            return check_sizes(folder)
        if self.last_written is None or not (folder / self.last_written).is_file():
            names = f"neither {MANIFEST} nor {self.last_written} is" if self.last_written else f"{MANIFEST} is not"
            raise CheckpointError(f"{names} there: a save that did not finish")
        return None


def latest_checkpoint(folder: str | os.PathLike[str], prefix: str = PREFIX) -> Path | None:
    """The newest complete checkpoint `<folder>/<prefix><number>`, the same on every rank; None where there is none yet.

    A collective: call it on every rank, once the process group is there. Every byte is checked, the ranks sharing the work.
    A damaged one is passed over, with a warning that names it and says why. What killed saves have left is removed.

        start = zero.latest_checkpoint("runs/mine")         # saved as engine.save(f"runs/mine/checkpoint-{step}")
        if start is not None:
            engine.load(start, objects={"progress": progress})

    Raises:
        CheckpointError: on every rank: there are checkpoints, and none is complete.
    """
    wire, series = open_wire(home_device()), CheckpointSeries(Path(folder), prefix)
    series.tidy(wire)
    return series.newest_whole(wire)


def prune_checkpoints(folder: str | os.PathLike[str], keep: int, prefix: str = PREFIX) -> None:
    """Remove checkpoints `<folder>/<prefix><number>` until `keep` are left: incomplete ones first, then the oldest.

    The newest complete one always stays. A collective.

    Raises:
        CheckpointError: on every rank: `keep` is below 1.
    """
    wire, series = open_wire(home_device()), CheckpointSeries(Path(folder), prefix)
    with on_all_ranks(wire, f"pruning {folder}"):
        if keep < 1:
            raise CheckpointError(f"prune_checkpoints: expected to keep at least 1 checkpoint, found keep={keep}")
        if wire.rank == 0:
            series.rotate(series.folders(), keep, ())
