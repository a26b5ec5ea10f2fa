"""Measure growth with blocks and ranks: seconds, Python calls and memory of shard, a step, save, load, and a plan.

    python benchmarks/growth.py --output growth.json --plot growth.png

One process for each row. Ranks beyond `--real-ranks` are absent: rank 0's own work is measured, nothing is sent. The exponent
in the last column of the table is the slope of log(cost) over log(size) between the last two rows: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import free_port, machine
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.recorded import absent_ranks
from hf_zero.tiers.tier import Tier

PHASES = ("shard", "first step", "step", "save", "load", "state_dict", "plan")


class Block(nn.Module):
    """LayerNorm, and an MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Blocks(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def measured(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def calls_of(call: Callable[[], Any]) -> int:
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def row(blocks: int, width: int, stage: int, ranks: int, *, saves: bool) -> dict[str, Any]:
    """Measure this rank, over the open process group. A collective."""
    from hf_zero.core.precision import Precision
    from hf_zero.plan.machine import Machine
    from hf_zero.plan.plan import Drafter, plan
    from hf_zero.plan.solve import PlanInputs

    torch.manual_seed(0)
    config = zero.ZeroConfig(stage=stage)
    warm = Blocks(2, width)
    zero.shard(warm, torch.optim.AdamW(warm.parameters()), config)  # what is loaded and compiled on the way
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Blocks(blocks, width)
    seconds: dict[str, float] = {}

    def draft() -> Any:
        precision = Precision.of("no", None)
        drafter = Drafter(model, precision)
        layout = drafter.layout(drafter.specs(dict.fromkeys(drafter.names, 0)), config.shards(ranks))
        return plan(PlanInputs(layout, Machine(), config, ranks, precision))

    _, seconds["plan"] = measured(draft)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, seconds["shard"] = measured(lambda: zero.shard(model, optimizer, config))
    batch = torch.ones(1, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    _, seconds["first step"] = measured(step)
    step()
    seconds["step"] = min(measured(step)[1] for _ in range(3))
    calls = calls_of(step)
    _, seconds["state_dict"] = measured(model.state_dict)
    if saves:
        with tempfile.TemporaryDirectory() as folder:
            names = [folder]
            if dist.is_initialized():
                dist.broadcast_object_list(names)
            _, seconds["save"] = measured(lambda: engine.save(Path(names[0]) / "checkpoint"))
            _, seconds["load"] = measured(lambda: engine.load(Path(names[0]) / "checkpoint"))
            if dist.is_initialized():
                dist.barrier()
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {
        "blocks": blocks,
        "ranks": ranks,
        "parameters": sum(math.prod(param.shape) for param in model.parameters()),
        "seconds": seconds,
        "calls_per_step": calls,
        "resident_bytes": taken,
        "planned_peak_bytes": engine.plan.memory.at_peak(Tier.DEVICE),
    }


@contextmanager
def real_ranks(rank: int, world: int, port: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(rank: int, world: int, port: int, options: dict[str, Any], absent: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    with absent_ranks(world) if absent else real_ranks(rank, world, port):
        found = row(**options, ranks=world, saves=not absent)
    if rank == 0:
        pipe.send(found)


def measure(world: int, absent: bool, **options: Any) -> dict[str, Any]:
    """Rank 0's row; every rank is a process of its own that has run nothing before."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    port = free_port()
    processes = [
        context.Process(target=work, args=(rank, world, port, options, absent, there), daemon=True)
        for rank in range(1 if absent else world)
    ]
    for process in processes:
        process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        raise SystemExit(f"{world} ranks, {options}: a rank ended without a result") from None
    for process in processes:
        process.join()
    return found


def exponent(rows: Sequence[dict[str, Any]], size: str, cost: Callable[[dict[str, Any]], float]) -> float:
    before, last = rows[-2:]
    return math.log(cost(last) / cost(before)) / math.log(last[size] / before[size])


def show(title: str, rows: Sequence[dict[str, Any]], size: str) -> dict[str, float]:
    """Print a table and return the exponents."""
    print(f"\n{title}\n{'':>12}" + "".join(f"{each[size]:>12,}" for each in rows) + f"{'exponent':>12}")
    found: dict[str, float] = {}
    costs: dict[str, Callable[[dict[str, Any]], float]] = {
        f"{phase}, s": lambda each, phase=phase: each["seconds"][phase]  # type: ignore[misc]
        for phase in PHASES
        if phase in rows[0]["seconds"]
    }
    costs |= {"calls": lambda each: each["calls_per_step"], "MB": lambda each: max(1, each["resident_bytes"]) / 1e6}
    for name, cost in costs.items():
        found[name] = exponent(rows, size, cost)
        cells = "".join(f"{cost(each):>12,.3f}" if name != "calls" else f"{cost(each):>12,.0f}" for each in rows)
        print(f"{name:>12}{cells}{found[name]:>12.2f}")
    return found


def draw(parts: dict[str, tuple[str, Sequence[dict[str, Any]]]], path: str) -> None:
    """Seconds over size, both logarithmic, one panel for each series."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("a picture needs matplotlib: pip install 'hf-zero[plot]'") from error
    figure = Figure(figsize=(5 * len(parts), 4.5), layout="constrained")
    for axes, (title, (size, rows)) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items()):
        for phase in rows[0]["seconds"]:
            axes.loglog(
                [each[size] for each in rows],
                [each["seconds"][phase] for each in rows],
                "o-",
                markersize=3,
                label=phase,
            )
        axes.set(title=title, xlabel=size, ylabel="seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--real-ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--absent-ranks", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--rank-blocks", type=int, default=20, help="blocks of the rows over ranks")
    parser.add_argument("--output", help="JSON")
    parser.add_argument("--plot", help="PNG")
    given = parser.parse_args()
    common = {"width": given.width, "stage": given.stage}
    parts = {
        "blocks, one rank": (
            "blocks",
            [measure(1, False, blocks=blocks, **common) for blocks in given.blocks],
        ),
        "real ranks": (
            "ranks",
            [measure(ranks, False, blocks=given.rank_blocks, **common) for ranks in given.real_ranks],
        ),
        "absent ranks": (
            "ranks",
            [measure(ranks, True, blocks=given.rank_blocks, **common) for ranks in given.absent_ranks],
        ),
    }
    parts = {title: (size, rows) for title, (size, rows) in parts.items() if len(rows) > 1}
    exponents = {title: show(title, rows, size) for title, (size, rows) in parts.items()}
    if given.plot:
        draw(parts, given.plot)
    if given.output:
        found = {
            "options": {name: value for name, value in vars(given).items() if name not in ("output", "plot")},
            "exponents": exponents,
            "rows": {title: rows for title, (_, rows) in parts.items()},
        }
        Path(given.output).write_text(json.dumps({"machine": machine(1)} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
