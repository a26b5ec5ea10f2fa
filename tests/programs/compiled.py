"""`torch.compile` of the whole model."""

from __future__ import annotations

import torch

from tests.oracle import Run, program


@program(reference="average")
def compile_whole(run: Run) -> None:
    f = torch.compile(run.mlp(depth=2), backend="aot_eager")
    run.loop(lambda t: f(run.inputs(t, 4, 16)).square().mean(), 3)
