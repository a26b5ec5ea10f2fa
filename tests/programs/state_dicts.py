"""State dicts taken, kept and loaded in mid-training; averages of the model."""

from __future__ import annotations

import copy

import torch

from tests.models import adamw
from tests.oracle import Run, program
from tests.programs.sequences import broadcast_state
from tests.programs.usual import is_released, see_weights, without_memory


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
def state_dict_gathers_nothing_for_long(run: Run) -> None:
    """All entries are alive, and the parameters that they were copied from are released."""
    model = run.mlp()
    for step in range(3):
        run.step(step)
        state = model.state_dict()
        if run.engine_of(model) is not None and is_released(run.setting) and not run.setting.kept:
            assert all(map(without_memory, model.parameters())), "state_dict() left full parameters gathered"
        run.see([value.double().sum() for value in state.values()], "sums")


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


@program(reference="average", more={"ranks": (1, 2)})
def optimizer_state_of_another_form(run: Run) -> None:
    """As older versions of torch wrote it, or in a narrower type: taken as torch takes it."""
    for kind in ("int", "float", "bfloat16"):
        run.mlp(adamw)
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(broadcast_state(run))
                for entries in state["state"].values():
                    if kind == "bfloat16":
                        entries.update({key: entries[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")})
                    else:
                        entries["step"] = {"int": int, "float": float}[kind](entries["step"])
                run.optimizer.load_state_dict(state)
            run.step(step)
        see_weights(run, run.model, f"after a state with {kind}:")
