"""Units that stay cut among the ranks of a node from a forward to its backward: four ranks as two nodes of two."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from hf_zero.runtime import usage
from hf_zero.runtime.transports import Roads
from hf_zero.tiers.pool import Storage
from hf_zero.tiers.tier import Tier
from tests.kit.common import gpt2, is_on_the_bar, optimizer_for
from tests.runtime import test_spare_room
from tests.runtime.test_spare_room import programs

pytestmark = pytest.mark.gloo

PER_NODE, NAMES = 2, "aabb"
ROOM = 400_000
"""For parts of some units, and for some whole."""


class Loop(test_spare_room.Loop):
    def __init__(self, rank: int, device_memory: int | None = None, **settings: Any) -> None:
        self.model = gpt2(n_layer=4, n_embd=64, tie_word_embeddings=settings.pop("tied", True))
        if settings.pop("frozen", False):
            self.model.transformer.h[2].requires_grad_(False)
        self.optimizer = optimizer_for(self.model, 1)
        names = settings.pop("names", NAMES)
        dtype = settings.pop("mixed_precision", "no")
        roads = Roads(node_names=lambda wire: names, storage=settings.pop("storage", Storage))
        config = zero.ZeroConfig(stage=3, device_memory=device_memory, **settings)
        self.engine = zero.shard(self.model, self.optimizer, config, mixed_precision=dtype, roads=roads)

    @property
    def parted(self) -> int:
        return len(self.engine.schedule.backward.parted)

    def sent(self, kind: str) -> int:
        kinds = self.engine.traffic.to_dict()
        return kinds[kind]["bytes"] if kind in kinds else 0


def in_between(rank: int, world: int, settings: dict[str, Any]) -> None:
    plain = Loop(rank, **settings)
    memory = plain.planned_bytes
    assert plain.engine.plan.inputs.node_ranks == 1  # no budget: nothing was agreed on
    expected = programs(plain, rank)
    plain.engine.detach()
    loop = Loop(rank, memory + ROOM, **settings)
    found = programs(loop, rank)
    assert loop.parted
    assert loop.sent("node")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))
    assert loop.gathered_bytes() == 0
    loop.engine.detach()


@pytest.mark.parametrize(
    "settings",
    [{}, {"offload_optimizer": "cpu", "offload_params": "cpu"}, {"wire": "int8"}],
    ids=["device", "host", "int8"],
)
def test_whatever_comes_between_a_forward_and_its_backward(pools, settings: dict[str, Any]) -> None:
    pools[4].run(in_between, settings, timeout_s=300)


def planned(rank: int, world: int, settings: dict[str, Any]) -> int:
    loop = Loop(rank, **settings)
    found = loop.planned_bytes
    loop.engine.detach()
    return found


def steady(rank: int, world: int, memory: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the third step, and its peak, beside what is planned of both."""
    loop = Loop(rank, memory, **settings)
    for number in range(2):
        loop.loss(rank, number).backward()
        loop.step()
    recorder = loop.engine.record()
    before = loop.sent("gather"), loop.sent("node")
    loop.loss(rank, 2).backward()
    loop.step()
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


def lost(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int]:
    """A released parameter is given other values between a forward and its backward, which are what backward computes with."""
    loop = Loop(rank, memory)
    for number in range(2):
        loop.loss(rank, number).backward()
        loop.step()
    weight = loop.model.transformer.h[1].mlp.c_fc.weight  # read here: there it would be gathered, and stay
    loss = loop.loss(rank, 2)
    before = loop.sent("node")
    weight.data = torch.full(weight.shape, 0.01)
    loss.backward()
    sent = loop.sent("node") - before
    loop.step()
    units = loop.engine.layout.units
    left = [units[at].gathered_bytes for at in loop.engine.schedule.backward.parted if ".1" not in units[at].name]
    found = loop.weights()
    loop.engine.detach()
    return found, sent * PER_NODE - sum(left)


def test_values_given_between_a_forward_and_its_backward_end_the_parts_of_their_unit(pools) -> None:
    memory = pools[4].run(planned, {})[0]
    expected = pools[4].run(lost, None)
    found = pools[4].run(lost, memory + ROOM)
    for (mine, more), (theirs, _) in zip(found, expected):
        assert more == 0
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def raising(rank: int, world: int, memory: int | None) -> tuple[list[Tensor], int]:
    """A backward raises in its middle, on every rank; and is made again."""
    loop = Loop(rank, memory)
    for number in range(2):
        loop.loss(rank, number).backward()
        loop.step()

    def refuse(grad: Tensor) -> None:
        raise ArithmeticError

    def refusing(module: Any, args: Any, output: Any) -> None:
        output.register_hook(refuse)

    handle = loop.model.transformer.h[1].mlp.register_forward_hook(refusing)
    with contextlib.suppress(ArithmeticError):
        loop.loss(rank, 2).backward()
    handle.remove()
    loop.optimizer.zero_grad()
    loop.loss(rank, 3).backward()
    loop.step()
    found = loop.weights()
    left = loop.gathered_bytes()
    loop.engine.detach()
    return found, left


def test_a_backward_that_raises_leaves_no_part(pools) -> None:
    memory = pools[4].run(planned, {})[0]
    for (mine, left), (theirs, _) in zip(pools[4].run(raising, memory + ROOM), pools[4].run(raising, None)):
        assert left == 0
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def elsewhere(rank: int, world: int, memory: int, names: str) -> int:
    loop = Loop(rank, memory, names=names)
    for number in range(3):
        loop.loss(rank, number).backward()
        loop.step()
    found = loop.sent("node") + loop.parted
    loop.engine.detach()
    return found


@pytest.mark.parametrize("names", ["aaaa", "abcd", "abab", "aaab", "abbb"])
def test_no_parts_where_nodes_are_unequal_or_one_or_ranks_of_them_no_neighbours(pools, names: str) -> None:
    memory = pools[4].run(planned, {})[0]
    assert pools[4].run(elsewhere, memory + ROOM, names) == [0] * 4


class Odd(torch.nn.Module):
    """Blocks of an odd number of elements, each a span that is not padded where its optimizer steps over whole matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(65, 65, bias=False) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        return rows


def odd(rank: int, world: int, room: int | None) -> tuple[list[Tensor], int, bool]:
    model = Odd()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    config = zero.ZeroConfig(stage=3, device_memory=room)
    engine = zero.shard(model, optimizer, config, roads=Roads(node_names=lambda wire: NAMES))
    torch.manual_seed(rank)
    for _ in range(4):
        model(torch.randn(3, 65)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    at = engine.schedule.backward.parted
    is_odd = any(span.numel % PER_NODE for place in at for span in engine.layout.units[place].spans)
    found = [zero.full_parameter(param).clone() for param in model.parameters()]
    sent = engine.traffic.to_dict().get("node", {"bytes": 0})["bytes"]
    memory = engine.plan.memory.at_most(Tier.DEVICE)
    engine.detach()
    return found, memory if room is None else sent, is_odd


def test_spans_that_a_node_does_not_divide(pools) -> None:
    plain = pools[4].run(odd, None)
    for (mine, sent, is_odd), (theirs, _, _) in zip(pools[4].run(odd, plain[0][1] + 12_000), plain):
        assert sent
        assert is_odd
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
