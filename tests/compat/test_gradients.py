"""Lazy gradients: what they cost, and what optimizer groups show where ranks hold different tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import Engine, ZeroConfig, shard
from tests.kit.pool import on_ranks
from tests.models import inputs, mlp

pytestmark = pytest.mark.gloo


def start(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Engine:
    return shard(model, optimizer, ZeroConfig(stall_s=20, **settings))


def loss(rank: int, model: nn.Module, step: int = 0) -> Tensor:
    return model(inputs(rank, step)).square().mean()


# Costs ------------------------------------------------------------------------------------------------------------------


@on_ranks()
def test_only_values_are_gathered(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = mlp()
    engine = start(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    loss(rank, model).backward()
    found: dict[str, dict[str, int]] = {}

    def count(what: str, act: Any) -> Any:
        engine.traffic.reset()
        out = act()
        found[what] = {kind: each.calls for kind, each in engine.traffic.kinds.items() if each.calls}
        return out

    count("is not None", lambda: [(p.grad is not None, p.grad.shape, p.grad.dtype) for p in model.parameters()])
    norm = count("clip", lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    flat = count("reshaped", lambda: torch.stack([p.grad.view(-1).norm() for p in model.parameters()]).norm())
    count("edit", lambda: [p.grad.mul_(2) for p in model.parameters()])
    count("read", lambda: [p.grad.sum() for p in model[0].parameters()])
    assert norm > 0.1
    assert abs(flat.item() - 0.1) < 1e-5
    engine.detach()
    one = {"scalar": 1}
    assert found == {"is not None": {}, "clip": one, "reshaped": one, "edit": {}, "read": {"gather": 1}}


@on_ranks()
def test_clearing_one_after_another_splits_nothing(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, stage=2)
    before = len(optimizer.param_groups[0]["params"])
    for step in range(2):
        loss(rank, model, step).backward()
        optimizer.step()
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert len(optimizer.param_groups[0]["params"]) == before


class Classes(torch.optim.SGD):
    """Its step notes the classes that torch chooses kernels by."""

    found: set[type] = set()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        tensors = [param for group in self.param_groups for param in group["params"]]
        self.found = {type(each) for param in tensors for each in (param, param.grad) if each is not None}
        return super().step(closure)


@on_ranks()
def test_a_step_sees_plain_tensors(rank: int, world: int) -> None:
    model = mlp()
    optimizer = Classes(model.parameters(), lr=0.1)
    start(model, optimizer, stage=2)
    for step in range(2):
        loss(rank, model, step).backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        optimizer.step()
        assert optimizer.found == {nn.Parameter, Tensor}


# Groups -----------------------------------------------------------------------------------------------------------------


@on_ranks()
def test_copies_of_what_groups_hold_are_plain(rank: int, world: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start(model, optimizer, stage=2)
    loss(rank, model).backward()
    for param in optimizer.param_groups[0]["params"]:
        for each in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
            assert type(each) is nn.Parameter
            assert torch.equal(each, param)
            assert each.grad is None
