"""Reads and copies of sharded parameters that no program of tests/programs has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero import Engine, StateError, ZeroConfig, shard
from tests.kit.pool import on_ranks

WIDTH = 16


def sharded(depth: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, shard(model, optimizer, ZeroConfig(stage=3, stall_s=20.0), mixed_precision="bf16")


def gathered(engine: Engine) -> int:
    return sum(unit.state.value != "SHARDED" for unit in engine.units)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks()
def test_a_penalty_does_not_keep_the_model_gathered(rank: int, world: int) -> None:
    """Units that are gathered between a penalty over all weights and the backward, and after it."""
    model, optimizer, engine = sharded()
    loss = model(torch.ones(2, WIDTH)).square().mean() + sum(p.square().sum() for p in model.parameters())
    assert gathered(engine) == 1
    loss.backward()
    assert gathered(engine) == 0


@on_ranks()
def test_one_rank_prints(rank: int, world: int) -> None:
    model, optimizer, engine = sharded()
    text = f"{model[0].weight!r} {model[0].bias}" if rank == 0 else ""
    step(model, optimizer)
    assert text.count("sharded over the ranks") == (2 if rank == 0 else 0)


@on_ranks()
def test_held_views_are_snapshots(rank: int, world: int) -> None:
    """A view that is held too long keeps its values, and is refused."""
    model, optimizer, engine = sharded()
    found = []
    for make in (lambda p: p.data, lambda p: p.detach()[0], lambda p: p.detach().float().numpy(), _memory):
        view, values = make(model[1].weight), make(model[1].weight)
        expected = values.copy() if not isinstance(values, Tensor) else values.clone()
        del values
        try:
            step(model, optimizer)
        except StateError as error:
            found.append(str(error))
        else:
            found.append("")
        same = (view == expected).all()
        assert bool(same), "the view has other values"
        del view
        step(model, optimizer)
    cycle: list[object] = [model[1].weight.data]
    cycle.append(cycle)
    del cycle
    step(model, optimizer)  # garbage that is not collected yet is not held
    assert ["still held" in text for text in found] == [True, True, False, True]


def _memory(param: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(param.detach()))


class Inner(nn.Module):
    """A block with an activation that losses may take."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.hooks, self.seen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(self.one(x))
        self.hooks += torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return self.two(self.seen)


@pytest.mark.parametrize(("is_inner", "expected"), [(False, [4, 4, 4]), (True, [4, 10, 4])])
@on_ranks()
def test_saved_tensors_are_watched_where_a_backward_came_unannounced(
    rank: int, world: int, is_inner: bool, expected: list[int]
) -> None:
    """By block, forwards of ten in which saved tensors pass through hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Inner() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, optimizer, ZeroConfig(stage=3, stall_s=20.0))
    for _ in range(10):
        out = model(torch.ones(2, WIDTH))
        (model[1].seen if is_inner else out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [block.hooks for block in model] == expected


@on_ranks()
def test_without_views_memory_is_reused(rank: int, world: int) -> None:
    """Whether weights are gathered into the same memory as in the first step."""
    model, optimizer, engine = sharded()
    places = []
    spans = [span for unit in engine.units for span in unit.spans]
    for _ in range(7):
        for micro in range(3):
            x = torch.full((2, WIDTH), 1.0 + micro).requires_grad_()
            model(x).square().mean().backward()
            checkpoint(model[0], x, use_reentrant=False).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        places.append([span.full.untyped_storage()._cdata for span in spans])
    assert places == places[:1] * 7
