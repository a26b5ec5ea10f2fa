"""Measure offloading: the step over host memory and disk against what the hardware gives, and training steps.

    python benchmarks/offload.py                                    # all kinds; those that cannot run here are listed
    python benchmarks/offload.py --kinds step-disk --folder /data/scratch --output runs/offload.json

`offload_worker.py` says how each number is taken. Quote the ratios: they are medians over turns next to each
other; absolute figures differ from machine to machine and from hour to hour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import LaunchError, launch, machine
from engines import SIZES
from offload_worker import LLAMAS, OffloadJob, available_bytes
from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("offload_worker.py")
GPU_MARGIN_BYTES = 12 << 30
"""Device memory for activations and libraries."""


@dataclass(frozen=True)
class Options:
    kinds: Sequence[str]
    peers: bool
    dtypes: Sequence[str]
    ranks: Sequence[int]
    steps: int
    numel: int
    model: str
    gpu_model: str | None
    folder: str | None
    timeout: float
    output: Path | None

    def job(self, kind: str, case: str, config: dict[str, Any], **changes: Any) -> OffloadJob:
        return OffloadJob(
            measure=kind, engine=case, config=config, steps=self.steps, clip=0.0, numel=self.numel, folder=self.folder
        ).but(**changes)


Cases = Iterator[OffloadJob | str]
"""Launches, and lines about those that cannot be made here."""


def _why_not_deepspeed(options: Options) -> str | None:
    if not options.peers:
        return "--no-peers"
    return None if find_spec("deepspeed") else "it is not installed (make peers)"


def _step_host(options: Options) -> Cases:
    places = {"in place": ("cpu", 3), "to the device": ("none", 2)}
    for ranks in options.ranks:
        for dtype in options.dtypes:
            for place, (params, stage) in places.items():
                config = {"stage": stage, "offload_optimizer": "cpu", "offload_params": params}
                yield options.job("step-host", f"parameters {place}", config, dtype=dtype, world_size=ranks)


def _step_disk(options: Options) -> Cases:
    config = {"stage": 2, "offload_optimizer": "disk", "offload_params": "none"}
    for ranks in options.ranks:
        yield options.job("step-disk", "hf_zero", config, world_size=ranks)
    if reason := _why_not_deepspeed(options):
        yield f"step-disk: DeepSpeed left out, {reason}"
    else:  # on one rank: on two it trains to other numbers
        yield options.job("step-disk", "against deepspeed", config, world_size=1)


def _train(options: Options) -> Cases:
    cases: dict[str, dict[str, Any]] = {
        "optimizer on cpu": {"stage": 2, "offload_optimizer": "cpu"},
        "optimizer on cpu, in backward": {"stage": 2, "offload_optimizer": "cpu", "step_in_backward": True},
        "all on cpu": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
        "optimizer on disk": {"stage": 2, "offload_optimizer": "disk"},
        "all on disk": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    }
    for dtype in options.dtypes:
        for case, config in cases.items():
            changes: dict[str, Any] = {"dtype": dtype, "model": options.model, "world_size": max(options.ranks)}
            yield options.job("train", f"hf_zero {case}", config, **changes)


def _gpu(options: Options) -> Cases:
    if not torch.cuda.is_available():
        yield "gpu: left out, there is no CUDA device"
        return
    free, host = torch.cuda.mem_get_info()[0] - GPU_MARGIN_BYTES, available_bytes()

    def largest(device_each: float, host_each: float) -> str | None:
        fitting = [
            size for size, numel in LLAMA_NUMEL.items() if numel * device_each < free and numel * host_each < host
        ]
        return options.gpu_model or (fitting[-1] if fitting else None)

    shared: dict[str, Any] = {"dtype": "bf16", "world_size": 1, "device": "cuda", "sequence": 2048, "accumulation": 4}
    on_host = {"stage": 2, "offload_optimizer": "cpu"}
    # Bytes per parameter: on the device 4 while the model is made and 2 + 4 as it is sharded; 18 with nothing offloaded.
    alone, peers = largest(18, 18), largest(8, 20)
    if alone is None or peers is None:
        yield f"gpu: left out, {free >> 30} GiB of device and {host >> 30} GiB of host memory hold no model of {list(LLAMAS)}"
        return
    cases: dict[str, dict[str, Any]] = {"hf_zero in memory": {"stage": 2}, "hf_zero optimizer on cpu": on_host}
    for case, config in cases.items():
        yield options.job("gpu", f"{case}, 8k tokens", config, model=alone, batch=4, **shared)
    yield options.job("gpu", "hf_zero optimizer on cpu", on_host, model=peers, batch=1, **shared)
    in_backward = {**on_host, "step_in_backward": True}
    yield options.job("gpu", "hf_zero optimizer on cpu, in backward", in_backward, model=peers, batch=1, **shared)
    if options.peers:
        yield options.job("gpu", "fsdp2 on cpu", {}, model=peers, batch=1, **shared)
    if reason := _why_not_deepspeed(options):
        yield f"gpu: DeepSpeed left out, {reason}"
    else:
        yield options.job("gpu", "deepspeed on cpu", {}, model=peers, batch=1, **shared)


LLAMA_NUMEL = {"tiny": 5e6, "1b": 1.35e9, "3b": 3.43e9, "7b": 6.74e9}


KINDS: dict[str, Callable[[Options], Cases]] = {
    "step-host": _step_host,
    "step-disk": _step_disk,
    "train": _train,
    "gpu": _gpu,
}

PEERS = ("step-disk", "gpu")
"""Kinds in which others than hf_zero run; what does not run here of theirs is left out."""
TITLES = {
    "step-host": "optimizer step over host memory, AdamW, one thread per rank: share of the speed of",
    "step-disk": "optimizer step over the disk, AdamW, one thread per rank: share of the speed of",
    "train": "training steps on the CPU, optimizer step included: share of the speed of",
    "gpu": "training steps on one GPU, 4 micro-batches of 2k tokens or 8k",
}


def summarize(job: OffloadJob, result: dict[str, Any]) -> dict[str, Any]:
    """One case as one row. Every rank has the same figures: the slowest rank's."""
    seconds, nbytes = result["seconds"], result["bytes"]
    row: dict[str, Any] = {
        "case": job.engine,
        "dtype": job.dtype,
        "world_size": job.world_size,
        "config": dict(job.config),
        "numel": result["numel"],
        "seconds": statistics.median(seconds["step"]),
        "first_seconds": result["first_seconds"]["step"],
    }
    if nbytes["step"]:
        row["bytes"] = nbytes["step"]
        row["gb_per_second"] = nbytes["step"] / row["seconds"] / 1e9
    row["ratios"] = {
        name: [other / mine * nbytes["step"] / nbytes[name] if nbytes[name] else other / mine for mine, other in pairs]
        for name, others in seconds.items()
        if name != "step" and (pairs := list(zip(seconds["step"], others)))
    }
    if job.measure in ("train", "gpu"):
        row["tokens_per_second"] = job.world_size * job.batch * job.sequence * job.accumulation / row["seconds"]
        row["model"] = job.model
    known = ("loss_difference", "losses", "host_bytes", "device_bytes", "direct", "storage_bytes")
    return row | {name: result[name] for name in known if name in result}


def table(kind: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Shares are medians of turns next to each other, with the lowest and the highest."""
    out = Table(title=TITLES[kind], title_justify="left")
    cells = [_cells(row) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    for name in columns:
        out.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in cells:
        out.add_row(*(row.get(name, "") for name in columns))
    return out


def _cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {
        "case": row["case"],
        "dtype": row["dtype"],
        "ranks": str(row["world_size"]),
        "M elements": f"{row['numel'] / 1e6:,.1f}",
        "s": f"{row['seconds']:.3f}",
        "first s": f"{row['first_seconds']:.3f}",
    }
    if "gb_per_second" in row:
        cells["GB/s"] = f"{row['gb_per_second']:.2f}"
    if "tokens_per_second" in row:
        cells["tokens/s"] = f"{row['tokens_per_second']:,.0f}"
    for name, ratios in row["ratios"].items():
        cells[name] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    if "loss_difference" in row:
        cells["loss difference"] = f"{row['loss_difference']:.1e}" if row["loss_difference"] else "0"
    if "host_bytes" in row:
        cells["host B/parameter"] = f"{row['host_bytes'] / row['numel']:.1f}"
        cells["device GiB"] = f"{row['device_bytes'] / 2**30:.1f}"
    return cells


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        metavar="KIND",
        help=f"any of: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the others that are installed, too; DeepSpeed compiles for minutes in its first launch",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="of step-host and train"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 2], help="of step-host and step-disk; train: the most"
    )
    parser.add_argument("--steps", type=int, default=9, help="timed turns of each subject")
    parser.add_argument(
        "--numel", type=int, default=1 << 26, help="elements of state per rank of step-host and step-disk"
    )
    parser.add_argument("--model-size", choices=list(SIZES), default="50m", help="of train")
    parser.add_argument("--gpu-model", choices=list(LLAMAS), help="of gpu; without: the largest that fits")
    parser.add_argument("--folder", help="on the disk to be measured; without: a temporary one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a launch is given up")
    parser.add_argument("--output", type=Path, help="write the results as JSON to this file")
    values = parser.parse_args(arguments)
    for name, least in {
        "steps": values.steps,
        "numel": values.numel,
        "timeout": values.timeout,
        "ranks": min(values.ranks),
    }.items():
        if least <= 0:
            parser.error(f"--{name} must be positive, got {least}")
    return Options(
        kinds=values.kinds,
        peers=values.peers,
        dtypes=values.dtype,
        ranks=values.ranks,
        steps=values.steps,
        numel=values.numel,
        model=values.model_size,
        gpu_model=values.gpu_model,
        folder=values.folder,
        timeout=values.timeout,
        output=values.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=max(180, Console().width))

    def tell(line: str, style: str = "dim") -> None:
        console.print(line, highlight=False, markup=False, style=style)

    here = machine(max(options.ranks))
    results: dict[str, list[dict[str, Any]]] = {}
    skipped: list[str] = []
    failures: dict[str, str] = {}
    for kind in options.kinds:
        for job in KINDS[kind](options):
            if isinstance(job, str):
                skipped.append(job)
                tell(job, "yellow")
                continue
            name = f"{kind}, {job.engine}, {job.dtype}, {job.world_size} ranks"
            try:
                result = launch_in(job, options)
            except LaunchError as error:
                if job.engine.startswith("hf_zero") or kind not in PEERS:
                    failures[name] = str(error)
                    tell(f"{name}: {error}", "red")
                else:
                    skipped.append(f"{name}: left out, {str(error).splitlines()[-1]}")
                    tell(skipped[-1], "yellow")
                continue
            results.setdefault(kind, []).append(summarize(job, result))
            tell(f"{name}: {results[kind][-1]['seconds']:.3f} s")
    for kind, rows in results.items():
        console.print(table(kind, rows))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shared = {name: value for name, value in asdict(options).items() if name not in ("folder", "output")}
        record = {"machine": here, "options": shared, "results": results, "skipped": skipped, "failures": failures}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
        tell(f"written to {options.output}", "")
    return 1 if failures else 0


def launch_in(job: OffloadJob, options: Options) -> dict[str, Any]:
    """Rank 0's result of one launch, with a folder for the disk tier that is gone afterwards."""
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": "1"} if job.measure.startswith("step") else {}
    with tempfile.TemporaryDirectory(prefix="benchmark-offload-", dir=options.folder) as folder:
        ranks = launch(job.but(folder=os.path.abspath(folder)), options.timeout, worker=WORKER, environment=threads)
    return ranks[0]


if __name__ == "__main__":
    sys.exit(main())
