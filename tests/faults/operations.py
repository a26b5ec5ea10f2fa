"""What the table of faults does to a training run, and what must hold afterwards."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero as zero
from tests.kit.injection import instead
from tests.models import inputs, mlp
from tests.settings import Setting

ON_DISK = Setting(stage=3, tier="disk/disk")
TAIL = (2, 3)
"""Steps that follow the checkpoint `new`."""


class Note:
    """A state beside the weights."""

    def __init__(self) -> None:
        self.version = ""

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


class Job:
    """A training run with two checkpoints, `old` (of more files) and `new`, whose values it knows."""

    def __init__(
        self,
        rank: int,
        world: int,
        place: Path,
        setting: Setting = ON_DISK,
        stall_s: float = 20.0,
        offload_dir: str = "",
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.world, self.place = rank, world, place
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        config = {**setting.config(offload_dir or str(place / "tier")), "stall_s": stall_s}
        precision = "bf16" if setting.precision == "bf16" else "no"
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(**config), mixed_precision=precision)
        self.note = Note()
        self.known: dict[str, str] = {}
        self.tail: list[float] = []

    def step(self, step: int) -> float:
        try:
            loss = self.model(inputs(0, step)).square().mean()
            loss.backward()
            self.engine.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.engine.finish_step()
        finally:
            self.optimizer.zero_grad()
        return loss.item()

    def make_templates(self) -> None:
        """Both are made by training from the first step on; afterwards the run is two steps past `new`."""
        for step, name in enumerate(("old", "new")):
            self.step(step)
            self.note.version = name
            self.known[self.digest()] = name
            self.save(self.place / name, max_shard_size="300B" if name == "old" else "1MB")
        self.tail = [self.step(step) for step in TAIL]

    def know(self, other: Job) -> None:
        self.known, self.tail = other.known, other.tail

    def digest(self) -> str:
        """Of weights, optimizer state and the note; the same on every rank."""
        weights, state = self.model.state_dict(), self.optimizer.state_dict()
        found = hashlib.sha256(self.note.version.encode())
        if self.rank == 0:
            for value in [*weights.values(), *(v for entries in state["state"].values() for v in entries.values())]:
                found.update(value.detach().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
        return str(self.everyone(found.hexdigest())[0])

    def save(self, folder: Path, **options: Any) -> None:
        self.engine.save(folder, objects={"note": self.note}, **options)

    def load(self, folder: Path) -> None:
        self.engine.load(folder, objects={"note": self.note})

    def version(self, folder: Path) -> str | None:
        """Return the version of the checkpoint there; None if there is none, "rejected" if a load names a bad file."""
        try:
            self.load(folder)
        except zero.CheckpointError as error:
            if "is not a folder" in str(error) or "holds no weights" in str(error):
                return None
            if str(folder) not in str(error):
                raise
            return "rejected"
        return self.known[self.digest()]

    def everyone(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    @property
    def target(self) -> Path:
        return self.place / "out" / "checkpoint"

    def restore_target(self, start: str) -> None:
        """A rank of its own, or all of them."""
        self.everyone(None)
        if self.rank == 0:
            shutil.rmtree(self.place / "out", ignore_errors=True)
            self.target.parent.mkdir()
            if start == "old":
                shutil.copytree(self.place / "old", self.target)
            if start != "nothing":
                (self.target / "runs").mkdir(parents=True)
                (self.target / "runs" / "notes.txt").write_text("mine")
        self.everyone(None)

    def left_overs(self) -> list[str]:
        """Of saves, in the target and beside it."""
        return [path.name for path in (self.place / "out").rglob(".*")]


def refusal(act: Callable[[], object]) -> str:
    """The error that it ends in, or nothing."""
    try:
        act()
    except zero.ZeroError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Operation:
    """
    Attributes:
        start: what is at the target before.
        makes: what a whole one leaves at the target; None: nothing.
        alone: no collective: the ranks do not hear of each other's errors.
    """

    act: Callable[[Job], object]
    start: str = "old"
    makes: str | None = None
    alone: bool = False
    trains: bool = False
    setting: Setting = ON_DISK


def _save_behind(job: Job) -> None:
    job.save(job.target, async_save=True)
    job.engine.wait_for_save()


def hidden(rank: int) -> AbstractContextManager[None]:
    """Rank 1 does not see the folder of rank 0, as on another node without a shared file system: it sends its bytes."""
    if rank != 1:
        return nullcontext()
    return instead(os.path, exists=lambda exists, path: ".zero_saving-" not in str(path) and exists(path))


def _save_apart(job: Job) -> None:
    with hidden(job.rank):
        job.save(job.target)


def _gather(job: Job) -> None:
    with zero.GatheredParameters(job.model):
        pass


def _export(job: Job) -> None:
    zero.export(job.place / "new", job.place / f"exported{job.rank}", dtype="bfloat16", overwrite=True)


def _weight(job: Job) -> Any:
    return next(iter(job.model.parameters()))


OPERATIONS: dict[str, Operation] = {
    "save over": Operation(lambda job: job.save(job.target), makes="new"),
    "save": Operation(lambda job: job.save(job.target), "nothing", "new"),
    "save beside": Operation(lambda job: job.save(job.target), "files of others", "new"),
    "save behind": Operation(_save_behind, makes="new"),
    "save apart": Operation(_save_apart, makes="new"),
    "load": Operation(lambda job: job.load(job.place / "new")),
    "verify": Operation(lambda job: zero.verify(job.place / "new"), alone=True),
    "export": Operation(_export, alone=True),
    "state dict": Operation(lambda job: job.model.state_dict()),
    "optimizer state dict": Operation(lambda job: job.optimizer.state_dict()),
    "full parameter": Operation(lambda job: zero.full_parameter(_weight(job))),
    "full optimizer state": Operation(lambda job: zero.full_optimizer_state(_weight(job), "exp_avg")),
    "gather": Operation(_gather),
    "step": Operation(lambda job: job.step(TAIL[0]), trains=True),
    "step, parameters on disk": Operation(
        lambda job: job.step(TAIL[0]), trains=True, setting=Setting(stage=3, tier="cpu/disk", precision="bf16")
    ),
    "step, stage 1": Operation(
        lambda job: job.step(TAIL[0]), trains=True, setting=Setting(stage=1, tier="disk", precision="bf16")
    ),
}
IN_MEMORY: dict[str, Operation] = {
    f"step at stage {stage}": Operation(lambda job: job.step(TAIL[0]), trains=True, setting=Setting(stage=stage))
    for stage in range(4)
}
"""No system calls on files: for ranks that end."""
