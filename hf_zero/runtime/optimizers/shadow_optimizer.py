"""The user's optimizer, stepping over other tensors than its groups'."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from ..values.state_shard import is_elementwise

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(master, gradient, exp_avg, exp_avg_sq, step count): one update of the first and of the moments, in place."""


class Counts:
    """Numbers of an optimizer that its step changes, besides each parameter's state: as they are now, or not there yet.

    Args:
        names: attributes of the optimizer, and options of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
        self._names = names
        self._own, *self._groups = (
            {key: copied(having[key]) for key in names if key in having}
            for having in (optimizer.__dict__, *optimizer.param_groups)
        )

    def put_back(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        """As they were, in an optimizer whose only group is this one. What the first step makes (`step` in a group, by which
        a rule knows that it has not begun) is not there before."""
        for having, was in ((optimizer.__dict__, self._own), (optimizer.param_groups[0], self._groups[group])):
            for name in self._names:
                having.pop(name, None)
            having.update({name: copied(value) for name, value in was.items()})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What another optimizer of its class is to have, besides groups and state. Methods that were put on the object are this
    one's: they would write its state."""
    skipped = {"state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict"}
    for key, value in optimizer.__dict__.items():
        method = getattr(value, "__wrapped__", None)
        if method is not None and method is getattr(type(optimizer), key, None):
            skipped.add(key)
    return {key: value for key, value in optimizer.__dict__.items() if key not in skipped}


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def copy_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Of the same class and settings over these groups, without state and hooks. Tensors among the attributes are copies."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({key: copied(value) for key, value in attributes_of(optimizer).items()})
    torch.optim.Optimizer.__init__(made, groups, dict(optimizer.defaults))
    return made


class Twin:
    """Steps of an optimizer over other tensors than its groups': same class, same options as of now, no hooks.

    Args:
        fuse: use the fused kernel where the optimizer has one and its user left that open.
        wholes: it steps over parameters of true shape, on the device and as it would by itself.
        counts: what every stretch is to find as it was before the optimizer's own step, where a step changes that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fuse: bool,
        *,
        wholes: bool = False,
        steps_without_gradient: bool = False,
        counts: Counts | None = None,
    ) -> None:
        self._kind = type(optimizer)
        self._twin: Any = copy_of(optimizer, [{"params": [torch.zeros(1, device="cpu")]}])
        options_of = _own_options if wholes else partial(_host_options, fuse=fuse)
        self._options = [options_of(group) for group in optimizer.param_groups]
        self._counts = counts
        self.steps_without_gradient = steps_without_gradient  # it changes parameters that have no gradient, too
        # A loss scaler may ask the optimizer's own step to unscale, or to pass.
        scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        self.kernels = [None if scaled else _adam(self._kind, options) for options in self._options]
        """By group, what its step ends in once there is state, where that is one call; None: call `step`."""
        self.fused = [bool(options.get("fused")) for options in self._options]
        """By group, whether an update reads and writes memory once."""

    def step(self, group: int, master: Tensor, grad: Tensor | None, state: dict[str, Any]) -> dict[str, Any]:
        """Update `master` in place: 1-D, or of true shape, and then also without a gradient.

        Returns:
            The state; its tensors are those of `state` where they were there.
        """
        param = nn.Parameter(master, requires_grad=True)
        param.grad = grad
        twin = self._twin
        twin.param_groups = [{**self._options[group], "params": [param]}]
        if self._counts is not None:
            self._counts.put_back(twin, group)
        twin.state.clear()
        if state:
            twin.state[param] = state
        self._kind.step(twin)
        found: dict[str, Any] = twin.state.get(param, {})
        if master.numel() and param.data_ptr() != master.data_ptr():  # the optimizer gave it other memory
            place = master.untyped_storage().data_ptr()
            for key, value in found.items():  # and may have kept the former
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == place:
                    found[key] = value.clone()
            master.copy_(param.detach())
        return found

    def single_state(self, group: int, key: str, value: Any, device: torch.device) -> Any:
        """A single value of a whole's state, where a step on `device` has it."""
        options = self._options[group]
        is_there = key != "step" or options.get("fused") or options.get("capturable")
        return value.to(device) if isinstance(value, Tensor) and is_there else value


def _adam(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Kernel | None:
    """The function that Adam's and AdamW's `step` ends in; None where they would do anything else, and for other optimizers.
    What comes before it takes as long as a small block in the cache."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or "decoupled_weight_decay" not in options:
        return None
    if options["amsgrad"] or options["differentiable"] or options["foreach"]:
        return None
    settings = {name: options[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    settings |= {"amsgrad": False, "grad_scale": None, "found_inf": None}
    beta1, beta2 = options["betas"]
    decoupled = options["decoupled_weight_decay"]
    if not options["fused"]:
        settings |= {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": decoupled}
        settings |= {"foreach": False, "fused": False}

        def loop(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor) -> None:
            adam([master], [grad], [exp_avg], [exp_avg_sq], [], [count - 1], **settings)  # it counts by itself

        return loop
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    settings |= {"beta1": float(beta1), "beta2": float(beta2)}

    def step(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor) -> None:
        kernel([master], [grad], [exp_avg], [exp_avg_sq], [], [count], **settings)

    return step


def _host_options(group: dict[str, Any], fuse: bool) -> dict[str, Any]:
    options = options_of(group)
    for key, value in options.items():
        if isinstance(value, Tensor):  # a copy: a scheduler writes to it while the step goes on
            options[key] = value.detach().to("cpu", copy=True)
    if options.get("capturable"):
        options["capturable"] = False  # of graphs on the device
    if fuse and "fused" in options and options["fused"] is None and not options.get("foreach"):
        options["fused"] = not options.get("differentiable")
    return options


def _own_options(group: dict[str, Any]) -> dict[str, Any]:
    """A scheduler writes to tensors while the step goes on."""
    return {key: copied(value) for key, value in options_of(group).items()}


def refusal_of(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Why the optimizer's class refuses to be built with the options `others`; None where it takes them, and where it cannot be
    asked: it does not take a plain parameter with the options that it has now."""
    if others == options:
        return None
    known = inspect.signature(type(optimizer)).parameters

    def refused(given: Mapping[str, Any]) -> str | None:
        build: Any = type(optimizer)
        try:
            build(
                [nn.Parameter(torch.zeros(1, device="cpu"))],
                **{key: value for key, value in given.items() if key in known},
            )
        except Exception as error:  # a constructor refuses with whatever its author chose
            return f"{type(error).__name__}: {error}"
        return None

    reason = refused(others)
    return reason if reason is None or refused(options) is None else None


def options_added(optimizer: torch.optim.Optimizer) -> set[str]:
    """Options that a step adds to its group (a count that begins with the first step), by a step on a few elements. None are
    known where that cannot be tried."""
    found: set[str] = set()
    with suppress(Exception):  # whatever a user's optimizer raises on a stretch that is no parameter of its own
        for group in optimizer.param_groups:
            param = nn.Parameter(torch.zeros(7, device="cpu"))
            param.grad = torch.ones(7, device="cpu")
            twin = copy_of(optimizer, [{**options_of(group), "params": [param]}])
            type(optimizer).step(twin)
            found |= set(twin.param_groups[0]) - set(group)
    return found


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, bool] | None:
    """What its state has after a step, and whether one value per element, by a step on a few; None: that cannot be tried."""
    numel = 7
    try:
        with torch.no_grad():
            return {
                str(key): is_elementwise(key, value, numel)
                for index in range(len(optimizer.param_groups))
                for key, value in Twin(optimizer, fuse=False)
                .step(index, torch.zeros(numel, device="cpu"), torch.ones(numel, device="cpu"), {})
                .items()
            }
    except Exception:  # whatever a user's optimizer raises on a stretch that is no parameter of its own
        return None
