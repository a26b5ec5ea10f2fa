"""Moves of a shard between tiers, faults, and what gradients take. Values: tests/programs, for every tier and optimizer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import TierError
from hf_zero.runtime.values.offloaded_shard import SHARDS, new_shard
from hf_zero.runtime.values.state_shard import Shard
from hf_zero.tiers.array import OnDisk, fetch
from hf_zero.tiers.pool import KEPT_BUFFERS, Storage
from hf_zero.tiers.tier import Sizes, Tier, padded
from tests.kit.injection import fails, instead
from tests.kit.offloading import same

NUMEL = 5000
TIERS = list(SHARDS)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    storage = Storage(torch.device("cpu"), 0, str(tmp_path), sizes=Sizes(slab_numel=2048))
    yield storage
    storage.close()


def random(seed: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(storage: Storage, tier: Tier, numel: int = NUMEL) -> tuple[Shard, torch.optim.Optimizer]:
    """A shard with state, in an optimizer's groups."""
    shard = new_shard(storage, 100, random(0, numel), tier, trainable=True)
    optimizer = torch.optim.Adam([shard.master])
    shard.put(optimizer, shard.master, states(numel))
    return shard, optimizer


def states(numel: int = NUMEL) -> dict[str, Any]:
    return {
        "step": torch.tensor(3.0),
        "exp_avg": random(1, numel),
        "exp_avg_sq": random(2, numel, torch.bfloat16),
        "kind": "plain",
    }


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if found.keys() != expected.keys():
        return ["names"]
    at_hand = {key: fetch(value) if isinstance(value, OnDisk) else value for key, value in found.items()}
    return [key for key, value in expected.items() if not same(at_hand[key], value)]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_gradients_of_a_narrow_type_stay_so_until_they_add_up(storage: Storage, tier: Tier) -> None:
    shard, _ = made(storage, tier)
    first, second = random(5, dtype=torch.bfloat16), random(6, dtype=torch.bfloat16)
    shard.add(first)
    assert shard.grad.dtype == torch.bfloat16
    assert stored_bytes(shard) == ((2 * NUMEL, 0) if tier is Tier.HOST else (0, padded(2 * NUMEL)))
    shard.scale(torch.tensor(0.25))
    assert torch.equal(shard.grad, first)  # the factor is applied by the step
    shard.add(second)
    assert torch.equal(shard.grad, first.float() * 0.25 + second.float())
    assert stored_bytes(shard) == ((4 * NUMEL, 0) if tier is Tier.HOST else (0, padded(4 * NUMEL)))


def stored_bytes(shard: Shard) -> tuple[int, int]:
    """What a gradient takes in host memory and on disk."""
    shard.land()
    return shard.grad_bytes, shard.gradient_bytes


def test_a_gradient_on_disk_is_in_memory_while_it_is_looked_at(storage: Storage) -> None:
    """One at a time; what is written to it is kept, and what a caller holds is not taken away."""
    shards = [made(storage, Tier.DISK)[0] for _ in range(4)]
    for index, shard in enumerate(shards):
        shard.add(random(index))
    for shard in shards:
        shard.land()
    kept = storage.ledger.host.now["staging"]
    assert kept <= KEPT_BUFFERS * padded(4 * NUMEL)
    for shard in shards:
        grad = shard.whole_grad()
        assert grad is not None
        grad.mul_(2.0)
        del grad
    for index, shard in enumerate(shards):
        assert torch.equal(shard.grad, 2.0 * random(index))
    assert storage.ledger.host.now["staging"] <= (KEPT_BUFFERS + 1) * padded(4 * NUMEL)
    held = [shard.whole_grad() for shard in shards]
    for grad in held:
        grad.add_(1.0)
    assert [torch.equal(shard.grad, 2.0 * random(i) + 1.0) for i, shard in enumerate(shards)] == [True] * 4
    held.clear()
    for index, shard in enumerate(shards):
        claim = shard.claim()
        assert isinstance(claim[0], OnDisk)
        assert torch.equal(fetch(claim[0]), 2.0 * random(index) + 1.0)


@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
def test_a_gradient_that_the_disk_does_not_take(storage: Storage, kind: str) -> None:
    """What cannot be written stays in memory, and the failure is noted for all ranks."""
    shard, _ = made(storage, Tier.DISK)
    shard.add(random(5))
    shard.land()
    with instead(os, **{kind: fails(errno.EIO)}):
        shard.add(random(6))
        shard.land()
    assert isinstance(storage.failure, TierError)
    assert "the disk failed" in str(storage.failure)
    if kind == "pwritev":
        assert torch.equal(shard.grad, random(5) + random(6))
        claim = shard.claim()
        assert torch.equal(fetch(claim[0]), random(5) + random(6))
    shard.drop_grad()
    assert not shard.has_grad


@pytest.mark.parametrize("origin", TIERS)
@pytest.mark.parametrize("tier", TIERS)
def test_moves(storage: Storage, origin: Tier, tier: Tier) -> None:
    """To another tier and back everything is the same to the bit, in the same parameter; what is left is given back."""
    shard, optimizer = made(storage, origin)
    shard.add(random(5))
    master, edited = shard.master, ""
    for target in (tier, origin):
        shard = shard.move(SHARDS[target], optimizer)
        assert type(shard) is SHARDS[target]
        assert shard.master is master is optimizer.param_groups[0]["params"][0]
        assert torch.equal(fetch(shard.values), random(0))
        assert differing(shard.entries(optimizer), states()) == []
        assert torch.equal(shard.whole_grad(), random(5))
        assert shard.edited() == edited
        taken = 2 * padded(4 * NUMEL) + padded(2 * NUMEL) if target is Tier.DISK else 0
        assert shard.disk_bytes == taken
        shard.land()
        assert taken == 0 if not storage.has_disk else storage.disk.nbytes == taken + shard.gradient_bytes


@pytest.mark.parametrize("allowed", [0, 1, 2])
@pytest.mark.parametrize("origin", [Tier.DEVICE, Tier.HOST])
def test_a_move_that_the_disk_refuses(storage: Storage, origin: Tier, allowed: int) -> None:
    """There is room for some of the arrays only: everything is where it was, and no space is taken."""
    shard, optimizer = made(storage, origin)
    shard.add(random(5))
    assert storage.disk.nbytes == 0
    calls: list[int] = []

    def allocate(real: Any, fd: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    with instead(os, posix_fallocate=allocate):
        with pytest.raises(TierError, match="No space left"):
            shard.move(SHARDS[Tier.DISK], optimizer)
    assert len(calls) == allowed + 1
    assert torch.equal(fetch(shard.values), random(0))
    assert differing(shard.entries(optimizer), states()) == []
    assert torch.equal(shard.whole_grad(), random(5))
    assert storage.disk.nbytes == 0


def test_a_master_over_memory_of_the_parameters(storage: Storage) -> None:
    own = random(0)
    shard = new_shard(storage, 0, own, Tier.HOST, trainable=True, alias=own)
    assert shard.aliased
    assert isinstance(shard.master, nn.Parameter)
    assert shard.master.data_ptr() == own.data_ptr()
    shard.rest_on(None)
    assert not shard.aliased
    assert shard.master.data_ptr() != own.data_ptr()
    assert torch.equal(fetch(shard.values), own)
