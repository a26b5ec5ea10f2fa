"""Models whose blocks are cut inside equal the same models trained whole; the helpers of other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from hf_zero.core.units import Limits
from hf_zero.runtime.transports import Roads
from tests.programs.architectures import ARCHITECTURES

pytestmark = pytest.mark.gloo
Loss = Callable[[nn.Module, int, int], Tensor]


class Block(nn.Module):
    def __init__(self, width: int = 8, inplace: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head; the base of most cases here."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, tied: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(depth)])
        self.head = nn.Linear(8, 23, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def ids_for(rank: int, step: int) -> Tensor:
    return torch.randint(0, 23, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def token_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = ids_for(rank, step)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def reference(
    build: Callable[[], nn.Module], loss: Loss, world: int, steps: int, optimizer: Callable
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build()
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(steps):
        sums: list[Tensor | None] = [None] * len(params)
        for rank in range(world):
            model.zero_grad()
            loss(model, rank, step).backward()
            for index, p in enumerate(params):
                if p.grad is not None:
                    grad, total = p.grad.to_dense() if p.grad.is_sparse else p.grad, sums[index]
                    sums[index] = grad if total is None else total + grad
        for total, p in zip(sums, params):
            p.grad = None if total is None else total / world  # what no rank has used has none
        opt.step()
    return model.state_dict()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> None:
    for step in steps:
        token_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, *steps: int) -> None:
    """The same steps of a plain model on all ranks' batches."""
    for step in steps:
        sums: dict[Tensor, Tensor] = {}
        for rank in range(world):
            token_loss(model, rank, step).backward()
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
                    p.grad = None
        for p, total in sums.items():
            p.grad = total * (1.0 / world)
        optimizer.step()
        optimizer.zero_grad()


def check(
    rank: int,
    world: int,
    build,
    loss,
    stages=(0, 1, 2, 3),
    steps: int = 4,
    optimizer=sgd,
    bound: float = 1e-6,
    roads: Roads | None = None,
    **settings,
) -> None:
    expected = reference(build, loss, world, steps, optimizer) if rank == 0 else {}
    for stage in stages:
        torch.manual_seed(0)
        model = build()
        names = list(model.state_dict())
        opt = optimizer([p for p in model.parameters() if p.requires_grad])
        engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage, **settings), roads=roads)
        for step in range(steps):
            loss(model, rank, step).backward()
            opt.step()
            opt.zero_grad()
            if stage == 3 and world > 1:
                held = [f for u in engine.units for f in u.flats if f.full.untyped_storage().nbytes()]
                assert not held, f"still gathered after the step: {held}"
        ours = model.state_dict()
        assert list(ours) == names
        for name, value in expected.items():
            gap = (ours[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
            assert gap <= bound, f"stage {stage}: {name} off by {gap}"
            assert ours[name].dtype == value.dtype


CUT = Roads(limits=Limits(unit_bytes=600, run_bytes=300))
"""Blocks of these models are cut inside, down to single layers."""


def check_cut(rank: int, world: int, name: str) -> None:
    build, loss = ARCHITECTURES[name]
    check(rank, world, build, loss, stages=(2, 3), roads=CUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_with_blocks_cut_inside(two, name):
    two.run(check_cut, name)
