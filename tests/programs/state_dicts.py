"""State dicts taken, kept and loaded in mid-training; averages of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import adamw
from tests.oracle import Run, program
from tests.programs.usual import FP32, LOWEST, is_released, see_weights, without_memory


def broadcast_state(run: Run) -> Any:
    """The optimizer's state dict, which rank 0 alone may hold."""
    state = [run.optimizer.state_dict()]
    if run.world > 1:
        dist.broadcast_object_list(state, 0)
    return state[0]


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


@program(reference="average", only={"tier": ("none", "cpu")}, tells=lambda row: row.stage < 3)
def groups_written_before_state_dict(run: Run) -> None:
    """What user code writes to tensors of optimizer groups is in the model's entries at once."""
    model = run.mlp()
    for step in range(2):
        run.step(step)
        with torch.no_grad():
            for group in run.optimizer.param_groups:
                for tensor in group["params"]:
                    tensor.mul_(0.5)
        for name, value in model.state_dict().items():
            run.see(value if run.rank == 0 else None, f"state dict {name}")


@program(reference="average", only=FP32 if LOWEST else {})
def averaged_model(run: Run) -> None:
    model = run.mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    for t in range(4):
        run.step(t)
        average.update_parameters(model)
    with torch.no_grad():
        run.see(average(torch.ones(2, 16)).sum())


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


class Uneven(nn.Module):
    """Parts that have gradients in different steps: their parameters count steps apart. One weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(5, 7) for _ in range(3))
        self.scale, self.frozen = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        total = sum((part(x) * self.frozen.sum()).pow(2).mean() for part in self.parts[: 1 + step % 3])
        return total * self.scale


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 2e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], value) for key, value in theirs.items())
    if isinstance(theirs, Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return bool(mine == theirs)


@program(reference="average", more={"ranks": (1, 2)})
def optimizer_state_of_uneven_steps(run: Run) -> None:
    """A state that every rank loads, or rank 0 alone, stays to the bit; also after `detach`, with torch's own types."""
    torch.manual_seed(0)
    plain = Uneven()
    other = in_groups(plain)
    for step in range(5):
        plain(torch.full((4, 5), 0.1 * step + 0.1), step).backward()
        other.step()
        other.zero_grad()
    wanted = copy.deepcopy(other.state_dict())
    model = run.build(Uneven)
    model.load_state_dict(plain.state_dict())
    run.shard(model, in_groups(model))
    for is_alone in (False, True):
        given = copy.deepcopy(wanted)
        for entries in given["state"].values() if is_alone and run.rank > 0 and not run.is_plain else ():
            entries.update({name: each.to("meta") for name, each in entries.items() if each.dim()})
        model(run.inputs(7, 4, 5), 2).backward()
        run.update()
        run.optimizer.load_state_dict(given)
        found = run.optimizer.state_dict()
        run.see(run.rank > 0 or _same(found, wanted), "whether the state dict is what was loaded")
    run.detach(model)
    run.see(_same(run.optimizer.state_dict(), wanted), "whether it is after detach")
    kinds = {type(param) for group in run.optimizer.param_groups for param in group["params"]}
    run.see(kinds == {nn.Parameter}, "whether parameters are plain")
