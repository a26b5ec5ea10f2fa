"""Ranks that leave: killed, or ended by their own program. The others end with an error, soon."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import hf_zero as zero
from tests.comm.test_watch import Loop
from tests.kit.pool import RankFailure, RankPool, free_port

pytestmark = pytest.mark.gloo


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


LEAVING: dict[str, Callable[[], object]] = {
    "killed": die,
    "ends": partial(os._exit, 9),
}


class Left(Exception):
    """Carries what rank 0 found past the failure of rank 1."""


def leave(rank: int, world: int, stage: int, how: str) -> None:
    """Rank 1 leaves in the third step; raises rank 0's error, and the seconds until it came."""
    loop = Loop(rank, stage, Path())
    for step in range(2):
        loop.train(step)
    if rank == 1:
        loop.model.transformer.h[1].register_forward_pre_hook(lambda *_: LEAVING[how]())
    began = time.monotonic()
    with pytest.raises(zero.StallError) if rank == 0 else contextlib.nullcontext() as caught:
        for step in range(2, 4):
            loop.train(step)
        loop.engine.exchange(None)
    raise Left(f"{time.monotonic() - began:.1f} s: {caught.value}")


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "how"), [(0, "killed"), (2, "killed"), (3, "killed"), (3, "ends")])
def test_how_long_the_error_of_a_lost_rank_takes(stage: int, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of docs/RELIABILITY.md; on a machine that does nothing else."""
    pool = RankPool(2)
    with pytest.raises(RankFailure) as failure:
        pool.run(leave, stage, how, timeout_s=60)
    text = str(failure.value)
    found = re.search(
        r"Left: ([\d.]+) s: rank 0, in .*: the connection to another rank has broken. rank 1: its process has ended",
        text,
    )
    assert found is not None, text
    assert float(found[1]) <= 5
    with capsys.disabled():
        print(f"\n{how}, stage {stage}: {found[1]} s")


PROGRAM = """
import sys, torch, torch.distributed as dist
from tests.comm.test_watch import Loop
dist.init_process_group("gloo")
rank = dist.get_rank()
loop = Loop(rank, 2, None)
for step in range(4):
    if step == 2 and rank == 1:
        match sys.argv[1]:
            case "exit":
                sys.exit(0)
            case "error":
                raise ValueError("of the program")
            case "memory":
                raise torch.OutOfMemoryError("of the device")
    loop.train(step)
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit", 0, "after 2 steps"),
        ("error", 1, "after 2 steps: ValueError: of the program"),
        ("memory", 1, "after 2 steps: OutOfMemoryError: of the device"),
    ],
)
def test_a_program_that_ends_on_one_rank(how, code, words, tmp_path):
    """Real interpreters: the others are told what ended it, though its process is gone."""
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), how],
            env={**os.environ, **world, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == code, said[1]
    assert "StallError" in said[0]
    assert re.search(f"rank 1:? has ended {words}", said[0]), said[0]
