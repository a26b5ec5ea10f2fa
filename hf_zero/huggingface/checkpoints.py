"""Saving and loading shared by the Trainer and the Accelerator.

The stock code writes a checkpoint's small files into the staged folder; every rank writes weights and optimizer state
there through `CheckpointWriter`. One rename makes the complete folder appear.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from ..checkpoint.load import CheckpointReader
from ..checkpoint.save import CheckpointWriter, is_hf_zero_checkpoint
from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..core.patching import patched
from ..engine.saving import filling
from ..errors import CheckpointError, OutOfMemoryError
from ..params.engine import Engine
from .patches import patched_state_dict

MAX_SHARD_SIZE = "50GB"
"""Largest weight file, as in `save_pretrained`."""


def save_gathered(saving: CheckpointWriter, engine: Engine, stock: Callable[[], None]) -> None:
    """Run `stock` on rank 0 with the full model. A collective.

    If the stage releases parameters, all ranks gather them on their devices, because `stock` may run forwards, as Sentence
    Transformers' model card does. If they do not fit, only rank 0 gathers a `state_dict()`.
    """
    with ExitStack() as stack:
        if engine.context.reshards:
            with suppress(OutOfMemoryError):  # raised on every rank
                stack.enter_context(engine.unsharded())
        state = engine.model.state_dict()
        with on_all_ranks(engine.wire, f"saving to {saving.target}"):
            if engine.rank == 0:
                with patched(patched_state_dict(engine.model, state)):
                    stock()


def send_files(saving: CheckpointWriter, wire: Wire) -> None:
    """Send small files from the disks of other nodes to rank 0's folder. A collective."""
    with on_all_ranks(wire, f"saving to {saving.target}") as report:
        if saving.is_remote:
            found = [path for path in saving.folder.rglob("*") if path.is_file()]
            report.local = {path.relative_to(saving.folder).as_posix(): path.read_bytes() for path in found}
            shutil.rmtree(saving.folder.parent, ignore_errors=True)
    with on_all_ranks(wire, f"saving to {saving.target}"):
        for files in report.by_rank if wire.rank == 0 else ():
            for name, content in (files or {}).items():
                place = saving.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


def load_optimizer(loading: CheckpointReader, engine: Engine, optimizer: Optimizer, folder: str) -> None:
    """Load a bound optimizer's state, and masters of higher precision than the weights."""
    engine.prepare_load()
    with filling(engine, loading):
        loading.optimizer(engine.optimizer_state(optimizer), folder=folder)()


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def agree_is_checkpoint(wire: Wire, folder: str | os.PathLike[str]) -> bool:
    """Return `is_hf_zero_checkpoint`, equal on every rank. A collective.

    Raises:
        CheckpointError: on every rank: only some ranks see the folder.
    """
    with on_all_ranks(wire, f"looking at {folder}") as report:
        report.local = Path(folder).is_dir(), is_hf_zero_checkpoint(folder)
    answers: list[tuple[bool, bool]] = report.by_rank
    if len(set(answers)) > 1:
        blind = [rank for rank, answer in enumerate(answers) if answer != max(answers)]
        raise CheckpointError(
            f"{folder} is missing on ranks {blind} and exists on others: every rank must see it; use a "
            "shared file system, or copy it to every node"
        )
    return answers[0][1]
