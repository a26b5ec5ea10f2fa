"""What the optimizer's groups show as `.grad` between a backward and the step, where ranks share out a span: a stand-in."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from .gradients import Keeper
from .saved_tensors import in_backward_of_any
from .stand_in import Call, Kind, StandIn, mapped


class Slice(StandIn):
    """What a master in the optimizer's groups shows for its gradient, where several ranks have the rest of the span.

    Every operation runs on this rank's elements, as plain tensors, and gives plain tensors; except for norms of the whole,
    which are those over all ranks: each span's at its first shard, and nothing at its others, because ranks may cut their
    slices at different places. One collective answers for all spans, until something is written or one is asked for again.

    Invariants: a master shows it only between the end of a backward and the optimizer's own step, which sees plain
    tensors; code of this package never reads it. What rests on the device it keeps itself (`local`), what does not is the
    shard's.
    """

    keeper: Keeper
    shard: weakref.ref[Any] | None
    """None: the result of an operation, `local`."""
    root: Slice | None
    """What this is another name for (`.data`, `detach()`)."""
    local: Tensor | None
    place: int

    @staticmethod
    def __new__(
        cls,
        keeper: Keeper,
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

    @classmethod
    def run(cls, call: Call, kind: Kind | None) -> Any:
        first = call.first
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
        return Slice(self.keeper, self, root=self.origin)

    def norm_over_all(self, order: float) -> Tensor:
        if in_backward_of_any():
            raise StateError("the norm of a gradient of the optimizer's groups: ask for it when backward has ended")
        if self.origin.shard is None or self.owner is None:  # the latter says that it has been cleared
            return self.keeper.norm_over_ranks(self.plain(), order)
        return self.keeper.slice_norm(self.origin.place, order, self.device)

    def scale(self, factor: Any) -> Slice:
        """As the engine's own clipping: what is in host memory is scaled on its way through the step."""
        self.keeper.settle_step()
        self.offloaded.scale(torch.as_tensor(factor))
        self.keeper.wrote()
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({self.plain()!r}; its norms are those over all ranks)"

    def data_ptr(self) -> int:
        return self.plain().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain().untyped_storage()


class OwnGradient(Slice):
    """What a whole in the groups shows for its gradient where every parameter has one owner: plain, but for norms.

    A rank has none of the other ranks' tensors: who asks for the norms of a group's gradients asks on each rank for others, and
    cannot be given what adds up to the norm over all ranks. Refused by name.
    """

    @staticmethod
    def of(keeper: Keeper, part: Tensor) -> OwnGradient:
        return OwnGradient(keeper, part, local=part)

    @staticmethod
    def __new__(
        cls,
        keeper: Keeper,
        like: Tensor,
        shard: weakref.ref[Any] | None = None,
        root: Slice | None = None,
        local: Tensor | None = None,
    ) -> OwnGradient:
        made: OwnGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.keeper, made.shard, made.root, made.local, made.place = keeper, shard, root, local, -1
        return made

    def alias(self) -> Slice:
        return OwnGradient(self.keeper, self, root=self.origin)

    def norm_over_all(self, order: float) -> Tensor:
        raise StateError(
            "the norm of a gradient of the optimizer's groups: this optimizer steps over whole parameters, and each rank has "
            "those that it owns. Clip by Engine.clip_grad_norm_ (accelerator.clip_grad_norm_) or over model.parameters()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnGradient({self.plain()!r}; its norm is another rank's business, too)"


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
