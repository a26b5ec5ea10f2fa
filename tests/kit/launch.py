"""Start a job of `jobs/` on real ranks (gloo), with a hard time limit, and read what its checks found.

A job is one script with many checks, so that the price of starting is paid once. Its rank r writes `rank<r>.json`:
{check: {"value": ...} or {"error": traceback}}. Ranks are forked from one process that has imported torch and transformers
and has done nothing else.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .pool import ON_CPU, forking, free_port

JOBS = Path(__file__).parent / "jobs"


class Results:
    """What the ranks of one job found."""

    def __init__(self, ranks: list[dict[str, Any]], output: str) -> None:
        self.ranks = ranks
        self.output = output

    def __call__(self, check: str, rank: int = 0) -> Any:
        """The value of a check; fails with the job's traceback if the check raised on any rank, or never ran."""
        entries = [found.get(check) for found in self.ranks]
        errors = [f"on rank {n}:\n{e['error']}" for n, e in enumerate(entries) if e is not None and "error" in e]
        if errors:
            raise RuntimeError(f"{check!r} raised " + "\n".join(errors))
        missing = [number for number, entry in enumerate(entries) if entry is None]
        if missing:
            raise RuntimeError(f"{check!r} never ran on ranks {missing}; the job said:\n{self.output[-6000:]}")
        return self.ranks[rank][check]["value"]


def launch(job: str, out: Path, *arguments: str, ranks: int = 2, timeout: float = 150) -> Results:
    """Run `jobs/<job>.py <out> <arguments>` and wait. Nothing of it is alive afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PARALLELISM_"))},
        **ON_CPU,
        "JOB_TIMEOUT": str(timeout),
    }
    words = [str(JOBS / f"{job}.py"), str(out), *arguments]
    log = out / "output.txt"
    fork_ranks(words, environment, [(log, log)] * ranks, timeout=timeout)
    # At the time limit, the checks that ran are in the files; the others fail by name.
    output = log.read_text(errors="replace")
    found = []
    for rank in range(ranks):
        path = out / f"rank{rank}.json"
        found.append(json.loads(path.read_text()) if path.is_file() else {})
    return Results(found, output)


def fork_ranks(
    words: Sequence[str],
    environment: Mapping[str, str],
    outputs: Sequence[tuple[Path, Path]],
    *,
    folder: Path | None = None,
    timeout: float,
    grace_s: float = 5,
) -> list[int | None]:
    """Run a Python file with arguments on as many ranks as there are `outputs`: files for stdout and stderr, appended to.

    Returns:
        Exit codes by rank. A rank that does not end in time, or not `grace_s` after another has failed, is killed.
    """
    context = forking()
    for path in {path for pair in outputs for path in pair}:
        path.write_text("")
    ranks = len(outputs)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    processes: list[Any] = []
    for rank, (out, err) in enumerate(outputs):
        own = {**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else environment
        arguments = ([*words], str(out), str(err), dict(own), str(folder or Path.cwd()))
        processes.append(context.Process(target=_run, args=arguments))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + grace_s)  # the others would wait for the one that failed
            processes[-1].join(0.05)
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):  # it may not have come to `setsid`
                    os.killpg(process.pid, signal.SIGKILL)  # a session of its own: the rank and what it started
                process.kill()
            process.join(10)
    return [process.exitcode for process in processes]


def _run(words: list[str], out: str, err: str, environment: dict[str, str], folder: str) -> None:
    """One rank: as if `words` had been executed in `folder`."""
    os.setsid()
    mp.current_process().name = "MainProcess"  # libraries ask whether they are in a data loader's worker
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # the process that was forked may have more
    gc.freeze()  # what was imported before stays, and need not be looked at in each collection
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
