"""Compare hf_zero with its peers on one machine: the same GPT-2-class model, the same batches, the same optimizer.

    python benchmarks/compare.py                                 # every engine that is installed, 50M parameters, fp32
    python benchmarks/compare.py --engines zero3 fsdp2 --dtype bf16 --output runs/benchmark.json

Each measurement is a separate launch (`compare_worker.py` explains how each number is taken, and why). Step times are
ratios to DDP, which runs in turn with each engine in the same processes; DDP's own row is such a pair too, so how far
it is from 1 shows the noise. Quote ratios: absolute times differ from machine to machine and from hour to hour.
Offloading has a script of its own, `offload.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import MALLOC, LaunchError, launch, machine
from engines import BUILDERS, SIZES, Job, missing
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("compare_worker.py")
TIMES = ("seconds", "cpu_seconds")
MEASURES = ("time", "memory", "calls")


@dataclass(frozen=True, kw_only=True)
class Options:
    engines: Sequence[str]
    measure: Sequence[str]
    rounds: int
    timeout: float
    output: Path | None
    job: Job
    """Options of every launch."""


def measure(options: Options, console: Console) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run all launches; return results by engine, and failed or skipped ones with the reason."""
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    plan = plan_launches(options)
    for index, (job, malloc) in enumerate(plan, 1):
        what = job.measure + (f", {malloc} malloc" if job.measure == "memory" and job.device == "cpu" else "")
        start = time.monotonic()
        try:
            ranks = launch(job, options.timeout, malloc, worker=WORKER)
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
    """Return one launch's main number, to show progress."""
    if job.measure == "time":
        mine, ddp = result["costs"]["engine"], result["costs"]["ddp"]
        wall, processor = (statistics.median(a / b for a, b in zip(mine[cost], ddp[cost])) for cost in TIMES)
        return f"{wall:.2f} × DDP's time, {processor:.2f} × its processor time"
    if job.measure == "memory":
        return f"{result['steady'] / 2**20:.0f} MiB steady, {result['peak'] / 2**20:.0f} MiB peak"
    return f"{result['calls']:,} Python calls"


def plan_launches(options: Options) -> list[tuple[Job, str]]:
    """Return the launches in order: rounds over all engines, so that slow periods of the machine affect all of them."""

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
    """Summarize one engine's launches as one row, by the largest value of any rank."""
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
    """Return the tables: time and traffic, memory, host work."""
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
    options = parse(arguments)
    console = Console(width=max(140, Console().width))
    skipped = {engine: f"{module} is not installed" for engine in options.engines if (module := missing(engine))}
    for engine, reason in skipped.items():
        console.print(f"{engine}: left out, {reason}", highlight=False)
    chosen = [engine for engine in options.engines if engine not in skipped]
    options = Options(**(vars(options) | {"engines": chosen}))
    here = machine(options.job.world_size)
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
