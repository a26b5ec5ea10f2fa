"""What the Trainer and accelerate share: stock code inside a `Saving`, saves behind training, a run's series of checkpoints.

The small files of a checkpoint are the stock code's own, written into the staged folder; weights and optimizer state go
there by way of `Saving`, from every rank. So one rename makes the whole folder appear, whoever wrote what.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.files import replace_file
from ..checkpoint.folder import SUFFIX, recover, remove_left_overs
from ..checkpoint.load import Loading
from ..checkpoint.manifest import MANIFEST, Manifest, check_segments, check_sizes, digest_file, share
from ..checkpoint.save import OPTIMIZER_FOLDER, OPTIMIZER_INDEX, Saving
from ..checkpoint.weights import Drawing, format_of
from ..comm.agree import on_all_ranks
from ..comm.wire import SoloWire
from ..errors import CheckpointError
from ..runtime.engine import Engine
from ..runtime.pieces import OptimizerPieces, ParameterPieces
from .stock import recording, replaced, serving

MAX_SHARD_SIZE = "50GB"
"""Of one weight file, as in `save_pretrained`."""


# Saving -------------------------------------------------------------------------------------------------------------


class SavesBehind:
    """A Trainer or Accelerator that saves: one save at most is under way, and something may have to wait for its end."""

    _zero_pending: tuple[Engine, Callable[[], None]] | None = None

    def _zero_commit(self, saving: Saving, engine: Engine, then: Callable[[], None]) -> None:
        """Commit, now or behind training as the configuration says; `then` runs on every rank once that is done."""
        if engine.config.async_save:
            engine.save_behind(saving)
            self._zero_pending = engine, then
        else:
            saving.commit()
            then()

    def _zero_wait_for_save(self) -> None:
        """Return when the save that was left behind is complete, and what was to follow is done.

        Raises:
            CheckpointError: on every rank: it failed on one.
        """
        pending, self._zero_pending = self._zero_pending, None
        if pending is not None:
            pending[0].wait_for_save()
            pending[1]()


def open_saving(engine: Engine, target: str | os.PathLike[str]) -> Saving:
    """A `Saving` with the engine's facts in its manifest."""
    engine.quiesce()
    return Saving(engine.wire, target, stage=engine.config.stage, precision=str(engine.precision))


def put_as(saving: Saving, engine: Engine, stock: Callable[[], None]) -> None:
    """The weights that `stock`, which saves the model and more to `saving.folder`, would write. A collective.

    It runs on rank 0, with stand-ins for the values. Where it writes no safetensors, or pickles something besides, it runs
    again, with the values.
    """
    model = engine.model
    needs_values: list[bool] = []

    def pickled(tensor: Tensor, protocol: Any) -> Any:
        needs_values.append(True)
        tensor.__dict__.clear()  # it would be pickled too
        return Tensor.__reduce_ex__(tensor, protocol)

    def draw() -> Drawing:
        outline = engine.outline()
        for value in outline.values():
            if isinstance(value, Tensor) and value.is_meta:
                value.__dict__["__reduce_ex__"] = partial(pickled, value)
        with recording(model, outline) as record:
            stock()
        if record.files:
            return record.drawing(saving.folder)
        needs_values.append(True)
        return Drawing(())

    saving.weights(ParameterPieces(engine.units), draw)
    with on_all_ranks(engine.wire, f"saving to {saving.target}") as report:
        report.mine = bool(needs_values)
    if report.everyone[0]:
        put_whole(saving, engine, stock)


def put_whole(saving: Saving, engine: Engine, stock: Callable[[], None]) -> None:
    """Gather the model on rank 0, and let `stock` write it there as it likes. A collective."""
    state = engine.model.state_dict()
    with on_all_ranks(engine.wire, f"saving to {saving.target}"):
        if engine.rank == 0:
            with replaced(serving(engine.model, state)):
                stock()


def hand_in(saving: Saving, wire: SoloWire) -> None:
    """Small files that ranks on other nodes wrote to disks of their own go to rank 0's folder. A collective."""
    with on_all_ranks(wire, f"saving to {saving.target}") as report:
        if saving.is_blind:
            found = [path for path in saving.folder.rglob("*") if path.is_file()]
            report.mine = {path.relative_to(saving.folder).as_posix(): path.read_bytes() for path in found}
            shutil.rmtree(saving.folder.parent, ignore_errors=True)
    with on_all_ranks(wire, f"saving to {saving.target}"):
        for files in report.everyone if wire.rank == 0 else ():
            for name, content in (files or {}).items():
                place = saving.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


# Loading ------------------------------------------------------------------------------------------------------------


def load_weights(loading: Loading, engine: Engine, *, strict: bool = True, folder: str = "") -> None:
    """Weights into a live engine. A collective."""
    engine.quiesce()
    try:
        loading.weights(
            ParameterPieces(engine.units), engine.model, format_of(engine.model), strict=strict, folder=folder
        )
    finally:
        engine.refresh()


def load_optimizer(loading: Loading, engine: Engine, folder: str = OPTIMIZER_FOLDER) -> None:
    """The bound optimizer's state, and masters that are finer than the weights. A collective."""
    if engine.optimizer is None:
        raise CheckpointError(f"{loading.folder}: there is no optimizer to load its {folder}/ into")
    if loading.has_optimizer(folder):
        engine.make_room(loading.marks(folder))
    engine.quiesce()
    try:
        loading.optimizer(OptimizerPieces(engine.units, engine.optimizer, engine.group_options()), folder=folder)
    finally:
        engine.refresh()


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether it was saved with a manifest, or should have been."""
    return any((Path(folder) / name).exists() for name in (MANIFEST, f"{OPTIMIZER_FOLDER}/{OPTIMIZER_INDEX}"))


def is_ours_everywhere(wire: SoloWire, folder: str | os.PathLike[str]) -> bool:
    """`is_ours`, after a look from every rank. A collective.

    Raises:
        CheckpointError: on every rank: only some of them see the folder.
    """
    with on_all_ranks(wire, f"looking at {folder}") as report:
        report.mine = Path(folder).is_dir(), is_ours(folder)
    answers: list[tuple[bool, bool]] = report.everyone
    if len(set(answers)) > 1:
        blind = [rank for rank, answer in enumerate(answers) if answer != max(answers)]
        raise CheckpointError(
            f"{folder} is not there for ranks {blind}, as it is for others: to load from it they all need to see it; use a "
            "shared file system, or copy it to every node"
        )
    return answers[0][1]


# A run's checkpoints ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointSeries:
    """The checkpoints that one run leaves in one folder: `<folder>/<prefix><number>`.

    Args:
        last_written: the file that plain data parallel writes last, and without which its folder is not complete.
    """

    folder: Path
    prefix: str
    last_written: str

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
                if wire.rank == 0:
                    recover(folder)
            except CheckpointError as error:
                report.mine = str(error)
        if report.everyone[0] is not None:
            return str(report.everyone[0])
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
        whole = [path for path in folders if self._is_whole(path)]
        busy = [path for path in folders if (path / SUFFIX).exists()]
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
        if not (folder / self.last_written).is_file():
            raise CheckpointError(f"neither {MANIFEST} nor {self.last_written} is there: a save that did not finish")
        return None

    def _is_whole(self, folder: Path) -> bool:
        try:
            self._check_names(folder)
        except CheckpointError:
            return False
        return True


def amend(folder: Path, name: str) -> None:
    """One file of a complete folder was written anew: its manifest follows. On one rank; nothing where there is none."""
    path = folder / MANIFEST
    if not path.exists():
        return
    manifest = Manifest.read(folder)
    if name in manifest.files:
        manifest.files[name] = digest_file(folder / name)
        replace_file(path, manifest.to_bytes())
