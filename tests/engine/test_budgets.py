"""`auto` places what the budgets have room for, and changes no result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero import ConfigError
from tests.kit.bits import equal, values
from tests.kit.common import gpt2, loss_of, optimizer_for
from tests.kit.pool import on_ranks
from tests.kit.transports import ROADS, Tier

pytestmark = pytest.mark.gloo
STEPS = 2


def made(config: zero.ZeroConfig, dtype: str) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    model = gpt2(n_layer=4)
    optimizer = optimizer_for(model, 2)
    return model, optimizer, zero.shard(model, optimizer, config, mixed_precision=dtype, **ROADS["small blocks"].given)


def trained(rank: int, made: tuple[Any, torch.optim.Optimizer, zero.Engine]) -> tuple[list[float], list[Any]]:
    model, optimizer, engine = made
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, rank, number)
        loss.backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model, optimizer)


def most(config: zero.ZeroConfig, dtype: str, tier: Tier) -> int:
    engine = made(config, dtype)[2]
    found = engine.plan.memory.at_peak(tier)
    engine.detach()
    return found


@pytest.mark.parametrize(("world", "dtype"), [(1, "no"), (2, "bf16")])
@on_ranks(None)
def test_budgets_are_kept_and_results_equal(rank: int, world: int, tmp_path: Path, dtype: str) -> None:
    """From room for all down to none: what is stored in a tier is within its budget, and uses what there is."""
    losses, expected = trained(rank, made(zero.ZeroConfig(stage=3), dtype))
    auto: dict[str, Any] = {"stage": 3, "offload_optimizer": "auto", "offload_params": "auto", "offload_dir": tmp_path}
    disk = zero.ZeroConfig(stage=3, offload_optimizer="disk", offload_params="disk", offload_dir=tmp_path)
    highest = most(zero.ZeroConfig(**auto), dtype, Tier.DEVICE)
    lowest, host = most(disk, dtype, Tier.DEVICE), most(disk, dtype, Tier.HOST)
    seen = []
    for device_share, host_share in ((1.0, 1.0), (0.6, 1.0), (0.6, 0.3), (0.0, 0.0)):
        device_memory = int(lowest + device_share * (highest - lowest))
        host_memory = int(host + host_share * highest)
        run = made(zero.ZeroConfig(**auto, device_memory=device_memory, host_memory=host_memory), dtype)
        engine = run[2]
        found, weights = trained(rank, run)
        assert found == losses
        assert equal(weights, expected)
        stored = {row.tier: row.measured for row in engine.report().tiers if row.kind == "all"}
        assert stored.get("device", 0) <= device_memory
        assert stored.get("host", 0) <= host_memory
        seen.append({span.tier for unit in engine.units for span in unit.spans})
        engine.detach()
    assert seen[0] == {Tier.DEVICE}
    assert Tier.HOST in seen[1]
    assert Tier.DISK in seen[-1]


@on_ranks()
def test_a_budget_that_nothing_fits_is_refused_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    config = zero.ZeroConfig(stage=3, offload_optimizer="auto", offload_dir=tmp_path, device_memory="1000B")
    model = gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"device_memory.*\d"):
        zero.shard(model, optimizer_for(model, 1), config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert zero.engine_of(model) is None
