"""What optimizers step over, registered kinds, hooks and failures around a step; on one rank, without observers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hf_zero as zero
from hf_zero import ConfigError, LayoutError, StateError, UnsupportedOptimizerError, ZeroConfig, register_optimizer
from hf_zero.engine import Engine, shard
from tests import optimizers as own


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Engine]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = shard(model, optimizer, ZeroConfig(stage=2))
    yield model, optimizer, engine
    engine.detach()


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 6)).square().mean().backward()


@pytest.mark.parametrize(
    ("kind", "dims"),
    [(own.Lion, 1), (own.Eager, 1), (own.Careful, 1), (own.Layerwise, 2), (own.Projects, 2), (own.Doubled, 2)],
)
def test_trials_find_what_an_unknown_class_steps_over(kind: Any, dims: int) -> None:
    """Elements are shown to the optimizer in one dimension."""
    model = mlp()
    optimizer = kind(model.parameters())
    engine = shard(model, optimizer, ZeroConfig(stage=2, offload_optimizer="cpu"))
    assert optimizer.param_groups[0]["params"][0].dim() == dims
    engine.detach()


class Noisy(own.Layerwise):
    """Adds noise."""

    def rate(self, p: Any) -> Any:
        return torch.randn_like(p)


def test_trials_leave_random_states() -> None:
    model = mlp()
    optimizer = Noisy(model.parameters())
    before = torch.get_rng_state()
    shard(model, optimizer, ZeroConfig(stage=2)).detach()
    assert torch.equal(torch.get_rng_state(), before)


class Tables(own.Layerwise):
    """Counts its steps in a dictionary and an object of its own, and in a list of each group."""

    def __init__(self, params: Any) -> None:
        super().__init__([{"params": list(params), "counts": [0]}])
        self.counts, self.noise, self.seen = {"all": 0}, torch.Generator().manual_seed(0), SimpleNamespace(steps=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["all"] += 1
        self.seen.steps += 1
        self.last = float(torch.rand((), generator=self.noise))
        for group in self.param_groups:
            group["counts"][0] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1 / self.counts["all"] / group["counts"][0])


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_what_steps_count_in_containers(tier: str) -> None:
    """Trial steps counted there, too, and so did the step over each block."""
    found = []
    for is_plain in (True, False):
        model = mlp()
        optimizer = Tables(model.parameters())
        engine = None if is_plain else shard(model, optimizer, ZeroConfig(stage=2, offload_optimizer=tier))
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            engine.detach()
        counts = optimizer.counts["all"], optimizer.param_groups[0]["counts"], optimizer.last
        assert tier != "none" or optimizer.seen.steps == 3
        found.append((counts, [param.tolist() for param in model.parameters()]))
    assert found[0] == found[1]


def test_a_registered_kind_goes_before_the_trial() -> None:
    class Declared(own.Global):
        pass

    model = mlp()
    config = ZeroConfig(stage=2, offload_optimizer="cpu")
    with pytest.raises(UnsupportedOptimizerError, match="one parameter after another"):
        shard(model, Declared(model.parameters()), config)
    register_optimizer(Declared, "matrices")
    shard(model, Declared(model.parameters()), config).detach()
    with pytest.raises(ConfigError, match="'elementwise' or 'matrices'"):
        register_optimizer(Declared, "rows")


def test_a_hook_that_removes_itself_runs_before_the_engine(trained: Any) -> None:
    model, optimizer, _ = trained
    seen: list[str] = []

    def before(*_: Any) -> None:
        seen.append("before")
        handle.remove()

    handle = optimizer.register_step_pre_hook(before)
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert seen == ["before"]


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_hooks_for_all_optimizers_see_steps_of_user_code_alone(tier: str) -> None:
    """Not those over small tensors that ask what a class does, nor those over blocks of offloaded state."""
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        model = mlp()
        optimizer = own.Lion(model.parameters())
        engine = shard(model, optimizer, ZeroConfig(stage=2, offload_optimizer=tier))
        backward(model)
        optimizer.step()
        engine.detach()
    finally:
        handle.remove()
    assert seen == [optimizer]


def test_a_step_past_the_instance_is_a_step(trained: Any) -> None:
    """accelerate calls the method that it found before, under a loss scaler."""
    model, optimizer, engine = trained
    for number in range(3):
        backward(model)
        if number == 1:
            with pytest.raises(TypeError):
                torch.optim.SGD.step(optimizer, 1)
            optimizer.zero_grad()
            backward(model)
        before = model[0].weight.detach().clone()
        torch.optim.SGD.step(optimizer)
        assert not torch.equal(model[0].weight, before)
        assert engine.wire.watch.step == number + 1
        optimizer.zero_grad()


class Breaks(torch.optim.SGD):
    """Raises in its step, before or after it has written through `.data`, which no version counter sees."""

    at = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.at == "before":
            raise ValueError("not yet")
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(0.1 * param.grad)
        if self.at == "after":
            raise ValueError("too late")
        if closure is not None:
            closure()


def raises() -> None:
    raise ValueError("too late")


@pytest.mark.parametrize("closure", [None, raises])
def test_a_step_may_be_repeated_only_if_it_has_not_written(closure: Any) -> None:
    model = mlp()
    optimizer = Breaks(model.parameters(), lr=0.1)
    shard(model, optimizer, ZeroConfig(stage=2))
    backward(model)
    optimizer.at = "before"
    with pytest.raises(ValueError, match="not yet"):
        optimizer.step()
    optimizer.at = ""
    optimizer.step()
    optimizer.at = "" if closure else "after"
    with pytest.raises(ValueError, match="too late"):
        optimizer.step(closure)
    with pytest.raises(StateError, match="half-way"):
        optimizer.step()


def test_groups_keep_names_of_parameters_that_move() -> None:
    model = mlp()
    named = [(f"m.{name}", param) for name, param in model.named_parameters()]
    optimizer = torch.optim.SGD([{"params": named[:2]}, {"params": named[2:], "lr": 0.0}], lr=0.1)
    engine = shard(model, optimizer, ZeroConfig(stage=2))
    first, second = optimizer.param_groups
    second["params"] = second["params"] + first["params"]
    del optimizer.param_groups[0]
    before = model[0].weight.detach().clone()
    backward(model)
    optimizer.step()
    assert torch.equal(model[0].weight, before)  # the rate of its new group is 0
    assert optimizer.param_groups[0]["param_names"] == ["m.2.weight", "m.2.bias", "m.0.weight", "m.0.bias"]
    engine.detach()


def test_full_matrices_cannot_be_bound_to_partitioned_elements(trained: Any) -> None:
    model, optimizer, engine = trained
    with pytest.raises(LayoutError, match="needs full matrices"):
        engine.bind(own.Layerwise(model.parameters()))
    backward(model)
    optimizer.step()  # what was refused has left no trace


class Held(own.Eager):
    """Its step over elements waits for `go`."""

    go = threading.Event()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                self.go.wait()
                param.sub_(self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad))


WAITS: tuple[Callable[[Any, Any, Any], object], ...] = (
    *(lambda o, t, p, other=other: setattr(o, "state", o.state | other) for other in ({}, {"user": {}})),
    lambda o, t, p: setattr(o, "state", {} | o.state),
    *(lambda o, t, p, name=name: getattr(o.state, name)() for name in ("copy", "keys", "items", "values", "popitem")),
    *(lambda o, t, p, name=name: getattr(o.state, name)(t) for name in ("get", "pop", "__getitem__", "__contains__")),
    *(lambda o, t, p, call=call: call(o.state) for call in (copy.copy, copy.deepcopy, len, list, reversed, dict, repr)),
    *(lambda o, t, p, name=name: getattr(o.state, name)({}) for name in ("update", "__ior__", "__or__", "__eq__")),
    lambda o, t, p: o.state.setdefault(t, {}),
    lambda o, t, p: o.state.__setitem__(t, {}),
    lambda o, t, p: o.state.__delitem__(t),
    lambda o, t, p: o.state.clear(),
    lambda o, t, p: o.state_dict(),
    lambda o, t, p: o.zero_grad(set_to_none=False),
    lambda o, t, p: t.sum(),
    lambda o, t, p: p.sum(),
    lambda o, t, p: p.grad.zero_(),
    lambda o, t, p: zero.full_parameter(p),
    lambda o, t, p: zero.local_parameter(p),
    lambda o, t, p: zero.set_full_parameter(p, torch.zeros_like(p)),
    lambda o, t, p: zero.full_optimizer_state(p, "sum"),
    lambda o, t, p: zero.local_optimizer_state(p, "sum"),
)
"""What user code does with an optimizer, a tensor of its group and a parameter."""


def test_reads_and_writes_wait_for_the_step_under_way() -> None:
    register_optimizer(Held, "elementwise")
    model = nn.Embedding(4, 4)  # its backward does not gather it
    optimizer = Held(model.parameters())
    Held.go.set()
    engine = zero.shard(model, optimizer, ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu"))
    early = []
    for number, act in enumerate((*WAITS, None)):
        loss = model(torch.arange(4)).sum()
        loss.backward(retain_graph=True)
        Held.go.clear()
        optimizer.step()
        timer = threading.Timer(0.1, Held.go.set)
        timer.start()
        if act is None:
            loss.backward()
        else:
            act(optimizer, optimizer.param_groups[0]["params"][0], model.weight)
        early += [] if Held.go.is_set() else [number]
        timer.join()
        optimizer.zero_grad()
    assert not early
    engine.detach()
