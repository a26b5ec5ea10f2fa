"""What every tier does for a shard: one suite for all of them; and what a step on disk needs beside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import StateError, TierError
from hf_zero.runtime.values.offloaded_shard import SHARDS, DiskShard, new_shard
from hf_zero.runtime.values.state_shard import MASTER, Shard
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


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("numel", [NUMEL, 1, 0])
def test_values_and_states(storage: Storage, tier: Tier, numel: int) -> None:
    shard, optimizer = made(storage, tier, numel)
    assert (shard.tier, shard.start, shard.stop, shard.numel) == (tier, 100, 100 + numel, numel)
    assert shard.is_offloaded == (tier is not Tier.DEVICE)
    assert torch.equal(fetch(shard.values), random(0, numel))
    assert differing(shard.entries(optimizer), states(numel)) == []
    shard.values[: numel // 2].copy_(torch.zeros(numel // 2))
    assert not fetch(shard.values[: numel // 2]).any()
    assert torch.equal(fetch(shard.values[numel // 2 :]), random(0, numel)[numel // 2 :])
    # Another optimizer's states replace them, given in memory of the shard's own.
    room = shard.new_state(shard.master, "momentum_buffer", torch.float32, (numel,))
    room.copy_(random(4, numel))
    shard.put(optimizer, shard.master, {"momentum_buffer": room})
    assert differing(shard.entries(optimizer), {"momentum_buffer": random(4, numel)}) == []
    shard.put(optimizer, shard.master, {})
    assert shard.entries(optimizer) == {}
    shard.close()
    assert not storage.has_disk or storage.disk.nbytes == 0


@pytest.mark.parametrize("tier", TIERS)
def test_gradients(storage: Storage, tier: Tier) -> None:
    shard, _ = made(storage, tier)
    assert not shard.has_grad
    assert shard.grad is shard.whole_grad() is None
    assert shard.claim() is None
    assert not shard.some_grad().any()
    shard.drop_grad()
    for piece in (random(5), random(6)):
        shard.add(piece)
        assert shard.has_grad
    assert torch.equal(shard.grad, random(5) + random(6))
    shard.scale(torch.tensor(0.5))
    shard.scale(torch.tensor(0.5))
    assert torch.equal(shard.whole_grad(), (random(5) + random(6)) * 0.5 * 0.5)
    assert shard.coefficient is None
    shard.show_grad()
    if tier is Tier.DISK:  # groups of an engine show a stand-in
        assert shard.master.grad is None
    else:
        assert torch.equal(shard.master.grad, shard.grad)
    claim = shard.claim()
    assert (claim is None) == (tier is Tier.DEVICE)
    if claim is not None:
        assert isinstance(claim[0], OnDisk) == (tier is Tier.DISK)
        assert torch.equal(fetch(claim[0]), shard.whole_grad())
        shard.hide_grad()
        assert shard.master.grad is None
    shard.drop_grad()
    assert not shard.has_grad
    assert shard.master.grad is None


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


@pytest.mark.parametrize("tier", TIERS)
def test_writes_to_the_master_are_seen(storage: Storage, tier: Tier) -> None:
    shard, _ = made(storage, tier)
    assert shard.edited() == ""
    if tier is Tier.DISK:
        for refused in (shard.master.isnan, shard.master.clone, lambda: setattr(shard.master, "data", torch.ones(1))):
            with pytest.raises(StateError, match="rests on disk"):
                refused()
        assert "at rest on disk" in repr(shard.master)
        return
    with torch.no_grad():
        shard.master.mul_(2)
    assert shard.edited() == "counted"
    shard.note()
    shard.master.detach().numpy()[:] = 1
    assert (shard.edited(closely=False), shard.edited()) == ("", "sampled")


# On disk --------------------------------------------------------------------------------------------------------------


def test_slabs(storage: Storage) -> None:
    """Read, updated and written slab by slab; a state that is new takes space, and is the optimizer's once all are written."""
    shard, optimizer = made(storage, Tier.DISK)
    assert isinstance(shard, DiskShard)
    assert list(shard.slabs) == [0, 2048, 4096]
    assert shard.slab_bytes(None) == 2 * padded(4 * 2048) + padded(2 * 2048)
    memory = storage.link.empty(shard.slab_bytes(None), torch.uint8)
    before = shard.disk_bytes
    for start in shard.slabs:
        shard.read(start, memory, None).wait()
        views = shard.views(start, memory, None)
        assert list(views) == [MASTER, "exp_avg", "exp_avg_sq"]
        views[MASTER].add_(views["exp_avg"])
        new = views[MASTER] * 2
        shard.write(start, {MASTER: views[MASTER], "exp_avg": views["exp_avg"], "new": new}).wait()
        assert list(shard.views(start, memory, None)) == [MASTER, "exp_avg", "exp_avg_sq"]
    assert shard.disk_bytes == before + padded(4 * NUMEL)
    optimizer.state[shard.master] = {**shard.keep_states(shard.master, ["exp_avg", "new"])}
    assert shard.disk_bytes == 3 * padded(4 * NUMEL)
    values = random(0) + random(1)
    assert torch.equal(fetch(shard.values), values)
    found = shard.entries(optimizer)
    assert differing({key: found[key] for key in ("exp_avg", "new")}, {"exp_avg": random(1), "new": 2 * values}) == []


def test_a_closed_shard_on_disk(storage: Storage) -> None:
    shard, _ = made(storage, Tier.DISK)
    shard.close()
    shard.close()
    with pytest.raises(StateError, match="after it was closed"):
        fetch(shard.values)


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
