"""Tensors without storage that stand for gradients whose elements the ranks share out: `StandIn`, and what the groups show.

`gradients.Gradient` is what a model's parameters show, `Slice` what the masters in the optimizer's groups do between a backward
and the step. Which torch operation is which is one table, `OPERATIONS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ...errors import StateError
from ..saved_tensors import in_backward_of_any
from .reads import AsTheyAre

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


UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""What `torch.amp.GradScaler` calls for the gradients of one optimizer."""


class Keeper(Protocol):
    """Who has the gradients (`gradient_ops.Gradients`). Norms are 0-dim float64, the same on every rank."""

    def norms(self, grads: Sequence[Any], order: float) -> list[Tensor]:
        """Of several `gradients.Gradient`s, in one collective."""

    def wrote(self) -> None:
        """Gradients have other values now."""

    def settle_step(self) -> None:
        """No thread reads gradients in host memory any more."""

    def overflowed(self, optimizer: int) -> Tensor:
        """Whether a gradient of this optimizer is not finite on any rank, 0-dim float32. A loss scaler is about to unscale."""

    def slice_norm(self, place: int, order: float, device: torch.device) -> Tensor: ...

    def norm_over_ranks(self, part: Tensor, order: float) -> Tensor: ...


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

    @property
    def is_collective(self) -> bool:
        """One of the program's own (`dist.all_reduce(param.grad)`)."""
        return self.name.startswith("c10d::")

    def written(self, kind: type[T]) -> list[T]:
        """The tensors of this kind that it writes to."""
        if self.is_collective:  # their schemas name none: it is the first argument, where the name says that any is
            return [each for each in _tensors((self.first,)) if isinstance(each, kind) and self.name.endswith("_")]
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

    def norms_together(self, name: str) -> tuple[Keeper, Any] | None:
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
    asked: dict[int, tuple[Keeper, list[tuple[int, StandIn, Any]]]] = {}
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


# What the optimizer's groups show ---------------------------------------------------------------------------------


class Slice(StandIn):
    """What a master in the optimizer's groups shows for its gradient, where several ranks have the rest of the span.

    Every operation runs on this rank's elements, as plain tensors, and gives plain tensors; except for norms of the whole,
    which are those over all ranks: each span's at its first shard, and nothing at its others, because ranks may cut their
    slices at different places. One collective answers for all spans, until something is written or one is asked for again.

    Invariants: a master shows it only between the end of a backward and the optimizer's own step, which sees plain
    tensors; code of this package never reads it. What rests on the device it keeps itself (`local`), what does not is the
    shard's.
    """

    is_flat: ClassVar[bool] = True
    """1-D; what it is made like (the NaN of a master on disk) may be one element expanded."""
    keeper: Keeper
    shard: weakref.ref[Any] | None
    """None: the result of an operation, `local`."""
    root: Slice | None
    """What this is another name for (`.data`, `detach()`)."""
    local: Tensor | None
    place: int
    optimizer: int
    """Which of the model's optimizers has it; -1: the result of an operation."""

    @staticmethod
    def __new__(
        cls,
        keeper: Keeper,
        like: Tensor,
        shard: weakref.ref[Any] | None = None,
        root: Slice | None = None,
        local: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Slice:
        strides = torch.empty(like.shape, device="meta").stride()
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=strides, dtype=like.dtype, device=device or like.device
        )
        made.keeper, made.shard, made.root, made.local, made.place = keeper, shard, root, local, -1
        made.optimizer = -1 if root is None else root.optimizer
        return made

    @classmethod
    def run(cls, call: Call, kind: Kind | None) -> Any:
        first = call.first
        if "foreach_" in call.name and len(first) > 1 and any(isinstance(g, Slice) and g.is_paged for g in first):
            return one_by_one(call)
        if call.is_collective:
            raise StateError(
                f"{call.name}: a gradient of the optimizer's groups is this rank's slice, and other ranks have others. "
                "Gradients are averaged over the ranks already; a collective of your own takes `.grad` of model.parameters()"
            )
        if call.name == UNSCALE:
            return _unscale(call)
        if isinstance(first, Slice):
            if call.name == "view" and list(call.args[1]) in ([-1], list(first.shape)):
                return first.alias()
            if call.name == "mul_" and first.offloaded is not None and _is_number(call.args[1]):
                return first.scale(call.args[1])
        if call.name == "_foreach_mul_" and _is_number(call.args[1]):
            grads = call.args[0]
            if any(isinstance(grad, Slice) and grad.offloaded is not None for grad in grads):
                for grad in grads:
                    grad.mul_(call.args[1])
                return None
        shown: dict[int, Slice] = {}

        def plain(grad: Slice) -> Tensor:
            own = grad.plain()
            shown[id(own)] = grad
            return own

        out = call.run(plain, Slice)
        keeper = next(iter(shown.values())).keeper
        if call.func._schema.is_mutable:
            if call.written(Slice):
                keeper.wrote()
            return mapped(out, lambda tensor: shown.get(id(tensor), tensor), Tensor)
        if kind is Kind.ELEMENTWISE and _is_a_gradient(out, call.args):
            return Slice(keeper, out, local=out)
        return out

    @property
    def origin(self) -> Slice:
        return self if self.root is None else self.root

    @property
    def at_rest(self) -> Tensor | None:
        """The plain tensor, of one on the device."""
        root = self.root
        return self.local if root is None else root.local

    @property
    def owner(self) -> Any:
        """The shard that shows it; None where that shows it no more, or it is the result of an operation."""
        origin = self.origin
        shard = None if origin.shard is None else origin.shard()
        return shard if shard is not None and shard.shown is origin else None

    @property
    def is_paged(self) -> bool:
        """It is brought into memory for each use."""
        shard = self.owner
        return shard is not None and bool(shard.is_paged)

    @property
    def offloaded(self) -> Any:
        """The shard, if the gradient is not on the device."""
        shard = self.owner
        return shard if shard is not None and shard.is_offloaded else None

    def plain(self) -> Tensor:
        """This rank's elements, to read and to write.

        Raises:
            StateError: they have been cleared.
        """
        origin = self.origin
        found: Tensor | None = origin.local
        if origin.shard is not None:
            shard = self.owner
            if self.offloaded is not None:
                origin.keeper.settle_step()
            found = None if shard is None else shard.whole_grad()
        if found is None:
            raise StateError(
                "this gradient of the optimizer's groups was kept from an earlier step and has been cleared since: keep "
                "`p.grad.clone()` instead"
            )
        return found

    def alias(self) -> Slice:
        return type(self)(self.keeper, self, root=self.origin)

    def norm_over_all(self, order: float) -> Tensor:
        if in_backward_of_any():
            raise StateError("the norm of a gradient of the optimizer's groups: ask for it when backward has ended")
        if self.origin.shard is None or self.owner is None:  # the latter says that it has been cleared
            return self.keeper.norm_over_ranks(self.plain(), order)
        return self.keeper.slice_norm(self.origin.place, order, self.device)

    def scale(self, factor: Any) -> Slice:
        """As the engine's own clipping: what is in host memory is scaled on its way through the step."""
        self.keeper.settle_step()
        self.offloaded.scale(factor if isinstance(factor, Tensor) else torch.tensor(factor, device="cpu"))
        self.keeper.wrote()
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({self.plain()!r}; its norms are those over all ranks)"

    def data_ptr(self) -> int:
        return self.plain().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain().untyped_storage()


def _unscale(call: Call) -> None:
    """Run a loss scaler's check and division on this rank's elements; report to it what any rank found.

    Else a rank whose slice has no infinity would step while another skips, and their scales would differ.
    """
    slices = [grad for grad in call.first if isinstance(grad, Slice)]
    asked = {grad.optimizer: grad.keeper for grad in slices if grad.optimizer >= 0}
    flags = [keeper.overflowed(optimizer) for optimizer, keeper in sorted(asked.items())]
    call.run(plain_of, Slice)
    found = call.argument("found_inf")
    for flag in flags:
        found.copy_(torch.maximum(found, flag.to(found.device, found.dtype)))


class OwnGradient(Slice):
    """What a whole in the groups shows for its gradient: plain, but for norms, where every parameter has one owner.

    A rank has none of the other ranks' tensors: who asks for the norms of a group's gradients asks on each rank for others, and
    cannot be given what adds up to the norm over all ranks. Refused by name.
    """

    is_flat = False
    is_shared_out: bool
    """Other ranks own other parameters."""
    widen: Callable[[], Tensor | None] | None
    """Gives `local` when it is asked for: a gradient in host memory that is narrower than its parameter."""

    @classmethod
    def of_whole(
        cls,
        keeper: Keeper,
        like: Tensor,
        optimizer: int,
        *,
        is_shared_out: bool,
        local: Tensor | None = None,
        widen: Callable[[], Tensor | None] | None = None,
    ) -> OwnGradient:
        made = cls(keeper, like, local=local, device=like.device if local is not None else torch.device("cpu"))
        made.optimizer, made.is_shared_out, made.widen = optimizer, is_shared_out, widen
        return made

    @property
    def origin(self) -> OwnGradient:
        return cast(OwnGradient, super().origin)

    def plain(self) -> Tensor:
        origin = self.origin
        if origin.local is None and origin.widen is not None:
            origin.keeper.settle_step()
            origin.local = origin.widen()
        return super().plain()

    def norm_over_all(self, order: float) -> Tensor:
        if not self.origin.is_shared_out:
            return self.keeper.norm_over_ranks(self.plain().reshape(-1), order)
        raise StateError(
            "the norm of a gradient of the optimizer's groups: this optimizer steps over whole parameters, and each rank has "
            "those that it owns. Clip by Engine.clip_grad_norm_ (accelerator.clip_grad_norm_) or over model.parameters()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnGradient({self.plain()!r}; its norm is another rank's business, too)"


class PagedGradient(OwnGradient):
    """The same for a whole whose gradient is on disk: a part of its shard's, in memory while it is used."""

    part: slice
    whole: weakref.ref[Tensor]

    @classmethod
    def of_part(
        cls,
        keeper: Keeper,
        whole: Tensor,
        shard: weakref.ref[Any],
        part: slice,
        optimizer: int,
        *,
        is_shared_out: bool,
    ) -> PagedGradient:
        made = cast(PagedGradient, cls.of_whole(keeper, whole, optimizer, is_shared_out=is_shared_out))
        made.shard, made.part, made.whole = shard, part, weakref.ref(whole)
        return made

    @property
    def owner(self) -> Any:
        """The shard, until the gradient is cleared or a later backward shows another."""
        origin = cast(PagedGradient, self.origin)
        whole = origin.whole()
        with AsTheyAre():
            now = None if whole is None else whole.grad
        is_shown = isinstance(now, Slice) and now.origin is origin
        return origin.shard() if is_shown and origin.shard is not None else None

    @property
    def offloaded(self) -> Any:
        """A factor for the shard would be one for other wholes, too."""
        return None

    def plain(self) -> Tensor:
        origin, shard = cast(PagedGradient, self.origin), self.owner
        origin.keeper.settle_step()
        found: Tensor | None = None if shard is None else shard.whole_grad()
        if found is None:
            raise StateError(
                "this gradient of the optimizer's groups was kept from an earlier backward and is no longer shown: read "
                "`p.grad` again, or keep `p.grad.clone()`"
            )
        return found[origin.part].view(self.shape)


def one_by_one(call: Call) -> Any:
    """A foreach operation on one element of its lists after the other."""
    count = len(call.args[0])

    def one(value: Any, at: int) -> Any:
        return [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value

    out: list[Any] = []
    for at in range(count):
        args = tuple(one(value, at) for value in call.args)
        out += call.func(*args, **{key: one(value, at) for key, value in call.kwargs.items()}) or []
    return out if call.func._schema.returns else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and not isinstance(value, Slice) and value.dim() == 0 and not value.is_complex()
    )


def _is_a_gradient(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether it is a gradient still, elements for elements. One that a number on some device has scaled is somebody's own."""
    return (
        out.dim() == 1
        and (out.is_floating_point() or out.is_complex())
        and not any(isinstance(value, Tensor) and value.shape != out.shape for value in args)
    )
