"""Trial steps over small tensors, which show how an unknown optimizer class updates parameters.

A trial uses the class, options and attributes of the user's optimizer, and does not change the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..errors import CheckpointError
from .optimizer_copy import bare_step, copy_optimizer, mutable_attributes, options_of, untouched
from .scalars import scalar_to_json

_FIRST = (8, 12)
"""The first trial's shape: for larger ones, a rule that builds an n x n matrix for n elements in a row would take hours."""
_MATRIX = (136, 192)
"""Large enough for rules that quantize only long states or factor only wide matrices."""
_DEEPER = (8, 17, 192), (17, 8, 12, 16)
"""Shapes for models with parameters of 3 or 4 dimensions."""
_STEPS = 8
"""By then even rules that first build up state (RAdam) move parameters."""
_CUT = 2311
"""Size of the first of two flat parts. No block size divides it."""
_MIN_OPTIONS = {"lr": 0.01, "initial_lr": None, "weight_decay": 0.01}
"""Options that scale an update -> the minimum in a trial: rounding would hide the first rate of a warm-up."""

Grads = Sequence[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]


class Trial:
    """A few steps over one small parameter, with the options of one group."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self._values = [torch.randn(shape, generator=generator, device="cpu").to(device) for _ in range(_STEPS + 1)]
        self._optimizer, self._options = optimizer, dict(options)
        self.is_small = tuple(shape) == _FIRST  # some rules cannot be tried on so few elements
        self._shape = f"on a tensor of {' x '.join(map(str, shape))}"
        for name, least in _MIN_OPTIONS.items():
            value = self._options.get(name)
            if least is not None and isinstance(value, (int, float, Tensor)) and 0 <= float(value) < least:
                self._options[name] = torch.full_like(value, least) if isinstance(value, Tensor) else least

    def why_not_elementwise(self) -> str | None:
        """Return why an element's update depends on other elements; None if it does not."""
        whole, _ = self._run()
        if torch.equal(whole, self._values[0].flatten()):
            return f"{_STEPS} steps {self._shape} moved nothing, so its rule is unknown"
        cut = min(_CUT, whole.numel() // 3 + 1)
        parts = torch.cat([self._run(lambda t: t.flatten()[:cut])[0], self._run(lambda t: t.flatten()[cut:])[0]])
        if (number := self._number_of_gradients()) is not None:
            return number
        if not _agree(whole, parts):
            return f"it gives other results on two flat slices than on a whole parameter ({self._shape})"
        reductions = _Reductions(whole.numel())
        with suppress(Exception):  # a compiled step may refuse dispatch modes; its results agree
            self._run(watching=reductions)
        return f"it computes {reductions.found} over a whole parameter ({self._shape})" if reductions.found else None

    def why_not_alone(self) -> str | None:
        """Return why a parameter's update depends on other parameters or on other ranks; None if it does not."""
        collectives = _Collectives()
        alone, _ = self._run(watching=collectives)
        if collectives.found is not None:
            return f"it communicates by itself ({collectives.found})"
        if (number := self._number_of_gradients()) is not None:
            return number
        for other_first in (False, True):
            for apart in (False, True):
                if not _agree(alone, self._next_to_other(other_first, apart)):
                    return f"it gives a parameter another update together with others than alone ({self._shape})"
        return None

    def unsaveable(self) -> str | None:
        """Return the state that a checkpoint cannot hold; None if it can hold all."""
        _, clone = self._run()
        known = {*self._options, *clone.defaults, "params"}
        held = [key for key, value in clone.param_groups[0].items() if key not in known and not _can_be_saved(value)]
        if held:
            return f"it keeps state in its groups (as {held[0]!r}), which cannot be saved"
        named = [key for key in clone.state if not isinstance(key, Tensor)]
        if named:
            return f"it keeps state of no parameter (as state[{named[0]!r}]), which cannot be sharded"
        for name, value in next(iter(clone.state.values()), {}).items():
            is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
            if not (is_plain and value.numel() > 1) and not _can_be_saved(value):
                return f"its state {name!r} is a {type(value).__name__}, which cannot be saved"
        return None

    def odd_state(self) -> str | None:
        """Return the name of a state that is neither one value nor one per element; None if there is none."""
        _, clone = self._run()
        for name, value in next(iter(clone.state.values()), {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != self._values[0].shape:
                return f"its state {name!r} has shape {tuple(value.shape)} ({self._shape})"
        return None

    def counts(self, *, with_gradient: bool) -> set[str]:
        """Return the attributes of the optimizer and options of its groups that steps change."""
        param = nn.Parameter(self._values[0].clone())
        clone: Any = self._stepped([[param]], [(param, Tensor.clone)] if with_gradient else [])
        before = {**self._optimizer.__dict__, **self._options}
        after = {**mutable_attributes(clone), **options_of(clone.param_groups[0])}
        return {key for key, value in after.items() if key not in before or repr(before[key]) != repr(value)}

    def moves_without_gradient(self) -> bool:
        """Return whether a step changes a parameter that has no gradient."""
        param = nn.Parameter(self._values[0].clone())
        clone = self._stepped([[param]], [])
        return param.grad is not None or bool(clone.state) or not torch.equal(param.detach(), self._values[0])

    def state_after_one_step(self) -> dict[str, Any]:
        del self._values[2:]
        return next(iter(self._run()[1].state.values()), {})

    def _number_of_gradients(self) -> str | None:
        """Return the option that depends on gradients, as D-Adaptation's distance does: it would differ between ranks."""
        found = []
        for scale in (1.0, 3.0):
            param = nn.Parameter(self._values[0].clone())
            clone = self._stepped([[param]], [(param, partial(torch.mul, other=scale))])
            options = clone.param_groups[0].items()
            found.append({key: value for key, value in options if isinstance(value, (float, Tensor))})
        differing = [key for key, value in found[0].items() if repr(value) != repr(found[1].get(key))]
        return f"{differing[0]!r} in its groups depends on the gradients of all parameters" if differing else None

    def _next_to_other(self, other_first: bool, apart: bool) -> Tensor:
        """Return the parameter after the same steps together with another one, in one group or in two."""
        corner = tuple(slice(0, -(-extent // 2)) for extent in self._values[0].shape)
        param, other = nn.Parameter(self._values[0].clone()), nn.Parameter(self._values[0][corner].clone() * 3)
        params = [other, param] if other_first else [param, other]
        grads: Grads = [(param, Tensor.clone), (other, lambda grad: grad[corner].clone() * 5)]
        self._stepped([[p] for p in params] if apart else [params], grads)
        return param.detach().flatten()

    def _run(
        self,
        part: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        watching: AbstractContextManager[object] | None = None,
    ) -> tuple[Tensor, torch.optim.Optimizer]:
        """Step over a part of the values. Returns the parameter, flat, and its optimizer."""
        param = nn.Parameter(part(self._values[0]).clone())
        clone = self._stepped([[param]], [(param, lambda grad: part(grad).clone())], watching)
        return param.detach().flatten(), clone

    def _stepped(
        self, groups: list[list[nn.Parameter]], grads: Grads, watching: AbstractContextManager[object] | None = None
    ) -> torch.optim.Optimizer:
        clone = trial_clone(self._optimizer, [{"params": params, **self._options} for params in groups])
        step = bare_step(type(self._optimizer))
        with torch.enable_grad(), watching or nullcontext():
            for value in self._values[1:]:
                for param, grad in grads:
                    param.grad = grad(value)
                step(clone)
        return clone


def trials(optimizer: torch.optim.Optimizer) -> Iterator[Trial]:
    """Yield a trial for each kind of group and each number of dimensions, small ones first."""
    depths = {param.dim() for group in optimizer.param_groups for param in group["params"]}
    shapes = [_FIRST, _MATRIX, *(shape for shape in _DEEPER if len(shape) in depths)]
    kinds = {
        repr({name: value for name, value in options.items() if name not in _MIN_OPTIONS}): options
        for options in map(options_of, optimizer.param_groups)
    }
    with untouched(optimizer):
        for shape in shapes:
            for options in kinds.values():
                yield Trial(optimizer, options, shape)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return attribute -> wrapped optimizer (Lookahead, SAM). They have the same groups."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)}


def trial_clone(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a copy over other groups, in training mode, whose steps do not change the optimizer and its groups."""
    clone = copy_optimizer(optimizer, groups)
    for key, value in inner_optimizers(optimizer).items():  # else the trial would step over the model's parameters
        inner = copy_optimizer(value, groups)
        inner.param_groups = clone.param_groups
        clone.__dict__[key] = inner
    train = getattr(clone, "train", None)
    if callable(train):  # schedule-free optimizers step only in this mode
        train()
    return clone


def _agree(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-7)


def _can_be_saved(value: Any) -> bool:
    try:
        scalar_to_json("", value)
    except CheckpointError:
        return False
    return True


class _Collectives(TorchDispatchMode):
    """Records the first call of `torch.distributed`."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and self.found is None:
            self.found = _name(func)
        return func(*args, **(kwargs or {}))


class _Reductions(TorchDispatchMode):
    """Records the first operation that reduces at least `numel` floating-point numbers to fewer.

    Results alone do not show a norm that matters only for some values.
    """

    found: str | None = None

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [
            item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor) and item.numel() >= self._numel
        ]
        if read and self.found is None:
            memory = {item.untyped_storage().data_ptr() for item in read}
            made = [item for item in tree_leaves(out) if isinstance(item, Tensor) and item.is_floating_point()]
            if any(item.numel() < self._numel and item.untyped_storage().data_ptr() not in memory for item in made):
                self.found = _name(func)
        return out


def _name(func: Any) -> str:
    name: str = func.name().partition("::")[2].partition(".")[0]
    return name
