"""Units that are kept from a forward to its backward, whole or in parts of a node: which ones, and bytes as planned.

Programs: tests/programs/kept_units.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.runtime import usage
from hf_zero.runtime.transports import Roads
from hf_zero.tiers.pool import Storage
from hf_zero.tiers.tier import Tier
from tests.kit.common import batch, gpt2, is_on_the_bar, optimizer_for
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo

NAMES = "aabb"
ROOM = 400_000
"""For parts of some units, and for some whole."""


class Loop:
    def __init__(
        self, device_memory: int | None = None, names: str = "", storage: type[Storage] = Storage, **settings: Any
    ) -> None:
        self.model = gpt2(n_layer=4, n_embd=64)
        self.optimizer = optimizer_for(self.model, 1)
        roads = Roads(node_names=lambda wire: names, storage=storage) if names else Roads(storage=storage)
        config = zero.ZeroConfig(stage=3, device_memory=device_memory, **settings)
        self.engine = zero.shard(self.model, self.optimizer, config, roads=roads)

    def train(self, rank: int, *numbers: int, rows: int = 2) -> None:
        for number in numbers:
            ids = batch(number, 0, rank).repeat(rows // 2, 1)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def kept(self) -> int:
        return len(self.engine.schedule.backward.kept)

    @property
    def parted(self) -> int:
        return len(self.engine.schedule.backward.parted)

    @property
    def planned_bytes(self) -> int:
        return self.engine.plan.memory.at_most(Tier.DEVICE)

    def sent(self, kind: str) -> int:
        kinds = self.engine.traffic.to_dict()
        return kinds[kind]["bytes"] if kind in kinds else 0

    def weights(self) -> list[Tensor]:
        return [zero.full_parameter(param).clone() for param in self.model.parameters()]


def planned(rank: int, world: int, settings: dict[str, Any]) -> int:
    loop = Loop(names=NAMES, **settings)
    assert loop.engine.plan.inputs.node_ranks == 1  # no budget: nothing was agreed on
    found = loop.planned_bytes
    loop.engine.detach()
    return found


def uneven(rank: int, world: int, memory: int | None) -> list[tuple[int, int]]:
    """Rank 1 has the larger batches, and from the third step on much larger ones; kept units and bytes of gathers by step."""
    loop, seen = Loop(memory), []
    for number in range(5):
        loop.engine.traffic.reset()
        loop.train(rank, number, rows=2 if rank == 0 else 4 if number < 2 else 400)
        seen.append((loop.kept, loop.engine.traffic["gather"].bytes))
    loop.engine.detach()
    return seen


def test_ranks_keep_what_the_one_with_the_largest_batch_has_room_for(two) -> None:
    """A larger batch keeps less from the next forward on."""
    bare = two.run(uneven, None)[0]
    loop_memory = two.run(planned, {})[0]
    first, second = two.run(uneven, loop_memory + 3_000_000)
    assert first == second
    kept, sent = zip(*first)
    assert kept[1] > 0 == kept[-1]
    assert sent[1] < bare[1][1]
    assert sent[0] == bare[0][1]  # nothing is known of activations before the first backward
    assert sent[-1] == bare[-1][1]


def steady(rank: int, world: int, memory: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the third step, and its peak, beside what is planned of both."""
    loop = Loop(memory, NAMES, **settings)
    loop.train(rank, 0, 1)
    recorder = loop.engine.record()
    before = loop.sent("gather"), loop.sent("node")
    loop.train(rank, 2)
    sent = loop.sent("gather") - before[0], loop.sent("node") - before[1]
    told, traffic = usage.predicted(loop.engine)
    backward = loop.engine.schedule.backward
    found = {
        "sent": sent,
        "planned": (traffic.gather - traffic.node, traffic.node),
        "peak": (recorder.peak["device"]["gathered"], told.peak[Tier.DEVICE]["gathered"]),
        "unit": max(unit.gathered_bytes for unit in loop.engine.layout.units),
        "parted bytes": sum(loop.engine.layout.units[at].gathered_bytes for at in backward.parted),
        "whole bytes": sum(loop.engine.layout.units[at].gathered_bytes for at in backward.kept),
        "agree": loop.engine.traffic.to_dict()["agree"]["calls"],
    }
    loop.engine.detach()
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"offload_optimizer": "cpu", "offload_params": "cpu"}], ids=["device", "host"]
)
def test_bytes_across_and_within_nodes_and_memory_are_as_planned(pools, settings: dict[str, Any]) -> None:
    memory = pools[4].run(planned, settings)[0]
    bare = pools[4].run(steady, None, settings)[0]
    for found in pools[4].run(steady, memory + ROOM, settings):
        assert found["parted bytes"]
        saved = found["parted bytes"] + found["whole bytes"]
        assert found["sent"] == found["planned"]
        assert found["sent"] == (bare["sent"][0] - saved * 3 // 4, found["parted bytes"] // 2)
        measured, told = found["peak"]
        assert is_on_the_bar("gathered", told, measured, found["unit"])
        assert found["agree"] == bare["agree"]  # not a message more


def elsewhere(rank: int, world: int, memory: int, names: str) -> int:
    loop = Loop(memory, names)
    loop.train(rank, 0, 1, 2)
    found = loop.sent("node") + loop.parted
    loop.engine.detach()
    return found


@pytest.mark.parametrize("names", ["aaaa", "abcd", "abab", "aaab", "abbb"])
def test_no_parts_where_nodes_are_unequal_or_one_or_ranks_of_them_no_neighbours(pools, names: str) -> None:
    memory = pools[4].run(planned, {})[0]
    assert pools[4].run(elsewhere, memory + ROOM, names) == [0] * 4


def in_replicas(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int, int]:
    loop = Loop(memory, "aabbccdd", replicas=2)
    loop.train(rank, 0, 1, 2, 3)
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

    loop = Loop(memory, NAMES, Short)
    loop.train(rank, *range(5))
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


def shrinking(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Shrinking() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zero.ZeroConfig(stage=3, device_memory=memory, wire="int8")
    engine = zero.shard(model, optimizer, config, roads=Roads(node_names=lambda wire: NAMES))
    torch.manual_seed(rank)
    for _ in range(5):
        model(torch.randn(3, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zero.full_parameter(param).clone() for param in model.parameters()]
    needed, parted = engine.plan.memory.at_most(Tier.DEVICE), len(engine.schedule.backward.parted)
    engine.detach()
    return found, needed, parted


def test_weights_that_a_forward_writes_are_what_codes_make_of_them(pools) -> None:
    """Before, a backward from parts had what was written."""
    plain = pools[4].run(shrinking, None)
    for (mine, _, parted), (theirs, _, _) in zip(pools[4].run(shrinking, plain[0][1] + 40_000), plain):
        assert parted
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
