"""With `offload_optimizer="disk"` gradients are on disk: a rank's memory. Faults: `failures.disk_fails_in_backward`."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
MIB = 1 << 20


# Memory -------------------------------------------------------------------------------------------------------------


def data_bytes() -> int:
    """This process's data segment, which `RLIMIT_DATA` limits."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))


def limited(rank: int, world: int, folder: str, layers: int, width: int, params: str, limit: int) -> tuple[float, int]:
    """Train two steps in `limit` bytes of data segment above what a tiny training takes; positive: in all. Returns the last
    loss and the bytes of gradients that the report has in host memory and on disk."""
    with zero.Init():  # it imports transformers
        tiny = nn.Linear(8, 8)
    adamw = torch.optim.AdamW(tiny.parameters())
    warm = zero.shard(tiny, adamw, zero.ZeroConfig(stage=3))
    tiny(torch.ones(1, 8)).sum().backward()
    warm.clip_grad_norm_(1.0)
    adamw.step()
    warm.detach()
    most = limit if limit > 0 else data_bytes() - limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.manual_seed(0)
    with zero.Init(offload_params=params, offload_dir=folder):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.ZeroConfig(stage=3, offload_optimizer="disk", offload_params=params, offload_dir=folder)
    engine = zero.shard(model, optimizer, config)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
    told = 0
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        rows = {(r["tier"], r["kind"]): r for r in engine.report().to_dict()["tiers"]}
        host, disk = rows.get(("host", "gradients")), rows["disk", "gradients"]
        assert host is None or not host["measured"]
        told = disk["measured"]
        assert disk["measured"] == disk["predicted"]
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.finish_step()
    return loss.item(), told


def in_a_limit(folder: Path, layers: int, width: int, params: str, limit: int, timeout_s: float) -> None:
    pool = RankPool(2, executed=True)
    try:
        answers = pool.run(limited, str(folder), layers, width, params, limit, timeout_s=timeout_s)
    finally:
        pool.stop()
    for loss, gradients in answers:
        assert 0 < loss < 10
        assert gradients >= 2 * layers * width * width


@pytest.mark.parametrize(("params", "limit_mib"), [("disk", 330), pytest.param("none", 410, marks=pytest.mark.wide)])
def test_gradients_take_no_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: str, limit_mib: int
) -> None:
    """96 MiB of gradients on each of two ranks: with parameters on disk, and with 96 MiB of them in memory.

    One bucket is sent while the next is made.
    """
    if params == "none":  # holes in malloc's heap differ from run to run
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(MIB))
    in_a_limit(tmp_path, 48, 1024, params, -limit_mib * MIB, 300)


@pytest.mark.wide
@pytest.mark.parametrize(("params", "limit_mib"), [("disk", 1536), ("none", 3072)])
def test_671_million_parameters_in_little_memory(tmp_path: Path, params: str, limit_mib: int) -> None:
    in_a_limit(tmp_path, 160, 2048, params, limit_mib * MIB, 1200)
