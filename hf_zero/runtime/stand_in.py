"""A tensor without storage that stands for a gradient whose elements the ranks share out: what both kinds have in common.

`gradients.Gradient` is what a model's parameters show, `slices.Slice` what the masters in the optimizer's groups do. Which
torch operation is which is one table, `OPERATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import StateError

T = TypeVar("T", bound=Tensor)


class Kind(Enum):
    """What a torch operation does with a stand-in. What is in no row reads it, writes it or views it, as its schema says."""

    ALIAS = auto()
    """Another name for the same."""
    NORM = auto()
    """One number, from all ranks' elements if it is over all dimensions."""
    NORMS = auto()
    """The same of a list, in one collective."""
    LIKE = auto()
    """A new tensor of the same shape and type, whatever the values are."""
    POINTWISE = auto()
    """In place, each element by itself: ranks do their own elements."""
    ELEMENTWISE = auto()
    """Of a `Slice` the result, too, has the norm over all ranks: `(p.abs() * p.grad).norm()`."""


OPERATIONS = {
    name: kind
    for kind, names in (
        (Kind.ALIAS, "detach alias"),
        (Kind.NORM, "linalg_vector_norm norm"),
        (Kind.NORMS, "_foreach_norm"),
        (
            Kind.LIKE,
            "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
            "new_empty_strided",
        ),
        (
            Kind.POINTWISE,
            "mul_ div_ add_ sub_ clamp_ clamp_min_ clamp_max_ zero_ fill_ neg_ nan_to_num_ copy_ abs_ sign_ sqrt_ pow_ "
            "addcmul_ addcdiv_ lerp_ masked_fill_ maximum_ minimum_",
        ),
        (Kind.ELEMENTWISE, "mul div abs neg _to_copy clone add sub clamp"),
    )
    for name in names.split()
}


class NormsOf(Protocol):
    """Who answers for the norms of several stand-ins in one collective: 0-dim float64, the same on every rank."""

    def norms(self, grads: Sequence[Any], order: float) -> list[Tensor]: ...


@dataclass(frozen=True)
class Call:
    """One torch operation that was given a stand-in."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def name(self) -> str:
        name: str = self.func._schema.name
        return name.removeprefix("aten::")

    @property
    def first(self) -> Any:
        return self.args[0] if self.args else None

    def argument(self, *names: str) -> Any:
        """By one of the names that the schema has for it, or its default."""
        for at, argument in enumerate(self.func._schema.arguments):
            if argument.name in names:
                return self.args[at] if at < len(self.args) else self.kwargs.get(argument.name, argument.default_value)
        return None

    def run(self, change: Callable[[Any], Any], kind: type[Tensor]) -> Any:
        """The operation, with `change` made to every tensor of this kind among its arguments."""
        return self.func(*mapped(self.args, change, kind), **mapped(self.kwargs, change, kind))

    def tensors(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    def written(self, kind: type[T]) -> list[T]:
        """The tensors of this kind that it writes to."""
        if not self.func._schema.is_mutable:
            return []
        values = dict(zip((argument.name for argument in self.func._schema.arguments), self.args)) | self.kwargs
        return [
            tensor
            for argument in self.func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
            for tensor in _tensors((values[argument.name],))
            if isinstance(tensor, kind)
        ]


class StandIn(Tensor):
    """A tensor that has a shape, a type and a device, and whose elements are with the ranks' shards."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        kind = OPERATIONS.get(call.name)
        first = call.first
        if kind is Kind.NORMS:
            return _norms(call)
        if isinstance(first, StandIn):
            if kind is Kind.ALIAS:
                return first.alias()
            if kind is Kind.NORM and len(call.argument("dim") or ()) in (0, first.dim()):
                norm = first.norm_over_all(_order(call))
                if norm is not None:
                    norm = norm.to(_norm_type(first, call))
                    norm = norm.reshape((1,) * first.dim()) if call.argument("keepdim") else norm
                    return call.kwargs["out"].copy_(norm) if "out" in call.kwargs else norm
        return cls.run(call, kind)

    @classmethod
    def run(cls, call: Call, kind: Kind | None) -> Any:
        """An operation that is neither a norm of the whole nor an alias."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """The values, to read."""
        raise NotImplementedError

    def alias(self) -> Tensor:
        """Another name for it."""
        raise NotImplementedError

    def norms_together(self, name: str) -> tuple[NormsOf, Any] | None:
        """Who answers for several at once, and what it is asked for this one; None: it is asked alone."""
        return None

    def norm_over_all(self, order: float) -> Tensor | None:
        """0-dim float64, the same on every rank; None where the values must be read for it."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own would turn this object into another tensor, which no step looks at.
        if value.shape != self.shape:
            raise StateError(f"a sharded gradient of shape {tuple(self.shape)} cannot take {tuple(value.shape)}")
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)


def _norms(call: Call) -> list[Tensor]:
    """One collective for all gradients of a model."""
    tensors: Sequence[Tensor] = call.args[0]
    order = _order(call)
    out: dict[int, Tensor] = {}
    asked: dict[int, tuple[NormsOf, list[tuple[int, StandIn, Any]]]] = {}
    for at, tensor in enumerate(tensors):
        together = tensor.norms_together(call.name) if isinstance(tensor, StandIn) else None
        if together is not None and isinstance(tensor, StandIn):
            keeper, key = together
            asked.setdefault(id(keeper), (keeper, []))[1].append((at, tensor, key))
        elif isinstance(tensor, StandIn) and (norm := tensor.norm_over_all(order)) is not None:
            out[at] = norm.to(_norm_type(tensor, call))
        else:
            out[at] = call.func([plain_of(tensor)], *call.args[1:], **call.kwargs)[0]
    for keeper, found in asked.values():
        norms = keeper.norms([key for _, _, key in found], order)
        out.update({at: norm.to(_norm_type(grad, call)) for (at, grad, _), norm in zip(found, norms)})
    return [out[at] for at in range(len(tensors))]


def _order(call: Call) -> float:
    order = call.argument("ord", "p")
    return 2.0 if order is None else float(order)


def _norm_type(grad: StandIn, call: Call) -> torch.dtype:
    """Of a norm: exact sums of narrow types are not rounded to them again."""
    wanted: torch.dtype | None = call.argument("dtype")
    return wanted or torch.promote_types(torch.float32, grad.dtype.to_real())


def plain_of(tensor: Tensor) -> Tensor:
    return tensor.plain() if isinstance(tensor, StandIn) else tensor


def mapped(values: Any, change: Callable[[Any], Any], kind: type[Tensor]) -> Any:
    """`values` (nested tuples, lists, dicts) with `change` made to every `kind`."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)(mapped(value, change, kind) for value in values)
    if isinstance(values, dict):
        return {key: mapped(value, change, kind) for key, value in values.items()}
    return values


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def is_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], Tensor)
