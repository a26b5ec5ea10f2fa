"""Norms and clipping of the optimizer's groups where ranks partition their spans in ways that only tests ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero as zero
from hf_zero.plan.plan import plan
from hf_zero.runtime.transports import Roads
from tests.kit.common import split_plan
from tests.models import Odd, inputs

pytestmark = pytest.mark.gloo
clip = nn.utils.clip_grad_norm_


def of_groups(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clipped(rank: int, world: int, folder: Path, roads: Roads, uses_disk: bool, stage: int, dtype: str) -> None:
    """Trains as the plain model does that gets the mean of all ranks' losses; one clipping is one collective."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    config = zero.ZeroConfig(stage=stage, offload_optimizer="cpu", offload_dir=str(folder))
    engine = zero.shard(model, optimizer, config, mixed_precision=dtype, roads=roads)
    if uses_disk:
        engine.offload.storage.uses_disk = True  # as under `auto`, on every rank
    else:
        assert any(len(flat.shards) > 1 for unit in engine.units for flat in unit.trained)
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


def unlike(rank: int, world: int, folder: Path) -> None:
    clipped(rank, world, folder, Roads(plan=split_plan if rank else plan), True, 2, "no")


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_of_spans_in_several_shards(two, tmp_path, stage, dtype):
    two.run(clipped, tmp_path, Roads(plan=split_plan), False, stage, dtype, timeout_s=60)


def test_ranks_may_partition_their_spans_differently(two, tmp_path):
    two.run(unlike, tmp_path, timeout_s=60)
