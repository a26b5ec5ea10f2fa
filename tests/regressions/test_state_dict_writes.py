"""`model.state_dict()` as PyTorch has it: writes to its tensors, calls on one rank, calls inside one another."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero

pytestmark = pytest.mark.gloo
NAME = "0.weight"


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def sharded(stage: int, dtype: str = "no", **settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, stall_s=20, **settings), mixed_precision=dtype)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def set_item(entry: Tensor) -> None:
    entry[2] = 5.0


def add_in_place(entry: Tensor) -> None:
    entry += 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda entry: entry.copy_(torch.ones(10, 6)),
    "add_": lambda entry: entry.add_(1),
    "fill_": lambda entry: entry.fill_(0.5),
    "+=": add_in_place,
    "item": set_item,
    "a view": lambda entry: entry[3].zero_(),
    "view, transposed": lambda entry: entry.t().view(-1, 5)[0].mul_(3) if entry.t().is_contiguous() else entry.t()[0].mul_(3),
    "detach": lambda entry: entry.detach().zero_(),
    "data": lambda entry: entry.data.mul_(2),
    "init": nn.init.ones_,
    "foreach": lambda entry: torch._foreach_add_([entry], 1.0),
    "out": lambda entry: torch.add(entry, 1.0, out=entry),
    "out of others": lambda entry: torch.mul(torch.ones(10, 6), 7.0, out=entry),
    "unbind": lambda entry: entry.unbind(0)[1].sub_(4),
    "index_fill_": lambda entry: entry.index_fill_(0, torch.tensor([1]), 9.0),
}  # fmt: skip


def written(rank: int, world: int, stage: int, dtype: str, settings: dict[str, Any]) -> None:
    model, optimizer = sharded(stage, dtype, **settings)
    train(model, optimizer, rank)
    for name, write in WRITES.items():
        expected = zero.full_parameter(model[0].weight).clone()
        state = model.state_dict()
        before = state[NAME].clone()
        with pytest.raises(zero.StateError, match=r"state_dict\(\).*clone"), torch.no_grad():
            write(state[NAME])
        assert torch.equal(state[NAME], before), name
        assert torch.equal(zero.full_parameter(model[0].weight), expected), (name, stage, dtype)
        again = model.state_dict()[NAME]
        assert rank != 0 or torch.equal(again, expected), name
        train(model, optimizer, rank)
    # A copy is the program's own.
    ema = copy.deepcopy(model.state_dict())
    mine = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in model.state_dict().items():
        ema[key].mul_(0.5).add_(value, alpha=0.5)
        mine[key].mul_(0.5).add_(value, alpha=0.5)
        value.double().zero_()
        (value + 1).zero_()
    whole = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    for found in (ema, mine):
        assert all(torch.allclose(found[name] + 0, value) for name, value in whole.items())


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_to_an_entry_is_refused(two, stage, dtype):
    two.run(written, stage, dtype, {})


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (1, {"offload_optimizer": "cpu"}),
        (2, {"offload_optimizer": "disk"}),
        (3, {"offload_optimizer": "cpu", "offload_params": "cpu"}),
        (3, {"offload_optimizer": "disk", "offload_params": "disk"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_write_to_an_entry_of_offloaded_state(two, tmp_path, stage, settings):
    two.run(written, stage, "no", {**settings, "offload_dir": str(tmp_path)})


def written_before_sharding(rank: int, world: int) -> None:
    with zero.Init():
        model = mlp()
    with pytest.raises(zero.StateError, match=r"created under zero\.Init\(\)"):
        model.state_dict()[NAME].copy_(torch.ones(10, 6))
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    assert torch.equal(zero.full_parameter(model[0].weight), mlp()[0].weight)


def test_a_state_dict_of_a_deferred_model_is_refused(two):
    two.run(written_before_sharding)


def numpy_arrays(rank: int, world: int) -> None:
    model, _ = sharded(3)
    array = model.state_dict()[NAME].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    assert torch.equal(zero.full_parameter(model[0].weight), mlp()[0].weight)


def test_a_numpy_view_of_an_entry_is_read_only(two):
    two.run(numpy_arrays)


def round_trips(rank: int, world: int, stage: int, dtype: str) -> None:
    from safetensors.torch import load, save

    model, optimizer = sharded(stage, dtype)
    train(model, optimizer, rank)
    state = model.state_dict()
    whole = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    for read in (state, copy.deepcopy(state)):
        file = io.BytesIO()
        torch.save(read, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is Tensor and torch.equal(value, whole[name]) for name, value in loaded.items())
        loaded[NAME].zero_()  # the program's own
    if rank == 0:
        loaded = load(save(state))
        assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    twin = mlp()
    twin.load_state_dict(state)
    assert all(torch.equal(param, whole[name]) for name, param in twin.named_parameters())
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(2, 6, requires_grad=True)
    nn.functional.linear(x, state[NAME]).sum().backward()  # in a graph
    assert torch.allclose(x.grad[0], whole[NAME].sum(0))
    model.load_state_dict(state)
    model.load_state_dict({key: value.clone() for key, value in state.items()})
    assert all(torch.equal(zero.full_parameter(param), whole[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_entries_are_saved_loaded_and_computed_with(two, stage, dtype):
    two.run(round_trips, stage, dtype)


# On one rank ----------------------------------------------------------------------------------------------------------


def alone(rank: int, world: int, stage: int, settings: dict[str, Any]) -> None:
    model, optimizer = sharded(stage, **settings)
    for saver in (0, world - 1):  # rank 0 in most programs
        train(model, optimizer, rank)
        file = io.BytesIO()
        if rank == saver:
            torch.save(model.state_dict(), file)
            model[2].state_dict(prefix="head.")
        whole = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
        if rank == saver:
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    train(model, optimizer, rank)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (0, {}), (0, {"dtype": "bf16"}), (1, {}), (2, {}), (1, {"offload_optimizer": "cpu"}),
        (2, {"offload_optimizer": "cpu", "step_in_backward": True}),
    ],
    ids=str,
)  # fmt: skip
def test_one_rank_saves_the_state_dict(two, stage, settings):
    two.run(alone, stage, settings)


def follows_edits(rank: int, world: int, stage: int) -> None:
    """What was written to parameters since the step is in the state dict, however it was written."""
    model, optimizer = sharded(stage)
    train(model, optimizer, rank)
    model[0].weight.data = torch.full((10, 6), 2.0)
    with torch.no_grad():
        model[2].bias.fill_(3.0)
    state = model.state_dict()
    assert bool((state[NAME] == 2).all())
    assert bool((state["2.bias"] == 3).all())
    with zero.unsharded(model):
        model[0].weight.data.fill_(4.0)
        assert bool((model.state_dict()[NAME] == 4).all())
        model.state_dict()["2.weight"].fill_(6.0)
    assert bool((zero.full_parameter(model[2].weight) == 6).all())
    kept = model.state_dict(keep_vars=True)[NAME]
    assert rank != 0 or bool((kept == 4).all())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_dict_follows_edits(two, stage):
    two.run(follows_edits, stage)


# Calls inside one another ---------------------------------------------------------------------------------------------


class Outer(nn.Module):
    """Saves a part of itself under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), mlp(), nn.Linear(4, 4)

    def get_extra_state(self) -> Any:
        return {"inner": {name: value.clone() for name, value in self.inner.state_dict().items()}}

    def set_extra_state(self, state: Any) -> None:
        pass


class Hooked(nn.Linear):
    """Adds a part's own state dict by a hook, as quantisers do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = mlp()
        self.register_state_dict_pre_hook(lambda *_: self.seen.append(self.inner.state_dict()))
        self.seen: list[Any] = []


def nested(rank: int, world: int, stage: int, dtype: str) -> None:
    torch.manual_seed(0)
    for build in (Outer, lambda: nn.Sequential(Hooked(), nn.Linear(4, 4))):
        plain = build()
        model = copy.deepcopy(plain)
        zero.shard(model, None, zero.ZeroConfig(stage=stage), mixed_precision=dtype)
        for _ in range(2):
            expected, found = plain.state_dict(), model.state_dict()
            assert list(expected) == list(found)
            for name, value in expected.items():
                if isinstance(value, Tensor):
                    assert rank != 0 or torch.equal(found[name], value), name
                elif rank == 0:
                    assert all(torch.equal(found[name]["inner"][k], v) for k, v in value["inner"].items())


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_inside_another(two, stage, dtype):
    two.run(nested, stage, dtype)


class Fails(nn.Module):
    """Its state is refused once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fails = True

    def get_extra_state(self) -> Any:
        if self.fails:
            raise ValueError("no state yet")
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


def after_an_error(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    with pytest.raises(ValueError, match="no state yet"):
        model.state_dict()
    zero.set_full_parameter(model[0].weight, torch.full((4, 4), 7.0))
    part = model[0].state_dict(prefix="part.")  # nothing of the call that raised
    assert rank != 0 or bool((part["part.weight"] == 7).all())
    model[1].fails = False
    state = model.state_dict()
    assert rank != 0 or bool((state["0.weight"] == 7).all())
    assert bool((model[1].inner.weight.detach().isfinite()).all())


def test_a_state_dict_after_one_that_raised(two):
    two.run(after_an_error)


def counted(rank: int, world: int) -> None:
    """Lists that are computed with a copy: torch counts what is written to the others."""
    model, _ = sharded(3)
    mine = torch.zeros(10, 6)
    torch._foreach_add_([mine], [model.state_dict()[NAME]])
    assert mine._version > 0
    assert torch.equal(mine, mlp()[0].weight)


def test_a_list_that_is_written_with_entries(two):
    two.run(counted)
