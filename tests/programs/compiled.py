"""`torch.compile` of parts and of the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models import mlp
from tests.oracle import Run, program


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = mlp()
        self.f = None
        self.b = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if self.f is None:
            self.f = torch.compile(lambda y: torch.tanh(self.b(y)) * 2, backend="eager")
        return self.f(self.a(x))


@program(reference="average")
def compile_whole(run: Run) -> None:
    f = torch.compile(run.mlp(), backend="aot_eager")
    run.loop(lambda t: f(run.inputs(t, 4, 16)).square().mean(), 3)
