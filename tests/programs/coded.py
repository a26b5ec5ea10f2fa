"""Gradients and matrices that travel as codes: training goes on as it would, on every rank alike."""

from __future__ import annotations

from functools import partial

import torch

from tests.models import LanguageModel, Odd, mlp, sgd, token_loss
from tests.oracle import Run, program
from tests.programs.accessors import full_parameter

CODED = {"wire": ("int8",), "stage": (1, 2, 3), "kept": (False,)}


def _learns(run: Run, **config: object) -> None:
    """Accumulated and clipped, scaled; one rank's gradient overflows once, and no rank makes that step."""
    model = run.build(lambda: LanguageModel(tied=True))
    optimizer = sgd(model, lr=0.05)
    model = run.shard(model, optimizer, **config)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    losses = []
    for step in range(8):
        for micro in range(2):
            rows = run.ids(2 * (step % 2) + micro)  # few, so that they are learnt
            loss = token_loss(model(rows), rows)
            scaler.scale(loss / 2 * (float("inf") if (step, run.rank) == (3, 1) else 1.0)).backward()
        scaler.unscale_(optimizer)
        run.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(scaler.get_scale(), "the scale")
        losses.append(loss.item())
    run.see(losses[-1] < losses[0] - 0.1, "whether it learns")
    run.see(torch.tensor(losses), "losses")
    values = torch.cat([full_parameter(run, p).flatten() for p in model.parameters()])
    everyone = [torch.empty_like(values) for _ in range(run.world)]
    torch.distributed.all_gather(everyone, values)
    run.see(all(torch.equal(other, values) for other in everyone), "whether ranks compute with the same weights")


program(_learns, name="learns_by_int8", only=CODED | {"ranks": (2, 3, 4), "precision": ("fp32", "bf16", "fp16")})
program(
    partial(_learns, wire="fp8"),
    name="learns_by_fp8",
    only=CODED | {"replicas": (1, 2), "deferred": (False,), "tier": ("none", "cpu")},
    loose=2.0,
)


@program(only=CODED | {"replicas": (2,), "precision": ("fp32",)})
def norms_of_spans_with_padding(run: Run) -> None:
    run.trained_model(Odd)
    for step in range(2):
        run.loss(step).backward()
        run.clip_grad_norm_(run.model, float("inf"))
        run.update()


def _decays(run: Run, **config: object) -> None:
    """A codec's rounding is larger than the decay; the rounding of any element would be far above what is allowed."""
    model = run.build(mlp)
    model = run.shard(model, sgd(model), **config)
    run.step(0)
    before = [full_parameter(run, param).clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 - 1e-4)
    gaps = [full_parameter(run, p) - value * (1 - 1e-4) for p, value in zip(model.parameters(), before)]
    run.see(max(float(gap.abs().max()) for gap in gaps) <= 1e-5, "whether the decay counts, and no more")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.full_like(param, 0.5))
            run.see(param, "a weight of one value")
    for param in model.parameters():
        run.see(torch.equal(full_parameter(run, param), torch.full(param.shape, 0.5)), "whether its master is exact")


DECAYED = CODED | {"precision": ("fp32",), "replicas": (1,)}


program(_decays, name="decays_by_int8", only=DECAYED)
program(partial(_decays, wire="fp8"), name="decays_by_fp8", only=DECAYED | {"deferred": (False,)})
