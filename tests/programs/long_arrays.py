"""Parameters longer than what offloaded steps move, cast and update at a time: several blocks and slabs, the last one short."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models import token_loss
from tests.oracle import Run, program
from tests.programs.accessors import full_gradient, full_optimizer_state, set_full_optimizer_state

ROWS, WIDTH = 2501, 1000
"""A table of more elements than two slabs of one rank, and than one slab of each of two."""
PLACES = {
    "ranks": (1, 2),
    "stage": (2, 3),
    "tier": ("cpu", "disk", "disk/disk"),
    "precision": ("fp32", "bf16", "fp16"),
    "replicas": (1,),
    "kept": (False,),
    "deferred": (False,),
}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@program(
    only=PLACES,
    loose=20.0,
    accept=lambda setting: setting.ranks == 1 or setting.stage == 3 or setting.tier != "disk/disk",
)
def table(run: Run) -> None:
    """Skipped, clipped, kept over a step, read and written."""
    model = run.build(Table)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model = run.shard(model, optimizer)
    weight = model.head.weight
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    targets = torch.arange(4) * 600
    for step in range(4):
        with run.no_sync(model):
            scaler.scale(token_loss(model(run.inputs(step, 4, WIDTH)), targets + step)).backward()
        loss = token_loss(model(run.inputs(step + 9, 4, WIDTH)), targets + 5 + step)
        scaler.scale(loss * (float("inf") if step == 1 and run.rank == run.world - 1 else 1.0)).backward()
        if step != 2:
            scaler.unscale_(optimizer)
            run.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step == 2:  # the gradient is kept, and added to once the scale is known to be the same
            run.see(full_gradient(run, weight)[::97, ::97], "some of the gradient")
        optimizer.zero_grad()
        run.see(scaler.get_scale(), "the scale")
        run.see(loss, "loss")
    moments = full_optimizer_state(run, weight, "exp_avg_sq")
    run.see(moments[::97, ::97], "some of a state")
    set_full_optimizer_state(run, weight, "exp_avg_sq", moments * 4.0)
