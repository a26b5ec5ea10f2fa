"""One host of `tests/regressions/test_cut_link.py`: ranks that train until they are told that the link was cut.

`python cut_link_job.py <out> <host> <address> <first port> <stall_s> <limit_s> <case>…`. Each case is a world of its own. All
run at the same time, forked from a process that has imported everything. A rank is paused at the place that its case names. Its
output is in `<out>/<case>/rank<r>.txt`, its exit code in `rank<r>.json`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero

STEPS, SAVED, WIDTH, BLOCKS = 8, 3, 48, 4


class Pause:
    """Holds a rank at one place, once, until the test has done something to the link."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.is_over = folder, False
        self._until = time.monotonic() + limit_s

    def __call__(self, *_: object) -> None:
        if self.is_over:
            return
        self.is_over = True
        (self.folder / f"at.{os.environ['RANK']}").write_text(str(os.getpid()))
        while not (self.folder.parent / "go").exists() and time.monotonic() < self._until:
            time.sleep(0.01)


class Pausing:
    """An object in a checkpoint."""

    def __init__(self, pause: Any) -> None:
        self._pause = pause

    def state_dict(self) -> dict[str, int]:
        self._pause()
        return {"of": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._pause()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def expected(rank: int) -> list[Tensor]:
    """DDP's parameters after all steps."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        model(rows(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def settings(case: str, stall_s: float) -> zero.ZeroConfig:
    name, _, tier = case.partition("-")
    stage = int(name[-1]) if name[-1].isdigit() else 3
    tiers = {"host": ("cpu", "none"), "both": ("cpu", "cpu")}
    optimizer, params = tiers.get(tier, ("none", "none"))
    return zero.ZeroConfig(stage=stage, stall_s=stall_s, offload_optimizer=optimizer, offload_params=params)


def train(case: str, folder: Path, stall_s: float, limit_s: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pause = Pause(folder, limit_s)
    where = case.partition("-")[0].rstrip("0123456789")
    if where == "init":
        with zero.Init(stall_s=stall_s):
            model = network()
            pause()
    else:
        model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zero.shard(model, optimizer, settings(case, stall_s))
    hooks: list[Any] = []
    first = 0
    if where == "resumed":
        engine.load(folder / "checkpoint-3")
        first = SAVED
    for step in range(first, STEPS):
        if step == SAVED + 1:
            if where == "forward":
                model[2].register_forward_pre_hook(pause)
            elif where == "backward":
                model[2].register_forward_pre_hook(lambda _, args: hooks.append(args[0].register_hook(pause)))
            elif where == "step":
                optimizer.register_step_pre_hook(pause)
            elif where == "evaluation":
                model[2].register_forward_pre_hook(pause)
                with torch.no_grad():
                    model(rows(0, rank))
            elif where in ("saving", "behind"):
                if rank:
                    (folder / f"at.{rank}").touch()
                objects = {"pausing": Pausing(pause if rank == 0 else lambda: None)}
                engine.save(folder / "checkpoint-4", objects=objects, async_save=where == "behind")
            elif where == "loading":
                pause()
                engine.load(folder / "checkpoint-3")
        model(rows(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED - 1 and where != "resumed":
            engine.save(folder / "checkpoint-3")
    with zero.GatheredParameters(model):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    for mine, theirs in zip(found, expected(rank)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    print("as DDP", flush=True)


def main() -> None:
    out, host, address, port, stall_s, limit_s, *cases = sys.argv[1:]
    ranks = {}
    gc.freeze()  # what is imported stays: at its end each rank would look at all of it
    for number, case in enumerate(cases):
        each = 2 if case.startswith("four") else 1
        for local in range(each):
            rank = int(host) * each + local
            folder = Path(out) / case.removeprefix("four_")
            folder.mkdir(parents=True, exist_ok=True)
            child = os.fork()
            if child == 0:
                file = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, 1)
                os.dup2(file, 2)
                world = {"MASTER_ADDR": address, "MASTER_PORT": str(int(port) + number)}
                os.environ.update(world, RANK=str(rank), WORLD_SIZE=str(2 * each), LOCAL_RANK=str(local))
                signal.alarm(int(float(limit_s)))
                train(case.removeprefix("four_"), folder, float(stall_s), float(limit_s))
                return  # to the end of the interpreter, as any program
            ranks[child] = folder / f"rank{rank}.json"
    while ranks:
        child, status = os.wait()
        ranks.pop(child).write_text(json.dumps({"code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
