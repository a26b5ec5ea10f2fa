"""Resume a Trainer on another number of ranks with the same number of rows per step.

The Trainer finds its position in the data by the number of optimizer steps, and the order of samples depends on seed and
epoch only. With the same rows per step, any number of ranks continues with the next sample under the same schedule. The
checkpoint's manifest has the rows per step.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ..checkpoint.manifest import MANIFEST, Manifest
from ..comm.agreement import on_all_ranks
from ..comm.group_wire import open_wire
from ..comm.process_group import home_device
from ..comm.wire import Wire
from ..core.patching import patched
from ..errors import ConfigError
from .patches import TrainerBase, show

LATEST = "latest"
"""`resume_from_checkpoint="latest"`: the newest complete checkpoint of the output folder, or a fresh start."""
FACT = "batches"
"""Key in a manifest."""


@dataclass(frozen=True)
class Batches:
    """Rows of an optimizer step.

    Attributes:
        asked_rows: `per_device_train_batch_size` of the user's arguments, or the choice of `auto_find_batch_size`.
        asked_accumulation: `gradient_accumulation_steps` of the user's arguments.
        rows_per_step: over all ranks and micro-batches.
        steps_per_epoch: 0 if the data has no length.
    """

    asked_rows: int
    asked_accumulation: int
    rows_per_step: int
    steps_per_epoch: int = 0

    @staticmethod
    def of(args: TrainingArguments, rows: int | None = None) -> Batches:
        """Return the rows of a step for the arguments, or for `rows` per micro-batch."""
        rows, accumulation = rows or args.per_device_train_batch_size, args.gradient_accumulation_steps
        return Batches(rows, accumulation, rows * accumulation * _concurrent_batches(args))

    @staticmethod
    def of_fact(found: Any) -> Batches | None:
        """Read an entry of a manifest; None if it is missing or invalid."""
        names = [item.name for item in fields(Batches)]
        if not isinstance(found, Mapping) or not all(type(found.get(name)) is int for name in names):
            return None
        batches = Batches(**{name: found[name] for name in names})
        most = 1 << 40  # the folder may be untrusted
        return batches if all(0 < value < most for value in asdict(batches).values() if value) else None

    def shares_its_arguments_with(self, other: Batches) -> bool:
        """Return whether the user's arguments are the same, so that only the number of ranks differs."""
        mine, theirs = (self.asked_rows, self.asked_accumulation), (other.asked_rows, other.asked_accumulation)
        return mine == theirs


def _concurrent_batches(args: Any) -> int:
    """Return the number of concurrent batches: 1 with `split_batches`, else one per rank (or group)."""
    groups: int = args.world_size // getattr(args.parallelism_config, "sp_size", 1)
    return 1 if args.accelerator_config.split_batches else groups


def split_rows(rows_per_step: int, ranks: int, most_rows: int) -> tuple[int, int]:
    """Return rows per micro-batch and micro-batches per step for `ranks` ranks that share `rows_per_step` rows.

    Args:
        most_rows: largest micro-batch that is known to fit into memory.

    Raises:
        ConfigError: the rows do not divide by the ranks.
    """
    mine, rest = divmod(rows_per_step, ranks)
    if rest or not mine:
        fits = [str(number) for number in range(max(1, ranks - 8), ranks + 9) if rows_per_step % number == 0]
        raise ConfigError(
            f"a step of this run takes {rows_per_step} rows, which {ranks} ranks cannot share evenly: with fewer or more rows "
            "samples would come twice or be left out, and the schedule would be another. Start it on a number of ranks that "
            f"divides {rows_per_step} ({', '.join(fits) or 'none is near'}), or begin with a batch that all numbers of ranks "
            "divide"
        )
    rows = next(number for number in range(min(most_rows, mine), 0, -1) if mine % number == 0)
    return rows, mine // rows


def kept(was: Batches, args: TrainingArguments) -> list[tuple[Any, str, Any]]:
    """Return arguments, for `replaced` while training, that keep the number of rows per step.

    Raises:
        ConfigError: there are none, or the order of samples depends on them.
    """
    strategy = str(getattr(args, "train_sampling_strategy", ""))
    if strategy == "group_by_length" or getattr(args, "group_by_length", False):
        raise ConfigError(
            "group_by_length orders samples by the size of a rank's batches, which is another on another number of ranks: "
            "samples would come twice or be left out. Start it on as many ranks as before"
        )
    rows, accumulation = split_rows(was.rows_per_step, _concurrent_batches(args), was.asked_rows)
    return [(args, "per_device_train_batch_size", rows), (args, "gradient_accumulation_steps", accumulation)]


class ElasticBatchMixin(TrainerBase):
    """A Trainer that saves the rows of a step in checkpoints and keeps them on another number of ranks."""

    args: Any
    _train_batch_size: int
    _zero_batches: Batches | None = None
    """Rows of a step, inside `train`."""
    _zero_batches_were: Batches | None = None
    """Rows of a step on the earlier number of ranks, while they are kept."""

    @contextmanager
    def _zero_keeping_batches(self, wire: Wire, resumed: str | os.PathLike[str] | None, keep: bool) -> Iterator[None]:
        """Use the rows per step of the user's arguments inside or, with `keep`, those of the checkpoint `resumed`.

        A collective.

        Raises:
            ConfigError: on every rank: the number of rows cannot be kept.
        """
        args = self.args
        was: Batches | None = None
        now = self._zero_batches = Batches.of(args)
        if resumed is not None and not args.auto_find_batch_size:
            with on_all_ranks(wire, f"reading {Path(resumed)}") as report:
                # Checkpoints of plain data parallel have no manifest.
                if wire.rank == 0 and Path(resumed, MANIFEST).is_file():
                    report.local = Batches.of_fact(Manifest.read(resumed).facts.get(FACT))
            was = report.by_rank[0]
        changes: list[tuple[Any, str, Any]] = []
        if was is not None and keep and was.shares_its_arguments_with(now) and was.rows_per_step != now.rows_per_step:
            changes = kept(was, args)
            self._zero_batches = self._zero_batches_were = was
            (_, _, rows), (_, _, times) = changes
            # The stock Trainer copies the argument in `__init__`, and its loader reads the copy.
            changes.append((self, "_train_batch_size", rows))
            if wire.rank == 0:
                text = f"{args.world_size} rank(s) share the {was.rows_per_step} rows of a step: {rows} per rank"
                text += f", {times} times per step" if times > 1 else ""
                show(f"hf_zero: {text}", sys.stderr)
        elif was is not None and was.rows_per_step != now.rows_per_step and wire.rank == 0:
            text = (
                f"a step takes {now.rows_per_step} rows, and took {was.rows_per_step} before the checkpoint: the place in the "
                "data is counted in steps, so samples of this epoch come twice or are left out"
            )
            if was.shares_its_arguments_with(now):
                text += f'; resume_from_checkpoint="{LATEST}" keeps the rows of a step on another number of ranks'
            warnings.warn(text, stacklevel=3)
        try:
            with patched(changes):
                yield
        finally:
            self._zero_batches_were = None

    def _zero_batch_facts(self) -> dict[str, Any]:
        """Return the entry of a checkpoint's manifest."""
        return {} if self._zero_batches is None else {FACT: asdict(self._zero_batches)}

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any, *others: Any) -> Any:
        """Compute the stock Trainer's values; record the number of steps in an epoch.

        Raises:
            ConfigError: on every rank: the number differs from that of the checkpoint.
        """
        values = super().set_initial_training_values(args, dataloader, *others)
        steps = int(values[1]) if has_length(dataloader) else 0
        was = self._zero_batches_were
        with on_all_ranks(open_wire(home_device()), "sharing out the data"):
            if was is not None and was.steps_per_epoch and steps and was.steps_per_epoch != steps:
                why = " (dataloader_drop_last leaves out other samples)" if args.dataloader_drop_last else ""
                raise ConfigError(
                    f"an epoch had {was.steps_per_epoch} steps of {was.rows_per_step} rows, and has {steps} on "
                    f"{args.world_size} ranks{why}: samples would come twice or be left out. Start it on as many ranks as "
                    "before, with the same data"
                )
        if self._zero_batches is not None:
            if args.auto_find_batch_size:
                self._zero_batches = Batches.of(args, self._train_batch_size)
            self._zero_batches = replace(self._zero_batches, steps_per_epoch=steps)
        return values
