"""`auto` in a running engine: budgets are kept, and what is moved under pressure, on one rank alone too, changes no result."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.errors import ConfigError
from hf_zero.runtime.moves import CALM_STEPS, MOVES_PER_STEP
from hf_zero.runtime.transports import Roads
from hf_zero.tiers.tier import Tier
from tests.kit.common import batch, gpt2, loss_of, optimizer_for
from tests.kit.injection import instead
from tests.kit.offloading import SMALL_ROADS, equal, values

pytestmark = pytest.mark.gloo
PLENTY = 1 << 40
STEPS = 2 * CALM_STEPS + 10


def free(host_bytes: list[int]) -> Roads:
    """What the monitor finds free in host memory (on a CPU device: in all of it) is the last entry."""
    return replace(SMALL_ROADS, free_host_bytes=lambda ranks: host_bytes[-1])


def made(
    config: zero.ZeroConfig, dtype: str, late: bool, roads: Roads = SMALL_ROADS
) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    model = gpt2(n_layer=4)
    optimizer = optimizer_for(model, 2)
    if late:
        engine = zero.shard(model, None, config, mixed_precision=dtype, roads=roads)
        engine.bind(optimizer)
    else:
        engine = zero.shard(model, optimizer, config, mixed_precision=dtype, roads=roads)
    return model, optimizer, engine


def step(model: Any, optimizer: torch.optim.Optimizer, engine: zero.Engine, number: int, rank: int) -> float:
    loss = loss_of(model, rank, number)
    loss.backward()
    engine.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    engine.finish_step()
    return loss.item()


def reference(rank: int, dtype: str, stage: int) -> tuple[list[float], list[Any]]:
    model, optimizer, engine = made(zero.ZeroConfig(stage=stage), dtype, late=False)
    losses = [step(model, optimizer, engine, number, rank) for number in range(STEPS)]
    out = losses, values(model, optimizer)
    engine.detach()
    return out


def places(engine: zero.Engine) -> list[Any]:
    return [(flat.rest, *(shard.tier for shard in flat.shards)) for unit in engine.units for flat in unit.flats]


def under_pressure(rank: int, world: int, folder: str, dtype: str, late: bool, everywhere: bool) -> None:
    """Memory runs short after a few steps, on the last rank or on all, and is there again later."""
    losses, expected = reference(rank, dtype, 3)
    config = zero.ZeroConfig(stage=3, offload_optimizer="auto", offload_params="auto", offload_dir=folder)
    room = [PLENTY]
    said = io.StringIO()
    model, optimizer, engine = made(config, dtype, late, free(room))
    planned = places(engine)
    assert {tier for place in planned for tier in place} == {Tier.DEVICE}
    found, moved = [], 0
    watch = engine.offload.monitor
    for number in range(STEPS):
        if number == 3 and (everywhere or rank == world - 1):
            room.append(0)
        if number == 8:
            room.append(PLENTY)
        with contextlib.redirect_stderr(said):
            found.append(step(model, optimizer, engine, number, rank))
        assert engine.offload.monitor is watch
        assert len(watch.moves) - moved <= MOVES_PER_STEP
        moved = len(watch.moves)
        if number == 7:
            lower = [tier for place in places(engine) for tier in place if tier is not Tier.DEVICE]
            assert bool(lower) == (everywhere or rank == world - 1)
            # On a CPU device the host has no room either: what goes, goes to disk.
            assert set(lower) <= {Tier.DISK}
    assert places(engine) == planned  # all of it is back
    assert found == losses
    assert equal(values(model, optimizer), expected)
    for line in watch.moves:
        assert f"hf_zero: rank {rank}: {line}" in said.getvalue()
    if watch.moves:
        assert "are missing on the device" in watch.moves[0]
        assert "from the device to the disk" in watch.moves[0]
        assert "there is room on the device again" in watch.moves[-1]
    engine.detach()


@pytest.mark.parametrize(("dtype", "late"), [("no", False), ("bf16", True)])
@pytest.mark.parametrize(
    ("world", "everywhere"),
    [(1, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_what_moves_under_pressure_changes_no_result(pools, tmp_path, world, everywhere, dtype, late):
    pools[world].run(under_pressure, str(tmp_path), dtype, late, everywhere)


@contextlib.contextmanager
def failing_writes(after: int) -> Iterator[None]:
    """The disk takes so many writes."""
    left = [after]

    def write(real: Any, *args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with instead(os, pwritev=write):
        yield


def refused(rank: int, world: int, folder: str, params: str, after: int) -> None:
    """A disk that fails under the monitor of one rank: nothing is lost, and the other ranks need not know."""
    losses, expected = reference(rank, "bf16", 3)
    config = zero.ZeroConfig(
        stage=3, offload_optimizer="none" if params == "auto" else "auto", offload_params=params, offload_dir=folder
    )
    room = [PLENTY]
    said = io.StringIO()
    model, optimizer, engine = made(config, "bf16", late=False, roads=free(room))
    planned, found = places(engine), []
    for number in range(STEPS):
        presses = rank == world - 1 and number == 3
        if presses:
            room.append(0)
        with contextlib.redirect_stderr(said), failing_writes(after) if presses else contextlib.nullcontext():
            found.append(step(model, optimizer, engine, number, rank))
        if presses:
            room.append(PLENTY)
    watch = engine.offload.monitor
    if rank == world - 1:
        assert "stays on the device" in said.getvalue()
        assert os.strerror(errno.EIO) in said.getvalue()
        assert len(watch.moves) < MOVES_PER_STEP * 2
    else:
        assert not watch.moves
    assert places(engine) == planned  # what had gone before is back
    assert found == losses
    assert equal(values(model, optimizer), expected)
    engine.detach()


@pytest.mark.parametrize(
    ("params", "after"),
    [("auto", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", 0), ("none", 3), ("auto", 0)))],
)
def test_a_disk_that_refuses_what_the_monitor_moves(two, tmp_path, params, after):
    two.run(refused, str(tmp_path), params, after)


def within_budgets(rank: int, world: int, folder: str, dtype: str) -> None:
    """From room for all down to none: the solver's placements rest within the budgets, train alike, and use what there is."""
    losses, expected = reference(rank, dtype, 3)
    everything = zero.ZeroConfig(stage=3, offload_optimizer="auto", offload_params="auto", offload_dir=folder)
    _, _, engine = made(everything, dtype, late=False)
    at_peak = engine.plan.memory.at_most(Tier.DEVICE)
    engine.detach()
    least = zero.ZeroConfig(stage=3, offload_optimizer="disk", offload_params="disk", offload_dir=folder)
    _, _, engine = made(least, dtype, late=False)
    lowest, host = engine.plan.memory.at_most(Tier.DEVICE), engine.plan.memory.at_most(Tier.HOST)
    engine.detach()
    seen = []
    for device_share, host_share in ((1.0, 1.0), (0.6, 1.0), (0.6, 0.3), (0.0, 0.0)):
        device_memory = int(lowest + device_share * (at_peak - lowest))
        host_memory = int(host + host_share * at_peak)
        config = zero.ZeroConfig(
            stage=3, offload_optimizer="auto", offload_params="auto", offload_dir=folder, device_memory=device_memory,
            host_memory=host_memory,
        )  # fmt: skip
        model, optimizer, engine = made(config, dtype, late=False)
        seen.append({tier for place in places(engine) for tier in place})  # later there are activations, too
        found = [step(model, optimizer, engine, number, rank) for number in range(STEPS)]
        assert found == losses
        assert equal(values(model, optimizer), expected)
        watch = engine.offload.monitor
        assert watch.resting_bytes(Tier.DEVICE) <= device_memory
        assert watch.resting_bytes(Tier.HOST) <= host_memory
        engine.detach()
    assert seen[0] == {Tier.DEVICE}
    assert Tier.HOST in seen[1]
    assert Tier.DISK in seen[-1]


@pytest.mark.parametrize(("world", "dtype"), [(1, "no"), pytest.param(2, "bf16", marks=pytest.mark.slow)])
def test_budgets_are_kept_and_results_equal(pools, tmp_path, world, dtype):
    pools[world].run(within_budgets, str(tmp_path), dtype)


def activations(rank: int, world: int, folder: str, dtype: str) -> None:
    """What a batch will keep is counted before its forward, once the batch is there."""
    losses, expected = reference(rank, dtype, 3)

    def built(spare_bytes: int) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
        config = zero.ZeroConfig(
            stage=3,
            offload_optimizer="auto",
            offload_dir=folder,
            device_memory=needed + spare_bytes,
            host_memory=PLENTY,
        )
        return made(config, dtype, late=world > 1)

    everything = zero.ZeroConfig(stage=3, offload_optimizer="auto", offload_dir=folder, host_memory=PLENTY)
    _, _, engine = made(everything, dtype, late=False)
    needed = engine.plan.memory.at_most(Tier.DEVICE)
    engine.detach()
    for spare_bytes in (40_000, 1 << 30):
        model, optimizer, engine = built(spare_bytes)
        planned = places(engine)
        assert {tier for place in planned for tier in place} == {Tier.DEVICE}
        with torch.no_grad():
            model(input_ids=batch(0, 0, rank).repeat(50, 1))  # keeps nothing
        watch = engine.offload.monitor
        assert not watch.moves
        ids = batch(0, 0, rank).repeat(3, 1)
        model(input_ids=ids, labels=ids).loss.backward()
        assert bool(watch.moves) == (spare_bytes == 40_000)
        assert all("from the device to the host" in line for line in watch.moves)
        assert watch.missing_bytes(Tier.DEVICE) <= 0
        optimizer.zero_grad()
        found = [step(model, optimizer, engine, number, rank) for number in range(STEPS)]
        assert found == losses
        assert equal(values(model, optimizer), expected)
        engine.detach()


@pytest.mark.parametrize(("world", "dtype"), [(1, "no"), pytest.param(2, "bf16", marks=pytest.mark.slow)])
def test_room_is_made_for_activations_before_the_forward(pools, tmp_path, world, dtype):
    pools[world].run(activations, str(tmp_path), dtype)


def too_small(rank: int, world: int, folder: str) -> list[str]:
    config = zero.ZeroConfig(stage=3, offload_optimizer="auto", offload_dir=folder, device_memory="1000B")
    model = gpt2()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as refused:
        zero.shard(model, optimizer_for(model, 1), config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert zero.engine_of(model) is None
    return [str(refused.value)]


def test_a_budget_that_nothing_fits_is_refused_on_every_rank(two, tmp_path):
    for (message,) in two.run(too_small, str(tmp_path)):
        assert "device_memory" in message
        assert any(char.isdigit() for char in message)
