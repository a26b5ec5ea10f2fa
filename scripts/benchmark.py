"""Compare hf_zero with its peers on one machine: the same GPT-2-class model, the same batches, the same optimizer.

    python scripts/benchmark.py                                   # every engine that is installed, 50M parameters, fp32
    python scripts/benchmark.py --engines zero3 fsdp2 --dtype bf16 --output runs/benchmark.json
    python scripts/benchmark.py --offload                         # optimizer and parameters elsewhere (benchmark_offload.py)

Each measurement is a launch of its own (`benchmark_worker.py` says how each number is taken and why so). Step times are
ratios to DDP, which runs in turn with each engine in the same processes; DDP's own row is such a pair too, so how far
it is from 1 shows the noise. Quote ratios: absolute times differ from machine to machine and from hour to hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from benchmark_engines import BUILDERS, SIZES, Job, missing
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("benchmark_worker.py")
MALLOC = {
    "default": {},
    # glibc raises these two thresholds as it goes and then keeps freed blocks, which hides what an engine gives back.
    # Naming them, with the values that glibc starts from, stops that.
    "pinned": {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"},
}
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "hf-zero")
TIMES = ("seconds", "cpu_seconds")
MEASURES = ("time", "memory", "calls")


class LaunchError(RuntimeError):
    """A launch ended without a result from every rank."""


@dataclass(frozen=True, kw_only=True)
class Options:
    engines: Sequence[str]
    measure: Sequence[str]
    rounds: int
    timeout: float
    output: Path | None
    job: Job
    """What every launch has in common."""


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
    worker: Path = WORKER,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Run `job` on its ranks and return each rank's result; if one rank fails or time is up, none is left behind."""
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
    """Return when every rank has ended well; raise as soon as one has not, or when time is up."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            raise LaunchError(f"{job.engine} ({job.measure}): not done after {timeout:.0f} s (--timeout)\n{tail(logs)}")
        if any(process.poll() for process in ranks):
            time.sleep(1.0)  # the others may still be writing down why
            break
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        codes = ", ".join(f"rank {rank}: exit status {ranks[rank].returncode}" for rank in failed)
        raise LaunchError(f"{job.engine} ({job.measure}): {codes}\n{tail(logs[rank] for rank in failed)}")


def tail(logs: Iterable[Path], lines: int = 15) -> str:
    return "\n".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-lines:])


def measure(options: Options, console: Console) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Every launch of the run; returns the results by engine, and what failed or was left out with the reason."""
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    plan = plan_launches(options)
    for index, (job, malloc) in enumerate(plan, 1):
        what = job.measure + (f", {malloc} malloc" if job.measure == "memory" and job.device == "cpu" else "")
        start = time.monotonic()
        try:
            ranks = launch(job, options.timeout, malloc)
        except LaunchError as error:
            failures[f"{job.engine} {what}"] = str(error)
            console.print(str(error), highlight=False, markup=False, style="red")
            continue
        key = f"memory_{malloc}" if job.measure == "memory" else job.measure
        results.setdefault(job.engine, {}).setdefault(key, []).append(ranks)
        passed = f"{time.monotonic() - start:.0f} s"
        line = f"{index}/{len(plan)} {job.engine} {what}: {headline(job, ranks[0])} ({passed})"
        console.print(line, highlight=False, markup=False, style="dim")
    return {engine: summarize(found, options.job) for engine, found in results.items()}, failures


def headline(job: Job, result: dict[str, Any]) -> str:
    """One launch's most wanted number, so that a long run can be followed."""
    if job.measure == "time":
        mine, ddp = result["costs"]["engine"], result["costs"]["ddp"]
        wall, processor = (statistics.median(a / b for a, b in zip(mine[cost], ddp[cost])) for cost in TIMES)
        return f"{wall:.2f} × DDP's time, {processor:.2f} × its processor time"
    if job.measure == "memory":
        return f"{result['steady'] / 2**20:.0f} MiB steady, {result['peak'] / 2**20:.0f} MiB peak"
    return f"{result['calls']:,} Python calls"


def plan_launches(options: Options) -> list[tuple[Job, str]]:
    """Launches in order: rounds over all engines, so that slow minutes of the machine are spread over them."""

    def job(**changes: Any) -> Job:
        return Job(**(asdict(options.job) | changes))

    plan = []
    if "time" in options.measure:
        plan += [
            (job(engine=name, measure="time"), "default") for _ in range(options.rounds) for name in options.engines
        ]
    if "memory" in options.measure:
        mallocs = ("pinned", "default") if options.job.device == "cpu" else ("default",)
        plan += [(job(engine=name, measure="memory"), malloc) for malloc in mallocs for name in options.engines]
    if "calls" in options.measure:
        small = {
            "model": "calls",
            "world_size": 1,
            "batch": 1,
            "sequence": 8,
            "accumulation": 1,
            "dtype": "fp32",
            "clip": 0.0,
        }
        plan += [(job(engine=name, measure="calls", **small), "default") for name in options.engines]
    return plan


def summarize(found: dict[str, list[list[dict[str, Any]]]], job: Job) -> dict[str, Any]:
    """One engine's launches as one row. Of ranks, the largest counts."""
    row: dict[str, Any] = {}
    if "time" in found:
        rounds = found["time"]
        first = rounds[0]
        turns = [(ranks[0]["costs"]["engine"], ranks[0]["costs"]["ddp"]) for ranks in rounds]
        ratios = {cost: [a / b for mine, ddp in turns for a, b in zip(mine[cost], ddp[cost])] for cost in TIMES}
        seconds, faults = (
            statistics.median(value for mine, _ in turns for value in mine[cost]) for cost in ("seconds", "page_faults")
        )
        collectives = first[0]["collectives"]
        row |= {
            "step_seconds": seconds,
            "tokens_per_second": job.world_size * job.batch * job.sequence * job.accumulation / seconds,
            "ratio": statistics.median(ratios["seconds"]),
            "ratios": ratios["seconds"],
            "cpu_ratio": statistics.median(ratios["cpu_seconds"]),
            "page_faults": faults,
            "losses": first[0]["losses"],
            "loss_difference": max(rank["loss_difference"] for ranks in rounds for rank in ranks),
            "sent_bytes": statistics.median(rank["sent"] for ranks in rounds for rank in ranks),
            "sent": statistics.median(rank["sent"] / (4 * rank["numel"]) for ranks in rounds for rank in ranks),
            "collectives": sum(collectives.values()),
            "collectives_by_kind": collectives,
            "start_up_seconds": statistics.median(max(rank["start_up"] for rank in ranks) for ranks in rounds),
            "numel": first[0]["numel"],
        }
    for malloc in MALLOC:
        for ranks in found.get(f"memory_{malloc}", []):
            names = ("baseline", "built", "steady", "peak")
            row[f"memory_{malloc}"] = {name: max(rank[name] for rank in ranks) for name in names}
    for ranks in found.get("calls", []):
        row |= {"python_calls": ranks[0]["calls"], "most_called": ranks[0]["most_called"]}
        row["small_step_milliseconds"] = ranks[0]["milliseconds"]
    return row


def tables(results: dict[str, dict[str, Any]], job: Job) -> list[Table]:
    """What a person reads: time and traffic, then memory, then host work."""
    chosen = {
        "step": [(engine, time_cells(row)) for engine, row in results.items() if "ratio" in row],
        "memory per rank, MiB (÷ DDP)": [(engine, memory_cells(results, engine)) for engine in results],
        "host work: 12-block Llama, one process": [
            (engine, {"Python calls": f"{row['python_calls']:,}", "ms": f"{row['small_step_milliseconds']:.1f}"})
            for engine, row in results.items()
            if "python_calls" in row
        ],
    }
    found = []
    for title, rows in chosen.items():
        columns = list(dict.fromkeys(name for _, cells in rows for name in cells))
        if not columns:
            continue
        if not title.startswith("host"):
            title = f"{title}: {job.model} parameters, {job.dtype}, {job.world_size} ranks"
        table = Table(title=title, title_justify="left")
        table.add_column("engine")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for engine, cells in rows:
            table.add_row(engine, *(cells.get(name, "") for name in columns))
        found.append(table)
    return found


def time_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "step s": f"{row['step_seconds']:.3f}",
        "÷ DDP": f"{row['ratio']:.2f}",
        "min … max": f"{min(row['ratios']):.2f} … {max(row['ratios']):.2f}",
        "CPU ÷ DDP": f"{row['cpu_ratio']:.2f}",
        "faults": f"{row['page_faults']:,.0f}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "loss − DDP's": f"{row['loss_difference']:.1e}" if row["loss_difference"] else "0",
        "sent ÷ 4Ψ": f"{row['sent']:.2f}",
        "collectives": str(row["collectives"]),
        "start-up s": f"{row['start_up_seconds']:.2f}",
    }


def memory_cells(results: dict[str, dict[str, Any]], engine: str) -> dict[str, str]:
    cells = {}
    for malloc in reversed(MALLOC):
        mine, ddp = (results.get(name, {}).get(f"memory_{malloc}") for name in (engine, "ddp"))
        for what in ("steady", "peak") if mine else ():
            share = f" ({mine[what] / ddp[what]:.2f})" if ddp else ""
            cells[f"{what}, {malloc} malloc"] = f"{mine[what] / 2**20:.0f}{share}"
    return cells


def versions() -> dict[str, str]:
    """Of the packages that numbers depend on and that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(job: Job) -> dict[str, Any]:
    """Where and with what the numbers were taken."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "threads_per_rank": threads(job.world_size),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(),
    }


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(BUILDERS),
        default=list(BUILDERS),
        metavar="ENGINE",
        help=f"any of: {', '.join(BUILDERS)}; ddp always runs, as the measure of the others",
    )
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES), help="what to measure")
    parser.add_argument("--model-size", choices=list(SIZES), default="50m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are enough"
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="launches of each engine for the step time")
    parser.add_argument(
        "--blocks",
        type=int,
        default=6,
        help="turns that an engine and DDP take within a launch; an even number gives both the same places",
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0 for no clipping")
    parser.add_argument("--batch", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a launch is given up")
    parser.add_argument("--output", type=Path, help="write the results as JSON to this file")
    parser.add_argument(
        "--offload",
        nargs="*",
        metavar="KIND",
        help="measure offloading instead, with options of its own: --offload --help",
    )
    values = parser.parse_args(arguments)
    for name in ("world_size", "rounds", "blocks", "steps", "accumulation", "batch", "sequence", "timeout"):
        if getattr(values, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(values, name)}")
    if values.clip < 0:
        parser.error(f"--clip must not be negative, got {values.clip}")
    device = values.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= values.world_size else "cpu"
    elif device == "cuda" and torch.cuda.device_count() < values.world_size:
        parser.error(f"--device cuda with --world-size {values.world_size}: {torch.cuda.device_count()} GPUs found")
    engines = ["ddp", *(engine for engine in dict.fromkeys(values.engines) if engine != "ddp")]
    shared = {
        name: getattr(values, name) for name in ("dtype", "world_size", "blocks", "steps", "accumulation", "clip")
    }
    job = Job(
        engine="ddp",
        measure="time",
        model=values.model_size,
        device=device,
        batch=values.batch,
        sequence=values.sequence,
        **shared,
    )
    return Options(
        engines=engines,
        measure=values.measure,
        rounds=values.rounds,
        timeout=values.timeout,
        output=values.output,
        job=job,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    if "--offload" in (sys.argv[1:] if arguments is None else arguments):
        import benchmark_offload

        return benchmark_offload.main(arguments)
    options = parse(arguments)
    console = Console(width=max(140, Console().width))
    skipped = {engine: f"{module} is not installed" for engine in options.engines if (module := missing(engine))}
    for engine, reason in skipped.items():
        console.print(f"{engine}: left out, {reason}", highlight=False)
    chosen = [engine for engine in options.engines if engine not in skipped]
    options = Options(**(vars(options) | {"engines": chosen}))
    here = machine(options.job)
    results, failures = measure(options, console)
    for table in tables(results, options.job):
        console.print(table)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shared = {name: value for name, value in asdict(options.job).items() if name not in ("engine", "measure")}
        record = {"machine": here, "options": shared | {"rounds": options.rounds}, "results": results}
        options.output.write_text(json.dumps(record | {"skipped": skipped, "failures": failures}, indent=1) + "\n")
        console.print(f"written to {options.output}", highlight=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
