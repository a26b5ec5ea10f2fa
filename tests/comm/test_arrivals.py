"""Collectives that a program calls on some ranks only: who waits says for whom."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_zero as zero
from hf_zero.comm import agree
from tests.kit.common import batch, gpt2, optimizer_for

pytestmark = pytest.mark.gloo


def heard(work: Callable[[], object], patience_s: float) -> str:
    """What is said on stderr meanwhile."""
    before, agree.PATIENCE_S = agree.PATIENCE_S, patience_s
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            work()
    finally:
        agree.PATIENCE_S = before
    return said.getvalue()


def waits(rank: int, world: int, folder: Path) -> dict[str, list[str]]:
    """Each collective, with the last rank late, and with all on time."""
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    ids = batch(0, 0, rank)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state = model.state_dict()
    works: dict[str, Callable[[], object]] = {
        "saving to": lambda: engine.save(folder / "saved"),
        "loading": lambda: engine.load(folder / "saved"),
        "state_dict()": model.state_dict,
        "load_state_dict()": lambda: model.load_state_dict(state),
        "the optimizer's state_dict()": optimizer.state_dict,
    }
    out = {}
    for name, work in works.items():

        def late(work: Callable[[], object] = work) -> None:
            if rank == world - 1:
                time.sleep(1.0)
            work()

        engine.exchange(None)
        on_time = heard(work, 30.0)
        engine.exchange(None)
        out[name] = [heard(late, 0.3), on_time]
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)  # a cancelled one takes a moment to end
    engine.detach()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_who_waits_names_the_rank_that_is_missing(pools, world, tmp_path):
    answers = pools[world].run(waits, tmp_path)
    for rank, found in enumerate(answers):
        for name, (said, on_time) in found.items():
            assert "has waited" not in on_time, (rank, name)
            if rank == world - 1:
                assert "has waited" not in said, (rank, name)
            elif rank == 0 or "state_dict" not in name:  # only rank 0 is given the values; others send theirs and go on
                assert f"rank {rank} has waited 0.3 s in {name}" in said, said
                assert re.findall(r"rank (\d) \(last in", said) == [str(world - 1)], said


def apart(rank: int, world: int) -> str:
    """Where nothing is sharded one rank may ask alone, and nobody waits."""
    model = gpt2()
    engine = zero.shard(model, None, zero.ZeroConfig(stage=0))
    said = heard(model.state_dict, 0.1) if rank == 0 else ""
    engine.exchange(None)
    engine.detach()
    return said


def test_plain_data_parallel_waits_for_nobody(two):
    assert two.run(apart) == ["", ""]
