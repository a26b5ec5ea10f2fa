"""A Trainer that is started again on another number of ranks: the rows of a step stay, each rank's share of them changes.

The Trainer knows where it is in its data by the number of optimizer steps, and the order of samples depends on seed and epoch
alone. So any number of ranks goes on with the next sample where a step takes as many rows as before; then the schedule is the
same one, too. What a step takes is in the checkpoint's manifest.
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
from ..comm.agree import on_all_ranks
from ..comm.group_wire import home_device, open_wire
from ..comm.wire import SoloWire
from ..errors import ConfigError
from .stock import TrainerBase, replaced

LATEST = "latest"
"""`resume_from_checkpoint="latest"`: the newest whole checkpoint of the output folder, a new start where there is none."""
FACT = "batches"
"""In a manifest."""


@dataclass(frozen=True)
class Batches:
    """What an optimizer step takes.

    Attributes:
        asked_rows: `per_device_train_batch_size` as the program has it.
        asked_accumulation: `gradient_accumulation_steps` as the program has it.
        rows_per_step: of all ranks and micro-batches.
        steps_per_epoch: 0 where the data has no length.
    """

    asked_rows: int
    asked_accumulation: int
    rows_per_step: int
    steps_per_epoch: int = 0

    @staticmethod
    def of(args: TrainingArguments, steps_per_epoch: int = 0) -> Batches:
        """As the arguments say, before anything is shared out anew."""
        rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return Batches(rows, accumulation, rows * accumulation * _sharers(args), steps_per_epoch)

    @staticmethod
    def of_fact(found: Any) -> Batches | None:
        """From a manifest; None where it has none, or none that makes sense."""
        names = [item.name for item in fields(Batches)]
        if not isinstance(found, Mapping) or not all(type(found.get(name)) is int for name in names):
            return None
        batches = Batches(**{name: found[name] for name in names})
        most = 1 << 40  # of anything: what a stranger's folder says is not computed with unseen
        return batches if all(0 < value < most for value in asdict(batches).values() if value) else None

    def shares_its_arguments_with(self, other: Batches) -> bool:
        """Whether the program asks for the same: then only the number of ranks is another."""
        mine, theirs = (self.asked_rows, self.asked_accumulation), (other.asked_rows, other.asked_accumulation)
        return mine == theirs


def _sharers(args: Any) -> int:
    """Ranks that take a batch of `per_device_train_batch_size` each; with `split_batches` they share one."""
    return 1 if args.accelerator_config.split_batches else args.world_size


def share_out(rows_per_step: int, ranks: int, most_rows: int) -> tuple[int, int]:
    """Rows of a micro-batch, and micro-batches of a step, such that `ranks` ranks take `rows_per_step` rows in a step.

    Args:
        most_rows: of a micro-batch; what is known to fit into memory. As many of them as divide the rank's rows are taken.

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
    """The arguments with which a step takes as many rows as it did: to be `replaced` while training.

    Raises:
        ConfigError: no such arguments; the order of samples depends on them.
    """
    strategy = str(getattr(args, "train_sampling_strategy", ""))
    if strategy == "group_by_length" or getattr(args, "group_by_length", False):
        raise ConfigError(
            "group_by_length orders samples by the size of a rank's batches, which is another on another number of ranks: "
            "samples would come twice or be left out. Start it on as many ranks as before"
        )
    rows, accumulation = share_out(was.rows_per_step, _sharers(args), was.asked_rows)
    return [(args, "per_device_train_batch_size", rows), (args, "gradient_accumulation_steps", accumulation)]


class KeepsBatches(TrainerBase):
    """A Trainer that knows what its steps take, writes it into its checkpoints, and keeps it on other numbers of ranks."""

    args: Any
    _zero_batches: Batches | None = None
    """What a step takes, inside `train`."""
    _zero_batches_were: Batches | None = None
    """What it took on another number of ranks, where that is kept."""

    @contextmanager
    def _zero_keeping_batches(
        self, wire: SoloWire, resumed: str | os.PathLike[str] | None, keep: bool
    ) -> Iterator[None]:
        """In here a step takes what the program asks for or, to `keep` it, what it took before the checkpoint `resumed`.

        A collective.

        Raises:
            ConfigError: on every rank: it cannot be kept.
        """
        args = self.args
        was: Batches | None = None
        now = self._zero_batches = Batches.of(args)
        if resumed is not None and not args.auto_find_batch_size:
            with on_all_ranks(wire, f"reading {Path(resumed)}") as report:
                # Else it is of plain data parallel; an older version says nothing.
                if wire.rank == 0 and Path(resumed, MANIFEST).is_file():
                    report.mine = Batches.of_fact(Manifest.read(resumed).facts.get(FACT))
            was = report.everyone[0]
        changes: list[tuple[Any, str, Any]] = []
        if was is not None and keep and was.shares_its_arguments_with(now) and was.rows_per_step != now.rows_per_step:
            changes = kept(was, args)
            self._zero_batches = self._zero_batches_were = was
            (_, _, rows), (_, _, times) = changes
            # The stock Trainer copies the argument in `__init__`, and from then on reads its loader's batch from the copy.
            changes.append((self, "_train_batch_size", rows))
            if wire.rank == 0:
                text = f"{args.world_size} rank(s) share the {was.rows_per_step} rows of a step: {rows} per rank"
                text += f", {times} times per step" if times > 1 else ""
                print(f"hf_zero: {text}", file=sys.stderr, flush=True)
        elif was is not None and was.rows_per_step != now.rows_per_step and wire.rank == 0:
            text = (
                f"a step takes {now.rows_per_step} rows, and took {was.rows_per_step} before the checkpoint: the place in the "
                "data is counted in steps, so samples of this epoch come twice or are left out"
            )
            if was.shares_its_arguments_with(now):
                text += f'; resume_from_checkpoint="{LATEST}" keeps the rows of a step on another number of ranks'
            warnings.warn(text, stacklevel=3)
        try:
            with replaced(changes):
                yield
        finally:
            self._zero_batches_were = None

    def _zero_batch_facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        return {} if self._zero_batches is None else {FACT: asdict(self._zero_batches)}

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any, *others: Any) -> Any:
        """As the stock Trainer's; notes the number of steps in an epoch.

        Raises:
            ConfigError: on every rank: on another number of ranks it is another one.
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
            self._zero_batches = replace(self._zero_batches, steps_per_epoch=steps)
        return values
