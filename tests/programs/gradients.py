"""Gradients that user code reads, edits, assigns or reduces."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.models import adamw, mlp
from tests.oracle import Refused, Run, program
from tests.programs.usual import before_steps, is_sharded


@before_steps
def grad_edit(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.grad.mul_(0.5)


@before_steps
def grad_assign(run: Run, t: int) -> None:
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)


@before_steps
def clip_foreach_value(run: Run, t: int) -> None:
    run.sync_gradients()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


@before_steps
def reduced_by_hand(run: Run, t: int) -> None:
    """Averaged once more by the program itself, as loops without DDP do."""
    run.sync_gradients()
    for number, p in enumerate(run.model.parameters()):
        if run.world > 1:
            if number % 2:
                dist.all_reduce(p.grad, async_op=True).wait()
            else:
                dist.all_reduce(p.grad.data)
            p.grad /= run.world


@before_steps(only={"replicas": (1,)}, refused=(Refused(zero.StateError, "is this rank's slice", is_sharded),))
def slices_reduced_by_hand(run: Run, t: int) -> None:
    run.sync_gradients()
    for p in run.optimizer.param_groups[0]["params"]:
        if run.world > 1:
            dist.all_reduce(p.grad)
            p.grad /= run.world


@program(reference="average")
def set_to_zero(run: Run) -> None:
    run.mlp()
    for t in range(4):
        run.loss(t).backward()
        run.update(set_to_none=False)


@program(reference="average")
def grad_twice_zero_none(run: Run) -> None:
    run.mlp(adamw)
    for t in range(4):
        for k in range(2):
            run.loss(t + k).backward()
        run.clip_grad_norm_(run.model, 0.1)
        run.update(set_to_none=t % 2 == 0)


class TwoSquares(nn.Module):
    """Parameters of one shape, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)
        self.c = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x @ self.a).tanh() @ self.b


@program(reference="average")
def one_tensor_for_all_gradients(run: Run) -> None:
    """Also for two parameters at once; it is written again before the step."""
    model = run.trained_model(TwoSquares)
    gradient = torch.ones(16, 16)
    for t in range(3):
        for micro in range(3):
            waits = run.no_sync(model, defer=True) if micro == 1 else contextlib.nullcontext()
            with waits:
                out = model(run.inputs(3 * t + micro, 16, 16)) + model.a + model.b
                out.backward(gradient.fill_(0.01 * (micro + 1)))
                gradient.fill_(1)
        run.update()


@program(reference="average")
def one_tensor_for_all_coefficients(run: Run) -> None:
    """Each gradient is scaled by a number of its own, in the optimizer's groups."""
    model = run.build(mlp)
    run.shard(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.05, momentum=0.9))
    coefficient = torch.ones(())
    for t in range(3):
        run.loss(t).backward()
        run.sync_gradients()
        for number, group in enumerate(run.optimizer.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(coefficient.fill_(0.1 * (number + 1)))
        run.update()
