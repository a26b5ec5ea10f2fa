"""One rank evaluates a model whose buffers change in training, and training goes on as DistributedDataParallel's."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero

pytestmark = pytest.mark.gloo


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("queue", torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        if self.training:
            with torch.no_grad():
                self.queue.mul_(0.5).add_(x[:2])
        return self.head(x + self.queue.mean(0))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    output = model(batch(rank, step))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()


def pair(stage: int, **settings: Any) -> tuple[Any, Any, Any, Any]:
    model = Normed()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, stall_s=20, **settings))
    ddp = DistributedDataParallel(plain)
    return model, optimizer, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05)


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-4, atol=1e-4)


def evaluates(model: nn.Module, rank: int, context: Any) -> Tensor:
    model.eval()
    with context():
        outputs = [model(batch(rank, 50 + number)).clone() for number in range(2)]
    model.train()
    return torch.stack(outputs)


def alone(rank: int, world: int, stage: int, whole: bool, who: int, context: str, settings: dict[str, Any]) -> None:
    model, optimizer, ddp, theirs = pair(stage, **settings)
    grad = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}[context]
    for step in range(5):
        close(train(model, optimizer, rank, step), train(ddp, theirs, rank, step))
        for mine, plain in zip(model.buffers(), ddp.module.buffers(), strict=True):
            close(mine, plain)
        with zero.unsharded(model) if whole else contextlib.nullcontext():
            if rank == who and step != 1:
                mine, plain = evaluates(model, rank, grad), evaluates(ddp.module, rank, grad)
                if rank == 0:  # another's are rank 0's in our evaluation, and its own in the module's
                    close(mine, plain)
            dist.barrier()
    close(train(model, optimizer, rank, 9), train(ddp, theirs, rank, 9))
    with zero.unsharded(model) if whole else contextlib.nullcontext():
        if rank == 0:
            close(evaluates(model, rank, torch.no_grad), evaluates(ddp.module, rank, torch.no_grad))


@pytest.mark.parametrize(
    ("stage", "whole", "who", "context"),
    [
        *((stage, whole, 0, "no_grad") for stage in (0, 1, 2) for whole in (False, True)),
        (3, True, 0, "no_grad"), (1, False, 0, "inference_mode"), (3, True, 0, "inference_mode"),
        (2, True, 0, "grad"), (3, True, 0, "grad"),
    ],
)  # fmt: skip
def test_one_rank_evaluates_alone(two, stage, whole, who, context):
    two.run(alone, stage, whole, who, context, {})


@pytest.mark.parametrize("settings", [{"offload_optimizer": "cpu"}, {"debug": True}], ids=str)
@pytest.mark.parametrize(("stage", "whole"), [(2, False), (3, True)])
def test_one_rank_evaluates_alone_with(two, stage, whole, settings):
    two.run(alone, stage, whole, 0, "no_grad", settings)


def another(rank: int, world: int, stage: int) -> None:
    """The last rank evaluates: with rank 0's buffers, as a forward of DDP has them."""
    model, optimizer, ddp, theirs = pair(stage)
    for step in range(3):
        close(train(model, optimizer, rank, step), train(ddp, theirs, rank, step))
        with zero.unsharded(model) if stage == 3 else contextlib.nullcontext():
            if rank == world - 1:
                evaluates(model, rank, torch.no_grad)
        mine = [value.clone() for value in model.buffers()]
        shared = [mine if rank == 0 else None]
        dist.broadcast_object_list(shared, 0)
        if rank == world - 1:
            assert all(torch.equal(ours, first) for ours, first in zip(mine, shared[0], strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_rank_evaluates_alone(two, stage):
    two.run(another, stage)


def together(rank: int, world: int, stage: int, whole: bool) -> None:
    """All ranks evaluate: as DDP's evaluation, on every rank."""
    model, optimizer, ddp, theirs = pair(stage)
    for step in range(6):
        close(train(model, optimizer, rank, step), train(ddp, theirs, rank, step))
        if step % 2:
            with zero.unsharded(model) if whole else contextlib.nullcontext():
                close(evaluates(model, rank, torch.no_grad), evaluates(ddp, rank, torch.no_grad))
        for mine, plain in zip(model.buffers(), ddp.module.buffers(), strict=True):
            close(mine, plain)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_evaluate(two, stage, whole):
    two.run(together, stage, whole)


def saved(rank: int, world: int, folder: str) -> None:
    """A checkpoint has rank 0's buffers, whoever evaluated."""
    from safetensors.torch import load_file

    model, optimizer, ddp, theirs = pair(2)
    engine = zero.engine_of(model)
    for step in range(2):
        train(model, optimizer, rank, step)
        train(ddp, theirs, rank, step)
    if rank == 1:
        evaluates(model, rank, torch.no_grad)
    engine.save(folder)
    if rank == 0:
        files = load_file(f"{folder}/model.safetensors")
        for name, plain in ddp.module.named_buffers():
            close(files[name].float(), plain.float())


def test_a_checkpoint_has_rank_0s_buffers(two, tmp_path):
    two.run(saved, str(tmp_path / "out"))


def written_alike(rank: int, world: int) -> None:
    """Buffers that every rank writes between a step and an evaluation keep what was written."""
    model, optimizer, _, _ = pair(1)
    for step in range(2):
        train(model, optimizer, rank, step)
    with torch.no_grad():
        model.queue.fill_(3.0)
    evaluates(model, rank, torch.no_grad)
    assert bool((model.queue == 3).all())


def test_buffers_that_every_rank_writes(two):
    two.run(written_alike)
