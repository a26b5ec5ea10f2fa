"""Which optimizers can be bound, and to what: long flat spans, or parameters of true shape.

* Element-wise ones (each element's update depends on that element alone) step over spans, cut or not, in any tier.
* All others need **wholes**: parameters of true shape. Where ranks share a model out, every whole has one owner, which sees
  none but its own, and where state is offloaded they are stepped over one by one: that is for rules in which a parameter's
  update depends on that parameter alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ...checkpoint.save import scalar
from ...errors import CheckpointError, UnsupportedOptimizerError
from ...tiers.array import is_array
from ..values.reads import plain_class
from .shadow_optimizer import copied, copy_of, options_of


class Needs(Enum):
    """What an optimizer has to step over."""

    ELEMENTS = auto()
    WHOLES = auto()
    """Parameters of true shape."""
    ITS_OWN = auto()
    """The parameters that it was built with, or state that is nobody else's business: it cannot be bound."""


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
_MULTIPLIES = {"Muon", "Shampoo", "SOAP"}
_QUANTISED = re.compile(r".*(8bit|4bit|Fp8)")
_OTHERS = "an element-wise optimizer (AdamW, Adam, SGD, RMSprop, Adagrad, Lion)"
_TRIED = (136, 192)
"""Large enough that optimizers which quantise only long states do so, and those that factor only wide matrices."""
_TRIED_DEEPER = (8, 17, 192), (17, 8, 12, 16)
"""As many elements in 3 and 4 dimensions."""
_STEPS = 8
"""So many that rules which begin with their state alone (RAdam's) move parameters, too."""
_TRIED_FIRST = (8, 12)
"""Before that: a rule that makes a matrix of n x n of n elements in a row would take hours over as many as `_TRIED` has."""
_CUT = 2311  # elements of the first part: nothing divides it


def needs_wholes(optimizer: torch.optim.Optimizer, params: Container[Tensor], *, cut: bool, offloaded: bool) -> bool:
    """Whether the optimizer must have parameters of true shape; False: it is element-wise.

    Known ones by name, unknown ones by trial: some steps on a matrix (and on a tensor of 3 or 4 dimensions where it has
    such) must give what the same elements give as two flat parts, each with an optimizer of its own, and no step may work out
    fewer numbers from many, whether or not these have mattered this time. One that cannot be tried is taken to need wholes.

    Args:
        cut: ranks share the parameters out. `offloaded`: state may be elsewhere than in the device's memory.

    Raises:
        UnsupportedOptimizerError: there are no wholes here, or not even they would do; names it and says what to use.
    """
    kind = type(optimizer)
    needs, reason = _needs_of(optimizer, params)
    if needs is Needs.ITS_OWN:
        raise UnsupportedOptimizerError(f"{kind.__name__} cannot step over a sharded model: {reason}; use {_OTHERS}")
    if needs is Needs.ELEMENTS:
        return False
    mixes = _mixes(optimizer) if cut or offloaded else None
    if mixes is None and offloaded and _inner(optimizer):
        mixes = "what steps over offloaded state has no place for that one's"
    if mixes is not None:
        places = ["where ranks share the parameters out, each with the whole of some"] if cut else []
        places += ["where its state is offloaded and updated one parameter after another"] if offloaded else []
        where = "one rank" + (" with offload_optimizer='none'" if offloaded else "")
        raise UnsupportedOptimizerError(
            f"{kind.__name__} cannot run {', and '.join(places)}: {reason}, and "
            f"{mixes}. Use {_OTHERS}, or this one where every rank has all: "
            f"{'' if offloaded else 'ZeroConfig(stage=0) on any number of ranks, or '}{where}"
        )
    return True


def counted(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Numbers that a step changes besides each parameter's state (`k` of schedule-free optimizers): attributes of the
    optimizer, and options of its groups. Of a step that is made stretch by stretch each must find them as they were before.

    Raises:
        UnsupportedOptimizerError: a step in which no parameter has a gradient leaves them as they are: that is the optimizer's
            own, where all its parameters are offloaded.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        return frozenset()
    found: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    with suppress(Exception):  # it was asked what it needs, and said it
        for trial in _trials(optimizer):
            found |= trial.counted(with_gradient=True)
            missed |= trial.counted(with_gradient=True) - trial.counted(with_gradient=False)
    if missed:
        raise UnsupportedOptimizerError(
            f"{kind.__name__} cannot run where state is offloaded: it changes {sorted(missed)[0]!r} only in steps in which "
            f"a parameter has a gradient, and its own step sees none there. Use {_OTHERS}, or set offload_optimizer='none'"
        )
    return found


def moves_without_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step does something to a parameter that has no gradient; by trial. False where it cannot be tried."""
    with suppress(Exception):
        return any(trial.moves_without_gradient() for trial in _trials(optimizer))
    return False


def step_cost(optimizer: torch.optim.Optimizer, shape: Sequence[int]) -> int:
    """What a step over one parameter costs beside others, for owners to be balanced: arithmetic where the rule multiplies the
    matrix by itself, else memory traffic, which goes with elements."""
    numel = max(1, math.prod(shape))
    products = any(base.__name__ in _MULTIPLIES for base in type(optimizer).__mro__)
    return numel * min(shape) if products and len(shape) > 1 and numel > 1 else numel


def state_bytes(
    optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype
) -> tuple[int, ...]:
    """Bytes of each array of the state that the optimizer makes of a parameter of this shape, in no order. By a step on the
    meta device, which makes the state and computes nothing. What it needs a value for ends it early: what a step on a small
    tensor makes besides is taken to grow with the parameter."""
    options = options_of(optimizer.param_groups[group])
    param = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    param.grad = torch.empty_like(param)
    with torch.device("meta"):
        twin = _ready(optimizer, [{"params": [param], **options}])
        with suppress(Exception):
            type(optimizer).step(twin)
    made = {str(key): value.nbytes for key, value in twin.state.get(param, {}).items() if is_array(value)}
    small = tuple(min(extent, 8) for extent in shape)
    with suppress(Exception):
        trial = _Trial(optimizer, options, small)
        found: dict[str, Any] = next(iter(trial.stepped_once().state.values()), {})
        scale = param.numel() / max(1, math.prod(small))
        for key, value in found.items():
            if is_array(value) and str(key) not in made:
                made[str(key)] = round(value.nbytes * scale)
    return tuple(made.values())


def _needs_of(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> tuple[Needs, str]:
    kind = type(optimizer)
    found = {needs: why for base in reversed(kind.__mro__) for needs, why in [_KNOWN.get(base.__name__, (None, ""))]}
    kept = found.get(Needs.ITS_OWN) or _kept_parameters(optimizer, params)
    if kept is not None:
        return Needs.ITS_OWN, kept
    if kind.__module__.startswith("torch.optim") and _KNOWN.get(kind.__name__, ("", ""))[0] is Needs.ELEMENTS:
        return Needs.ELEMENTS, ""
    # What it steps over instead, and what it is tried on, are plain tensors.
    special = None if kind.__module__.startswith("torch.optim") else _special(optimizer, params)
    if special is not None:
        return Needs.ITS_OWN, f"it may have rules of its own for a {special}, and would be given plain tensors"
    odd = _odd_state(optimizer)
    if odd is not None and odd[0] is Needs.ITS_OWN:
        return odd
    reason = found.get(Needs.WHOLES)
    if reason is None and (inner := _inner(optimizer)):
        reason = f"it steps by another optimizer (its {next(iter(inner))!r}), which keeps state of its own"
    if reason is None and _QUANTISED.fullmatch(kind.__name__):
        reason = "it quantises its state by blocks of elements, which slices cut otherwise"
    if reason is None:
        reason = _disagreement(optimizer) or (odd and odd[1])
    return (Needs.ELEMENTS, "") if reason is None else (Needs.WHOLES, reason)


def _kept_parameters(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> str | None:
    """Where an optimizer has the model's parameters besides in its groups: those would not be the ones it steps over."""
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults") and any(found in params for found in _tensors(value, 3)):
            return f"it keeps the parameters it was built with (as {name!r})"
    return None


def _inner(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Optimizers that it has, by attribute: Lookahead and SAM step by one, which has the same groups."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)}


def _special(optimizer: torch.optim.Optimizer, params: Container[Tensor]) -> str | None:
    """The class of a trained parameter of the model where it is derived from torch's: geoopt's optimizers keep such on their
    manifold. Released parameters count as what they are when they are gathered."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in params and param.requires_grad and isinstance(param, nn.Parameter):
                kind = plain_class(param)
                if kind is not nn.Parameter:
                    return kind.__name__
    return None


def _tensors(value: Any, depth: int) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _tensors(inner, depth - 1)


# Trials --------------------------------------------------------------------------------------------------------------


def _trials(optimizer: torch.optim.Optimizer, *shapes: tuple[int, ...]) -> Iterator[_Trial]:
    """One for each kind of group and each number of dimensions, or each of `shapes`."""
    seen: list[dict[str, Any]] = []
    depths = {param.dim() for group in optimizer.param_groups for param in group["params"]}
    for group in optimizer.param_groups:
        options = options_of(group)
        kept = {key: value for key, value in options.items() if key not in _SHOWN}
        if not any(repr(kept) == repr(other) for other in seen):
            seen.append(kept)
            wanted = shapes or (_TRIED, *(shape for shape in _TRIED_DEEPER if len(shape) in depths))
            yield from (_Trial(optimizer, options, shape) for shape in wanted)


def _disagreement(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer is not element-wise; None where it is."""
    with suppress(Exception):  # what cannot be tried on so few elements is tried on more
        for trial in _trials(optimizer, _TRIED_FIRST):
            if (why := trial.why_not_elements()) is not None:
                return why
    try:
        return next((why for trial in _trials(optimizer) if (why := trial.why_not_elements())), None)
    except Exception as error:
        return f"it could not be tried on a small example ({type(error).__name__}: {error})"


def _mixes(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a parameter's update depends on more than that parameter; None where it does not. Torch's own are not tried: of those
    that need wholes each is a rule for one parameter, and the 88 updates of a trial of Muon take 2 s of a CPU core."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return None
    try:
        return next((why for trial in _trials(optimizer) if (why := trial.why_not_alone())), None)
    except Exception as error:
        return f"it could not be tried on small examples ({type(error).__name__}: {error})"


def _odd_state(optimizer: torch.optim.Optimizer) -> tuple[Needs, str] | None:
    """What the state that it makes asks for; None where that is one value or one per element. One that cannot be tried may
    have any."""
    with suppress(Exception):
        return next((odd for trial in _trials(optimizer) if (odd := trial.odd_state())), None)
    return None


_SHOWN = {"lr": 0.01, "initial_lr": None, "weight_decay": 0.01}
"""Options of groups that do not change the rule, and what a trial takes for less: what a rule does to some shapes and not to
others, or to parameters beside each other, is lost in rounding at a warm-up's first rate or a decay of 1e-4."""


class _Trial:
    """A few steps of an optimizer of the same class and settings over one small parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: dict[str, Any], shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
        self._values = [torch.randn(shape, generator=generator, device="cpu").to(device) for _ in range(_STEPS + 1)]
        self._optimizer = optimizer
        self._options = dict(options)
        self._tried = f"tried on a tensor of {' x '.join(map(str, shape))}"
        for name, shown in _SHOWN.items():
            value = self._options.get(name)
            if shown is not None and isinstance(value, (int, float, Tensor)) and 0 <= float(value) < shown:
                self._options[name] = torch.full_like(value, shown) if isinstance(value, Tensor) else shown

    def why_not_elements(self) -> str | None:
        """Why the rule is not element-wise; None where it is."""
        whole = self._run(lambda tensor: tensor)[0]
        if torch.equal(whole, self._values[0].flatten()):
            return f"{_STEPS} steps on a small example moved nothing, so there is no telling what it does"
        cut = min(_CUT, whole.numel() // 3 + 1)
        parts = torch.cat([self._run(lambda t: t.flatten()[:cut])[0], self._run(lambda t: t.flatten()[cut:])[0]])
        if (number := self.number_of_gradients()) is not None:
            return number
        if not torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
            return f"it gives other results on two flat slices than on a whole parameter ({self._tried})"
        reductions = _Reductions(whole.numel())
        with suppress(Exception):  # compiled steps may not bear to be watched; their results agree
            self._run(lambda tensor: tensor, reductions)
        return f"it works out {reductions.found} over a whole parameter ({self._tried})" if reductions.found else None

    def why_not_alone(self) -> str | None:
        """Why the rule is not one for each parameter by itself; None where it is."""
        talks = _Talks()
        alone = self._run(lambda tensor: tensor, talks)[0]
        if talks.found is not None:
            return f"it communicates by itself ({talks.found})"
        if (number := self.number_of_gradients()) is not None:
            return number
        for other_first in (False, True):
            for apart in (False, True):
                if not torch.allclose(alone, self._run_beside(other_first, apart), rtol=1e-5, atol=1e-7):
                    return f"it gives a parameter another update beside others than alone ({self._tried})"
        return None

    def number_of_gradients(self) -> str | None:
        """Which number in its groups follows the gradients (the distance of D-Adaptation): each rank, and each stretch of an
        offloaded step, would have its own."""
        found = []
        for scale in (1.0, 3.0):
            param = nn.Parameter(self._values[0].clone())
            twin = self._stepped([[param]], [(param, lambda grad, scale=scale: grad * scale)])  # type: ignore[misc]
            found.append(
                {key: value for key, value in twin.param_groups[0].items() if isinstance(value, (float, Tensor))}
            )
        differing = (key for key, value in found[0].items() if not _same_number(value, found[1].get(key)))
        return next((f"{key!r} in its groups depends on the gradients of all parameters" for key in differing), None)

    def _run_beside(self, other_first: bool, apart: bool) -> Tensor:
        """The parameter, flat, after the same steps with another one beside it: of as many dimensions, smaller, larger values.

        Args:
            apart: each in a group of its own.
        """
        first = tuple(slice(0, -(-extent // 2)) for extent in self._values[0].shape)
        param, other = nn.Parameter(self._values[0].clone()), nn.Parameter(self._values[0][first].clone() * 3)
        params = [other, param] if other_first else [param, other]
        self._stepped(
            [[p] for p in params] if apart else [params],
            [(param, lambda grad: grad.clone()), (other, lambda grad: grad[first].clone() * 5)],
        )
        return param.detach().flatten()

    def odd_state(self) -> tuple[Needs, str] | None:
        """What state it makes that is neither one value nor one per element, and what that needs."""
        twin = self._run(lambda tensor: tensor)[1]
        new = [key for key in twin.param_groups[0] if key not in (*self._options, *twin.defaults, "params")]
        held = [key for key in new if not _has_place(twin.param_groups[0][key])]
        if held:
            return Needs.ITS_OWN, f"it keeps state in its groups (as {held[0]!r}), which cannot be saved"
        named = [key for key in twin.state if not isinstance(key, Tensor)]
        if named:
            return Needs.ITS_OWN, f"it keeps state of no parameter (as state[{named[0]!r}]), which cannot be shared out"
        found: tuple[Needs, str] | None = None
        for state, value in next(iter(twin.state.values()), {}).items():
            if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
                kind = type(value).__name__
                return Needs.ITS_OWN, f"its state {state!r} is a {kind}, a tensor made of others, which cannot be saved"
            if not (isinstance(value, Tensor) and value.numel() > 1) and not _has_place(value):
                return Needs.ITS_OWN, f"its state {state!r} is a {type(value).__name__}, which cannot be saved"
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != self._values[0].shape:
                found = Needs.WHOLES, f"its state {state!r} has shape {tuple(value.shape)} ({self._tried})"
        return found

    def moves_without_gradient(self) -> bool:
        param = nn.Parameter(self._values[0].clone())
        twin = self._stepped([[param]], [])
        return param.grad is not None or bool(twin.state) or not torch.equal(param.detach(), self._values[0])

    def counted(self, *, with_gradient: bool) -> frozenset[str]:
        """What a step changes of the optimizer's own numbers, and of its groups'."""
        param = nn.Parameter(self._values[0].clone())
        grads = [(param, lambda grad: grad.clone())] if with_gradient else []
        twin: Any = self._stepped([[param]], grads)
        before = {**self._optimizer.__dict__, **self._options}
        after = {key: value for key, value in {**twin.__dict__, **twin.param_groups[0]}.items() if key != "params"}
        numbers = {key for key, value in after.items() if isinstance(value, (int, float, Tensor))}
        return frozenset(key for key in numbers if key not in before or repr(before[key]) != repr(after[key]))

    def stepped_once(self) -> torch.optim.Optimizer:
        del self._values[2:]
        return self._run(lambda tensor: tensor)[1]

    def _run(
        self, cut: Callable[[Tensor], Tensor], watching: AbstractContextManager[object] | None = None
    ) -> tuple[Tensor, torch.optim.Optimizer]:
        """The parameter afterwards, flat, and its optimizer."""
        param = nn.Parameter(cut(self._values[0]).clone())
        twin = self._stepped([[param]], [(param, lambda grad: cut(grad).clone())], watching)
        return param.detach().flatten(), twin

    def _stepped(
        self,
        groups: Sequence[list[nn.Parameter]],
        grads: Sequence[tuple[nn.Parameter, Callable[[Tensor], Tensor]]],
        watching: AbstractContextManager[object] | None = None,
    ) -> torch.optim.Optimizer:
        """The steps, over these parameters; each one's gradient from the trial's."""
        kind = type(self._optimizer)
        twin = _ready(self._optimizer, [{"params": params, **self._options} for params in groups])
        with torch.enable_grad(), watching or nullcontext():
            for value in self._values[1:]:
                for param, grad in grads:
                    param.grad = grad(value)
                kind.step(twin)
        return twin


def _ready(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """As `copy_of`, in the mode in which it steps. Tensors among the groups' options are copies, too."""
    groups = [{key: value if key == "params" else copied(value) for key, value in group.items()} for group in groups]
    twin = copy_of(optimizer, groups)
    for key, value in _inner(optimizer).items():  # else the trial would step over the program's own parameters
        inner = copy_of(value, groups)
        inner.param_groups = twin.param_groups
        twin.__dict__[key] = inner
    train = getattr(twin, "train", None)
    if callable(train):  # schedule-free ones step in no other
        train()
    return twin


def _same_number(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def _has_place(value: Any) -> bool:
    """Whether a checkpoint has a place for it among an optimizer's options and single values."""
    try:
        scalar("", value)
    except CheckpointError:
        return False
    return True


class _Talks(TorchDispatchMode):
    """Notes the first call of `torch.distributed`."""

    found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and self.found is None:
            self.found = func.name().partition("::")[2].partition(".")[0]
        return func(*args, **(kwargs or {}))


class _Reductions(TorchDispatchMode):
    """Notes the first operation that makes fewer floating-point numbers of at least `numel`. Not questions such as whether
    all are finite: an optimizer may look at what it never takes a step by."""

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
            if any(i.numel() < self._numel and i.untyped_storage().data_ptr() not in memory for i in made):
                self.found = func.name().partition("::")[2].partition(".")[0]
        return out
