"""Time the step of `torch.optim.Muon`, in a list with AdamW, on several ranks against one rank.

    python benchmarks/muon.py                                  # 8 blocks of width 512, stage 3, 1 and 2 ranks
    python benchmarks/muon.py --ranks 1 2 4 --stage 2 --output runs/muon.json

Ranks have as many threads each at every number of ranks (`--threads`), so that one rank is not given the others' cores.
A step's time is that of the slowest rank, from a barrier on; launches of the numbers of ranks take turns, and the median over
all steps counts. At stage 3 a step does not communicate; at stages 1 and 2 the gather of the new matrices is a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import free_port, machine

SHAPES = ((3, 1), (1, 1), (4, 1), (1, 4))  # of a block's matrices, in widths: qkv, out, up, down


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="the first is what the others are compared with"
    )
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6, help="timed ones of a launch, after two others")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each number of ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def launch(options: argparse.Namespace, world_size: int) -> list[dict[str, list[float]]]:
    """Each rank's seconds of every timed step, by optimizer; ranks in order."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(options.threads),
        "_RANK_OF": "muon",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]], env=os.environ | shared | {"RANK": str(rank)}, stdout=-1
        )
        for rank in range(world_size)
    ]
    try:
        found = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {world_size} ended with exit status {[rank.returncode for rank in ranks]}")
    return [json.loads(out.splitlines()[-1]) for out in found]


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import hf_zero as zero

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = options.width

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.matrices = torch.nn.ModuleList(torch.nn.Linear(b * width, a * width) for a, b in SHAPES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv, out, up, down = self.matrices
            x = x + out(qkv(self.norm(x))[..., :width])
            return x + down(torch.relu(up(x)))

    model = torch.nn.Sequential(*(Block() for _ in range(options.blocks)))
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    optimizers = {"Muon": torch.optim.Muon(matrices, lr=1e-3), "AdamW": torch.optim.AdamW(rest, lr=1e-3)}
    zero.shard(model, [*optimizers.values()], zero.ZeroConfig(stage=options.stage))
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for step in range(options.steps + 2):
        model(torch.randn(4, width)).square().mean().backward()
        for name, optimizer in optimizers.items():
            dist.barrier()
            started = time.perf_counter()
            optimizer.step()
            if step > 1:
                times[name].append(time.perf_counter() - started)
            optimizer.zero_grad()
    dist.destroy_process_group()
    print(json.dumps(times))


def main() -> None:
    options = parse()
    if os.environ.get("_RANK_OF") == "muon":
        run_rank(options)
        return
    about = machine(max(options.ranks)) | {"threads_per_rank": options.threads}
    seconds: dict[int, dict[str, list[float]]] = {world: {"Muon": [], "AdamW": []} for world in options.ranks}
    for _ in range(options.rounds):
        for world in options.ranks:
            everyone = launch(options, world)
            for name, found in seconds[world].items():
                found += [max(step) for step in zip(*(rank[name] for rank in everyone))]
    medians = {
        world: {name: statistics.median(found) for name, found in times.items()} for world, times in seconds.items()
    }
    first = options.ranks[0]
    print(f"{'ranks':>5}  {'Muon, s':>9}  {'x':>5}  {'AdamW, s':>9}")
    for world, times in medians.items():
        print(
            f"{world:>5}  {times['Muon']:>9.4f}  {times['Muon'] / medians[first]['Muon']:>5.2f}  {times['AdamW']:>9.4f}"
        )
    if options.output is not None:
        settings: dict[str, Any] = {key: value for key, value in vars(options).items() if key != "output"}
        body = {"machine": about, "settings": settings, "median_s": medians, "seconds": seconds}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
