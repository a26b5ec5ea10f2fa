"""What `.grad` is between a backward and `zero_grad`, where the ranks share out its elements: a stand-in.

`Gradient` is what a model's parameters show; what the optimizer's groups show is in `slices`.

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
        return func(*mapped(args, _empty), **mapped(kwargs, _empty))
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
    return func(*mapped(args, _plain), **mapped(kwargs, _plain))


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
    return func(*mapped(args, _plain), **mapped(kwargs, _plain))


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

                func(*mapped(args, mine, Tensor), **mapped(kwargs, mine, Tensor))

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

    out = func(*mapped(args, value), **mapped(kwargs, value))
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
    written = targets(func, args, kwargs)
    return written if any(isinstance(tensor, Gradient) for tensor in written) else []


def targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    schema = func._schema
    values = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    return [
        tensor
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in values
        for tensor in _tensors((values[argument.name],))
    ]


def mapped(values: Any, change: Callable[[Any], Any], kind: type = Gradient) -> Any:
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


def _gradients(values: Iterable[Any]) -> list[Gradient]:
    return [tensor for tensor in _tensors(values) if isinstance(tensor, Gradient)]


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], Tensor)
