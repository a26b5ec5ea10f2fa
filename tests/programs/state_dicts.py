"""State dicts taken, kept and loaded in mid-training; averages of the model."""

from __future__ import annotations

import copy

import torch

from tests.oracle import Run, program


@program(reference="average")
def state_dict_cycle(run: Run) -> None:
    model = run.mlp()
    for t in range(5):
        run.step(t)
        if t == 1:
            sd = {k: v.clone() for k, v in model.state_dict().items()}
            osd = copy.deepcopy(run.optimizer.state_dict())
        if t == 3:
            model.load_state_dict(sd)
            run.optimizer.load_state_dict(osd)


@program(reference="average")
def averaged_model(run: Run) -> None:
    model = run.mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    for t in range(4):
        run.step(t)
        average.update_parameters(model)
    with torch.no_grad():
        run.see(average(torch.ones(2, 16)).sum())


@program(reference="average")
def ema_detach(run: Run) -> None:
    model = run.mlp()
    ema = [torch.zeros_like(p) for p in model.parameters()]
    for t in range(4):
        run.step(t)
        for e, p in zip(ema, model.parameters()):
            e.lerp_(p.detach(), 0.5)
    run.see(sum(float(e.sum()) for e in ema))
