"""Shared by the benchmarks: start ranks as processes that end together, and describe the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from engines import Job

MALLOC = {
    "default": {},
    # glibc raises these two thresholds at run time and then keeps freed blocks, which hides the memory that an engine frees.
    # Setting them, to glibc's own initial values, prevents that.
    "pinned": {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"},
}
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "hf-zero")


class LaunchError(RuntimeError):
    """A launch ended without a result from every rank."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def threads(world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def launch(
    job: Job,
    timeout: float,
    malloc: str = "default",
    *,
    worker: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run `job` on its ranks and return each rank's result; if one rank fails or time is up, all ranks are ended."""
    common = (
        os.environ
        | MALLOC[malloc]
        | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "OMP_NUM_THREADS": str(threads(job.world_size)),
            "HF_HUB_OFFLINE": "1",
        }
        | dict(environment)
    )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        results = [Path(folder, f"{rank}.json") for rank in range(job.world_size)]
        logs = [Path(folder, f"{rank}.log") for rank in range(job.world_size)]
        try:
            for rank, (result, log) in enumerate(zip(results, logs)):
                command = [sys.executable, str(worker), json.dumps(asdict(job)), str(result)]
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as stream:
                    # A rank ends when the pipe that is its stdin closes, so none outlives this process.
                    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stream, "stderr": stream}
                    ranks.append(subprocess.Popen(command, env=common | own, start_new_session=True, **streams))
            await_ranks(job, ranks, logs, timeout)
            return [json.loads(result.read_text()) for result in results]
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdin:
                    process.stdin.close()


def await_ranks(job: Job, ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout: float) -> None:
    """Return when every rank has succeeded; raise as soon as one fails, or when time is up."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            raise LaunchError(f"{job.engine} ({job.measure}): not done after {timeout:.0f} s (--timeout)\n{tail(logs)}")
        if any(process.poll() for process in ranks):
            time.sleep(1.0)  # the others may still be writing their errors
            break
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        codes = ", ".join(f"rank {rank}: exit status {ranks[rank].returncode}" for rank in failed)
        raise LaunchError(f"{job.engine} ({job.measure}): {codes}\n{tail(logs[rank] for rank in failed)}")


def tail(logs: Iterable[Path], lines: int = 15) -> str:
    return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-lines:])


def versions() -> dict[str, str]:
    """Return versions of the installed packages that results depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(world_size: int) -> dict[str, Any]:
    """Describe machine, versions and date."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "threads_per_rank": threads(world_size),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(),
    }
