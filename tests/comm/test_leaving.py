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
    (left, said), (code_1, said_1) = run_program(PROGRAM, tmp_path, how)
    assert code_1 == code, said_1
    assert "StallError" in said, left
    assert re.search(f"rank 1:? has ended {words}", said), said


LATE_THREADS = """
import os, subprocess, sys, time, torch, torch.distributed as dist
from tests.comm.test_watch import Loop
dist.init_process_group("gloo")
loop = Loop(dist.get_rank(), 2, None)
loop.train(0)
core = {min(os.sched_getaffinity(0))}
for task in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(task, core)
    with open(f"/proc/self/task/{task}/comm") as name:
        if "gloo_runloop" in name.read():
            os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
busy = "import time; end = time.time() + 5\\nwhile time.time() < end: pass"
os.sched_setaffinity(subprocess.Popen([sys.executable, "-c", busy], stderr=subprocess.DEVNULL).pid, core)
time.sleep(0.5)
value = torch.ones(4)
dist.all_reduce(value)
del value
dist.destroy_process_group()
"""


@pytest.mark.wide
@pytest.mark.parametrize("turn", range(2))
def test_a_program_ends_well_though_threads_of_gloo_get_no_core(turn, tmp_path):
    """A thread that frees a tensor while Python shuts down aborts the process: about every third time, without a wait."""
    for code, said in run_program(LATE_THREADS, tmp_path):
        assert code == 0, said


def run_program(program: str, folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Run a program as two ranks. Return each rank's exit code, and what it wrote to stderr."""
    (folder / "program.py").write_text(program)
    root = str(Path(__file__).parents[2])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py"), *arguments],
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
    return [(process.returncode, text) for process, text in zip(ranks, said)]
