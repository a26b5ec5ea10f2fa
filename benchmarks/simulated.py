"""Compare the step times of `hf-zero simulate` with real steps on this machine.

    python benchmarks/simulated.py --output simulated.json

Each model and number of ranks is one launch, in which these take turns on all ranks: the plain model's passes and its
optimizer's step without communication; the engine's steps of each stage; before and after, messages of several sizes. All but
the engine's steps make a machine file for `hf-zero simulate --machine FILE`. Nothing is fitted to the engine's steps.

`device_bandwidth` is what the plain optimizer's step reads and writes per second. `flops` makes the plain passes take their
measured time. Each rank has one thread. CPU ranks copy messages themselves, so a simulated step is the sum of computation and
communication. It leaves out Python between operations, fresh memory, and late ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import free_port, machine
from engines import SIZES, build_model

import hf_zero as zero
from hf_zero.cli.simulate import Record
from hf_zero.comm.group_wire import open_wire
from hf_zero.plan.machine import Machine, fitted, measure
from hf_zero.plan.timeline import Computed

WARM_UP = 4


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """Return the maximum over all ranks."""
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class Steps:
    """A plain or sharded model and its optimizer."""

    def __init__(self, size: str, stage: int | None, batch: int, sequence: int) -> None:
        self.model = build_model(size, sequence)
        self.ids = torch.randint(self.model.config.vocab_size, (batch, sequence))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if stage is not None:
            zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=stage))

    def passes(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> None:
        self.passes()
        self.update()

    def counted(self) -> dict[str, tuple[int, int]]:
        """Return (flops, bytes) of the passes and of the update."""
        found = {}
        for part in (self.passes, self.update):
            with Record() as record:
                part()
            work = [event for event in record.events if isinstance(event, Computed)]
            found[part.__name__] = sum(each.flops for each in work), sum(each.bytes for each in work)
        return found


def work(rank: int, world: int, port: int, options: dict[str, Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    shape = options["batch"], options["sequence"]
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    wire = open_wire(torch.device("cpu"))
    wire.start(stall_s=0)
    plain = Steps(options["model"], None, *shape)
    engines = {stage: Steps(options["model"], stage, *shape) for stage in options["stages"]}
    for each in (plain, *engines.values()):
        for _ in range(WARM_UP):
            each.whole()
    counted = plain.counted()
    speeds = [measure(wire.device if world > 1 else torch.device("cpu"), wire)]
    seconds: dict[str, list[float]] = {name: [] for name in ("passes", "update", *map(str, engines))}
    order: list[int | None] = [None, *engines]
    for _ in range(options["blocks"]):
        for stage in order:
            for step in range(1 + options["steps"]):  # the first step of a turn has cold caches
                together()
                if stage is None:
                    passes = slowest(timed(plain.passes))
                    together()
                    taken = {"passes": passes, "update": slowest(timed(plain.update))}
                else:
                    taken = {str(stage): slowest(timed(engines[stage].whole))}
                for name, value in taken.items() if step else ():
                    seconds[name].append(value)
        order.reverse()
    speeds.append(measure(wire.device if world > 1 else torch.device("cpu"), wire))
    if rank == 0:
        found = [None if each is None else asdict(each) for each in speeds]
        pipe.send({"counted": counted, "seconds": seconds, "wire": found})
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def launch(world: int, **options: Any) -> dict[str, Any]:
    """Start one process per rank; return the results of rank 0."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a second thread would wait whenever another program has its processor
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(target=work, args=(rank, world, port, options, there), daemon=True) for rank in range(world)
    ]
    for each in ranks:
        each.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        raise SystemExit(f"{world} ranks, {options}: a rank ended without a result") from None
    for each in ranks:
        each.join()
    return found


def machine_of(found: dict[str, Any], world: int) -> Machine:
    """Return one rank's share of the machine, from the measurements without the engine."""
    flops, bytes_ = found["counted"]["passes"]
    bandwidth = found["counted"]["update"][1] / statistics.median(found["seconds"]["update"])
    products_s = statistics.median(found["seconds"]["passes"]) - bytes_ / bandwidth
    if products_s <= 0:
        raise SystemExit(f"{world} ranks: the passes' bytes alone would take longer than the passes; measure again")
    machine = Machine(shares_memory=True, device_bandwidth=bandwidth, flops={"float32": flops / products_s})
    if world == 1:
        return machine
    latency_s, rate = fitted([tuple(point) for speed in found["wire"] for point in speed["points"]])
    values = machine.to_dict() | {
        "latency": latency_s / (world - 1),
        "collective": rate,
        "all_reduce": statistics.mean(speed["all_reduce"] for speed in found["wire"]),
    }
    return Machine.of(values, "measured")


def simulated(size: str, stage: int, world: int, given: Machine, batch: int, sequence: int) -> dict[str, Any]:
    """Return the output of `hf-zero simulate`."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(size, sequence)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        path = Path(folder, "machine.json")
        path.write_text(json.dumps(given.to_dict()))
        command = [sys.executable, "-m", "hf_zero", "simulate", folder, "--json", "--machine", str(path)]
        options = {"zero-stage": stage, "world-size": world, "batch": batch, "sequence": sequence}
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return {name: value for name, value in found.items() if name != "operations"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["7m", "50m"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--batch", type=int, default=2, help="rows of a rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row")
    parser.add_argument("--blocks", type=int, default=4, help="turns that each takes; an even number is fair")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    parser.add_argument("--output", type=Path, help="JSON")
    given = parser.parse_args()
    shape = {"batch": given.batch, "sequence": given.sequence}
    cores = len(os.sched_getaffinity(0))
    about, launches = machine(1) | {"threads_per_rank": 1}, []
    for size in given.models:
        for world in given.ranks:
            started = time.monotonic()
            found = launch(world, model=size, stages=given.stages, blocks=given.blocks, steps=given.steps, **shape)
            hardware = machine_of(found, world)
            print(
                f"{size}, {world} ranks{f' on {cores} cores' if world > cores else ''} ({time.monotonic() - started:.0f} s): "
                f"{hardware.flops['float32'] / 1e9:.1f} GFLOP/s, {(hardware.device_bandwidth or 0) / 1e9:.2f} GB/s; "
                f"messages {(hardware.latency or 0) * 1e6:.0f} us, {(hardware.collective or 0) / 1e9:.2f} GB/s",
                flush=True,
            )
            rows = []
            for stage in given.stages:
                said = simulated(size, stage, world, hardware, **shape)
                real = found["seconds"][str(stage)]
                row = {
                    "stage": stage,
                    "real_s": statistics.median(real),
                    "simulated_s": said["total_s"],
                    "ratio": said["total_s"] / statistics.median(real),
                    "simulated": said,
                }
                rows.append(row)
                print(
                    f"  stage {stage}: real {row['real_s'] * 1e3:.1f} ms ({min(real) * 1e3:.1f} to {max(real) * 1e3:.1f}), "
                    f"simulated {said['total_s'] * 1e3:.1f} (computing {said['compute_s'] * 1e3:.1f}, communication "
                    f"{said['communication_s'] * 1e3:.1f}): {row['ratio']:.2f}",
                    flush=True,
                )
            about_it = {"model": size, "ranks": world, "oversubscribed": world > cores, "load": os.getloadavg()[0]}
            launches.append(about_it | {"hardware": hardware.to_dict(), "measured": found, "steps": rows})
    if given.output:
        options = {name: value for name, value in vars(given).items() if name != "output"}
        given.output.write_text(
            json.dumps({"machine": about, "options": options, "launches": launches}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
