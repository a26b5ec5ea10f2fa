"""One rank of one launch of `compare.py`: build an engine, measure it, write the results as JSON.

How each number is taken, and why:

* time: the engine and a DDP copy of the same model live in the same processes and take turns, in blocks of a few
  steps, in the order A B B A. What else the machine does then hits both alike, which launches minutes apart would not
  give. The first step of a block is not timed: it finds the caches, and what is still on the wire, of the other
  engine.
* processor time: of all threads of the process, in the same steps; it stays meaningful where the machine is shared.
  Page faults tell of memory that is given back and taken again.
* memory: alone in its processes. Resident bytes less file pages (code that is paged in on first use is no engine's
  doing), over the same figure after the imports. The peak is the kernel's own high-water mark, reset after the build.
* wire: the bytes that this process's own TCP sockets have sent, as the kernel counts them (`TCP_INFO`): other jobs on
  the loopback device do not matter and headers are not in it. Connections to the rendezvous store are left out.
* collectives: operations of torch's own `c10d` dispatcher in one step, as its profiler sees them.
* Python calls: cProfile over a whole step in one process, on a model so small that nothing else is left.
"""

from __future__ import annotations

import cProfile
import ctypes
import json
import os
import pstats
import re
import resource
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from engines import BUILDERS, Job, Step, build_model, setup
from torch import Tensor

LOSSES = 10
J = TypeVar("J", bound=Job)
WARM_UP = 3
SENT_STEPS = 2


class Batches:
    """The stream of batches of one engine: step `i` of every engine sees the same tokens."""

    def __init__(self, job: Job, vocabulary: int, rank: int, device: torch.device) -> None:
        self.shape = (job.batch, job.sequence)
        self.count, self.vocabulary, self.rank, self.device = job.accumulation, vocabulary, rank, device
        self.index = 0

    def __call__(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.rank + self.index)
        self.index += 1
        draw = [torch.randint(self.vocabulary, self.shape, generator=generator) for _ in range(self.count)]
        return [batch.to(self.device) for batch in draw]


class Runner:
    """An engine with its stream of batches and the losses it has seen."""

    def __init__(self, name: str, job: Job, rank: int, device: torch.device) -> None:
        model = build_model(job.model, job.sequence).to(device)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.batches = Batches(job, model.config.vocab_size, rank, device)
        self.losses: list[float] = []
        self.device = device
        quiet()
        start = time.perf_counter()
        self.step: Step = BUILDERS[name](job, model)
        synchronize(device)
        self.start_up = time.perf_counter() - start

    def run(self) -> tuple[float, ...]:
        """Run one step; return its costs, in the order of `COSTS`."""
        batches = self.batches()
        start = costs()
        loss = self.step(batches)
        synchronize(self.device)
        stop = costs()
        self.losses.append(float(loss))
        return tuple(after - before for before, after in zip(start, stop))


COSTS = ("seconds", "cpu_seconds", "page_faults")


def costs() -> tuple[float, ...]:
    """Return the clock, the processor time of all threads of this process, and its number of minor page faults."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_minflt


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def quiet() -> None:
    """Wait for all ranks and their transfers, before something is read or timed."""
    dist.barrier()
    time.sleep(0.05)


def sent_bytes() -> int:
    """Payload bytes sent so far on this process's own TCP connections, the rendezvous store's left out."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=descriptor) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = (connection.getpeername()[1], connection.getsockname()[1])
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not a socket, or not a connected one
            continue
        if int(os.environ["MASTER_PORT"]) not in ports and len(information) >= 208:
            total += struct.unpack_from("=Q", information, 200)[0]  # tcpi_bytes_sent
    return total


def sent_by(action: Callable[[], object]) -> int:
    """Return the bytes that `action` sends."""
    quiet()
    before = sent_bytes()
    action()
    return sent_bytes() - before


def resident_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Bytes of memory that this process holds now, or at most held, without pages of mapped files."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return 1024 * (int(fields["VmHWM" if peak else "VmRSS"]) - int(fields["RssFile"]))


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def measure_time(job: Job, rank: int, device: torch.device) -> dict[str, Any]:
    """Step times in turn with DDP, losses, bytes on the wire and collectives."""
    engine, reference = Runner(job.engine, job, rank, device), Runner("ddp", job, rank, device)
    for runner in (engine, reference):
        quiet()
        for _ in range(WARM_UP):
            runner.run()
    turns: dict[str, list[list[float]]] = {"engine": [], "ddp": []}

    def turn(name: str, runner: Runner) -> None:
        quiet()
        runner.run()
        # Ranks go in step; what it costs the dearest of them is the step's cost.
        rows = torch.tensor([runner.run() for _ in range(job.steps)], dtype=torch.float64, device=device)
        dist.all_reduce(rows, dist.ReduceOp.MAX)
        turns[name].append([statistics.median(column) for column in rows.T.tolist()])

    pair = [("engine", engine), ("ddp", reference)]
    for _ in range(job.blocks):
        for name, runner in pair:
            turn(name, runner)
        pair.reverse()
    barriers = sent_by(quiet)

    def some_steps() -> None:
        for _ in range(SENT_STEPS):
            engine.run()
        quiet()

    sent = sent_by(some_steps) - barriers
    for runner in (engine, reference):
        while len(runner.losses) < LOSSES:
            runner.run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.run()
    operations = Counter(
        event.name.removeprefix("c10d::").strip("_")
        for event in profile.events() or ()
        if event.name.startswith("c10d::") and not event.name.startswith(("c10d::recv", "c10d::barrier"))
    )
    difference = max(abs(a - b) for a, b in zip(engine.losses[:LOSSES], reference.losses[:LOSSES]))
    return {
        "costs": {name: dict(zip(COSTS, zip(*rows))) for name, rows in turns.items()},
        "start_up": engine.start_up,
        "losses": engine.losses[:LOSSES],
        "loss_difference": difference,
        "sent": sent / SENT_STEPS,
        "numel": engine.numel,
        "collectives": dict(operations),
    }


def warm_up(job: Job, device: torch.device) -> None:
    """Import and create everything that an engine's first step needs, independent of the model's size."""
    model = build_model("tiny", job.sequence).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.zeros(job.batch, job.sequence, dtype=torch.long, device=device)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1, device=device))


def measure_memory(job: Job, rank: int, device: torch.device) -> dict[str, Any]:
    """Resident bytes between steps and at most, with nothing else in the process."""
    warm_up(job, device)
    if device.type == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
    baseline = resident_bytes(device)
    runner = Runner(job.engine, job, rank, device)
    built = resident_bytes(device)
    reset_peak(device)
    steady = []
    for _ in range(WARM_UP + job.steps):
        runner.run()
        steady.append(resident_bytes(device) - baseline)
    return {
        "baseline": baseline,
        "built": built - baseline,
        "steady": int(statistics.median(steady[WARM_UP:])),
        "peak": resident_bytes(device, peak=True) - baseline,
        "numel": runner.numel,
    }


def measure_calls(job: Job, rank: int, device: torch.device) -> dict[str, Any]:
    """Python calls per step, and the functions that make up most of them."""
    runner = Runner(job.engine, job, rank, device)
    for _ in range(5):  # engines that record an order first have it by then
        runner.run()
    batches = runner.batches()
    profile = cProfile.Profile()
    profile.enable()
    runner.step(batches)
    profile.disable()
    statistic: Any = pstats.Stats(profile)
    rows = sorted(statistic.stats.items(), key=lambda row: -row[1][1])[:25]
    return {
        "calls": statistic.total_calls,
        "milliseconds": 1e3 * min(runner.run()[0] for _ in range(25)),
        "most_called": [[f"{Path(file).name}:{line}:{name}", row[1]] for (file, line, name), row in rows],
        "numel": runner.numel,
    }


MEASURES: dict[str, Callable[[Job, int, torch.device], dict[str, Any]]] = {
    "time": measure_time,
    "memory": measure_memory,
    "calls": measure_calls,
}


def end_with_parent() -> None:
    """Exit as soon as the launcher has ended: the kernel then closes the pipe that is our stdin."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def work(kind: type[J], measures: Mapping[str, Callable[[J, int, torch.device], dict[str, Any]]]) -> None:
    """Run one rank of a launch: argument 1 is the job, 2 the file for the results."""
    end_with_parent()
    job = kind(**json.loads(sys.argv[1]))
    rank = int(os.environ["RANK"])
    device = setup(job, rank)
    result = asdict(job) | measures[job.measure](job, rank, device)
    Path(sys.argv[2]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(Job, MEASURES)
