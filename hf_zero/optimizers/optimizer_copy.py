"""A copy of the user's optimizer that steps over other tensors than its groups'.

The copy has the optimizer's class, current hyperparameters and no hooks. Each call steps over one block with its part of the
state. An element's update must depend on that element's values alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(master, gradient, exp_avg, exp_avg_sq, step count): one update of all but the step count, in place."""

_NOT_RESTORED = (ModuleType, torch.optim.Optimizer, Tensor)
_NOT_COPIED = frozenset({"state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict"})


class OptimizerCopy:
    """Steps like an optimizer, with its hyperparameters at the time of the copy.

    Args:
        fuse: use the fused kernel where the optimizer has one and user code chose neither `fused` nor `foreach`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, fuse: bool) -> None:
        self._step = bare_step(type(optimizer))
        self._options = [_options(group, fuse) for group in optimizer.param_groups]
        self._clone: Any = copy_optimizer(optimizer, [{"params": [torch.zeros(1, device="cpu")]}])
        # Attributes that a step changes: every block must start from their values before the step.
        # In host memory: torch copies a loss scaler's tensors for a fused step there without waiting.
        self._counts = {key: to_host(value) for key, value in mutable_attributes(self._clone).items()}
        is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        self.kernels = [None if is_scaled else _adam(type(optimizer), options) for options in self._options]
        """By group, the function that a step with state calls in the end; None: call `step`."""

    def is_fused(self, group: int) -> bool:
        return bool(self._options[group].get("fused"))

    @property
    def option_names(self) -> set[str]:
        """Return the options of the last stepped group, with those that the step added."""
        return set(self._clone.param_groups[0])

    def step(self, group: int, master: Tensor, grad: Tensor | None, state: dict[str, Any]) -> dict[str, Any]:
        """Update `master` in place. Returns the state; its tensors are those of `state` where these existed."""
        param = nn.Parameter(master, requires_grad=True)
        param.grad = grad
        clone = self._clone
        clone.__dict__.update({key: copy_value(value) for key, value in self._counts.items()})
        options = {key: copy_value(value) for key, value in self._options[group].items()}
        if master.is_complex() and options.get("fused"):
            options["fused"] = False  # there is no complex kernel
        clone.param_groups = [{**options, "params": [param]}]
        clone.state.clear()
        if state:
            clone.state[param] = state
        self._step(clone)
        found: dict[str, Any] = clone.state.get(param, {})
        if master.numel() and param.data_ptr() != master.data_ptr():  # the optimizer assigned `param.data`
            memory = master.untyped_storage().data_ptr()
            for name, value in found.items():  # and may have kept the old memory
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                    found[name] = value.clone()
            master.copy_(param.detach())
        return found


def mutable_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes, other than groups and state, that a step may write."""
    kinds = (int, float, Tensor, torch.Generator, dict, list, deque, set)
    skipped = {*_NOT_COPIED, "defaults"}
    return {
        key: value
        for key, value in vars(optimizer).items()
        if isinstance(value, kinds) and key not in skipped and not key.startswith("_optimizer_")  # hooks
    }


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[Any], object]:
    """Return a class's step without torch's wrapper, which calls user code's global optimizer hooks."""
    step: Any = kind.step
    bare: Callable[[Any], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


@contextmanager
def untouched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore at exit the state that a copy's steps share: torch's random state, and objects among the attributes."""
    owned = [each for each in vars(optimizer).values() if not (callable(each) or isinstance(each, _NOT_RESTORED))]
    kept = [each for each in owned if isinstance(getattr(each, "__dict__", None), dict)]
    before = [dict(vars(each)) for each in kept]
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        for each, attributes in zip(kept, before):
            vars(each).clear()
            vars(each).update(attributes)


def is_elementwise(name: str, value: Any, numel: int) -> bool:
    """Return whether an entry of an optimizer's state has one value per element of a tensor of `numel` elements."""
    return name != "step" and isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


def copy_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and attributes over these groups, without state and hooks.

    Tensors among attributes and options are copied: steps may write to them.
    """
    groups = [
        {key: value if key == "params" else copy_value(value) for key, value in group.items()} for group in groups
    ]
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update({key: copy_value(value) for key, value in _attributes(optimizer).items()})
    torch.optim.Optimizer.__init__(made, groups, dict(optimizer.defaults))
    return cast(torch.optim.Optimizer, made)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_value(value: Any) -> Any:
    """Copy a tensor (on its device), a generator or a container, which a step may write. Return other values themselves."""
    match value:
        case Tensor():
            return value.detach().clone()
        case torch.Generator():
            return value.clone_state()
        case dict():
            table = copy(value)
            table.update({key: copy_value(item) for key, item in value.items()})
            return table
        case list() | deque():
            items = copy(value)
            for index, item in enumerate(value):
                items[index] = copy_value(item)
            return items
        case set():
            return copy(value)
    return value


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that a copy must have besides groups and state.

    Methods set on the instance belong to this instance.
    """
    skipped = set(_NOT_COPIED)
    for key, value in optimizer.__dict__.items():
        method = getattr(value, "__wrapped__", None)
        if method is not None and getattr(method, "__func__", method) is getattr(type(optimizer), key, None):
            skipped.add(key)
    return {key: value for key, value in optimizer.__dict__.items() if key not in skipped}


def _options(group: Mapping[str, Any], fuse: bool) -> dict[str, Any]:
    # Copies: a scheduler may write to a tensor while the step runs.
    options = {key: to_host(value) for key, value in options_of(group).items()}
    if options.get("capturable"):
        options["capturable"] = False  # CUDA graphs have no host memory
    if fuse and "fused" in options and options["fused"] is None and not options.get("foreach"):
        options["fused"] = not options.get("differentiable")
    return options


def to_host(value: Any) -> Any:
    """Copy as `copy_value` does, but tensors to host memory."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy_value(value)


def _adam(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Kernel | None:
    """Return the function that Adam's and AdamW's step calls in the end. A direct call saves the time of one block."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or "decoupled_weight_decay" not in options:
        return None
    if options["amsgrad"] or options["differentiable"] or options["foreach"]:
        return None
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    settings: dict[str, Any] = {name: options[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    settings |= {"amsgrad": False, "grad_scale": None, "found_inf": None}
    if not options["fused"]:
        settings |= {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": decoupled}
        settings |= {"foreach": False, "fused": False}

        def loop(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor) -> None:
            adam([master], [grad], [exp_avg], [exp_avg_sq], [], [count - 1], **settings)  # it adds 1 to the count

        return loop
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    settings |= {"beta1": float(beta1), "beta2": float(beta2)}

    def fused(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor) -> None:
        kernel([master], [grad], [exp_avg], [exp_avg_sq], [], [count], **settings)

    return fused
