"""Gradients that loops clear in other ways than by the optimizer's own `zero_grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import WIDTH
from tests.optimizers import EachParameter
from tests.oracle import Run, program

Optimizers = list[torch.optim.Optimizer]


class Branches(nn.Module):
    """Steps use one branch or the other: a zero gradient decays weights, and no gradient leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.trunk(x)
        return self.left(x) if step % 3 else self.right(x)


class Spectral(EachParameter):
    """Reads whole matrices."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad / (p.grad.norm() + 1e-3), alpha=-group["lr"])


def each(opts: Optimizers, clear: Callable[[Any], object]) -> None:
    for opt in opts:
        for group in opt.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    clear(param)


def to_none(param: Any) -> None:
    param.grad = None


def to_zero(param: Any) -> None:
    param.grad.zero_()


def anew(param: Any) -> None:
    param.grad = torch.zeros_like(param.grad)


def of_class(opts: Optimizers, set_to_none: bool = True) -> None:
    for opt in opts:
        torch.optim.Optimizer.zero_grad(opt, set_to_none)


def of_model(model: nn.Module, clear: Callable[[Any], object]) -> None:
    for param in model.parameters():
        if param.grad is not None:
            clear(param)


def at_once(model: nn.Module) -> None:
    torch._foreach_zero_([param.grad for param in model.parameters() if param.grad is not None])


WAYS: dict[str, Callable[[nn.Module, Optimizers], object]] = {
    "optimizer": lambda model, opts: [opt.zero_grad() for opt in opts],
    "optimizer to zero": lambda model, opts: [opt.zero_grad(set_to_none=False) for opt in opts],
    "class": lambda model, opts: of_class(opts),
    "class to zero": lambda model, opts: of_class(opts, set_to_none=False),
    "groups": lambda model, opts: each(opts, to_none),
    "groups to zero": lambda model, opts: each(opts, to_zero),
    "class, of the first": lambda model, opts: of_class(opts[:1]),
    "groups, of the last": lambda model, opts: each(opts[-1:], to_none),
    "model": lambda model, opts: model.zero_grad(),
    "model to zero": lambda model, opts: model.zero_grad(set_to_none=False),
    "module class": lambda model, opts: nn.Module.zero_grad(model),
    "modules": lambda model, opts: [child.zero_grad() for child in model.children()],
    "modules to zero": lambda model, opts: [child.zero_grad(set_to_none=False) for child in model.children()],
    "parameters": lambda model, opts: of_model(model, to_none),
    "parameters to zero": lambda model, opts: of_model(model, to_zero),
    "parameters anew": lambda model, opts: of_model(model, anew),
    "at once": lambda model, opts: at_once(model),
}


def _in_every_way(run: Run, optimizers: Callable[[list[nn.Parameter]], Optimizers]) -> None:
    """Each way after a backward without an update, and after a step, with either branch."""
    plain = run.build(Branches)
    opts = optimizers([*plain.parameters()])
    model = run.shard(plain, opts)
    step = 0
    for way, clear in WAYS.items():
        for update in (False, True):
            model(run.inputs(step), step).square().mean().backward()
            if update:
                for opt in opts:
                    opt.step()
            run.sync_gradients()
            clear(plain, opts)
            run.forget_gradients()
            step += 1
        run.see([param.grad is not None for param in plain.parameters()], f"{way}: which gradients are left")
        left = [param.grad for param in plain.parameters() if param.grad is not None]
        run.see(nn.utils.get_total_norm(left), f"{way}: norm of what is left")
        if left:
            run.clip_grad_norm_(model, float("inf"))
            run.forget_gradients()
    model(run.inputs(step), 0).square().mean().backward()
    run.detach(model)
    if not run.is_plain and any(param.grad is not None for param in plain.parameters()):
        raise AssertionError("gradients of a sharded model are left after detach")
    plain.zero_grad()
    plain(torch.ones(2, WIDTH), 1).square().mean().backward()
    run.see(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]), "norm afterwards")
    plain.zero_grad()


EVERY_WAY: dict[str, Any] = {"reference": "average", "more": {"ranks": (1, 2)}}


@program(**EVERY_WAY)
def of_one_optimizer(run: Run) -> None:
    _in_every_way(run, lambda params: [torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5, eps=1e-3)])


@program(**EVERY_WAY)
def of_two_optimizers(run: Run) -> None:
    def two(params: list[nn.Parameter]) -> Optimizers:
        first = torch.optim.AdamW(params[:3], lr=1e-2, weight_decay=0.5, eps=1e-3)
        return [first, torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)]

    _in_every_way(run, two)


@program(**EVERY_WAY)
def of_whole_matrices(run: Run) -> None:
    _in_every_way(run, lambda params: [Spectral(params, lr=0.1)])


@program(**EVERY_WAY)
def of_some_parameters(run: Run) -> None:
    """The others, in no optimizer, keep adding up gradients until they are cleared themselves."""
    _in_every_way(run, lambda params: [torch.optim.AdamW(params[1:3], lr=1e-2, weight_decay=0.5, eps=1e-3)])
