"""Parameters frozen and unfrozen in mid-training."""

from __future__ import annotations

import torch
from torch import nn

import hf_zero as zero
from tests.models import mlp, sgd
from tests.oracle import Refused, Run, program


def deep() -> nn.Sequential:
    return mlp(depth=4)


@program(reference="average")
def unfrozen_before_an_evaluation(run: Run) -> None:
    """The first forward with other trained parameters, and with another group, is one under `inference_mode`."""
    model = run.build(deep)
    model[0].requires_grad_(False)
    run.shard(model, sgd(nn.Sequential(*model[:5])))
    for t in range(4):
        run.step(2 * t)
        if t == 1:
            model[0].requires_grad_(True)
        elif t == 2:
            model.zero_grad()
            run.optimizer.add_param_group({"params": [*model[6].parameters()]})
        with torch.inference_mode():
            run.see(run.loss(2 * t + 1))


@program(
    reference="average",
    refused=(
        Refused(
            zero.StateError, "whose parameters were put into other units since that forward", lambda s: s.stage == 3
        ),
    ),
)
def unfrozen_between_forwards(run: Run) -> None:
    """The first forward's graph has saved the parameters of units that are cut anew before the second."""
    model = run.build(mlp)
    model[2].requires_grad_(False)
    run.shard(model, sgd(model))
    run.step(0)
    first = run.loss(1)
    model[2].requires_grad_(True)
    (first + run.loss(2)).backward()
    run.update()
    run.step(3)
