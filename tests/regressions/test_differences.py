"""docs/differences.md: what reads differently from plain training on purpose, and the call that reads the plain value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
STAGES = (0, 1, 2, 3)


class Model(nn.Module):
    """Two trained blocks around a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.base(torch.tanh(self.first(x))))


def built(stage: int, precision: str = "no") -> tuple[Model, Model, torch.optim.Optimizer, zero.Engine]:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)
    return model, plain, optimizer, engine


def batch(rank: int, seed: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * seed + rank))


def mean_gradient(plain: Model, *batches: Tensor) -> Tensor:
    copied = copy.deepcopy(plain)
    for each in batches:
        copied(each).square().mean().backward()
    assert copied.first.weight.grad is not None
    return copied.first.weight.grad


def low_precision(rank: int, world: int, stage: int) -> None:
    model, plain, optimizer, engine = built(stage, "bf16")
    model(batch(rank)).square().mean().backward()
    param, frozen = model.first.weight, model.base.weight
    assert param.dtype == frozen.dtype == torch.bfloat16
    assert torch.equal(param.detach(), plain.first.weight.bfloat16())
    assert torch.equal(frozen.detach(), plain.base.weight.bfloat16())
    assert torch.equal(zero.full_parameter(param), plain.first.weight)
    assert torch.equal(zero.full_parameter(frozen), plain.base.weight)
    assert zero.full_parameter(param).dtype == torch.float32
    state = model.state_dict()
    assert state["base.weight"].dtype == torch.float32
    assert rank or torch.equal(state["base.weight"], plain.base.weight)
    assert param.grad is not None
    assert param.grad.dtype == torch.float32
    whole = zero.full_gradient(param)
    assert whole is not None
    assert whole.dtype == torch.float32
    assert torch.equal(param.grad + 0, whole)
    assert (param.grad + 0).dtype == torch.float32
    assert not torch.equal(whole, whole.bfloat16().float()), "the exact gradient was kept"
    assert optimizer.param_groups[0]["params"][0].dtype == torch.float32
    engine.detach()


@pytest.mark.parametrize("stage", STAGES)
def test_types_and_values_under_bf16(two: RankPool, stage: int) -> None:
    two.run(low_precision, stage)


def inside_no_sync(rank: int, world: int, stage: int, defer: bool) -> None:
    model, plain, _, engine = built(stage)
    first = [batch(each) for each in range(world)]
    own = mean_gradient(plain, first[rank])
    mean = sum(mean_gradient(plain, each) for each in first) / world
    with engine.no_sync(defer=defer):
        model(first[rank]).square().mean().backward()
        assert model.first.weight.grad is not None
        shown = model.first.weight.grad + 0
        torch.testing.assert_close(shown, own if stage < 2 or defer else mean)
        if not defer:
            torch.testing.assert_close(zero.full_gradient(model.first.weight), mean)
    second = [batch(each, 1) for each in range(world)]
    model(second[rank]).square().mean().backward()
    both = sum(mean_gradient(plain, first[each], second[each]) for each in range(world)) / world
    torch.testing.assert_close(model.first.weight.grad + 0, both)
    engine.detach()


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_inside_no_sync(two: RankPool, stage: int, defer: bool) -> None:
    two.run(inside_no_sync, stage, defer)


def objects(rank: int, world: int, stage: int) -> tuple[bool, bool]:
    model, _, optimizer, engine = built(stage)
    model(batch(rank)).square().mean().backward()
    param = model.first.weight
    assert isinstance(param, nn.Parameter)
    assert isinstance(param.grad, Tensor)
    assert optimizer.param_groups[0]["params"][0].dim() == 1
    kinds = type(param) is nn.Parameter, type(param.grad) is Tensor
    optimizer.step()
    state = zero.full_optimizer_state(param, "exp_avg")
    assert state.shape == param.shape == (16, 16)
    engine.detach()
    return kinds


@pytest.mark.parametrize("stage", STAGES)
def test_types_of_parameters_and_gradients(two: RankPool, stage: int) -> None:
    assert two.run(objects, stage) == [(False, False)] * 2


def kept_state(rank: int, world: int, stage: int) -> None:
    model, plain, optimizer, engine = built(stage)
    kept = model.state_dict()["first.weight"]
    model(batch(rank)).square().mean().backward()
    optimizer.step()
    later = model.state_dict()["first.weight"]
    if rank == 0:
        assert torch.equal(kept, plain.first.weight)
        assert not torch.equal(later, kept)
    engine.detach()


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_of_its_moment(two: RankPool, stage: int) -> None:
    two.run(kept_state, stage)


def summed(rank: int, world: int, stage: int) -> None:
    """docs/migration.md: the counterpart of `gradient_allreduce_op="sum"`."""
    model, plain, _, engine = built(stage)
    loss = model(batch(rank)).square().mean()
    (loss * engine.world_size).backward()
    total: Any = sum(mean_gradient(plain, batch(each)) for each in range(world))
    torch.testing.assert_close(model.first.weight.grad + 0, total)
    engine.detach()


@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_of_gradients(two: RankPool, stage: int) -> None:
    two.run(summed, stage)
