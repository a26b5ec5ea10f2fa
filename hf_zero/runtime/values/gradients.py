"""What `.grad` is between a backward and `zero_grad`, where the ranks share out its elements: a stand-in without storage.

`Gradient` is what a model's parameters show. It has the parameter's shape, and may be used like the plain tensor:

* in place and element by element (`mul_`, `clamp_`, `zero_`, `add_` of a whole tensor): on this rank's elements;
* norms over the whole of it: one small collective, for whole lists (`_foreach_norm`) and for runs of single ones alike;
* everything else: the gradient is brought together (a collective: on every rank, in the same order), the operation runs on
  plain tensors of the master's type, and what it wrote goes back to this rank's elements; one gradient at a time.

What the masters in the optimizer's groups show is in `stand_in`, over the same frame. What stand-ins ask their `Keeper` for is
in `gradient_ops`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...core.layout import Span
from ...errors import StateError
from ..saved_tensors import in_backward_of_any
from . import stand_in
from .stand_in import OPERATIONS, Call, Kind, StandIn, is_tensors, plain_of


class Accumulated(Protocol):
    """Parameters whose gradients add up side by side: a flat parameter."""

    span: Span
    params: list[nn.Parameter]
    present: list[bool]
    arrived: list[bool]

    @property
    def waits(self) -> bool: ...


F = TypeVar("F", bound=Accumulated)


class Keeper(stand_in.Keeper, Protocol):
    """Who has the gradients; see `gradient_ops`."""

    def ready(self, handles: Handles[Any], index: int, name: str) -> None:
        """The gradient may be used now."""

    def whole(self, handles: Handles[Any], index: int) -> Tensor: ...

    def empty(self, handles: Handles[Any], index: int) -> Tensor: ...

    def write(self, handles: Handles[Any], index: int, whole: Tensor) -> None: ...

    def pointwise(
        self, handles: Handles[Any], index: int, run: Callable[[Tensor, Callable[[Any], Any]], None]
    ) -> None: ...

    def norm(self, handles: Handles[Any], index: int, order: float) -> Tensor: ...


class Gradient(StandIn):
    """One parameter's stand-in, or a view of it (`grad[:10]`, `grad.view(-1)`).

    The same objects come back with every step; one that somebody holds while gradients are cleared is replaced, and says so
    when it is used. In a backward autograd adds to what `.grad` shows: a stand-in keeps such a tensor as this rank's new
    gradient.
    """

    handles: weakref.ref[Handles[Any]]
    """Weakly: a graph that the user keeps holds gradients, and they would hold the span's memory."""
    index: int  # type: ignore[assignment]
    chain: tuple[Callable[[Tensor], Tensor], ...]
    """From the whole gradient to this view of it."""
    local: Tensor | None
    """What a backward added, not reduced yet."""
    passed: bool
    """Autograd added out of place: `.grad` is a plain tensor since, with this rank's new gradient."""
    retired: bool

    @staticmethod
    def __new__(
        cls,
        handles: weakref.ref[Handles[Any]],
        index: int,
        like: Tensor,
        chain: tuple[Callable[[Tensor], Tensor], ...] = (),
        device: torch.device | None = None,
    ) -> Gradient:
        made: Gradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
        )
        made.handles, made.index, made.chain = handles, index, chain
        made.local, made.passed, made.retired = None, False, False
        return made

    @classmethod
    def run(cls, call: Call, kind: Kind | None) -> Any:
        first = call.first
        if isinstance(first, Gradient) and not first.chain and call.name in ("add", "add_") and in_backward_of_any():
            return first.accumulate(call.args[1], in_place=call.name == "add_")
        if kind is Kind.LIKE:
            return call.run(Gradient.empty, Gradient)
        if call.name.startswith("_foreach_"):
            return _one_by_one(call)
        if "out" in call.kwargs:
            raise StateError(
                f"{call.name}(out=...) does not take a sharded gradient: use its result, or an in-place operation"
            )
        written = call.written(Gradient)
        if written:
            return _write(call, kind, written)
        if isinstance(first, Gradient) and any(r.alias_info is not None for r in call.func._schema.returns):
            return _view(call, first)
        return call.run(Gradient.plain, Gradient)

    def kept(self, name: str) -> tuple[Handles[Any], Keeper]:
        """Where the elements are.

        Raises:
            StateError: it may not be used now, by `name`.
        """
        handles = self.handles()
        if handles is None or handles.keeper is None:
            raise StateError(
                "this gradient was kept, and its model is gone or was partitioned again since: keep `param.grad.clone()`"
            )
        what = f"the gradient of {handles.name(self.index)!r}"
        if self.retired:
            raise StateError(
                f"{what} was kept from an earlier step and has been cleared since: keep `param.grad.clone()` instead"
            )
        if in_backward_of_any():
            raise StateError(
                f"{what} was used by {name} inside a backward, before all ranks' parts are there: use it when backward has "
                "ended"
            )
        handles.keeper.ready(handles, self.index, name)
        return handles, handles.keeper

    def plain(self) -> Tensor:
        handles, keeper = self.kept("reading it")
        return self.of(keeper.whole(handles, self.index))

    def empty(self) -> Tensor:
        """Of the shape and type of `plain`."""
        handles, keeper = self.kept("reading its type")
        return self.of(keeper.empty(handles, self.index))

    def of(self, whole: Tensor) -> Tensor:
        """This view of the whole gradient."""
        for step in self.chain:
            whole = step(whole)
        return whole

    def alias(self) -> Gradient:
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return self.view_of(like, self.chain)

    def view_of(self, like: Tensor, chain: tuple[Callable[[Tensor], Tensor], ...]) -> Gradient:
        view = Gradient(self.handles, self.index, like, chain, self.device)
        view.retired = self.retired
        return view

    def norms_together(self, name: str) -> tuple[Keeper, tuple[Handles[Any], int]] | None:
        if self.chain:
            return None
        handles, keeper = self.kept(name)
        return keeper, (handles, self.index)

    def norm_over_all(self, order: float) -> Tensor | None:
        if self.chain:
            return None
        handles, keeper = self.kept("norm")
        return keeper.norm(handles, self.index, order)

    def accumulate(self, incoming: Tensor, *, in_place: bool) -> Tensor:
        """In a backward: what is added is this rank's, to be reduced."""
        before = self.local
        if in_place:
            # A copy: autograd may pass the program's own tensor on (`out.backward(gradient)`), or one tensor to two parameters.
            self.local = incoming.clone() if before is None else before + incoming
            return self
        self.passed, self.local = True, None
        return incoming.clone() if before is None else before + incoming

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Gradient(shape={tuple(self.shape)}, dtype={self.dtype}; its elements are with the ranks' shards: "
            "`.clone()` on every rank brings them together)"
        )


def _view(call: Call, grad: Gradient) -> Any:
    rest, kwargs, func = call.args[1:], call.kwargs, call.func
    out = func(torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta"), *rest, **kwargs)

    def made(part: Tensor, pick: Callable[[Any], Tensor]) -> Gradient:
        return grad.view_of(part, (*grad.chain, lambda whole: pick(func(whole, *rest, **kwargs))))

    if isinstance(out, (tuple, list)):
        return [made(part, lambda parts, at=at: parts[at]) for at, part in enumerate(out)]  # type: ignore[misc]
    return made(out, lambda part: part)


def _one_by_one(call: Call) -> Any:
    """A foreach operation, so that one gradient at a time is whole."""
    lists = [value for value in (*call.args, *call.kwargs.values()) if is_tensors(value)]
    count = len(lists[0])

    def one(value: Any, at: int) -> Any:
        return [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value

    kind = OPERATIONS.get(call.name.removeprefix("_foreach_"))
    out: list[Any] = []
    for at in range(count):
        single = Call(
            call.func,
            tuple(one(value, at) for value in call.args),
            {key: one(value, at) for key, value in call.kwargs.items()},
        )
        written = single.written(Gradient)
        if written:
            _write(single, kind, written)
        else:
            out += single.run(Gradient.plain, Gradient) or []
    return out if call.func._schema.returns else None


def _write(call: Call, kind: Kind | None, targets: Sequence[Gradient]) -> Any:
    """Run it, and carry what it wrote to this rank's elements."""
    if len(targets) == 1 and kind is Kind.POINTWISE and _runs_on_pieces(call, targets[0]):
        return _returned(call, targets[0])
    wholes: dict[tuple[int, int], Tensor] = {}

    def value(grad: Gradient) -> Tensor:
        handles, keeper = grad.kept(call.name)
        place = id(handles), grad.index
        if place not in wholes:
            wholes[place] = keeper.whole(handles, grad.index)
        return grad.of(wholes[place])

    out = call.run(value, Gradient)
    if call.is_collective:  # what is sent back later would find nobody
        (out[-1] if isinstance(out, tuple) else out).wait()
    for target in targets:
        handles, keeper = target.kept(call.name)
        keeper.write(handles, target.index, wholes[id(handles), target.index])
    return out if call.is_collective else _returned(call, targets[0])


def _runs_on_pieces(call: Call, target: Gradient) -> bool:
    """Run it piece by piece of this rank's elements, if all others are numbers or have one for each of them."""
    others = [tensor for tensor in call.tensors() if tensor is not target]
    if target.chain or any(tensor.dim() and tensor.shape != target.shape for tensor in others):
        return False
    handles, keeper = target.kept(call.name)
    plain = {id(tensor): plain_of(tensor).detach() for tensor in others}

    def run(piece: Tensor, part: Callable[[Any], Any]) -> None:
        def mine(tensor: Tensor) -> Any:
            if tensor is target:
                return piece
            whole = plain[id(tensor)]
            return part(whole) if whole.dim() else whole

        call.run(mine, Tensor)

    keeper.pointwise(handles, target.index, run)
    return True


def _returned(call: Call, target: Gradient) -> Gradient | None:
    return target if len(call.func._schema.returns) == 1 else None


class Handles(Generic[F]):
    """The stand-ins of one span's parameters.

    Attributes:
        placed: by parameter, whether its `.grad` shows its stand-in; where it does not any more, someone has cleared or
            replaced the gradient.
        keeper: set by the engine.
    """

    def __init__(self, flat: F, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.flat = flat
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self.grads: list[Gradient] = []
        self._none = [False] * len(shapes)
        self.placed = list(self._none)
        self.keeper: Keeper | None = None
        self._unheld = 0  # references to a stand-in that nobody else holds

    def show(self) -> None:
        """`.grad` of every parameter that has a gradient and shows none is its stand-in afterwards."""
        flat = self.flat
        if not self.grads:
            self.grads = [self._new(index) for index in range(len(self._shapes))]
            self._unheld = _references(self.grads)[0]
        for index, (param, grad) in enumerate(zip(flat.params, self.grads)):
            has = flat.present[index] or (flat.waits and flat.arrived[index])
            # torch refuses a gradient of another type than the parameter shows just now (`Flat.shown_dtype`).
            if has and param.grad is None and param.dtype == self._dtype:
                param.grad = grad
                self.placed[index] = True

    def _new(self, index: int) -> Gradient:
        like = torch.empty(self._shapes[index], dtype=self._dtype, device="meta")
        return Gradient(weakref.ref(self), index, like, (), self._device)

    def hide(self) -> None:
        """Parameters that show their stand-in show nothing."""
        if True not in self.placed:
            return
        for index, (param, grad) in enumerate(zip(self.flat.params, self.grads)):
            if param.grad is grad and grad.local is None:  # with `local` it has this rank's own, not reduced yet
                param.grad = None
                self.placed[index] = False

    def cleared(self, found: Sequence[Tensor | None]) -> list[int]:
        """Of what parameters show as `.grad`: where the stand-in that was put there has been taken away."""
        return [
            index
            for index, (grad, mine) in enumerate(zip(found, self.grads))
            if self.placed[index] and not mine.passed and not isinstance(grad, Gradient)
        ]

    def sort_out(self, found: list[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """Of what parameters showed as `.grad`, and do not any more: this rank's new gradients, and who was cleared."""
        if True not in self.placed:
            return found, []
        cleared = self.cleared(found)
        grads: list[Tensor | None] = []
        for index, (grad, mine) in enumerate(zip(found, self.grads)):
            if isinstance(grad, Gradient):
                if grad is not mine and not is_of(grad, self, index):
                    raise StateError(
                        f"parameter {self.name(index)!r}: its .grad was set to another parameter's; assign a clone() of it"
                    )
                grads.append(grad.local)
            else:
                grads.append(grad)
            mine.local, mine.passed = None, False
        self.placed = list(self._none)
        return grads, cleared

    def drop(self) -> None:
        """No parameter shows a stand-in any more: what someone keeps of one is not a gradient from now on."""
        if not self.grads:
            return
        self.placed = list(self._none)
        references = _references(self.grads)
        for index, grad in enumerate(self.grads):
            grad.local, grad.passed = None, False
            if references[index] > self._unheld:  # it would stand for the next step's gradient in that somebody's hands
                grad.retired = True
                self.grads[index] = self._new(index)

    def name(self, index: int) -> str:
        return self.flat.span.slots[index].spec.name


def is_of(grad: Tensor | None, handles: Handles[Any], index: int) -> bool:
    """Whether it stands for this very gradient (`p.grad = p.grad.detach()` changes nothing)."""
    return isinstance(grad, Gradient) and grad.handles() is handles and grad.index == index and not grad.chain


def _references(grads: Sequence[Gradient]) -> list[int]:
    return list(map(sys.getrefcount, grads))
