"""A plain program under `torchrun --max-restarts`: `elastic_plain.py OUT [KILL_STEP [PACE_S]]`. It resumes by itself.

Six rows in a step, split as evenly as the ranks allow. Each rank notes which rows it takes, before the step:
`OUT/rows.<world>.<rank>.jsonl`. In the first attempt rank 1 is killed before step KILL_STEP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hf_zero as zero

ROWS, TAKEN, STEPS = 24, 6, 12


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(out: Path, kill_step: int, pace_s: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    rank, world, progress = engine.rank, engine.world_size, Progress()
    objects = {"progress": progress, "scheduler": scheduler}
    start = zero.latest_checkpoint(out)
    if start is not None:
        engine.load(start, objects=objects)
    data = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    while progress.step < STEPS:
        if progress.step == kill_step and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        epoch, at = divmod(progress.step * TAKEN, ROWS)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
        rows = order[at : at + TAKEN][rank::world]
        with (out / f"rows.{world}.{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "step": progress.step, "rows": rows}) + "\n")
        loss = cross_entropy(model(data[rows]), torch.tensor(rows) % 4)
        engine.weigh(loss, len(rows)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 2 == 0:
            engine.save(out / f"checkpoint-{progress.step}", objects=objects)
            zero.prune_checkpoints(out, keep=2)
        time.sleep(pace_s)
    engine.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    words = [*sys.argv[2:], "-1", "0"]
    main(Path(sys.argv[1]), int(words[0]), float(words[1]) if len(sys.argv) > 3 else 0.0)
