"""Jobs that are killed and start again by themselves: their agents, their victims, and the rows that their steps took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.kit.pool import ON_CPU

ENVIRONMENT = {
    **ON_CPU,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # pytorch issue 135712: ranks that start again meet keys of the attempt before
}


def agent(log: Path, *words: str) -> subprocess.Popen[bytes]:
    """torchrun in a session of its own, so that it and its ranks can be killed together as a machine that is lost."""
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            env={**os.environ, **ENVIRONMENT},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def lose(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to an agent and all that it has started."""
    for pid in [*ranks_of(process), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Ids of the ranks that an agent has running; a rank is what its environment says is one."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    if b"TORCHELASTIC_RESTART_COUNT=" in Path(f"/proc/{child}/environ").read_bytes():
                        found.append(int(child))
    return sorted(found)


def until(condition: Callable[[], object], limit_s: float, log: Path) -> None:
    """
    Raises:
        AssertionError: it has not come true in time.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:.0f} s; the log:\n{log.read_text()[-6000:]}")
        time.sleep(0.05)


def ended(process: subprocess.Popen[bytes], log: Path, limit_s: float = 120) -> None:
    """
    Raises:
        AssertionError: the job has not ended well, or not in time.
    """
    try:
        until(lambda: process.poll() is not None, limit_s, log)
        if process.returncode:
            raise AssertionError(f"exit status {process.returncode}; the log:\n{log.read_text()[-6000:]}")
    finally:
        if process.poll() is None:
            lose(process)


def rows_by_step(folder: Path, worlds: Sequence[int]) -> dict[int, list[int]]:
    """The rows that each step took, in the attempt that came to it last: that of which the result is made.

    Args:
        worlds: numbers of ranks, in the order in which the run went on with them.
    """
    found: dict[int, list[int]] = {}
    for world in worlds:
        parts: dict[int, list[list[int]]] = {}
        for rank in range(world):
            mine: dict[int, tuple[int, list[int]]] = {}
            for line in (folder / f"rows.{world}.{rank}.jsonl").read_text().splitlines():
                note = json.loads(line)
                attempt, rows = mine.get(note["step"], (note["pid"], []))
                mine[note["step"]] = note["pid"], (rows if attempt == note["pid"] else []) + note["rows"]
            for step, (_, rows) in mine.items():
                parts.setdefault(step, []).append(rows)
        # A step that not all ranks have come to was not made.
        found.update({step: sorted(sum(rows, [])) for step, rows in parts.items() if len(rows) == world})
    return found
