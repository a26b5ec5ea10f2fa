"""A rank that dies: the others get an error at once, not a time-out."""

from __future__ import annotations

import os
import time

import pytest

import hf_zero as zero
from tests.kit.common import batch, gpt2, optimizer_for
from tests.kit.pool import RankFailure, RankPool

pytestmark = pytest.mark.gloo


def die(rank: int, world: int, stage: int) -> None:
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    for step in range(4):
        if step == 2 and rank == 1:
            os._exit(9)
        ids = batch(step, 0, rank)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dead_rank_is_noticed_at_once(stage):
    pool = RankPool(2)
    pool.run(rank_of)  # both are up
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool.run(die, stage, timeout_s=60)
    assert time.monotonic() - started < 60  # not the half hour of a collective
    assert "no answer" not in str(failure.value)
    assert "--- rank 0" in str(failure.value)
    assert "RuntimeError" in str(failure.value)


def rank_of(rank: int, world: int) -> int:
    return rank
