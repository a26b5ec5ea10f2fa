"""Which optimizers step over flat segments, which need full matrices, and which cannot work.

* Element-wise optimizers: an element's update depends on that element alone. Segments may be any part of a span.
* Full-matrix optimizers: a parameter's update depends on that whole parameter, and on no other. Each parameter has one
  owner rank. Where every rank has all parameters on its device, an update may depend on several of them.

A table lists torch's own and common others. Users register classes. All others run trial steps (`trials`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnsupportedOptimizerError
from ..tiers.array import is_array
from .optimizer_copy import bare_step, options_of, untouched
from .trials import Trial, inner_optimizers, trial_clone, trials


class Kind(Enum):
    """The tensors that an optimizer steps over."""

    ELEMENTWISE = "elementwise"
    MATRICES = "matrices"


_ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Classes of `torch.optim`."""
_MATRICES = {
    name: reason
    for reason, names in (
        ("it factors each matrix", "Adafactor CAME SM3"),
        ("it orthogonalizes full matrices", "Muon"),
        ("it preconditions full matrices", "Shampoo SOAP"),
        ("it projects full matrices", "GaLoreAdamW"),
        ("it averages over blocks of each matrix", "AdamMini Adam_mini"),
        ("it scales by each layer's norm", "LAMB Lamb FusedLAMB FusedLamb LARS Lars NovoGrad Novograd"),
    )
    for name in names.split()
}
_UNSUPPORTED = {
    "LBFGS": "it keeps the parameters it was built with, and evaluates the model inside its step",
    "SparseAdam": "it needs sparse gradients",
    "KFAC": "it hooks the modules it was built with",
    "DistributedShampoo": "it keeps blocks of the parameters it was built with",
}
_QUANTIZED = re.compile(r".*(8bit|4bit|Fp8)")
_MULTIPLIES = frozenset({"Muon", "Shampoo", "SOAP"})
"""Their steps multiply matrices. The cost of all others is memory traffic."""
_INSTEAD = "an element-wise optimizer (AdamW, Adam, SGD, RMSprop, Adagrad, Lion)"
_REGISTERED: dict[type[torch.optim.Optimizer], Kind] = {}


def register_optimizer(cls: type[torch.optim.Optimizer], kind: str) -> None:
    """Declare what an optimizer class steps over, instead of trial steps.

    Args:
        cls: the class, and those derived from it that are not registered themselves.
        kind: "elementwise": each element's update depends on that element alone. "matrices": each parameter's update depends
            on that whole parameter alone.

    Raises:
        ConfigError: another kind.

    Example:
        >>> zero.register_optimizer(MyLion, "elementwise")
    """
    try:
        _REGISTERED[cls] = Kind(kind)
    except ValueError:
        raise ConfigError(f"kind is {kind!r}. Use 'elementwise' or 'matrices'") from None


def optimizer_kind(
    optimizer: torch.optim.Optimizer,
    params: Collection[Tensor],
    *,
    sharded: bool,
    offloaded: bool,
    class_of: Callable[[nn.Parameter], type[Any]] = type,
) -> Kind:
    """Return the kind of tensors that an optimizer steps over.

    Args:
        params: the model's parameters.
        sharded: each rank owns a part of the parameters.
        offloaded: state may be outside the device's memory.
        class_of: returns the class that user code gave a parameter.

    Raises:
        UnsupportedOptimizerError: the optimizer cannot step over such tensors.
    """
    registered = [_REGISTERED[base] for base in type(optimizer).__mro__ if base in _REGISTERED]
    if registered:
        return registered[0]
    name = type(optimizer).__name__
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    unusable = _why_unsupported(optimizer, params, class_of, is_torchs=is_torchs)
    if unusable is not None:
        raise UnsupportedOptimizerError(f"{name} cannot step over a sharded model: {unusable}. Use {_INSTEAD}")
    reason = None if is_torchs and name in _ELEMENTWISE else _why_matrices(optimizer)
    if offloaded and not is_torchs:
        _refuse_hidden_counts(optimizer)
    if reason is None:
        return Kind.ELEMENTWISE
    # torch's own optimizers update each parameter independently; a trial of Muon takes 2 s.
    mixes = _reason(optimizer, Trial.why_not_alone) if (sharded or offloaded) and not is_torchs else None
    if mixes is None and offloaded and inner_optimizers(optimizer):
        mixes = "the state of that one cannot be offloaded"
    if mixes is not None:
        places = ["where each rank owns some of the parameters"] if sharded else []
        places += ["where state is offloaded and updated one parameter after another"] if offloaded else []
        everywhere = "" if offloaded else "ZeroConfig(stage=0) on any number of ranks, or "
        raise UnsupportedOptimizerError(
            f"{name} cannot run {', and '.join(places)}: {reason}, and {mixes}. Use {_INSTEAD}, or use it where every rank has "
            f"all parameters: {everywhere}one rank{' with offload_optimizer=' + repr('none') if offloaded else ''}"
        )
    return Kind.MATRICES


def moves_without_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a trial step changes parameters without a gradient."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    with suppress(Exception):
        return any(trial.moves_without_gradient() for trial in trials(optimizer))
    return False


# Costs of full matrices -----------------------------------------------------------------------------------------------


def step_cost(optimizer: torch.optim.Optimizer, shape: Sequence[int]) -> int:
    """Return the relative cost of a step over one parameter, to balance owners."""
    numel = max(1, math.prod(shape))
    multiplies = any(base.__name__ in _MULTIPLIES for base in type(optimizer).__mro__)
    return numel * min(shape) if multiplies and len(shape) > 1 and numel > 1 else numel


def state_bytes(
    optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the bytes of each array of a parameter's state, by a step on the meta device and one over a small tensor."""
    options = options_of(optimizer.param_groups[group])
    param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    param.grad = torch.empty_like(param)
    with untouched(optimizer):
        with torch.device("meta"):
            clone = trial_clone(optimizer, [{"params": [param], **options}])
            with suppress(Exception):  # a step that needs a value ends early
                bare_step(type(optimizer))(clone)
        made = {str(key): value.nbytes for key, value in clone.state.get(param, {}).items() if is_array(value)}
        small = tuple(min(extent, 8) for extent in shape)
        with suppress(Exception):
            scale = param.numel() / max(1, math.prod(small))
            for key, value in Trial(optimizer, options, small).state_after_one_step().items():
                if is_array(value):
                    made.setdefault(str(key), round(value.nbytes * scale))
    return tuple(made.values())


# Reasons --------------------------------------------------------------------------------------------------------------


def _why_unsupported(
    optimizer: torch.optim.Optimizer,
    params: Collection[Tensor],
    class_of: Callable[[nn.Parameter], type[Any]],
    *,
    is_torchs: bool,
) -> str | None:
    for base in type(optimizer).__mro__:
        if base.__name__ in _UNSUPPORTED:
            return _UNSUPPORTED[base.__name__]
    known = {id(param) for param in params}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults") and not known.isdisjoint(_ids_in(value)):
            return f"it keeps the parameters it was built with, or their ids (as {name!r}): use parameter groups"
    if is_torchs:
        return None
    for group in optimizer.param_groups:
        for param in group["params"]:
            kind = class_of(param)
            if param.requires_grad and kind is not nn.Parameter and issubclass(kind, nn.Parameter):
                return f"it may have rules of its own for a {kind.__name__}, and would be given plain tensors"
    with suppress(Exception):
        return next((why for trial in trials(optimizer) if (why := trial.unsaveable())), None)
    return None


def _ids_in(value: Any, depth: int = 3) -> Iterator[int]:
    """Yield the ids that an attribute may use to look up parameters."""
    if isinstance(value, nn.Parameter):
        yield id(value)
    elif isinstance(value, int):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _ids_in(inner, depth - 1)


def _why_matrices(optimizer: torch.optim.Optimizer) -> str | None:
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _MATRICES:
            return _MATRICES[base.__name__]
    if inner := inner_optimizers(optimizer):
        return f"it steps by another optimizer (its {next(iter(inner))!r}), which keeps state of its own"
    if _QUANTIZED.fullmatch(kind.__name__):
        return "it quantizes its state by blocks of elements, which slices cut otherwise"
    return _reason(optimizer, lambda trial: trial.why_not_elementwise() or trial.odd_state())


def _reason(optimizer: torch.optim.Optimizer, ask: Callable[[Trial], str | None]) -> str | None:
    """Return the first answer of a trial. If a trial fails, assume the worst."""
    for trial in trials(optimizer):
        try:
            why = ask(trial)
        except Exception as error:  # of any kind: user code
            why = (
                None
                if trial.is_small
                else f"it could not be tried on a small example ({type(error).__name__}: {error})"
            )
        if why is not None:
            return why
    return None


def _refuse_hidden_counts(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        UnsupportedOptimizerError: some attributes or options change only in steps with a gradient. Its own step sees none
            if all parameters are offloaded.
    """
    missed: set[str] = set()
    with suppress(Exception):
        for trial in trials(optimizer):
            missed |= trial.counts(with_gradient=True) - trial.counts(with_gradient=False)
    if missed:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} cannot run where state is offloaded: it changes {min(missed)!r} only in steps in "
            f"which a parameter has a gradient, and its own step sees none. Use {_INSTEAD}, or set offload_optimizer='none'"
        )
