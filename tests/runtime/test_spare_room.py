"""Units that are kept from a forward to its backward: the same ones on every rank, whatever the program does in between."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from hf_zero.tiers.tier import Tier
from tests.kit.common import batch, gpt2, optimizer_for

pytestmark = pytest.mark.gloo


class Loop:
    def __init__(self, device_memory: int | None = None, **changes: Any) -> None:
        self.model = gpt2(n_layer=4, n_embd=64, **changes)
        self.optimizer = optimizer_for(self.model, 1)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=3, device_memory=device_memory))

    def loss(self, rank: int, number: int, rows: int = 2) -> Tensor:
        ids = batch(number, 0, rank).repeat(rows // 2, 1)
        return self.model(input_ids=ids, labels=ids).loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def kept(self) -> int:
        return len(self.engine.schedule.backward.kept)

    @property
    def planned_bytes(self) -> int:
        return self.engine.plan.memory.at_most(Tier.DEVICE)

    def gathered_bytes(self) -> int:
        return self.engine.offload.storage.ledger.device.now["gathered"]

    def weights(self) -> list[Tensor]:
        return [zero.full_parameter(param).clone() for param in self.model.parameters()]


def programs(loop: Loop, rank: int) -> list[Tensor]:
    """What may come between a forward and its backward, and what may not come after it at all."""
    for number in range(2):
        loop.loss(rank, number).backward()
        loop.step()
    for number in range(2, 5):  # accumulation
        loop.loss(rank, number).backward()
    loop.step()
    for defer in (False, True):
        with loop.engine.no_sync(defer=defer):
            loop.loss(rank, 5).backward()
        loop.loss(rank, 6).backward()
        loop.step()
    first, second = loop.loss(rank, 7), loop.loss(rank, 8)  # two forwards, one backward
    (first + second).backward()
    loop.step()
    loss = loop.loss(rank, 9)
    with torch.no_grad():
        loop.loss(rank, 10)
    loop.model.state_dict()
    loss.backward(retain_graph=True)
    loss.backward()
    loop.step()
    loop.loss(rank, 11)  # without a backward
    loop.loss(rank, 12).backward()
    loop.step()
    loop.loss(rank, 13)  # nor this one: what it has gathered is old after the next step
    loop.optimizer.step()
    with torch.no_grad():
        losses = loop.loss(rank, 14)
    for reentrant in (True, False):
        loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loop.loss(rank, 15).backward()
        loop.step()
    loop.model.gradient_checkpointing_disable()
    with contextlib.suppress(IndexError):
        loop.model(input_ids=torch.full((1, 4), 10**6), labels=torch.zeros(1, 4, dtype=torch.long))
    loop.loss(rank, 16)
    loop.model.load_state_dict({name: value.clone() * 0.5 for name, value in loop.model.state_dict().items()})
    loop.loss(rank, 17).backward()
    loop.step()
    return [losses.detach(), *loop.weights()]


def in_between(rank: int, world: int) -> None:
    plain = Loop()
    memory = plain.planned_bytes
    expected = programs(plain, rank)
    plain.engine.detach()
    for room in (400_000, 1 << 30):
        loop = Loop(memory + room)
        found = programs(loop, rank)
        assert loop.kept
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))
        assert loop.gathered_bytes() == 0
        loop.engine.detach()


def test_whatever_comes_between_a_forward_and_its_backward(two) -> None:
    two.run(in_between, timeout_s=200)


def uneven(rank: int, world: int, memory: int | None) -> list[tuple[int, int]]:
    """Rank 1 has the larger batches, and from the third step on much larger ones; kept units and bytes of gathers by step."""
    loop, seen = Loop(memory), []
    for number in range(5):
        loop.engine.traffic.reset()
        loop.loss(rank, number, rows=2 if rank == 0 else 4 if number < 2 else 400).backward()
        loop.step()
        seen.append((loop.kept, loop.engine.traffic["gather"].bytes))
    loop.engine.detach()
    return seen


def test_ranks_keep_what_the_one_with_the_largest_batch_has_room_for(two) -> None:
    """A larger batch keeps less from the next forward on."""
    bare = two.run(uneven, None)[0]
    loop_memory = two.run(planned_bytes)[0]
    first, second = two.run(uneven, loop_memory + 3_000_000)
    assert first == second
    kept, sent = zip(*first)
    assert kept[1] > 0 == kept[-1]
    assert sent[1] < bare[1][1]
    assert sent[0] == bare[0][1]  # nothing is known of activations before the first backward
    assert sent[-1] == bare[-1][1]


def planned_bytes(rank: int, world: int) -> int:
    loop = Loop()
    found = loop.planned_bytes
    loop.engine.detach()
    return found
