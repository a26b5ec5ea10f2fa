"""Which optimizers are element-wise; what whole matrices take, as planned. Numbers: programs/whole_matrices.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.diagnostics.usage import stored_bytes
from tests.kit.pool import on_ranks
from tests.kit.transports import Tier
from tests.optimizers import (
    Lars,
    Shampoo,
)

pytestmark = pytest.mark.gloo


class Rows(torch.optim.Optimizer):
    """As Alice: multiplies with a matrix of as many rows and columns as the parameter has rows."""

    def __init__(self, params, see: Callable[[int], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.see = see

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                grad = param.grad.reshape(len(param), -1)
                self.see(len(grad))
                param.sub_((grad @ grad.T @ grad).view_as(param), alpha=0.01)


def test_a_trial_of_a_rule_over_rows_has_few_of_them():
    seen, model = [], nn.Linear(8, 8)
    rule = Rows(model.parameters(), seen.append)
    zero.shard(model, rule, zero.ZeroConfig(stage=2)).detach()
    assert 0 < max(seen) < 1000


# What it takes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3)
def test_ranks_that_own_nothing(rank: int, world: int, stage: int) -> None:
    """One matrix: ranks that own nothing hold nothing of it, and nobody holds padding."""
    torch.manual_seed(0)
    model = nn.Linear(64, 50, bias=False)
    optimizer = Lars(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    for _ in range(2):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    owned = [p.shape for p in optimizer.param_groups[0]["params"] if p.numel()]
    assert owned == ([] if rank else [(50, 64)])
    assert zero.local_parameter(model.weight).numel() == (0 if rank else 3200)
    rest, measured = engine.plan.memory.stored, engine.report().measured
    of_masters = sum(kinds["parameters"] for kinds in rest.values())
    assert of_masters == 3200 * 4 if stage < 3 or not rank else of_masters == 0, (rank, of_masters)
    assert measured["optimizer"] == (0 if rank else 3200 * 4), measured
    assert engine.plan.layout.imbalance() == tuple([float(world)] + [0.0] * (world - 1))
    assert any("one owner" in reason for reason in engine.plan.reasons)


class Blocks(nn.Module):
    """Blocks of matrices of unequal sizes, so that ranks own unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, width), nn.Tanh(), nn.Linear(width, 96)) for width in (64, 160, 96, 224)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def wide(rank: int, name: str, config: zero.ZeroConfig, batches: range) -> tuple[zero.Engine, list[Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    opts = [SPLIT[name]([p for p in model.parameters() if p.dim() == 2])]
    opts.append(torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2))
    engine = zero.shard(model, opts, config)
    for step in batches:
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return engine, [zero.full_parameter(p) for p in model.parameters()]


SPLIT = {
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Shampoo": Shampoo,
}


def planned(rank: int, world: int, tier: str, stage: int) -> None:
    """State at rest is as planned to the byte, but for counts of steps; the highest of what comes and goes is no more."""
    for name in SPLIT:
        config = zero.ZeroConfig(stage=stage, offload_optimizer=tier)
        engine, _ = wide(rank, name, config, range(2))
        engine.finish_step()
        plan, found = engine.plan.memory, stored_bytes(engine)
        for where in Tier:
            single = 4 * 16 if where is Tier.HOST or where.value == "device" else 0
            expected = plan.stored[where]["optimizer"]
            assert expected <= found[where.value]["optimizer"] <= expected + single, (name, where, found, plan.stored)
        staging = engine.context.storage.ledger.host
        assert staging.peak["staging"] <= plan.peak[Tier.HOST]["staging"], (name, staging.peak, plan.peak[Tier.HOST])
        assert (tier == "disk") is (staging.peak["staging"] > 0)


@pytest.mark.parametrize("tier", [*(pytest.param(each, marks=pytest.mark.wide) for each in ("none", "cpu")), "disk"])
def test_state_rests_as_planned(pools, tier):
    pools[2].run(planned, tier, 2)
    pools[1].run(planned, tier, 1)


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.wide)])
@on_ranks(None)
def test_auto_weighs_whole_parameters(rank: int, world: int, tmp_path: Path) -> None:
    """`auto` within a budget that is too small for all of it: the same tiers on every rank, and the same numbers."""
    for name in SPLIT:
        all_, plain = wide(rank, name, zero.ZeroConfig(stage=3), range(3))
        least, _ = wide(rank, name, zero.ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu"), range(0))
        peaks = [engine.exchange(engine.plan.memory.at_peak(Tier.DEVICE)) for engine in (all_, least)]
        budget = (max(peaks[0]) + max(peaks[1])) // 2
        config = zero.ZeroConfig(
            stage=3,
            offload_optimizer="auto",
            offload_params="auto",
            offload_dir=tmp_path,
            device_memory=budget,
            host_memory="64MiB",
        )
        engine, found = wide(rank, name, config, range(3))
        tiers = [(p.parameters.value, p.master_tier.value) for p in engine.plan.placements]
        assert all(other == tiers for other in engine.exchange(tiers))
        assert {home for _, home in tiers} != {"device"}, tiers
        assert engine.plan.memory.at_peak(Tier.DEVICE) <= budget
        assert all(torch.equal(p, q) for p, q in zip(found, plain, strict=True)), name
