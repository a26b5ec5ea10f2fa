"""Programs that write weights, freeze parameters and run blocks without a graph while ranks of a node have parts, beside the
same at stage 3 without a budget: four ranks as two nodes of two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.runtime.transports import Roads
from hf_zero.tiers.pool import Storage
from hf_zero.tiers.tier import Tier
from tests.kit.pool import RankPool
from tests.runtime.test_node_parts import ROOM, Loop, planned

pytestmark = pytest.mark.gloo


def written(loop: Loop, rank: int, folder: str) -> Iterator[list[Tensor]]:
    """The weights after each step; in its middle, between forward and backward, somebody writes some of them."""

    def step(number: int) -> Iterator[nn.Parameter]:
        weight = loop.model.transformer.h[1].mlp.c_fc.weight  # before: to read it later would bring it in
        loss = loop.loss(rank, number)
        yield weight
        loss.backward()
        loop.step()

    for number in range(2):
        for _ in step(number):
            pass
    for weight in step(2):
        weight.data = torch.full(weight.shape, 0.01)
        zero.local_parameter(weight)
    yield loop.weights()
    for weight in step(3):
        weight.data = torch.full(weight.shape, 0.02)
        zero.full_parameter(weight)
    yield loop.weights()
    for weight in step(4):
        weight.data.mul_(0.5)
    yield loop.weights()
    for weight in step(5):
        zero.set_full_parameter(weight, torch.full(weight.shape, 0.03))
    yield loop.weights()
    for weight in step(6):
        zero.set_local_parameter(weight, zero.local_parameter(weight) * 0.5)
    yield loop.weights()
    for weight in step(7):
        with zero.GatheredParameters([weight], modifier_rank=0):
            if rank == 0:
                weight.data.mul_(0.5)
    yield loop.weights()
    if loop.engine.config.offload_optimizer != "disk":  # there the optimizer's tensors have no memory
        for _ in step(8):
            with torch.no_grad():
                for group in loop.optimizer.param_groups:
                    for param in group["params"]:
                        param.mul_(0.5)
        yield loop.weights()
    for _ in step(9):
        loop.engine.save(folder)
    yield loop.weights()
    for _ in step(10):
        loop.engine.load(folder)
    yield loop.weights()
    for _ in step(11):
        loop.engine.offload_states()
        loop.engine.reload_states()
    yield loop.weights()
    ids = torch.zeros(1, 2, dtype=torch.long)
    for _ in step(12):
        loop.model.generate(ids, max_new_tokens=3, do_sample=False)
    loop.model.generate(ids, max_new_tokens=3, do_sample=False)
    for _ in step(13):
        with contextlib.suppress(IndexError):
            loop.model(input_ids=torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))
    yield loop.weights()


def frozen(loop: Loop, rank: int, folder: str) -> Iterator[list[Tensor]]:
    """Blocks are frozen and trained again, between steps and between a forward and its backward: spans are cut anew."""
    block = loop.model.transformer.h[1]
    for number in range(2):
        loop.loss(rank, number).backward()
        loop.step()
    for trains in (False, True):
        loop.loss(rank, 2)  # what its parts are of is no more
        block.requires_grad_(trains)
        for number in range(3, 6):
            loop.loss(rank, number).backward()
            loop.step()
        yield loop.weights()
    loss = loop.loss(rank, 6)
    block.requires_grad_(False)
    loss.backward()
    loop.step()
    for number in range(7, 9):
        loop.loss(rank, number).backward()
        loop.step()
    yield loop.weights()
    first, second = loop.loss(rank, 9), loop.loss(rank, 10)  # two backwards
    first.backward()
    second.backward()
    loop.step()
    rows = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(rank))
    for number in range(11, 13):  # a block by itself
        out = loop.model.transformer.h[3](rows)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        loop.step()
        loop.loss(rank, number).backward()
        loop.step()
    yield loop.weights()


def trained(loop: Loop, rank: int, folder: str) -> Iterator[list[Tensor]]:
    """Nothing but steps."""
    for number in range(6):
        loop.loss(rank, number).backward()
        loop.step()
        yield loop.weights()


PROGRAMS = {"written": written, "frozen": frozen, "trained": trained}


def run(
    rank: int, world: int, program: str, memory: int | None, folder: str, settings: dict[str, Any]
) -> tuple[list[list[Tensor]], int, int]:
    settings = dict(settings)
    if "disk" in settings.values():
        settings["offload_dir"] = folder
    loop = Loop(rank, memory, **settings)
    found = list(PROGRAMS[program](loop, rank, str(Path(folder, "checkpoint"))))
    sent, left = loop.sent("node"), loop.gathered_bytes()
    loop.engine.detach()
    return found, sent, left


def check(pool: RankPool, program: str, folder: Path, settings: dict[str, Any]) -> None:
    memory = pool.run(planned, settings)[0] + (ROOM // 2 if settings.get("mixed_precision") else ROOM)
    expected = pool.run(run, program, None, str(folder / "plain"), settings, timeout_s=250)
    found = pool.run(run, program, memory, str(folder / "parts"), settings, timeout_s=250)
    for (mine, sent, left), (theirs, none, _) in zip(found, expected):
        assert sent
        assert not none
        assert left == 0
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert all(torch.equal(x, y) for x, y in zip(a, b)), number


HOST = {"offload_optimizer": "cpu", "offload_params": "cpu"}
DISK = {"offload_optimizer": "disk", "offload_params": "disk"}
SETTINGS = {
    "device": {},
    "host": HOST,
    "disk": DISK,
    "int8": {"wire": "int8"},
    "bf16": {"mixed_precision": "bf16"},
    "bf16-host": {"mixed_precision": "bf16", **HOST},
    "bf16-disk": {"mixed_precision": "bf16", "offload_optimizer": "cpu", "offload_params": "disk"},
    "frozen": {"frozen": True, "tied": False, "offload_params": "disk", "offload_optimizer": "cpu"},
}


@pytest.mark.parametrize("program", ["written", "frozen"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_programs_equal_those_without_a_budget(pools, program: str, settings: str, tmp_path: Path) -> None:
    for name in ("plain", "parts"):
        (tmp_path / name).mkdir()
    check(pools[4], program, tmp_path, SETTINGS[settings])


def test_steps_in_backward_equal_those_without_a_budget(pools, tmp_path: Path) -> None:
    check(pools[4], "trained", tmp_path, {"step_in_backward": True, "offload_optimizer": "cpu"})


class Residual(nn.Module):
    """Blocks, one of which runs without a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.without: int | None = None

    def forward(self, rows: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            with torch.set_grad_enabled(place != self.without):
                more = block(rows)
            rows = rows + more
        return rows


def unlike(rank: int, world: int, memory: int | None, names: str) -> tuple[list[Tensor], int, tuple[int, int]]:
    """In each step another rank runs a block without a graph: what it has of it for backward is not what others have."""
    model = Residual()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zero.ZeroConfig(stage=3, device_memory=memory)
    engine = zero.shard(model, optimizer, config, roads=Roads(node_names=lambda wire: names))
    torch.manual_seed(rank)
    for number in range(6):
        model.without = 2 + number % 3 if number > 1 and rank == number % world else None
        model(torch.randn(3, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    backward = engine.schedule.backward
    found = [zero.full_parameter(param).clone() for param in model.parameters()]
    needed, there = engine.plan.memory.at_most(Tier.DEVICE), (len(backward.kept), len(backward.parted))
    engine.detach()
    return found, needed, there


@pytest.mark.parametrize(("names", "room"), [("aabb", 40_000), ("aaaa", 60_000)], ids=["parts", "whole"])
def test_a_block_that_one_rank_runs_without_a_graph(pools, names: str, room: int) -> None:
    plain = pools[4].run(unlike, None, names)
    for (mine, _, (kept, parted)), (theirs, _, _) in zip(pools[4].run(unlike, plain[0][1] + room, names), plain):
        assert kept
        assert bool(parted) == (names == "aabb")
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def saved(rank: int, world: int, memory: int | None, folder: str) -> None:
    loop = Loop(rank, memory)
    for number in range(3):
        loop.loss(rank, number).backward()
        loop.step()
    loss = loop.loss(rank, 3)
    loop.engine.save(folder)
    loss.backward()
    loop.engine.detach()


def resumed(rank: int, world: int, folder: str) -> list[Tensor]:
    loop = Loop(rank, names="a" * world)
    loop.engine.load(folder)
    loop.loss(rank, 0).backward()
    loop.step()
    found = loop.weights()
    loop.engine.detach()
    return found


def test_what_is_saved_with_parts_is_resumed_on_another_number_of_ranks(pools, tmp_path: Path) -> None:
    memory = pools[4].run(planned, {})[0]
    found = []
    for name, limit in (("plain", None), ("parts", memory + ROOM)):
        pools[4].run(saved, limit, str(tmp_path / name))
        found.append(pools[2].run(resumed, str(tmp_path / name))[0])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def in_replicas(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int, int]:
    loop = Loop(rank, memory, names="aabbccdd", replicas=2)
    for number in range(4):
        loop.loss(rank, number).backward()
        loop.step()
    found = loop.weights(), loop.sent("node"), loop.planned_bytes
    loop.engine.detach()
    return found


@pytest.mark.slow
def test_replicas_over_two_nodes_each() -> None:
    """Eight ranks: two replicas of four shards, each on two nodes of two."""
    pool = RankPool(8)
    try:
        plain = pool.run(in_replicas, None, timeout_s=250)
        found = pool.run(in_replicas, plain[0][2] + ROOM, timeout_s=250)
    finally:
        pool.stop()
    for (mine, sent, _), (theirs, _, _) in zip(found, plain):
        assert sent
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def short_of_memory(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int]:
    """On one rank there is no room for some parts: no rank of any node may wait for them."""

    class Short(Storage):
        refused = 0

        def allocate(self, kind: str, what: str, bytes_: int, make: Callable[[], Any]) -> Any:
            if what == "keeping a part for backward" and rank == 1 and self.refused < 5:
                self.refused += 1
                raise zero.OutOfMemoryError(what)
            return super().allocate(kind, what, bytes_, make)

    loop = Loop(rank, memory, storage=Short)
    for number in range(5):
        loop.loss(rank, number).backward()
        loop.step()
    assert memory is None or rank != 1 or loop.engine.offload.storage.refused == 5
    found = loop.weights(), loop.sent("node")
    loop.engine.detach()
    return found


def test_no_room_for_a_part_on_one_rank(pools) -> None:
    memory = pools[4].run(planned, {})[0]
    plain = pools[4].run(short_of_memory, None)
    for (mine, sent), (theirs, _) in zip(pools[4].run(short_of_memory, memory + ROOM), plain):
        assert sent
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


class Shrinking(nn.Module):
    """A block that writes its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return rows + torch.tanh(self.inner(rows))


def shrinking(rank: int, world: int, memory: int | None, wire: str) -> tuple[list[Tensor], int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Shrinking() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zero.ZeroConfig(stage=3, device_memory=memory, wire=wire)
    engine = zero.shard(model, optimizer, config, roads=Roads(node_names=lambda wire: "aabb"))
    torch.manual_seed(rank)
    for _ in range(5):
        model(torch.randn(3, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zero.full_parameter(param).clone() for param in model.parameters()]
    needed, parted = engine.plan.memory.at_most(Tier.DEVICE), len(engine.schedule.backward.parted)
    engine.detach()
    return found, needed, parted


@pytest.mark.parametrize("wire", ["none", "int8"])
def test_weights_that_a_forward_writes(pools, wire: str) -> None:
    plain = pools[4].run(shrinking, None, wire)
    for (mine, _, parted), (theirs, _, _) in zip(pools[4].run(shrinking, plain[0][1] + 40_000, wire), plain):
        assert parted
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
