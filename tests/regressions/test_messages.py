"""Errors that say what to do instead, with names that the reader has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import on_ranks

pytestmark = pytest.mark.gloo


def net() -> nn.Module:
    """Every rank of two has elements of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def said(call: Callable[[], object], kind: type[zero.ZeroError]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(timeout_s=30)
def test_a_model_that_was_made_in_inference_mode(rank: int, world: int, stage: int) -> None:
    with torch.inference_mode():
        whole = net()
    base = net()
    with torch.inference_mode():
        base[0] = nn.Linear(8, 8).requires_grad_(False)
    with torch.inference_mode(), zero.Init():
        deferred = net()
    late = net()
    config = zero.ZeroConfig(stage=stage)

    def around() -> None:
        with torch.inference_mode():
            zero.shard(late, torch.optim.AdamW(late.parameters()), config)

    for model in (whole, base, deferred):
        text = said(lambda m=model: zero.shard(m, torch.optim.AdamW(m.parameters()), config), zero.ConfigError)
        for words in ("'0.weight'", "torch.inference_mode()", "outside"):
            assert words in text
    assert "zero.shard was called inside" in said(around, zero.ConfigError)


@pytest.mark.parametrize("tier", ["none", "cpu", "disk"])
@on_ranks(timeout_s=30)
def test_a_sum_over_the_optimizers_state(rank: int, world: int, tier: str, tmp_path: Path) -> None:
    """A schedule of a sum over the optimizer's state."""
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    config = zero.ZeroConfig(stage=2, offload_optimizer=tier, offload_dir=tmp_path if tier == "disk" else None)
    zero.shard(model, opt, config)

    def run(how: Callable[[Any], Any]) -> None:
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            opt.param_groups[0]["lr"] = sum(float(how(state["exp_avg_sq"])) for state in opt.state.values())

    kind = zero.StateError if tier == "disk" else zero.RankMismatchError
    for how in (torch.sum, lambda state: state.sum()) if tier == "disk" else (torch.sum,):
        assert "zero.full_optimizer_state" in said(lambda how=how: run(how), kind)
