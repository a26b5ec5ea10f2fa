"""Writes to parameters reach the masters with all their digits, and leave those of all other elements alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import ZeroConfig
from hf_zero.compat.on_demand import OnDemand
from hf_zero.compat.writes import Writes
from hf_zero.engine import Engine, shard
from hf_zero.engine.build import full_values
from tests.kit.pool import RankPool


def trained(rank: int, world: int, config: dict[str, Any], precision: str) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = shard(model, optimizer, ZeroConfig(**config), [OnDemand(), Writes()], mixed_precision=precision)
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, engine


def masters(engine: Engine) -> dict[str, Tensor]:
    """Full values in the master dtype, by name."""

    def all_of() -> Iterator[tuple[str, Tensor]]:
        for unit in engine.units:
            for span in unit.spans:
                whole = full_values(span).clone()
                for slot in span.layout.slots:
                    yield slot.spec.name, whole[slot.offset : slot.stop].view(slot.spec.shape)

    return dict(all_of())


def writes(rank: int, world: int, config: dict[str, Any], precision: str) -> None:
    model, engine = trained(rank, world, config, precision)
    before = masters(engine)
    weight = model[0].weight  # type: ignore[index]
    with torch.no_grad():
        weight[3, 5] = 0.5
        weight[40:].fill_(0.25)
    expected = before["0.weight"].clone()
    expected[3, 5] = 0.5
    expected[40:] = 0.25
    assert torch.equal(masters(engine)["0.weight"], expected)
    weight.data[0].zero_()  # torch does not count it
    expected[0] = 0
    assert torch.equal(masters(engine)["0.weight"], expected)
    exact = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    model[2].weight.data = exact  # type: ignore[index]
    after = masters(engine)
    assert torch.equal(after["2.weight"], exact)
    for name in ("0.bias", "2.bias"):
        assert torch.equal(after[name], before[name])
    # Values that go away and come back, as shown, leave the masters as they were.
    for param in model.parameters():
        kept = param.detach().clone()
        param.data = torch.zeros_like(kept)
        if config["stage"] < 3:
            assert not param.any()
        param.data = kept
    engine.schedule.quiesce()
    close = masters(engine)
    for name, value in after.items():
        assert torch.allclose(close[name], value, atol=4e-3 if precision == "bf16" else 0.0, rtol=8e-3)


CONFIGS: dict[str, dict[str, Any]] = {
    "replicated": {"stage": 0},
    "sharded": {"stage": 2},
    "released": {"stage": 3},
    "in host memory": {"stage": 2, "offload_optimizer": "cpu"},
    "away": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("where", CONFIGS)
def test_masters_have_what_was_written(two: RankPool, where: str, precision: str) -> None:
    two.run(writes, CONFIGS[where], precision)


def decays(rank: int, world: int, stage: int, wire: str) -> None:
    model, engine = trained(rank, world, {"stage": stage, "wire": wire}, "no")
    before = masters(engine)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 - 1e-4)
    after = masters(engine)
    for name, value in before.items():
        # A codec's rounding is larger than the decay. The rounding of any element would be far above this.
        assert (after[name] - value * (1 - 1e-4)).abs().max() <= 1e-5
    with torch.no_grad():
        for param in model.parameters():
            kept = param.detach().clone()
            param.copy_(torch.full_like(param, 0.5))
    last = model[2].bias  # type: ignore[index]
    assert torch.equal(masters(engine)["2.bias"], torch.full_like(kept, 0.5))
    assert torch.equal(last.detach(), torch.full_like(kept, 0.5))


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_decay_by_less_than_a_codes_rounding(two: RankPool, stage: int, wire: str) -> None:
    two.run(decays, stage, wire)
