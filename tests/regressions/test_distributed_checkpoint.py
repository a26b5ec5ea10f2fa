"""`torch.distributed.checkpoint.state_dict` of a sharded model: models work, optimizers raise a named error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import hf_zero as zero

pytestmark = pytest.mark.gloo


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def functions(rank: int, world: int, stage: int, dtype: str, steps: int, kind: str, settings: dict[str, Any]) -> None:
    model, plain = mlp(0), mlp(1)
    make = getattr(torch.optim, kind)
    optimizer = make([p for p in model.parameters() if p.dim() == 2 or kind != "Muon"], lr=0.1)
    theirs = make([p for p in plain.parameters() if p.dim() == 2 or kind != "Muon"], lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, **settings), mixed_precision=dtype)
    for _ in range(steps):
        train(model, optimizer)
    train(plain, theirs)
    whole = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    full = dcp.StateDictOptions(full_state_dict=True)
    given = dcp.get_optimizer_state_dict(plain, theirs)
    for refused in (
        lambda: dcp.get_optimizer_state_dict(model, optimizer),
        lambda: dcp.get_optimizer_state_dict(model, optimizer, options=full),
        lambda: dcp.get_state_dict(model, optimizer),
        lambda: dcp.set_optimizer_state_dict(model, optimizer, given),
        lambda: dcp.set_state_dict(
            model, optimizer, model_state_dict=dcp.get_model_state_dict(model), optim_state_dict=given
        ),
    ):
        with pytest.raises(zero.StateError, match=r"engine\.save.*zero\.full_optimizer_state"):
            refused()
    assert all(torch.equal(zero.full_parameter(param), whole[name]) for name, param in model.named_parameters())
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is None for group in optimizer.param_groups for param in group["params"])
    assert bool(optimizer.state) is (kind != "SGD" and steps > 0)
    # Of the model.
    state = dcp.get_model_state_dict(model)
    assert rank != 0 or all(torch.equal(value, whole[name]) for name, value in state.items())
    dcp.set_model_state_dict(model, dcp.get_model_state_dict(plain))
    for name, param in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(name)), param)
    train(model, optimizer)
    assert dcp.get_optimizer_state_dict(plain, theirs)["param_groups"]  # others are left alone


@pytest.mark.parametrize(
    ("stage", "dtype", "steps", "kind", "settings"),
    [
        (0, "no", 1, "AdamW", {}),
        (1, "no", 0, "AdamW", {}),
        (2, "bf16", 1, "SGD", {}),
        (3, "no", 1, "AdamW", {}),
        (3, "bf16", 0, "AdamW", {"offload_optimizer": "cpu"}),
        (2, "no", 1, "AdamW", {"offload_optimizer": "disk"}),
        (2, "no", 1, "Muon", {}),
    ],
    ids=str,
)
def test_optimizers_are_refused_and_models_work(two, tmp_path, stage, dtype, steps, kind, settings):
    two.run(functions, stage, dtype, steps, kind, {**settings, "offload_dir": str(tmp_path)})
