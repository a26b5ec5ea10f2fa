"""Gradients whose parts are edited through views, that are copied, and that hooks assign within the backward."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from tests.oracle import Run, program
from tests.programs.usual import before_steps, see_gradients


@before_steps(tells=lambda row: row.stage == 3)
def edited_through_views(run: Run, step: int) -> None:
    """Factors by column, halves, rows: no operation on each element by itself."""
    run.sync_gradients()
    for param in run.model.parameters():
        grad = param.grad
        grad.mul_(torch.linspace(0.5, 1.5, grad.shape[-1]))
        upper, lower = grad.chunk(2)
        upper.mul_(0.5)
        lower += upper[: len(lower)]
        for row in grad.unbind()[:2]:
            row.clamp_(min=-0.01)
        torch._foreach_add_(grad.split(5), 1e-3)
    see_gradients(run, run.model)


@before_steps(tells=lambda row: row.stage in (2, 3))
def copied_and_pickled(run: Run, step: int) -> None:
    """A copy keeps its values when the gradient changes."""
    run.sync_gradients()
    params = [*run.model.parameters()]
    copies = [copy.deepcopy(param.grad) for param in params] + [
        pickle.loads(pickle.dumps(param.grad)) for param in params
    ]
    for param in params:
        param.grad.neg_()
    for number, each in enumerate(copies):
        run.see(each, f"copy {number}")


def _limit(param: nn.Parameter) -> None:
    param.grad = param.grad.clamp(-1e-3, 1e-3) if param.dim() > 1 else None


@program(reference="average")
def assigned_in_the_backward(run: Run) -> None:
    """Each rank limits its own gradients as they come, and has none of the biases."""
    model = run.mlp()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_limit)
    for step in range(3):
        run.loss(step).backward()
        run.update()
