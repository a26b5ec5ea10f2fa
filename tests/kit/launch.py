"""Start a job of `jobs/` on real ranks (gloo), with a hard time limit, and read what its checks found.

A job is one script with many checks, so that the price of starting Python, torch and transformers is paid once. Its
rank r writes `rank<r>.json`: {check: {"value": ...} or {"error": traceback}}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(JOBS / f"{job}.py"), str(out), *arguments]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PARALLELISM_"))},
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "JOB_TIMEOUT": str(timeout),
    }
    with (out / "output.txt").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # the checks that ran are in the files; the others fail by name
        finally:
            _end(process)
    output = (out / "output.txt").read_text(errors="replace")
    found = []
    for rank in range(ranks):
        path = out / f"rank{rank}.json"
        found.append(json.loads(path.read_text()) if path.is_file() else {})
    return Results(found, output)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: torchrun and its ranks, nothing else
        process.wait(10)
