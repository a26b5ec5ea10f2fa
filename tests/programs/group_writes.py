"""Tensors of optimizer groups that user code writes between steps, beside the model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hf_zero as zero
from tests.models import mlp
from tests.oracle import Refused, Run, program
from tests.programs.accessors import full_parameter
from tests.settings import Setting


def is_on_disk(setting: Setting) -> bool:
    return setting.optimizer_tier == "disk"


ON_DISK = Refused(zero.StateError, "have no values where its state is on disk", is_on_disk)


def by_group(run: Run) -> Any:
    """A model whose optimizer has the matrices in one group, and all other parameters in another."""
    model = run.build(mlp)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.05},
    ]
    return run.shard(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(0.5),
    "through data": lambda p: p.data.mul_(0.5),
    "by assignment": lambda p: setattr(p, "data", p.data * 0.5),
}


def written(run: Run, model: Any, step: int, group: int) -> None:
    """Write the last matrix, and all tensors of a group; look at both in another way in each step."""
    weight, bias = model[4].weight, model[4].bias
    with torch.no_grad():
        [*WRITES.values()][step % 3](weight)
        for tensor in run.optimizer.param_groups[group]["params"]:
            tensor.mul_(0.5)
    match step:
        case 0:
            for name, value in model[4].state_dict().items():
                run.see(value if run.rank == 0 else None, name)
        case 1:
            run.see(full_parameter(run, weight), "a weight")
            run.see(full_parameter(run, bias), "a bias")
        case 2:
            run.save(model)
            run.load(model)
        case 3:
            with torch.no_grad():
                run.see(model(run.inputs(7, 2, 16)), "an evaluation")
    run.step(step)


@program(reference="average", refused=(ON_DISK,), more={"precision": ("fp32", "bf16"), "stage": (1, 2, 3)})
def tensors_of_one_group_and_a_parameter_of_another(run: Run) -> None:
    model = by_group(run)
    for step in range(6):
        written(run, model, step, 1)


@program(reference="average", refused=(ON_DISK,), more={"precision": ("fp32", "bf16"), "stage": (1, 2, 3)})
def tensors_of_a_group_and_its_parameters_in_turn(run: Run) -> None:
    """`engine.refresh()` between the two writes, in either order."""
    model = by_group(run)
    engine = run.engine_of(model)
    for step in range(4):
        with torch.no_grad():
            for number in (0, 1) if step % 2 else (1, 0):
                for tensor in run.optimizer.param_groups[0]["params"] if number else [model[4].weight]:
                    tensor.mul_(0.5)
                if engine is not None:
                    engine.refresh()
        run.step(step)


def in_other_memory(setting: Setting) -> bool:
    """A parameter and its master are not one memory."""
    is_released = setting.stage == 3 and setting.ranks > setting.replicas
    is_elsewhere = is_released or setting.precision != "fp32" or setting.optimizer_tier != "none"
    return is_elsewhere and not is_on_disk(setting)


@program(
    reference="average",
    refused=(ON_DISK, Refused(zero.StateError, "so neither write can count alone", in_other_memory)),
    more={"precision": ("fp32", "bf16"), "stage": (1, 2, 3)},
)
def tensors_of_a_group_and_a_parameter_of_it(run: Run) -> None:
    model = by_group(run)
    for step in range(6):
        written(run, model, step, 0)
