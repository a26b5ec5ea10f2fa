"""Forwards that no backward follows: ended by Ctrl-C, or only looked at. Later steps are as if they had not been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.bits import equal
from tests.kit.pool import on_ranks
from tests.models import ids, llama
from tests.regressions.test_failed_steps import Loop, heard, interrupt
from tests.sequence.models import batch, whole

pytestmark = pytest.mark.gloo


def gathers(engine: zero.Engine, act: Any) -> int:
    before = engine.traffic["gather"].calls
    act()
    return engine.traffic["gather"].calls - before


def interrupted(loop: Loop) -> None:
    with (
        loop.model.body.blocks[1].up.register_forward_pre_hook(interrupt),
        heard(signal.SIGINT, signal.default_int_handler),
        pytest.raises(KeyboardInterrupt),
    ):
        loop.micro(99)


@torch.no_grad()
def looked_at(loop: Loop) -> None:
    for step in range(10):
        loop.model(ids(loop.rank, step))


def kept(loop: Loop) -> None:
    """More forwards with a graph than one agreement has bits."""
    for step in range(40):
        loop.model(ids(loop.rank, step))


@on_ranks()
def test_later_steps_gather_as_often_as_without_them(rank: int, world: int, tmp_path: Path) -> None:
    clean, loop = (Loop(rank, "stage 3", tmp_path) for _ in range(2))
    usual = [gathers(clean.engine, lambda step=step: clean.steps(step)) for step in range(4)]
    seen = []
    for step, before in enumerate((looked_at, interrupted, kept, looked_at)):
        before(loop)
        if before is interrupted:
            looked_at(loop)
        seen.append(gathers(loop.engine, lambda step=step: loop.steps(step)))
    assert seen == usual
    assert equal(loop.values(), clean.values())


@pytest.mark.parametrize("is_checkpointed", [False, True])
@on_ranks()
def test_later_forwards_of_parts_have_batches_of_their_own(rank: int, world: int, is_checkpointed: bool) -> None:
    torch.manual_seed(3)
    model = llama()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload = "cpu" if is_checkpointed else "none"
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, sp_size=2, offload_activations=offload))
    torch.manual_seed(3)
    plain = llama()
    losses = [whole(plain, [batch(0, step)], True)[0] for step in range(2)]
    model(**engine.local_sequence(batch(0, 0))).loss.backward()
    optimizer.zero_grad()
    with (
        model.model.layers[1].register_forward_pre_hook(interrupt),
        heard(signal.SIGINT, signal.default_int_handler),
        pytest.raises(KeyboardInterrupt),
    ):
        model(**engine.local_sequence(batch(0, 0, length=14)))
    for step in range(2):
        out = model(**engine.local_sequence(batch(0, step)))
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach(), losses[step], rtol=1e-6, atol=0)
