"""Which optimizers can be bound, and to what: long flat spans, or parameters of true shape.

* Element-wise ones (each element's update depends on that element alone) step over spans, cut or not, in any tier.
* All others need **wholes**: parameters of true shape, the same on every rank that updates them. There are wholes where
  nothing is cut (stage 0, or one rank) and the state is in the device's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedOptimizerError


class Needs(Enum):
    """What an optimizer has to step over."""

    ELEMENTS = auto()
    WHOLES = auto()
    ITS_OWN = auto()
    """The parameters that it was built with: it cannot be bound."""


_KNOWN = {
    name: (needs, reason)
    for needs, reason, names in (
        (Needs.ELEMENTS, "", "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD"),
        (Needs.WHOLES, "it factors each matrix into row and column statistics", "Adafactor"),
        (Needs.WHOLES, "it factors each matrix", "CAME SM3"),
        (Needs.WHOLES, "it orthogonalizes whole matrices", "Muon"),
        (Needs.WHOLES, "it preconditions whole matrices", "Shampoo SOAP"),
        (Needs.WHOLES, "it projects whole matrices", "GaLoreAdamW"),
        (Needs.WHOLES, "it averages over blocks of each matrix", "AdamMini Adam_mini"),
        (
            Needs.WHOLES,
            "it scales by each layer's norm",
            "LAMB Lamb FusedLAMB FusedLamb LARS Lars NovoGrad Novograd",
        ),
        (
            Needs.ITS_OWN,
            "it keeps the parameters it was built with, and evaluates the model inside its step",
            "LBFGS",
        ),
        (Needs.ITS_OWN, "it needs sparse gradients", "SparseAdam"),
        (Needs.ITS_OWN, "it listens to the modules it was built with", "KFAC"),
        (Needs.ITS_OWN, "it keeps blocks of the parameters it was built with", "DistributedShampoo"),
    )
    for name in names.split()
}
"""By class name, and why. The first row is of torch's own classes; the others hold for classes derived from them, too."""
_QUANTISED = re.compile(r".*(8bit|4bit|Fp8)")
_OTHERS = "an element-wise optimizer (AdamW, Adam, SGD, RMSprop, Adagrad, Lion)"
_TRIED = (64, 96)
"""Large enough that optimizers which quantise only long states do so."""
_CUT = 2311  # elements of the first part: nothing divides it


def needs_wholes(optimizer: torch.optim.Optimizer, params: Container[Tensor], *, cut: bool, offloaded: bool) -> bool:
    """Whether the optimizer must have parameters of true shape; False: it is element-wise.

    Known ones by name, unknown ones by trial: three steps on a matrix must give what the same elements give as two flat
    parts, each with an optimizer of its own. One that cannot be tried is taken to need wholes.

    Args:
        params: the model's parameters.
        cut: ranks have slices of parameters.
        offloaded: state may be elsewhere than in the device's memory.

    Raises:
        UnsupportedOptimizerError: there are no wholes here, or not even they would do; names it and says what to use.
    """
    kind = type(optimizer)
    needs, reason = _needs_of(optimizer, params)
    if needs is Needs.ITS_OWN:
        raise UnsupportedOptimizerError(f"{kind.__name__} cannot step over a sharded model: {reason}; use {_OTHERS}")
    if needs is Needs.ELEMENTS:
        return False
    if cut:
        where = "one rank" + (" with offload_optimizer='none'" if offloaded else "")
        raise UnsupportedOptimizerError(
            f"{kind.__name__} cannot run on flat slices of parameters: {reason}. Use {_OTHERS}, or this one where nothing is "
            f"cut: {'' if offloaded else 'ZeroConfig(stage=0) on any number of ranks, or '}{where}"
        )
    if offloaded:
        raise UnsupportedOptimizerError(
            f"{kind.__name__} cannot run on stretches of offloaded state: {reason}. Use {_OTHERS}, or set "
            "offload_optimizer='none', where it steps over whole parameters"
        )
    return True


def _needs_of(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> tuple[Needs, str]:
    """What it needs, and why: by name, else by trial."""
    kind = type(optimizer)
    found = {needs: why for base in reversed(kind.__mro__) for needs, why in [_KNOWN.get(base.__name__, (None, ""))]}
    kept = found.get(Needs.ITS_OWN) or _kept_parameters(optimizer, params)
    if kept is not None:
        return Needs.ITS_OWN, kept
    if kind.__module__.startswith("torch.optim") and _KNOWN.get(kind.__name__, ("", ""))[0] is Needs.ELEMENTS:
        return Needs.ELEMENTS, ""
    reason = found.get(Needs.WHOLES)
    if reason is None and _QUANTISED.fullmatch(kind.__name__):
        reason = "it quantises its state by blocks of elements, which slices cut otherwise"
    if reason is None:
        reason = _disagreement(optimizer)
    return (Needs.ELEMENTS, "") if reason is None else (Needs.WHOLES, reason)


def _kept_parameters(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> str | None:
    """Where an optimizer has the model's parameters besides in its groups: those would not be the ones it steps over."""
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults") and any(found in params for found in _tensors(value, 3)):
            return f"it keeps the parameters it was built with (as {name!r})"
    return None


def _tensors(value: Any, depth: int) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _tensors(inner, depth - 1)


def _disagreement(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer is not element-wise, by trial of each kind of group; None where it is."""
    seen: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        shape = {key: value for key, value in options.items() if key not in ("lr", "initial_lr", "weight_decay")}
        if any(repr(shape) == repr(other) for other in seen):
            continue
        seen.append(shape)
        try:
            with torch.enable_grad():
                found = _tried(optimizer, options)
        except Exception as error:
            return f"it could not be tried on a small example ({type(error).__name__}: {error})"
        if found is not None:
            return found
    return None


def _tried(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    values = [torch.randn(_TRIED, generator=generator).to(device) for _ in range(4)]
    options = dict(options)
    if "lr" in options and float(options["lr"]) == 0.0:  # a warm-up's first value shows nothing
        options["lr"] = torch.full_like(lr, 0.01) if isinstance(lr := options["lr"], Tensor) else 0.01

    def run(cut: Callable[[Tensor], Tensor]) -> Tensor:
        param = nn.Parameter(cut(values[0]).clone())
        twin = object.__new__(type(optimizer))
        skipped = ("state", "param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
        twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in skipped})
        torch.optim.Optimizer.__init__(twin, [{"params": [param], **options}], dict(optimizer.defaults))
        train = getattr(twin, "train", None)
        if callable(train):  # schedule-free ones step in that mode only
            train()
        for grad in values[1:]:
            param.grad = cut(grad).clone()
            type(optimizer).step(twin)
        return param.detach().flatten()

    whole = run(lambda tensor: tensor)
    if torch.equal(whole, values[0].flatten()):
        return "three steps on a small example moved nothing, so there is no telling what it does"
    parts = torch.cat([run(lambda t: t.flatten()[:_CUT]), run(lambda t: t.flatten()[_CUT:])])
    if torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
        return None
    return f"it gives other results on two flat slices than on a whole parameter (tried on a {_TRIED[0]} x {_TRIED[1]} matrix)"
