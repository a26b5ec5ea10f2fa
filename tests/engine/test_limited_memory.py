"""Models without blocks, larger than the memory of their ranks: units are bounded in bytes, both tiers are on disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.common import nameless_files
from tests.kit.pool import RankPool, on_ranks
from tests.kit.transports import Limits, LinkApart, Roads, Sizes

pytestmark = pytest.mark.gloo
LIMITS = Limits(unit_bytes=1 << 20, run_bytes=256 << 10)


def born(layers: int, width: int, folder: str) -> nn.Module:
    with zero.Init(offload_params="disk", offload_dir=folder):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def train(model: nn.Module, rank: int, folder: str, roads: Roads | None = None) -> tuple[list[float], zero.Engine]:
    """The losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.ZeroConfig(
        stage=3, offload_params="disk", offload_optimizer="disk", offload_dir=folder, step_in_backward=True
    )
    engine = zero.shard(model, optimizer, config, **(roads or Roads()).given)
    engine.record()
    x = torch.randn(4, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.finish_step()
    return losses, engine


def peaks(rank: int, world: int, folder: str) -> list[tuple[int, int, int, int]]:
    """By number of layers: units, the engine's bytes on the device and the host at their highest, the plan's on the device."""
    out = []
    for layers in (16, 64):
        roads = Roads(limits=LIMITS, sizes=Sizes(slab_numel=1 << 15))
        _, engine = train(born(layers, 256, folder), rank, folder, roads)
        ledger, told = engine.context.storage.ledger, engine.report().to_dict()["tiers"]
        device = next(row["predicted_peak"] for row in told if (row["tier"], row["kind"]) == ("device", "all"))
        out.append((len(engine.units), ledger.device.peak_total, ledger.host.peak_total, device))
        engine.detach()
    return out


def test_memory_does_not_grow_with_the_length_of_a_chain(two: RankPool, tmp_path: Path) -> None:
    """Four times the layers: as many more units, and no byte more while training."""
    layer_bytes = 4 * (256 * 256 + 256)
    for short, long in two.run(peaks, str(tmp_path)):
        assert (short[0], long[0]) == (16, 64)
        assert long[1] == short[1] <= 3.5 * layer_bytes
        assert long[2] <= short[2] + layer_bytes  # the speed of the stepping thread decides
        assert long[3] == short[3]


def test_at_most_two_gradients_are_on_their_way_to_a_disk(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    config = zero.ZeroConfig(stage=2, offload_optimizer="disk", offload_dir=tmp_path)
    roads = Roads(link=LinkApart, limits=Limits(unit_bytes=1, run_bytes=1))
    engine = zero.shard(model, torch.optim.AdamW(model.parameters()), config, **roads.given)
    host = engine.context.storage.ledger.host
    before = host.now["staging"]
    model(torch.ones(2, 64)).sum().backward()
    assert 0 < host.peak["staging"] - before <= 3 * 4 * 64 * 65
    engine.detach()


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_slices_are_born_on_disk(rank: int, world: int, tmp_path: Path) -> None:
    """With the plain constructor's values; gathered, written to and sharded as others are."""
    model = born(4, 256, tmp_path)
    assert nameless_files(tmp_path) == 1
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(mine, theirs)
            if rank == 0:
                mine.data.mul_(2.0)
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.equal(zero.full_parameter(mine), 2.0 * theirs)
    losses, engine = train(model, rank, tmp_path)
    state = model.state_dict()
    assert rank != 0 or not torch.equal(state["0.weight"], 2.0 * plain[0].weight)
    assert losses[1] < losses[0]
    engine.detach()


def limited(rank: int, world: int, folder: str) -> list[float]:
    resource.setrlimit(resource.RLIMIT_DATA, (1536 << 20, 1536 << 20))
    return train(born(160, 2048, folder), rank, folder)[0]


@pytest.mark.wide
def test_671_million_parameters(tmp_path: Path) -> None:
    """Stepped in backward, in 1.5 GiB of data segment. Otherwise: tests/regressions/test_disk_gradients.py."""
    pool = RankPool(2, executed=True)
    try:
        found = pool.run(limited, str(tmp_path), timeout_s=1200)
    finally:
        pool.stop()
    assert found[0]
    assert all(0 < loss < 1 for losses in found for loss in losses)
