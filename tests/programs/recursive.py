"""Modules that call themselves or each other, in activation checkpoints and without."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import WIDTH, sgd
from tests.oracle import Run, program

Reentrant = bool | None
"""`use_reentrant` of the checkpoints; None: no checkpoints."""


def called(reentrant: Reentrant, module: nn.Module, x: Tensor, *args: Any) -> Tensor:
    return module(x, *args) if reentrant is None else checkpoint(module, x, *args, use_reentrant=reentrant)


class Recursive(nn.Module):
    """Calls itself `depth` times, below its own weight or between two of them."""

    def __init__(self, reentrant: Reentrant, between: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.between = reentrant, between

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if self.between:
            x = torch.tanh(self.first(x))
        if depth:
            x = called(self.reentrant, self, x, depth - 1)
        return torch.tanh(self.second(x if self.between else self.first(x)))


class Mutual(nn.Module):
    """Calls its partner, which calls it."""

    def __init__(self, reentrant: Reentrant) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant
        self.partner: list[nn.Module] = []

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.linear(x))
        if depth:
            x = called(self.reentrant, self.partner[0], x, depth - 1)
        return torch.tanh(self.linear(x))


class Root(nn.Module):
    """A model that calls itself between its blocks."""

    def __init__(self, reentrant: Reentrant, times: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            if depth and place < self.times:
                x = called(self.reentrant, self, x, depth - 1)
        return x


class Model(nn.Module):
    """Two blocks of a kind. `outer`: both in one checkpoint."""

    def __init__(self, kind: str, reentrant: Reentrant, outer: bool) -> None:
        super().__init__()
        self.kind, self.outer = kind, reentrant if outer else None
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any
        if kind == "mutual":
            self.blocks = nn.ModuleList([Mutual(reentrant) for _ in range(2)])
            for one, other in zip(self.blocks, reversed(self.blocks)):
                one.partner.append(other)
        elif kind == "shared":
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        else:
            self.blocks = nn.ModuleList([Recursive(reentrant, kind == "between") for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return first(second(first(first(x)))) if self.kind == "shared" else second(first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(called(self.outer, self.body, self.embed(x)))  # type: ignore[arg-type]


def _train(run: Run, *makes: Any) -> None:
    for make in makes:
        run.trained_model(make, sgd)
        run.loop(lambda step: run.model(run.inputs(step).requires_grad_()).square().mean(), 2)


for reentrant in (None, False, True):
    suffix = {None: "without_checkpoints", False: "in_checkpoints", True: "in_reentrant_checkpoints"}[reentrant]

    def modules(run: Run, reentrant: Reentrant = reentrant) -> None:
        kinds = {"around": True, "between": False, "mutual": True, "shared": False}
        _train(run, *(functools.partial(Model, kind, reentrant, outer) for kind, outer in kinds.items()))

    def roots(run: Run, reentrant: Reentrant = reentrant) -> None:
        _train(run, *(functools.partial(Root, reentrant, times) for times in (1, 2)))

    for each in (modules, roots):  # layers that run many times amplify rounding
        program(each, name=f"{each.__name__}_{suffix}", reference="average", loose=2.0)


class Interrupted(Root):
    """Ctrl-C comes once in its second block."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.calls = 0

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.blocks[0](x)
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return self.blocks[2](self.blocks[1](x))


@program(reference="average")
def interrupted_is_no_recursion(run: Run) -> None:
    """No hook runs for Ctrl-C. The next forward is no call of the model by itself."""
    run.trained_model(Interrupted)
    try:
        run.model(run.inputs(0))
    except KeyboardInterrupt:
        run.see("interrupted")
    run.loop()
