"""Parts of the model that a step leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import mlp, sgd
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


@program(reference="average")
def bad_batches(run: Run) -> None:
    """A forward that raises is passed over."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(depth=4)

        def forward(self, x: Tensor, is_bad: bool) -> Tensor:
            for number, layer in enumerate(self.layers):
                if is_bad and number == 4:
                    raise ValueError("a bad batch")
                x = layer(x)
            return x

    model = Net()
    run.shard(model, sgd(model))
    for t in range(5):
        try:
            model(run.inputs(t, 4, 16), t in (1, 2)).square().mean().backward()
        except ValueError:
            continue
        run.optimizer.step()
        run.optimizer.zero_grad()
