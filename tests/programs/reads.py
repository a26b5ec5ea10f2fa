"""Weights that user code reads: in the loss, in a forward, between forward and backward, between steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.models import adamw, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import FP32, after_steps, is_released, trained_on


def deep() -> nn.Sequential:
    return mlp(depth=4)


@trained_on(deep)
def weight_reads(run: Run, t: int) -> Tensor:
    return run.loss(t) + 0.1 * sum(p.square().sum() for p in run.model.parameters())


@trained_on(deep)
def weight_reads_before(run: Run, t: int) -> Tensor:
    return 0.1 * sum(p.abs().sum() for p in run.model.parameters()) + run.loss(t)


@trained_on(deep)
def loss_weights_only(run: Run, t: int) -> Tensor:
    return 0.1 * sum(p.abs().sum() for p in run.model.parameters())


@trained_on()
def views_in_a_graph(run: Run, t: int) -> Tensor:
    return run.loss(t) + sum((p.view(-1) * p.detach().view(-1)).sum() for p in run.model.parameters())


@trained_on()
def attributes_in_a_graph(run: Run, t: int) -> Tensor:
    return 0.1 * sum((p.T @ p).sum() for p in run.model.parameters() if p.dim() == 2) + run.loss(t)


@trained_on()
def looks_then_graphs(run: Run, t: int) -> Tensor:
    """What was gathered for a look is there for the graph that is made next, before the forward that comes between."""
    with torch.no_grad():
        for p in run.model.parameters():
            run.see(p.norm())
    last = list(run.model.parameters())[-2]
    penalty = last.square().sum() + (last.T @ last).sum()
    return run.loss(t) + 0.1 * penalty


class PenaltyInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = deep()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean() + 0.01 * sum(p.abs().sum() for p in self.parameters())


@trained_on(PenaltyInForward)
def l1_in_forward(run: Run, t: int) -> Tensor:
    return run.model(run.inputs(t, 4, 16))


class ReadAfterUse(nn.Module):
    """A forward that reads the weights of a module just after that has run; whether others run before it, or after it."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.read, self.others, self.is_last = nn.Linear(16, 16), mlp(), is_last

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(self.others(x) if self.is_last else x)
        penalty = self.read.weight.square().sum() + sum(p.abs().sum() for p in self.read.parameters())
        return (h if self.is_last else self.others(h)).square().mean() + 0.1 * penalty


PAST_LEARNING = 8
"""Steps of programs that are to be right, too, when saved tensors are not looked at any more."""


@trained_on(lambda: ReadAfterUse(False), steps=PAST_LEARNING)
def read_in_mid_forward(run: Run, t: int) -> Tensor:
    return run.model(run.inputs(t, 4, 16))


@trained_on(lambda: ReadAfterUse(True), steps=PAST_LEARNING, only=FP32)
def read_before_an_evaluation(run: Run, t: int) -> Tensor:
    loss = run.model(run.inputs(t, 4, 16))
    with torch.no_grad():
        run.see(run.model(run.inputs(t + 20, 4, 16)))
    return loss


@trained_on(deep, steps=PAST_LEARNING)
def penalty_between_forwards(run: Run, t: int) -> Tensor:
    loss = run.loss(t) + 0.1 * sum(p.square().sum() for p in run.model.parameters())
    return loss + run.loss(t + 20)


@trained_on(deep)
def last_forward_without_graph(run: Run, t: int) -> Tensor:
    """On one of the ranks: the others' last forward has one."""
    loss = run.loss(t)
    with torch.set_grad_enabled(run.rank == 0):
        run.see(run.loss(t + 20))
    return loss


@after_steps(3, adamw)
def item_reads(run: Run, t: int) -> None:
    run.see(run.model[0].weight[0, 0].item())
    run.see(list(run.model.parameters())[2].norm())
    run.see(run.model[2].bias.detach().numpy()[1])
    run.see(len(run.model[0].weight.tolist()))


@program(
    reference="average",
    refused=(Refused(zero.StateError, "is still held that was taken between passes", is_released),),
)
def keeps_views(run: Run) -> None:
    kept = [p.detach() for p in run.mlp().parameters()]
    run.loop()
    run.see(sum(k.sum() for k in kept))


@program(
    reference="average",
    refused=(Refused(zero.StateError, "is still held that was taken between passes", is_released),),
)
def view_over_an_unfreeze(run: Run) -> None:
    """A view of the weights is there when their unit is cut anew; from then on it keeps the values that it had."""
    model = run.build(mlp)
    model[2].requires_grad_(False)
    run.shard(model, sgd(model))
    kept = model[2].weight.detach()
    run.see(kept.sum())
    model[2].requires_grad_(True)
    run.loss(1).backward()
    run.see(kept.sum())
    run.update()


@program(reference="average")
def looks_between_forward_and_backward(run: Run) -> None:
    model = run.mlp()
    for t in range(4):
        loss = run.loss(t)
        with torch.no_grad():
            largest = max(float(p.abs().max()) for p in model.parameters())
        (loss * (1.0 if largest < 100 else 0.0)).backward()
        run.update()


@program(reference="average", only=FP32)
def fisher_ewc(run: Run) -> None:
    model = run.mlp()
    for t in range(2):
        run.step(t)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    run.loop(lambda t: run.loss(t) + sum((((p - old[n]) ** 2).sum() for n, p in model.named_parameters())))


class SparseInside(nn.Module):
    """Saves sparse tensors for the backward: of constants, and of a weight's own elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.pattern = torch.eye(16)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.sparse_csr_tensor(*_rows(16), torch.ones(16), (16, 16))
        return torch.sparse.mm(chosen, self.a(x)).tanh() @ torch.sparse.mm(self.pattern.to_sparse(), self.b.weight)


def _rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count + 1), torch.arange(count).flip(0)


@program(reference="average", only=FP32, tells=lambda row: row.stage == 3)
def sparse(run: Run) -> None:
    """Sparse copies of weights between steps, sparse tensors in a graph."""
    model = run.trained_model(SparseInside)
    for step in range(3):
        model(run.inputs(step, 16, 16)).square().mean().backward()
        run.update()
        with torch.no_grad():
            for name, copied in (("coo", model.a.weight.to_sparse()), ("csr", model.b.weight.to_sparse_csr())):
                run.see(copied.to_dense(), name)
