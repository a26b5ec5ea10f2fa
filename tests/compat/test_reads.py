"""Reads and copies of sharded parameters that no program of tests/programs has."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_zero import StateError, ZeroConfig, shard
from hf_zero.engine.unit import State
from tests.kit.pool import RankPool

WIDTH = 16


def sharded(depth: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer, object]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, shard(model, optimizer, ZeroConfig(stage=3, stall_s=20.0), mixed_precision="bf16")


def gathered(engine: object) -> int:
    return sum(unit.state is not State.SHARDED for unit in engine.units)


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
    return found


def _memory(param: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(param.detach()))


def test_held_views_are_snapshots(two: RankPool) -> None:
    for found in two.run(held_views):
        assert ["still held" in text for text in found] == [True, True, False, True]


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.data[0]
        return super().forward(x)


def held_in_a_forward(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Keeps(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model[0].weight.detach()[0].clone()
    shard(model, optimizer, ZeroConfig(stage=3, stall_s=20.0))
    model(torch.ones(2, WIDTH)).square().mean().backward()
    assert torch.equal(model[0].kept, expected)
    optimizer.step()
    assert torch.equal(model[0].kept, expected)


def test_data_that_outlives_its_forward_is_a_snapshot(two: RankPool) -> None:
    two.run(held_in_a_forward)


def copies(rank: int, world: int) -> None:
    model, optimizer, engine = sharded()
    whole = copy.deepcopy(model)
    alone = copy.deepcopy(model[2].weight)
    assert type(alone) is nn.Parameter
    assert alone.dtype == torch.float32
    assert torch.equal(alone, whole[2].weight)  # the master's values, which forwards round
    step(model, optimizer)
    assert not torch.equal(copy.deepcopy(model)[2].weight, whole[2].weight)
    pickle.loads(pickle.dumps(whole))
    whole(torch.ones(2, WIDTH)).sum().backward()
    for value in (model, model[2], model[2].weight):
        with pytest.raises(StateError, match="copy.deepcopy"):
            pickle.dumps(value)


def test_copies_are_plain_and_pickles_are_refused(two: RankPool) -> None:
    two.run(copies)


class Positions(nn.Linear):
    """Returns a part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: len(x)]


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        part = self.positions(x)
        for layer in self.layers:
            x = layer(x)
        return x * part


def weights_returned(rank: int, world: int) -> float:
    torch.manual_seed(0)
    model = Positioned()
    plain = copy.deepcopy(model)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, plain)]
    engine = shard(*pairs[0], ZeroConfig(stage=3, stall_s=20.0))
    for _ in range(3):
        for each, optimizer in pairs:
            step(each, optimizer)
        with torch.no_grad():
            assert torch.allclose(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)), atol=1e-6)
    assert gathered(engine) <= 2
    engine.detach()
    return max((mine - theirs).abs().max().item() for mine, theirs in zip(model.parameters(), plain.parameters()))


def test_a_forward_returns_a_part_of_its_weight(two: RankPool) -> None:
    for apart in two.run(weights_returned):
        assert apart < 1e-5


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


def view_from_unsharded(rank: int, world: int, precision: str) -> None:
    """What user code took inside `unsharded` keeps its memory and its values after it, and over steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard(model, optimizer, ZeroConfig(stage=3, stall_s=20.0), mixed_precision=precision)
    with engine.unsharded():
        views = [param.detach() for param in model.parameters()]
    for _ in range(2):
        assert all(view.untyped_storage().nbytes() for view in views)  # to read freed memory would end the process
        assert all(torch.equal(view, param) for view, param in zip(views, plain.parameters(), strict=True))
        step(model, optimizer)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_view_outlives_unsharded(two: RankPool, precision: str) -> None:
    two.run(view_from_unsharded, precision)
