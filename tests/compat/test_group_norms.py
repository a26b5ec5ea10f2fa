"""Norms and clipping over the gradients of the optimizer's groups: over all ranks, by one collective each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import Odd, inputs

pytestmark = pytest.mark.gloo
clip = nn.utils.clip_grad_norm_


def of_groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clipped(rank: int, world: int, folder: Path, tier: str, stage: int, dtype: str) -> None:
    """Trains as the plain model does that gets the mean of all ranks' losses; one clipping is one collective."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    config = zero.ZeroConfig(stage=stage, offload_optimizer=tier, offload_dir=str(folder))
    engine = zero.shard(model, optimizer, config, mixed_precision=dtype)
    for step in range(3):
        model(inputs(rank, step)).square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            losses = [plain(inputs(each, step)).square().mean() for each in range(world)]
        (sum(losses) / world).backward()
        for foreach in (True, False):
            norm = nn.utils.get_total_norm([p.grad for p in of_groups(optimizer)], foreach=foreach)
            torch.testing.assert_close(norm, engine.clip_grad_norm_(float("inf")))
            assert len({float(each) for each in engine.exchange(norm)}) == 1
        before = engine.traffic["scalar"].calls
        for each in (optimizer, other):
            clip(of_groups(each), 0.05)
        assert engine.traffic["scalar"].calls == before + 1
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    tolerance = 3e-2 if dtype == "bf16" else 2e-5
    for param, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(zero.full_parameter(param), theirs.detach(), rtol=tolerance, atol=tolerance)
    engine.detach()


@pytest.mark.parametrize(
    ("tier", "stage", "dtype"), [("none", 1, "no"), ("cpu", 2, "bf16"), ("disk", 3, "no"), ("disk", 2, "bf16")]
)
def test_norms_and_clipping_of_groups(two: RankPool, tmp_path: Path, tier: str, stage: int, dtype: str) -> None:
    two.run(clipped, tmp_path, tier, stage, dtype, timeout_s=60)
