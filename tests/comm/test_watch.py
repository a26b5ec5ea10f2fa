"""Ranks that diverge: every one that lives gets an error that says where all of them stand. Slow ranks are waited for."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import hf_zero as zero
from hf_zero.comm.watch import Place, explain
from tests.kit.common import batch, gpt2, optimizer_for
from tests.kit.pool import RankFailure, RankPool

pytestmark = pytest.mark.gloo
STALL_S = 3.0


class Loop:
    """Three steps; then `fault` happens in the fourth on one rank."""

    def __init__(self, rank: int, stage: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.model = gpt2()
        self.optimizer = optimizer_for(self.model, 1)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=stage, stall_s=STALL_S))

    def loss(self, step: int) -> object:
        ids = batch(step, 0, self.rank)
        return self.model(input_ids=ids, labels=ids).loss

    def train(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def left_out(loop: Loop) -> None:
    """A batch is left out: this rank makes one step fewer, and waits at a barrier of its program."""
    loop.train(4)
    with contextlib.suppress(RuntimeError):  # torch's own, once the connections are broken
        dist.barrier()
    loop.engine.exchange(None)


def after_an_exception(loop: Loop) -> None:
    with contextlib.suppress(ValueError):
        loss = loop.loss(3)
        raise ValueError("caught by the user's loop", loss)
    loop.train(4)
    loop.engine.exchange(None)


ALONE: dict[str, tuple[Callable[[Loop], object], str]] = {
    "state_dict": (lambda loop: loop.model.state_dict(), r"rank 0 called state_dict\(\)"),
    "save": (lambda loop: loop.engine.save(loop.folder / "saved"), "rank 0 called saving to"),
    "full_parameter": (
        lambda loop: zero.full_parameter(next(loop.model.parameters())),
        r"rank 0 called full_parameter\(\)",
    ),
    "clip": (lambda loop: loop.engine.clip_grad_norm_(1.0), r"rank 0 called clip_grad_norm_\(\)"),
    "bind": (lambda loop: loop.engine.bind(optimizer_for(loop.model, 1)), "rank 0 called Engine.bind"),
    "step": (lambda loop: loop.optimizer.step(), ""),
    "forward": (lambda loop: loop.loss(3), ""),
    "left_out": (left_out, "torch.distributed, in barrier"),
    "after_an_exception": (after_an_exception, ""),
}
"""What rank 0 does alone, and what the error says of the cause."""


def diverge(rank: int, world: int, stage: int, case: str, folder: Path) -> tuple[str, str]:
    loop = Loop(rank, stage, folder)
    for step in range(3):
        loop.train(step)
    loop.engine.exchange(None)
    said = io.StringIO()
    error = ""
    try:
        with contextlib.redirect_stderr(said):
            if rank == 0:
                ALONE[case][0](loop)
            for step in range(3, 6):
                loop.train(step)
            loop.engine.exchange(None)
    except zero.StallError as stalled:
        error = str(stalled)
    return error, said.getvalue()


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Ranks of their own: their connections are broken afterwards."""
    ranks = RankPool(2)
    yield ranks
    ranks.stop()


CASES = [
    *[(stage, case) for stage in (2, 3) for case in ("state_dict", "full_parameter", "clip")],
    *[(3, case) for case in ("forward", "save", "bind", "step")],
    (1, "left_out"),
]


@pytest.mark.parametrize(("stage", "case"), CASES)
def test_ranks_that_diverge_are_named_on_every_rank(pool, stage, case, tmp_path):
    answers = pool.run(diverge, stage, case, tmp_path, timeout_s=100)
    for error, _ in answers:
        assert "ranks have diverged" in error
        assert "rank 0: " in error
        assert "rank 1: " in error
        assert "test_watch.py:" in error  # where each rank's own program stands
        assert re.search(ALONE[case][1], error), error


def slow(rank: int, world: int, stage: int) -> tuple[int, str]:
    """Rank 1 is busy, and then stopped for less than the limit; both go on."""
    loop = Loop(rank, stage, Path())
    loop.train(0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(1, 3):
            if rank == 1 and step == 1:
                until = time.monotonic() + 2 * STALL_S
                while time.monotonic() < until:
                    sum(range(1000))
            if rank == 1 and step == 2:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
                time.sleep(0.3)
            loop.train(step)
        loop.engine.exchange(None)
    loop.engine.detach()
    return loop.engine.rank, said.getvalue()


def test_a_slow_rank_is_waited_for(pool):
    """Busy for longer than `stall_s`: the others say for whom they wait. Stopped for less: nobody notices."""
    done = threading.Event()

    def wake() -> None:
        while not done.wait(STALL_S / 3):
            for process, _ in pool._ranks:
                os.kill(process.pid, signal.SIGCONT)

    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    try:
        answers = pool.run(slow, 3, timeout_s=100)
    finally:
        done.set()
        waker.join()
    assert [rank for rank, _ in answers] == [0, 1]
    assert re.search(r"rank 0 has waited \d+ s for .*rank 1: .*test_watch.py:\d+ in slow", answers[0][1]), answers[0][1]


def leave(rank: int, world: int, stage: int) -> str:
    loop = Loop(rank, stage, Path())
    for step in range(4):
        if step == 2 and rank == 1:
            os._exit(9)
        loop.train(step)
    return "went on"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dead_rank_is_noticed_at_once(pool, stage):
    """Its connections are closed with it; the error is ours, and says where this rank was."""
    pool.run(rank_of)  # both are up
    with pytest.raises(RankFailure) as failure:
        pool.run(leave, stage, timeout_s=60)
    found = str(failure.value)
    assert "no answer" not in found
    assert "StallError: rank 0, in " in found
    assert "the connection to another rank has broken" in found


def with_a_full_store(rank: int, world: int, folder: Path) -> list[str]:
    """Train over a store in a file that rank 1 must not let grow."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
            loop = Loop(rank, 3, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loop.train(0)
    return [str(warning.message) for warning in told if "watched for stalls" in str(warning.message)]


def test_a_store_that_refuses_one_rank_leaves_all_unwatched(pool, tmp_path):
    (told,), others = pool.run(with_a_full_store, tmp_path)
    assert "rank 1: " in told
    assert others == []
    pool.stop()  # its group is another one


def rank_of(rank: int, world: int) -> int:
    return rank


def standing(rank: int, **what: object) -> Place:
    before = {"step": 3, "phase": "forward", "waits_for": "", "purpose": "", "code": "train.py:1 in f", "progress": 0}
    return Place(rank=rank, **{**before, **what})


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([standing(0), None, None, None], "ranks 1-3 has not called"),
        ([standing(0, step=7), standing(1, step=5)], "rank 1 has made 2 optimizer steps fewer"),
        (
            [standing(0, waits_for="the parameters of a"), standing(1, waits_for="the parameters of b")],
            "different parts",
        ),
        ([standing(0, waits_for="x"), standing(1, phase="backward", waits_for="y")], "different parts of one step"),
        ([standing(0, waits_for="x"), standing(1)], "rank 1 stands still"),
        ([standing(0), standing(1, ended=True, code="ValueError: y")], "rank 1 has ended before the others"),
    ],
)
def test_the_likely_cause(places, words):
    assert words in explain(places, 30.0)
