"""Reads and copies of sharded parameters that no program of tests/programs has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero import Engine, StateError, ZeroConfig, shard
from tests.kit.pool import RankPool

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


def penalty_memory(rank: int, world: int) -> tuple[int, int]:
    """Units that are gathered between a penalty over all weights and the backward, and after it."""
    model, optimizer, engine = sharded()
    loss = model(torch.ones(2, WIDTH)).square().mean() + sum(p.square().sum() for p in model.parameters())
    before = gathered(engine)
    loss.backward()
    return before, gathered(engine)


def test_a_penalty_does_not_keep_the_model_gathered(two: RankPool) -> None:
    for before, after in two.run(penalty_memory):
        assert (before, after) == (1, 0)


def text_on_one_rank(rank: int, world: int) -> str:
    model, optimizer, engine = sharded()
    text = f"{model[0].weight!r} {model[0].bias}" if rank == 0 else ""
    step(model, optimizer)
    return text


def test_one_rank_prints(two: RankPool) -> None:
    text, _ = two.run(text_on_one_rank)
    assert text.count("sharded over the ranks") == 2


def held_views(rank: int, world: int) -> list[str]:
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
    return found


def _memory(param: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(param.detach()))


def test_held_views_are_snapshots(two: RankPool) -> None:
    for found in two.run(held_views):
        assert ["still held" in text for text in found] == [True, True, False, True]


class Inner(nn.Module):
    """A block with an activation that losses may take."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.hooks, self.seen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(self.one(x))
        self.hooks += torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return self.two(self.seen)


def watched(rank: int, world: int, is_inner: bool) -> list[int]:
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
    return [block.hooks for block in model]


def test_saved_tensors_are_watched_where_a_backward_came_unannounced(two: RankPool) -> None:
    for found in two.run(watched, False):
        assert found == [4, 4, 4]
    for found in two.run(watched, True):
        assert found == [4, 10, 4]


def memory_of_weights(rank: int, world: int) -> list[bool]:
    """Whether weights are gathered into the same memory as in the first step."""
    model, optimizer, engine = sharded()
    found, places = [], []
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
        found.append(places[-1] == places[0])
    return found


def test_without_views_memory_is_reused(two: RankPool) -> None:
    assert two.run(memory_of_weights) == [[True] * 7] * 2
