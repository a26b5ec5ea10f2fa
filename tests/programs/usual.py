"""Shorthand for programs that are the usual loop over a small model with one thing of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

from tests.models import mlp, sgd
from tests.oracle import Run, program
from tests.settings import Setting
from tests.settings import is_sharded as is_sharded

Build = Callable[[], nn.Module]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[Run, int], Tensor]
Act = Callable[[Run, int], Any]

LOWEST = Version(torch.__version__) < Version("2.13")
"""With the lowest versions that pyproject.toml allows: torch and transformers have faults of their own (docs/LIMITS.md)."""
FP32 = {"precision": ("fp32",)}
"""`only=FP32`: what reads or writes weights sees them rounded to bf16, which plain data parallel training does not do; or
its numbers hang on the sign of a rounding error; or torch has no bf16 kernel for it."""


def is_released(setting: Setting) -> bool:
    """Whether parameters have no memory between their uses."""
    is_whole = setting.ranks == setting.replicas and setting.params_tier == "none"
    return setting.stage == 3 and not is_whole


def without_memory(param: nn.Parameter) -> bool:
    """Whether the values of a parameter are on other ranks."""
    return getattr(type(param), "_zero_released", False) or param.stride() == (0,) * param.dim()


def of_groups(run: Run) -> list[nn.Parameter]:
    """The optimizer's parameters."""
    return [p for group in run.optimizer.param_groups for p in group["params"]]


def see_weights(run: Run, model: Any, what: str = "weight") -> None:
    with run.unsharded(model):
        for name, param in model.named_parameters():
            run.see(param, f"{what} {name.removeprefix('module.')}")


def see_gradients(run: Run, model: Any, what: str = "gradient") -> None:
    for number, param in enumerate(model.parameters()):
        run.see(param.grad, f"{what} {number}")


def same_on_ranks(run: Run, value: Tensor) -> bool:
    """Whether a number is the same on all ranks, to the bit."""
    values: list[Any] = [float(value)] * run.world
    if run.world > 1:
        dist.all_gather_object(values, float(value))
    return len(set(values)) == 1


def trained_on(build: Build = mlp, optimizer: Optimize = sgd, steps: int = 4, **options: Any) -> Callable[[Loss], Loss]:
    """The usual loop with this loss. `options` are those of `program`."""

    def register(loss: Loss) -> Loss:
        @functools.wraps(loss)
        def run_it(run: Run) -> None:
            run.trained_model(build, optimizer)
            run.loop(lambda step: loss(run, step), steps)

        program(run_it, **{"reference": "average", **options})
        return loss

    return register


def before_steps(act: Act | None = None, **options: Any) -> Any:
    """The usual loop; `act(run, step)` comes between the backward and the step."""

    def register(act: Act) -> Act:
        @functools.wraps(act)
        def run_it(run: Run) -> None:
            run.mlp()
            for step in range(3):
                run.loss(step).backward()
                act(run, step)
                run.update()

        program(run_it, **{"reference": "average", **options})
        return act

    return register if act is None else register(act)


def after_steps(steps: int = 3, optimizer: Optimize = sgd, **options: Any) -> Callable[[Act], Act]:
    """The usual loop; `act(run, step)` comes after each step."""

    def register(act: Act) -> Act:
        @functools.wraps(act)
        def run_it(run: Run) -> None:
            run.mlp(optimizer)
            for step in range(steps):
                run.step(step)
                act(run, step)

        program(run_it, **{"reference": "average", **options})
        return act

    return register


def after_two_steps(**options: Any) -> Callable[[Callable[[Run], Any]], None]:
    """The usual loop; `act(run)` comes once, after the second of three steps."""

    def register(act: Callable[[Run], Any]) -> None:
        @functools.wraps(act)
        def once(run: Run, step: int) -> None:
            if step == 1:
                act(run)

        after_steps(3, **options)(once)

    return register
