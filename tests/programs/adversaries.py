"""Adversarial training: one module with two optimizers, where a graph outlives the step of the other one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tests.models import mlp
from tests.oracle import Run, program
from tests.programs.usual import FP32


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(), nn.Sequential(mlp(depth=2), nn.Linear(16, 1))


def start(run: Run) -> tuple[Any, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = run.build(Adversaries)
    maker, critic = (torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.maker, model.critic))
    return run.shard(model, [maker, critic]), maker, critic


def update(run: Run, optimizer: torch.optim.Optimizer, loss: Tensor, *clears: torch.optim.Optimizer) -> None:
    loss.backward()
    run.see(loss, "loss")
    run.sync_gradients()
    optimizer.step()
    for each in (optimizer, *clears):
        each.zero_grad()
    run.forget_gradients()


@program(reference="average", only=FP32, tells=lambda row: row.stage == 3)
def judged_after_the_critics_step(run: Run) -> None:
    """The maker's graph is older than the last step of an optimizer."""
    model, maker, critic = start(run)
    for t in range(4):
        made, real = model.maker(run.inputs(t)), run.inputs(t + 9)
        update(run, critic, (softplus(-model.critic(real)) + softplus(model.critic(made.detach()))).mean())
        update(run, maker, softplus(-model.critic(made)).mean(), critic)


@program(reference="average", only=FP32, tells=lambda row: row.stage == 3)
def gradient_penalty(run: Run) -> None:
    """A gradient by the critic's input, whose graph is a part of the loss."""
    model, maker, critic = start(run)
    for t in range(4):
        made, real = model.maker(run.inputs(t)), run.inputs(t + 9)
        between = (0.3 * real + 0.7 * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        update(run, critic, (model.critic(made.detach()) - model.critic(real)).mean() + 10 * penalty)
        update(run, maker, -model.critic(made).mean(), critic)
