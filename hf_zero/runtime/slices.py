"""What the optimizer's groups show as `.grad` between a backward and the step, where ranks share out a span: a stand-in."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import StateError
from .gradients import mapped, targets

_NORMS = frozenset({"linalg_vector_norm", "norm"})
_ELEMENTWISE = frozenset({"mul", "div", "abs", "neg", "_to_copy"})
"""Of these the result, too, has the norm over all ranks: `(p.abs() * p.grad).norm()`."""


class SliceKeeper(Protocol):
    """Who has the other ranks' slices; see `gradient_ops`."""

    def wrote(self) -> None:
        """Gradients have other values now."""
        ...

    def settle_step(self) -> None:
        """No thread reads gradients in host memory any more."""
        ...

    def slice_norm(self, place: int, order: float, device: torch.device) -> Tensor: ...

    def norm_over_ranks(self, part: Tensor, order: float) -> Tensor: ...


class Slice(Tensor):
    """What a master in the optimizer's groups shows for its gradient, where several ranks have the rest of the span.

    Every operation runs on this rank's elements, as plain tensors, and gives plain tensors; except for norms of the whole,
    which are those over all ranks: each span's at its first shard, and nothing at its others, because ranks may cut their
    slices at different places. One collective answers for all spans, until something is written or one is asked for again.

    Invariants: a master shows it only between the end of a backward and the optimizer's own step, which sees plain
    tensors; code of this package never reads it. What rests on the device it keeps itself (`local`), what does not is the
    shard's.
    """

    keeper: SliceKeeper
    shard: weakref.ref[Any] | None
    """None: the result of an operation, `local`."""
    root: Slice | None
    """What this is another name for (`.data`, `detach()`)."""
    local: Tensor | None
    place: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        keeper: SliceKeeper,
        like: Tensor,
        shard: weakref.ref[Any] | None = None,
        root: Slice | None = None,
        local: Tensor | None = None,
    ) -> Slice:
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=(1,) * like.dim(), dtype=like.dtype, device=like.device
        )
        made.keeper, made.shard, made.root, made.local, made.place = keeper, shard, root, local, -1
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run_on_slices(func, args, kwargs or {})

    @property
    def origin(self) -> Slice:
        return self if self.root is None else self.root

    @property
    def at_rest(self) -> Tensor | None:
        """The plain tensor, of one on the device."""
        root = self.root
        return self.local if root is None else root.local

    @property
    def own(self) -> Tensor:
        """This rank's elements, to read and to write.

        Raises:
            StateError: they have been cleared.
        """
        origin = self.origin
        found: Tensor | None = origin.local
        if origin.shard is not None:
            shard = origin.shard()
            found = None
            if shard is not None and shard.shown is origin:
                if shard.is_offloaded:
                    origin.keeper.settle_step()
                found = shard.whole_grad()
        if found is None:
            raise StateError(
                "this gradient of the optimizer's groups was kept from an earlier step and has been cleared since: keep "
                "`p.grad.clone()` instead"
            )
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({self.own!r}; its norms are those over all ranks)"

    def numpy(self, *, force: bool = False) -> Any:
        return self.own.numpy(force=force)

    def tolist(self) -> Any:
        return self.own.tolist()

    def data_ptr(self) -> int:
        return self.own.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.own.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.own.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.own.clone().__reduce_ex__(protocol)


def _run_on_slices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    first = args[0] if args else None
    if name == "_foreach_norm":
        order, dtype = _argument(func, args, kwargs, "ord"), _argument(func, args, kwargs, "dtype")
        return [
            _norm(tensor, order, dtype) if isinstance(tensor, Slice) else func([tensor], *args[1:], **kwargs)[0]
            for tensor in args[0]
        ]
    if isinstance(first, Slice):
        if name in _NORMS and first.dim() == 1:
            order = _argument(func, args, kwargs, "ord" if name == "linalg_vector_norm" else "p")
            norm = _norm(first, order, _argument(func, args, kwargs, "dtype"))
            norm = norm.reshape(1) if _argument(func, args, kwargs, "keepdim") else norm
            return kwargs["out"].copy_(norm) if "out" in kwargs else norm
        if name in ("detach", "alias") or (name == "view" and list(args[1]) in ([-1], list(first.shape))):
            return Slice(first.keeper, first, root=first.origin)
        if name == "mul_" and _is_offloaded(first) and _is_number(args[1]):
            return _scale(first, args[1])
    if name == "_foreach_mul_" and _is_number(args[1]) and any(_is_offloaded(grad) for grad in args[0]):
        for grad in args[0]:
            grad.mul_(args[1])
        return None
    shown: dict[int, Slice] = {}

    def plain(grad: Slice) -> Tensor:
        own = grad.own
        shown[id(own)] = grad
        return own

    out = func(*mapped(args, plain, Slice), **mapped(kwargs, plain, Slice))
    keeper = next(iter(shown.values())).keeper
    if func._schema.is_mutable:
        if any(isinstance(target, Slice) for target in targets(func, args, kwargs)):
            keeper.wrote()
        return mapped(out, lambda tensor: shown.get(id(tensor), tensor), Tensor)
    if name in _ELEMENTWISE and _keeps_norm(out, args):
        return Slice(keeper, out, local=out)
    return out


def _norm(grad: Slice, order: Any, dtype: torch.dtype | None) -> Tensor:
    if torch._C._current_graph_task_id() != -1:
        raise StateError("the norm of a gradient of the optimizer's groups: ask for it when backward has ended")
    origin, order = grad.origin, 2.0 if order is None else float(order)
    if origin.shard is None:
        norm = grad.keeper.norm_over_ranks(grad.own, order)
    else:
        if origin.shard() is None or origin.shard().shown is not origin:  # type: ignore[union-attr]
            grad.own  # noqa: B018 -- says so
        norm = grad.keeper.slice_norm(origin.place, order, grad.device)
    return norm.to(dtype or torch.promote_types(torch.float32, grad.dtype.to_real()))


def _scale(grad: Slice, factor: Any) -> Slice:
    """As the engine's own clipping: what is in host memory is scaled on its way through the step."""
    shard = None if grad.origin.shard is None else grad.origin.shard()
    if shard is None or shard.shown is not grad.origin:
        grad.own.mul_(factor)
    else:
        grad.keeper.settle_step()
        shard.scale(torch.as_tensor(factor))
    grad.keeper.wrote()
    return grad


def _is_offloaded(grad: Tensor) -> bool:
    if not isinstance(grad, Slice) or grad.origin.shard is None:
        return False
    shard = grad.origin.shard()
    return shard is not None and shard.is_offloaded


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and not isinstance(value, Slice) and value.dim() == 0 and not value.is_complex()
    )


def _keeps_norm(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether it is a gradient still, elements for elements. One that a number on some device has scaled is somebody's own."""
    return (
        out.dim() == 1
        and (out.is_floating_point() or out.is_complex())
        and not any(isinstance(value, Tensor) and value.shape != out.shape for value in args)
    )


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[at] if at < len(args) else kwargs.get(name, argument.default_value)
    return None
