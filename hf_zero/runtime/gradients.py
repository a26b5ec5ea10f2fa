"""What `.grad` is between a backward and `zero_grad`, where the ranks share out its elements: a stand-in.

`Gradient` is what a model's parameters show; `Slice` what the optimizer's groups show, see there.

A `Gradient` has the parameter's shape, and no storage. It may be used like the plain tensor:

* in place and element by element (`mul_`, `clamp_`, `zero_`, `add_` of a whole tensor): on this rank's elements,
  nothing is sent;
* norms over the whole of it: one small collective, for whole lists (`_foreach_norm`) and for runs of single ones
  alike;
* everything else: the gradient is brought together (a collective: on every rank, in the same order), the operation
  runs on plain tensors of the master's type, and what it wrote goes back to this rank's elements. Lists are worked
  through one gradient at a time.

Views of it (`grad[:10]`, `grad.view(-1)`) are stand-ins, too. The same objects come back with every step; one that
somebody holds while gradients are cleared is replaced, and says so when it is used.

In a backward autograd adds to what `.grad` shows: a stand-in keeps such a tensor as this rank's new gradient
(`local`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..core.layout import Span
from ..errors import StateError

_LIKE = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
        "new_zeros", "new_ones", "new_full", "new_empty_strided",
    }
)  # fmt: skip
"""New tensors of a gradient's shape and type, whatever its values are."""
_POINTWISE = frozenset(
    {
        "mul_", "div_", "add_", "sub_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "fill_", "neg_", "nan_to_num_", "copy_",
        "abs_", "sign_", "sqrt_", "pow_", "addcmul_", "addcdiv_", "lerp_", "masked_fill_", "maximum_", "minimum_",
    }
)  # fmt: skip
"""In place, each element by itself: ranks do their own elements."""
_ADDS = frozenset({"add", "add_"})


class Accumulated(Protocol):
    """Parameters whose gradients add up side by side: a flat parameter."""

    @property
    def params(self) -> Sequence[nn.Parameter]: ...

    @property
    def present(self) -> Sequence[bool]: ...

    @property
    def arrived(self) -> Sequence[bool]: ...

    @property
    def waits(self) -> bool: ...

    @property
    def span(self) -> Span: ...


F = TypeVar("F", bound=Accumulated)


class Keeper(Protocol):
    """Who has the gradients; see `gradient_ops`."""

    def ready(self, handles: Handles[Any], index: int, name: str) -> None:
        """The gradient may be used now."""
        ...

    def whole(self, handles: Handles[Any], index: int) -> Tensor: ...

    def empty(self, handles: Handles[Any], index: int) -> Tensor: ...

    def write(self, handles: Handles[Any], index: int, whole: Tensor) -> None: ...

    def pointwise(
        self, handles: Handles[Any], index: int, run: Callable[[Tensor, Callable[[Any], Any]], None]
    ) -> None: ...

    def norms(self, grads: Sequence[tuple[Handles[Any], int]], order: float) -> list[Tensor]: ...

    def norm(self, handles: Handles[Any], index: int, order: float) -> Tensor: ...


class Gradient(Tensor):
    """One parameter's stand-in, or a view of it. See the module's text."""

    handles: weakref.ref[Handles[Any]]
    index: int  # type: ignore[assignment]
    chain: tuple[Callable[[Tensor], Tensor], ...]
    """From the whole gradient to this view of it."""
    local: Tensor | None
    """What a backward added, not reduced yet."""
    passed: bool
    """Autograd added out of place: `.grad` is a plain tensor since, with this rank's new gradient."""
    retired: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Gradient(shape={tuple(self.shape)}, dtype={self.dtype}; its elements are with the ranks' shards: "
            "`.clone()` on every rank brings them together)"
        )

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


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
        self._alone = 0

    def show(self) -> None:
        """`.grad` of every parameter that has a gradient and shows none is its stand-in afterwards."""
        flat = self.flat
        if not self.grads:
            self.grads = [self._new(index) for index in range(len(self._shapes))]
            self._alone = _holders(self.grads)[0]
        for index, (param, grad) in enumerate(zip(flat.params, self.grads)):
            has = flat.present[index] or (flat.waits and flat.arrived[index])
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
            if param.grad is grad and grad.local is None:
                param.grad = None
                self.placed[index] = False

    def sort_out(self, found: list[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """Of what parameters showed as `.grad`, and do not any more: this rank's new gradients, and who was cleared."""
        if True not in self.placed:
            return found, []
        cleared = []
        grads: list[Tensor | None] = []
        for index, (grad, mine) in enumerate(zip(found, self.grads)):
            if isinstance(grad, Gradient):
                if grad is not mine and not is_of(grad, self, index):
                    raise StateError(
                        f"parameter {self.name(index)!r}: its .grad was set to another parameter's; assign a clone() of it"
                    )
                grads.append(grad.local)
            else:
                if self.placed[index] and not mine.passed:
                    cleared.append(index)
                grads.append(grad)
            mine.local, mine.passed = None, False
        self.placed = list(self._none)
        return grads, cleared

    def drop(self) -> None:
        """No parameter shows a stand-in any more: what someone keeps of one is not a gradient from now on."""
        if not self.grads:
            return
        self.placed = list(self._none)
        holders = _holders(self.grads)
        for index, grad in enumerate(self.grads):
            grad.local, grad.passed = None, False
            if holders[index] > self._alone:
                grad.retired = True
                self.grads[index] = self._new(index)

    def name(self, index: int) -> str:
        return self.flat.span.slots[index].spec.name


def is_new(grad: Tensor | None) -> bool:
    """Whether `.grad` holds something that this rank's backward has made, and nobody has taken."""
    return grad is not None and (not isinstance(grad, Gradient) or grad.local is not None)


def is_of(grad: Tensor | None, handles: Handles[Any], index: int) -> bool:
    """Whether it stands for this very gradient (`p.grad = p.grad.detach()` changes nothing)."""
    return isinstance(grad, Gradient) and grad.handles() is handles and grad.index == index and not grad.chain


def _holders(grads: Sequence[Gradient]) -> list[int]:
    return list(map(sys.getrefcount, grads))


# Operations ---------------------------------------------------------------------------------------------------------


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    first = args[0] if args else None
    if torch._C._current_graph_task_id() != -1 and name in _ADDS and isinstance(first, Gradient) and not first.chain:
        return _accumulate(first, args[1], name)
    if isinstance(first, Gradient) and name in ("detach", "alias"):
        return _view(func, args, kwargs)
    if name in _LIKE:
        return func(*_mapped(args, _empty), **_mapped(kwargs, _empty))
    if name == "_foreach_norm":
        return _foreach_norm(func, args, kwargs)
    if name.startswith("_foreach_"):
        return _one_by_one(func, args, kwargs)
    if "out" in kwargs:
        raise StateError(f"{name}(out=...) does not take a sharded gradient: use its result, or an in-place operation")
    if (
        name == "linalg_vector_norm"
        and isinstance(first, Gradient)
        and not first.chain
        and _is_whole_norm(args, kwargs)
    ):
        handles, keeper = _keeper(first, name)
        return keeper.norm(handles, first.index, float(args[1]) if len(args) > 1 else 2.0)
    written = _written(func, args, kwargs)
    if written:
        return _in_place(func, name, args, kwargs, written)
    if isinstance(first, Gradient) and any(r.alias_info is not None for r in func._schema.returns):
        return _view(func, args, kwargs)
    return func(*_mapped(args, _plain), **_mapped(kwargs, _plain))


def _accumulate(grad: Gradient, incoming: Tensor, name: str) -> Tensor:
    """In a backward: what is added is this rank's, to be reduced."""
    if name == "add_":
        grad.local = incoming if grad.local is None else grad.local + incoming
        return grad
    grad.passed = True
    before, grad.local = grad.local, None
    return incoming.clone() if before is None else before + incoming


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad: Gradient = args[0]
    rest = args[1:]
    shape = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta")
    out = func(shape, *rest, **kwargs)

    def made(part: Tensor, pick: Callable[[Any], Tensor]) -> Gradient:
        chain = grad.chain
        if func is not torch.ops.aten.detach.default and func is not torch.ops.aten.alias.default:
            chain = (*chain, lambda whole: pick(func(whole, *rest, **kwargs)))
        view = Gradient(grad.handles, grad.index, part, chain, grad.device)
        view.retired = grad.retired
        return view

    if isinstance(out, (tuple, list)):
        return [made(part, lambda parts, at=at: parts[at]) for at, part in enumerate(out)]  # type: ignore[misc]
    return made(out, lambda part: part)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """One collective for all of them."""
    tensors: Sequence[Tensor] = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    out: list[Tensor | None] = [None] * len(tensors)
    by_keeper: dict[int, tuple[Keeper, list[tuple[int, Handles[Any], int]]]] = {}
    for at, tensor in enumerate(tensors):
        if isinstance(tensor, Gradient) and not tensor.chain:
            handles, keeper = _keeper(tensor, "_foreach_norm")
            by_keeper.setdefault(id(keeper), (keeper, []))[1].append((at, handles, tensor.index))
        else:
            out[at] = func([_plain(tensor)], *args[1:], **kwargs)[0]
    for keeper, found in by_keeper.values():
        norms = keeper.norms([(handles, index) for _, handles, index in found], order)
        for (at, _, _), norm in zip(found, norms):
            out[at] = norm
    return [norm for norm in out if norm is not None]


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A foreach operation, so that one gradient at a time is whole."""
    lists = [value for value in (*args, *kwargs.values()) if _is_tensors(value)]
    count = len(lists[0])

    def one(value: Any, at: int) -> Any:
        return [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value

    name = func._schema.name.removeprefix("aten::_foreach_")
    out: list[Any] = []
    for at in range(count):
        mine, named = tuple(one(value, at) for value in args), {key: one(value, at) for key, value in kwargs.items()}
        if not any(
            isinstance(tensor, Gradient) for value in (*mine, *named.values()) if _is_tensors(value) for tensor in value
        ):
            result = func(*mine, **named)
        else:
            result = _in_list(func, name, mine, named)
        out += result or []
    return out if func._schema.returns else None


def _in_list(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    if written:
        _in_place(func, name, args, kwargs, written)
        return None
    return func(*_mapped(args, _plain), **_mapped(kwargs, _plain))


def _in_place(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Gradient | Tensor]
) -> Any:
    """Run it, and carry what it wrote to this rank's elements."""
    targets = [tensor for tensor in written if isinstance(tensor, Gradient)]
    if len(targets) == 1 and name in _POINTWISE and not targets[0].chain:
        target = targets[0]
        handles, keeper = _keeper(target, name)
        plain = {id(g): _plain(g) for g in _gradients((args, kwargs)) if g is not target}
        if all(_fits(tensor, target) for tensor in _tensors((args, kwargs)) if tensor is not target):

            def run(piece: Tensor, part: Callable[[Any], Any]) -> None:
                def mine(tensor: Tensor) -> Tensor:
                    if tensor is target:
                        return piece
                    whole: Tensor = plain.get(id(tensor), tensor)
                    return whole if whole.dim() == 0 else part(whole.detach())

                func(*_mapped(args, mine, Tensor), **_mapped(kwargs, mine, Tensor))

            keeper.pointwise(handles, target.index, run)
            return _returned(func, target)
    wholes: dict[tuple[int, int], Tensor] = {}

    def value(grad: Gradient) -> Tensor:
        handles, keeper = _keeper(grad, name)
        whole = wholes.get((id(handles), grad.index))
        if whole is None:
            whole = wholes[id(handles), grad.index] = keeper.whole(handles, grad.index)
        for step in grad.chain:
            whole = step(whole)
        return whole

    out = func(*_mapped(args, value), **_mapped(kwargs, value))
    for target in targets:
        handles, keeper = _keeper(target, name)
        keeper.write(handles, target.index, wholes[id(handles), target.index])
    return _returned(func, targets[0]) if targets else out


def _returned(func: Any, target: Gradient) -> Any:
    return target if len(func._schema.returns) == 1 else None


def _fits(tensor: Tensor, target: Gradient) -> bool:
    """One number, or one for each element."""
    return tensor.dim() == 0 or tensor.shape == target.shape


def _is_whole_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    return not dims and not (args[3] if len(args) > 3 else kwargs.get("keepdim", False)) and kwargs.get("dtype") is None


def _keeper(grad: Gradient, name: str) -> tuple[Handles[Any], Keeper]:
    handles = grad.handles()
    if handles is None or handles.keeper is None:
        raise StateError("this gradient's model is gone, or sharded anew: read `.grad` of the parameter afresh")
    what = f"the gradient of {handles.name(grad.index)!r}"
    if grad.retired:
        raise StateError(
            f"{what} was kept from an earlier step and has been cleared since: keep `param.grad.clone()` instead"
        )
    if torch._C._current_graph_task_id() != -1:
        raise StateError(
            f"{what} was used by {name} inside a backward, before all ranks' parts are there: use it when backward has ended"
        )
    handles.keeper.ready(handles, grad.index, name)
    return handles, handles.keeper


def _plain(tensor: Tensor) -> Tensor:
    """The values, brought together."""
    if not isinstance(tensor, Gradient):
        return tensor
    handles, keeper = _keeper(tensor, "reading it")
    whole = keeper.whole(handles, tensor.index)
    for step in tensor.chain:
        whole = step(whole)
    return whole


def _empty(grad: Gradient) -> Tensor:
    handles, keeper = _keeper(grad, "reading its type")
    whole = keeper.empty(handles, grad.index)
    for step in grad.chain:
        whole = step(whole)
    return whole


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to; none, where no gradient is among what it may write."""
    if not func._schema.is_mutable:
        return []
    written = _targets(func, args, kwargs)
    return written if any(isinstance(tensor, Gradient) for tensor in written) else []


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    schema = func._schema
    values = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    return [
        tensor
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
        for tensor in _tensors((values[argument.name],))
    ]


def _mapped(values: Any, change: Callable[[Any], Any], kind: type = Gradient) -> Any:
    """`values` (nested tuples, lists, dicts) with `change` made to every `kind`."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)(_mapped(value, change, kind) for value in values)
    if isinstance(values, dict):
        return {key: _mapped(value, change, kind) for key, value in values.items()}
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


def _gradients(values: Iterable[Any]) -> list[Gradient]:
    return [tensor for tensor in _tensors(values) if isinstance(tensor, Gradient)]


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], Tensor)


# The optimizer's groups ---------------------------------------------------------------------------------------------

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

    out = func(*_mapped(args, plain, Slice), **_mapped(kwargs, plain, Slice))
    keeper = next(iter(shown.values())).keeper
    if func._schema.is_mutable:
        if any(isinstance(target, Slice) for target in _targets(func, args, kwargs)):
            keeper.wrote()
        return _mapped(out, lambda tensor: shown.get(id(tensor), tensor), Tensor)
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
