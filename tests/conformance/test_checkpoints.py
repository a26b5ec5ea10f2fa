"""`check_checkpoint` over folders written by other ranks, stages, tiers and types than those that read them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.conformance.checkpoint import Expected, check_checkpoint
from tests.kit.pool import RankPool
from tests.optimizers import STATES, Shampoo, States
from tests.settings import Setting

pytestmark = pytest.mark.gloo


class Zoo(nn.Module):
    """Tied, frozen, 0-dim, empty and smaller than the world; batch statistics; an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 9)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)) for _ in range(2)])
        self.statistics = nn.BatchNorm1d(9)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.pair = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(9, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.body:
            x = x + block(x)
        x = self.statistics(self.frozen(x).flatten(0, 1)) * self.scale + self.pair.sum() + self.empty.sum()
        return self.head(x)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "lr": 3e-3},
    ]
    if kind == "amsgrad":
        return torch.optim.Adam(params, lr=1e-2, amsgrad=True)
    if kind == "sgd":
        return torch.optim.SGD(params, lr=1e-1)
    if kind == "momentum":
        return torch.optim.SGD(groups, lr=1e-1, momentum=0.9)
    if kind == "shampoo":
        return Shampoo(params)
    if kind in STATES:
        return States(params, kind)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


def optimizers_of(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if kind != "muon and adamw":
        return [optimizer_of(kind, model)]
    matrices = [model.body[0][0].weight, model.body[1][0].weight]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is each for each in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


@dataclass(frozen=True)
class Row:
    """Who wrote a checkpoint."""

    setting: Setting
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32
    limit: str = "50GB"
    behind: bool = False


ROWS: dict[str, Row] = {
    "alone": Row(Setting(1, 0), "amsgrad", limit="1KB"),
    "alone on disk": Row(Setting(1, 3, "disk/disk", "bf16"), behind=True),
    "double": Row(Setting(1, 2), dtype=torch.float64),
    "replicated": Row(Setting(2, 0), "momentum"),
    "stage 1": Row(Setting(2, 1), "sgd", limit="1KB"),
    "stage 2": Row(Setting(2, 2, "cpu"), limit="1KB", behind=True),
    "stage 3": Row(Setting(2, 3, "cpu/disk", "bf16")),
    "int8 wire": Row(Setting(2, 3, wire="int8"), "momentum"),
    "bf16 masters": Row(Setting(2, 3), dtype=torch.bfloat16, limit="1KB"),
    "three": Row(Setting(3, 3, "cpu/cpu"), "amsgrad", limit="1KB"),
    "three on disk": Row(Setting(3, 1, "disk"), "momentum", behind=True),
    "fp16 masters": Row(Setting(3, 2), dtype=torch.float16),
    "four": Row(Setting(4, 3, "none/cpu"), limit="1KB", behind=True),
    "replicas": Row(Setting(4, 2, "disk", replicas=2), "amsgrad"),
    "full matrices": Row(Setting(4, 1), "shampoo"),
    "two optimizers": Row(Setting(2, 3, "disk/disk"), "muon and adamw"),
    "a state of truths": Row(Setting(3, 3), "bools"),
    "a state of several tensors": Row(Setting(1, 1), "tensors in a tuple"),
}
READERS: tuple[tuple[int, str, int], ...] = (
    (3, "none", 1), (2, "disk", 1), (1, "cpu", 1), (3, "disk/disk", 2), (0, "none", 1), (3, "cpu/cpu", 1),
)  # fmt: skip
"""Stage, tier and replicas that read."""
IN_FULL = {("stage 2", 3), ("alone", 1)}
"""Rows and numbers of ranks whose every file is damaged in every way."""


def reader(row: str, world: int) -> Setting:
    """Another way to train than that of the row."""
    wrote = ROWS[row].setting
    number = list(ROWS).index(row) + world
    for shift in range(len(READERS)):
        stage, tier, replicas = READERS[(number + shift) % len(READERS)]
        setting = Setting(world, stage, tier, wrote.precision, replicas if world % 2 == 0 and world > 2 else 1)
        if setting.is_valid and (setting.stage, setting.tier) != (wrote.stage, wrote.tier):
            return setting
    raise AssertionError(f"no reader for {row}")


class Job:
    def __init__(self, row: Row, setting: Setting, rank: int, place: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.row, self.rank, self.world = row, rank, setting.ranks
        self.model = Zoo().to(row.dtype)
        self.optimizers = optimizers_of(row.optimizer, self.model)
        names = {id(p): name for name, p in self.model.named_parameters()}
        self.orders = [
            [names[id(p)] for group in optimizer.param_groups for p in group["params"]] for optimizer in self.optimizers
        ]
        mixed = "bf16" if setting.precision == "bf16" else "no"
        config = zero.ZeroConfig(**setting.config(str(place / "tier")))
        self.engine = zero.shard(self.model, self.optimizers, config, mixed_precision=mixed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, 0.5)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            ids = torch.randint(0, 23, (3, 5), generator=torch.Generator().manual_seed(100 * step + self.rank))
            loss = F.cross_entropy(self.model(ids).float(), ids.flatten())
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def load(self, folder: Path) -> None:
        self.engine.load(folder, objects={"scheduler": self.scheduler})

    def save(self, folder: Path, behind: bool = False) -> None:
        options = {"max_shard_size": self.row.limit, "async_save": behind}
        self.engine.save(folder, objects={"scheduler": self.scheduler}, **options)

    def found(self) -> Expected | None:
        weights, states = self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers]
        if self.rank:
            return None
        assert weights.pop("head.weight") is weights["embed.weight"]
        assert "passing" not in weights
        copied = {
            order[at]: {key: _copy(value) for key, value in entries.items()}
            for order, state in zip(self.orders, states)
            for at, entries in state["state"].items()
        }
        options = [*(group for state in states for group in state["param_groups"]), self.scheduler.state_dict()]
        limit = 1000 if self.row.limit == "1KB" else 1 << 60
        return Expected({name: value.clone() for name, value in weights.items()}, copied, options, limit)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def everyone(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values


def draws() -> tuple[float, ...]:
    return torch.rand(1).item(), random.gauss(0, 1), np.random.normal()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def write(rank: int, world: int, place: Path) -> None:
    for name, row in ROWS.items():
        if row.setting.ranks == world:
            job = Job(row, row.setting, rank, place, seed=0)
            job.train(0, 1)
            job.scheduler.step()
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(rank)
            draws()  # Python and numpy keep the second of two normal numbers
            job.save(place / name, row.behind)
            drawn = job.everyone(draws())
            before = job.found()
            losses = job.everyone(job.train(2, 3))  # while it is being written
            job.engine.wait_for_save()
            facts = zero.verify(place / name).facts
            assert (facts["world_size"], facts["stage"]) == (world, row.setting.stage)
            if rank == 0:
                torch.save((before, drawn, losses), place / f"{name}.expected")
            job.engine.detach()


def read(rank: int, world: int, place: Path) -> None:
    for number, (name, row) in enumerate(ROWS.items()):
        wrote = row.setting
        if (
            wrote.ranks + world + number
        ) % 2 and wrote.ranks != world:  # half of them for every pair of numbers of ranks
            continue
        setting = reader(name, world)
        expected, drawn, losses = torch.load(place / f"{name}.expected", weights_only=False)
        job = Job(row, setting, rank, place, seed=1)
        if number % 3:
            job.train(7)  # has state of its own
        try:
            check_checkpoint(place / name, expected, job, None if (name, world) in IN_FULL else 3)
            state = torch.manual_seed(9).get_state()
            job.load(place / name)
            if wrote.ranks != world:
                assert torch.equal(torch.get_rng_state(), state), "the random state of another number of ranks"
            if wrote.ranks == world:
                assert draws() == drawn[rank], "the random state of this rank"
                found = job.train(2, 3)
                is_exact = (
                    min(wrote.stage, setting.stage) > 0 and wrote.wire == "none" and wrote.replicas == setting.replicas
                )
                rel = (
                    0.0
                    if is_exact or world == 1
                    else 1e-3
                    if row.dtype is torch.float32 and wrote.wire == "none"
                    else 0.05
                )
                assert found == pytest.approx(losses[rank], rel=rel, abs=0.0), "training goes on to other losses"
        except BaseException as error:
            error.add_note(f"{name}, read with {setting}")
            raise
        job.engine.detach()


@pytest.fixture(scope="module")
def written(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("written")
    for world in pools:
        pools[world].run(write, place)
    return place


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_checkpoints(world: int, pools: dict[int, RankPool], written: Path) -> None:
    pools[world].run(read, written, timeout_s=250)


class Long(nn.Module):
    """An array of 12 MB, and small ones of 9 MB together, which one write joins."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(1537, 2003)
        self.small = nn.ParameterList(torch.randn(400, 500) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.long(x).square().mean() + torch.stack([each.square().mean() for each in self.small]).sum()


def long_arrays(rank: int, world: int, folder: Path, setting: Setting, writes: bool) -> list[Tensor]:
    """Values that are written and read in several segments. Return what rank 0 has of them."""
    torch.manual_seed(int(writes))
    model = Long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**setting.config(str(folder / "tier"))))
    if writes:
        model(torch.randn(2, 1537)).backward()
        optimizer.step()
        engine.save(folder / "saved", max_shard_size="5MB" if world > 1 else "50GB")
    else:
        engine.load(folder / "saved")
    found = [
        *model.state_dict().values(),
        *(each["momentum_buffer"] for each in optimizer.state_dict()["state"].values()),
    ]
    return [value.clone() for value in found] if rank == 0 else []


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        (Setting(2, 3, "cpu/disk"), Setting(3, 1)),
        (Setting(3, 2), Setting(2, 3, "disk/disk")),
        (Setting(1, 0), Setting(2, 3)),
    ],
)
def test_arrays_of_several_segments(wrote: Setting, reads: Setting, pools: dict[int, RankPool], tmp_path: Path) -> None:
    expected = pools[wrote.ranks].run(long_arrays, tmp_path, wrote, True)[0]
    found = pools[reads.ranks].run(long_arrays, tmp_path, reads, False)[0]
    assert len(found) == len(expected) == 28
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)
        assert ours.std() > 0
