"""Whole and local values that user code asks the package for. The reference takes them from the tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hf_zero as zero
from tests.oracle import Run


def full_parameter(run: Run, param: Tensor) -> Tensor:
    return param.detach() if run.is_plain else zero.full_parameter(param)


def set_full_parameter(run: Run, param: Tensor, value: Tensor) -> None:
    if run.is_plain:
        param.data.copy_(value)
    else:
        zero.set_full_parameter(param, value)


def full_gradient(run: Run, param: Tensor) -> Tensor | None:
    run.sync_gradients()
    return param.grad if run.is_plain else zero.full_gradient(param)


def set_full_gradient(run: Run, param: Tensor, value: Tensor) -> None:
    run.sync_gradients()
    if run.is_plain:
        param.grad = value
    else:
        zero.set_full_gradient(param, value)


def _state(run: Run, param: Tensor) -> dict[str, Any]:
    optimizers = [optimizer for each in run.trained for optimizer in each.optimizers]
    return next((optimizer.state[param] for optimizer in optimizers if param in optimizer.state), {})


def full_optimizer_state(run: Run, param: Tensor, name: str) -> Any:
    return _state(run, param).get(name) if run.is_plain else zero.full_optimizer_state(param, name)


def set_full_optimizer_state(run: Run, param: Tensor, name: str, value: Any) -> None:
    if run.is_plain:
        _state(run, param)[name] = torch.as_tensor(value).clone()
    else:
        zero.set_full_optimizer_state(param, name, value)
