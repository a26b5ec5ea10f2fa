"""Modules that call themselves or each other, in activation checkpoints and without: as averaged gradients have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.kit.rows import each_value

pytestmark = pytest.mark.gloo
WIDTH = 8


class Recursive(nn.Module):
    """Calls itself `depth` times, below its own weight or between two of them."""

    def __init__(self, reentrant: bool | None, between: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.between = reentrant, between

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if self.between:
            x = torch.tanh(self.first(x))
        if depth:
            x = self.call(self, x, depth - 1)
        return torch.tanh(self.second(x if self.between else self.first(x)))

    def call(self, module: nn.Module, x: Tensor, *args: Any) -> Tensor:
        if self.reentrant is None:
            return module(x, *args)
        return checkpoint(module, x, *args, use_reentrant=self.reentrant)


class Mutual(nn.Module):
    """Calls its partner, which calls it."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant
        self.partner: list[nn.Module] = []

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.linear(x))
        if depth:
            if self.reentrant is None:
                x = self.partner[0](x, depth - 1)
            else:
                x = checkpoint(self.partner[0], x, depth - 1, use_reentrant=self.reentrant)
        return torch.tanh(self.linear(x))


class Root(nn.Module):
    """A model that calls itself between its blocks."""

    def __init__(self, reentrant: bool | None, times: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if depth and place < self.times:
                x = self.again(x, depth - 1)
        return x

    def again(self, x: Tensor, depth: int) -> Tensor:
        if self.reentrant is None:
            return self(x, depth)
        return checkpoint(self, x, depth, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self, kind: str, reentrant: bool | None, outer: bool) -> None:
        super().__init__()
        self.kind, self.reentrant, self.outer = kind, reentrant, outer
        self.embed = nn.Linear(WIDTH, WIDTH)
        if kind == "mutual":
            self.blocks = nn.ModuleList([Mutual(reentrant) for _ in range(2)])
            for one, other in zip(self.blocks, reversed(self.blocks)):
                one.partner.append(other)
        elif kind == "shared":
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        else:
            self.blocks = nn.ModuleList([Recursive(reentrant, kind == "between") for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        if self.kind == "shared":
            first, second = self.blocks
            return first(second(first(first(x))))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.outer and self.reentrant is not None:
            x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        else:
            x = self.body(x)
        return self.head(x)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trains(
    rank: int, world: int, make: Callable[..., nn.Module], args: tuple[Any, ...], config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = make(*args)
    torch.manual_seed(0)
    plain = make(*args)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    zero.shard(model, optimizers[0], zero.ZeroConfig(**config))
    for step in range(6):
        model(inputs(rank, step).requires_grad_()).square().mean().backward()
        for peer in range(world):
            (plain(inputs(peer, step).requires_grad_()).square().mean() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    if rank == 0:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "reentrant", "outer"),
    each_value(["around", "between", "mutual", "shared"], [None, False, True], [False, True]),
)
def test_a_module_calls_itself(two: RankPool, kind: str, reentrant: bool | None, outer: bool) -> None:
    two.run(trains, Model, (kind, reentrant, outer), {"stage": 3})


@pytest.mark.parametrize(("reentrant", "times"), each_value([None, False, True], [1, 2]))
def test_the_model_calls_itself(two: RankPool, reentrant: bool | None, times: int) -> None:
    two.run(trains, Root, (reentrant, times), {"stage": 3})


@pytest.mark.parametrize(("stage", "offload"), each_value([1, 2, 3], ["cpu", "disk"]))
def test_the_model_calls_itself_at_other_stages_and_tiers(two: RankPool, stage: int, offload: str) -> None:
    config = {"stage": stage, "offload_optimizer": offload, "offload_params": offload if stage == 3 else "none"}
    two.run(trains, Root, (False, 1), config)


def interrupted(rank: int, world: int) -> None:
    """Ctrl-C, which no hook hears of, is no call of the model by itself: the next forward begins anew."""
    model = Root(None, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    handle = model.blocks[1][1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(rank, 0))
    handle.remove()
    model(inputs(rank, 0)).square().mean().backward()
    optimizer.step()
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_forward_is_no_recursion(two: RankPool) -> None:
    two.run(interrupted)
