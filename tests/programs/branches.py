"""Parts of the model that a step leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import LanguageModel, mlp
from tests.oracle import Run, program
from tests.programs.usual import FP32, trained_on


def deep() -> nn.Sequential:
    return mlp(depth=4)


@trained_on(deep)
def sub_call(run: Run, t: int) -> Tensor:
    return run.model[:2](run.inputs(t, 4, 16)).square().mean() + run.model[4](run.inputs(t + 1, 4, 16)).square().mean()


@trained_on(deep, only=FP32)
def a_part_after_a_look(run: Run, t: int) -> Tensor:
    with torch.no_grad():
        run.model[0].weight.mul_(0.99)
    return run.model[:2](run.inputs(t, 4, 16)).square().mean() + run.model[2](run.inputs(t + 1, 4, 16)).square().mean()


@program(reference="average")
def only_features(run: Run) -> None:
    kept = []
    model = run.mlp()
    model[2].register_forward_hook(lambda mod, i, o: kept.append(o))

    def loss(t: int) -> Tensor:
        kept.clear()
        model(run.inputs(t, 4, 16))
        return kept[0].abs().mean()

    run.loop(loss)


@program(reference="average")
def early_exit(run: Run) -> None:
    class Stop(Exception):
        pass

    model = run.mlp(depth=4)

    def hook(mod: nn.Module, i: Any, o: Tensor) -> None:
        hook.o = o
        raise Stop

    def loss(t: int) -> Tensor:
        h = model[4].register_forward_hook(hook) if t % 2 else None
        try:
            o = model(run.inputs(t, 4, 16))
        except Stop:
            o = hook.o
        if h:
            h.remove()
        return o.square().mean()

    run.loop(loss)


class Rare(nn.Module):
    """Only some batches use its `rare` layer, and its `shift` on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.rare, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.scale, self.shift, self.slope = (nn.Parameter(torch.full((32,), value)) for value in (1.0, 0.1, 0.9))

    def forward(self, x: Tensor, rare: bool = False, shift: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        hidden = hidden + torch.tanh(self.often(hidden)) + (torch.tanh(self.rare(hidden)) if rare else 0)
        out = self.last(hidden) * self.slope
        return out + self.shift if shift else out


def _rare_parts(run: Run, build: Callable[[Any], torch.optim.Optimizer], micros: int) -> None:
    """Two groups, a schedule, clipped where micro-batches are added up. All parts have a gradient first, and a state."""
    model = run.build(Rare)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    run.shard(model, build(groups))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7)
    for step in range(4):
        for micro in range(micros):
            number = step * micros + micro
            is_shifted = number % 3 == 0 or (number % 3 == 1 and run.rank == 0)
            with contextlib.nullcontext() if micro + 1 == micros else run.no_sync(model):
                out = model(run.inputs(number, 3, 32), rare=number % 3 == 0, shift=is_shifted)
                out.square().mean().backward()
        if micros > 1:
            run.clip_grad_norm_(model, 0.05)
        run.update()
        scheduler.step()


@program(reference="average", more={"ranks": (1, 2)})
def rare_parts(run: Run) -> None:
    _rare_parts(run, lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9), 1)


@program(reference="average", more={"ranks": (1, 2)})
def rare_parts_of_micro_batches(run: Run) -> None:
    _rare_parts(run, lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-3, amsgrad=True), 2)


@program(reference="average", only={"tier": ("cpu", "disk")})
def other_heads_where_backward_steps(run: Run) -> None:
    """Some parameters of a unit have a gradient when the backward updates it."""
    model = run.build(lambda: LanguageModel(heads=3))
    run.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), step_in_backward=True)
    for step in range(4):
        loss = model(run.ids(step), head=step % 2).square().mean()
        loss.backward()
        run.see(loss, "loss")
        run.update()
