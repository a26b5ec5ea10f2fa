"""With `offload_optimizer="disk"` gradients are on disk: a rank's memory, and a disk that fails."""

from __future__ import annotations

import copy
import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.injection import fails, instead
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


# A disk that fails --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three blocks of which one is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(24, 24) for _ in range(3))
        self.spare = nn.Linear(24, 24)

    def forward(self, x: Tensor, with_spare: bool = False) -> Tensor:
        x = self.third(self.second(self.first(x).tanh()).tanh())
        return self.spare(x) if with_spare else x


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def broken(rank: int, world: int, folder: str, kind: str, parameters: bool) -> list[str]:
    """In a backward rank 1's disk fails for gradients: every rank raises, nothing was updated, and training continues."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    tiers = {"offload_optimizer": "disk", "offload_params": "disk" if parameters else "none"}
    ways: list[tuple[Net, torch.optim.Optimizer, zero.Engine]] = []
    for each, settings in ((model, tiers), (twin, {})):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        ways.append(
            (each, optimizer, zero.shard(each, optimizer, zero.ZeroConfig(stage=3, offload_dir=folder, **settings)))
        )

    def step(number: int, way: int) -> None:
        net, optimizer, engine = ways[way]
        for micro in range(2):
            net(batch(rank, 2 * number + micro)).square().sum().backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        engine.finish_step()

    lock = threading.Lock()
    failing = [False]

    def call(real: Any, fd: int, *args: Any) -> int:
        with lock:
            if failing[0] and not os.fstat(fd).st_nlink:  # the file of the disk tier has no name
                return int(fails(errno.EIO)(real, fd, *args))
        return int(real(fd, *args))

    step(0, 0), step(0, 1)
    told = []
    with instead(os, **{kind: call}):
        net, optimizer, _ = ways[0]
        net(batch(rank, 8)).square().sum().backward()
        loss = net(batch(rank, 9)).square().sum()
        failing[0] = rank == 1
        try:
            loss.backward()
        except zero.TierError as error:
            told.append(str(error))
        failing[0] = False
        try:
            optimizer.step()
        except zero.StateError as error:
            told.append(str(error))
        optimizer.zero_grad()
    step(1, 0), step(1, 1)
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(zero.full_parameter(mine), zero.full_parameter(theirs))
    for _, _, engine in ways:
        engine.detach()
    return told


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
def test_a_disk_that_fails_in_a_backward(two: RankPool, tmp_path: Path, kind: str, parameters: bool) -> None:
    for told in two.run(broken, str(tmp_path), kind, parameters):
        assert len(told) == 2, told
        assert "rank 1" in told[0]
        assert "The disk failed" in told[0]
        assert "zero_grad()" in told[1]
