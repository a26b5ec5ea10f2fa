"""Lazy gradients: tensors of true shape without memory, whose elements a `GradSource` provides.

Operations on a `DistributedGrad`:

* Norms of all elements come from the source, over all ranks.
* Elementwise in-place operations (`mul_`, `clamp_`, `copy_`, …) run on the elements that each rank owns.
* All others run on the values that the source returns; written values are returned to the source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError

_POINTWISE = frozenset(
    {
        "mul_", "div_", "add_", "sub_", "clamp_", "clamp_min_", "clamp_max_", "zero_", "fill_", "neg_", "nan_to_num_",
        "copy_", "abs_", "sign_", "sqrt_", "pow_", "addcmul_", "addcdiv_", "lerp_", "masked_fill_", "maximum_", "minimum_",
    }
)  # fmt: skip
"""In-place operations that treat each element separately."""
_ELEMENTWISE = frozenset({"mul", "div", "abs", "neg", "_to_copy", "clone", "add", "sub", "clamp"})
"""Operations on a group's gradient whose result also has its norm over all ranks: `(p.abs() * p.grad).norm()`."""
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""Called by `torch.amp.GradScaler` for the gradients of one optimizer."""


class GradSource:
    """Provides the elements of one lazy gradient.

    Attributes:
        is_alive: False after the gradient was cleared or replaced: user code that kept it must not use it any more.
        is_slice: the gradient is this rank's slice; other ranks have other elements.
    """

    is_alive = True
    is_slice = False

    def check_alive(self, what: str) -> None:
        """Check that the gradient has not been cleared or replaced.

        Raises:
            StateError: it has.
        """
        if not self.is_alive:
            raise StateError(f"{what} has been replaced or cleared since it was read. Keep a clone() of it instead")

    def values(self) -> Tensor:
        """Return the elements, of true shape, for reading. A collective for parameters."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Store elements of true shape."""
        raise NotImplementedError

    def change(self, run: Callable[[Tensor, Callable[[Tensor], Tensor]], object]) -> None:
        """Call `run(elements, part)`, which changes this rank's elements in place. `part` selects them from another tensor."""
        values = self.values()
        run(values, lambda other: other)
        self.write(values)

    def norm(self, order: float) -> Tensor:
        """Return the norm over all ranks: 0-dim, float64."""
        raise NotImplementedError

    def overflow(self) -> Tensor:
        """Return 1 (0-dim) if any rank has a gradient of the same optimizer that is not finite."""
        raise NotImplementedError

    def derived(self, values: Tensor) -> GradSource:
        """Return the source of an elementwise operation's result over a slice."""
        raise NotImplementedError


class DistributedGrad(Tensor):
    """A tensor whose elements `source` provides, or a view of one (`grad[0]`).

    Attributes:
        source: provides the elements.
        steps: view operations that lead from the full gradient to this tensor.
        is_whole: the tensor has all elements, so that its norms are those of the gradient.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    source: GradSource
    steps: tuple[Callable[[Tensor], Tensor], ...]
    is_whole: bool

    @staticmethod
    def __new__(
        cls, source: GradSource, like: Tensor, device: torch.device, steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    ) -> DistributedGrad:
        made: DistributedGrad = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made.source, made.steps, made.is_whole = source, steps, True
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def of(self, whole: Tensor) -> Tensor:
        for step in self.steps:
            whole = step(whole)
        return whole

    def plain(self) -> Tensor:
        return self.of(self.source.values())

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise StateError(
                f"a gradient of shape {tuple(self.shape)} cannot take values of shape {tuple(values.shape)}"
            )
        with torch.no_grad():
            self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DistributedGrad(shape={tuple(self.shape)}, dtype={self.dtype}; clone() on every rank gives the values)"


# Operations -------------------------------------------------------------------------------------------------------------


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name: str = func._schema.name.removeprefix("aten::")
    first: Any = args[0] if args else None
    if "out" in kwargs:
        raise StateError(f"{name}(out=...) does not take a sharded gradient. Use its result, or an in-place operation")
    if name == "_foreach_norm":
        return [_norm(grad, args, kwargs) if _is_whole(grad) else func([_plain(grad)], *args[1:])[0] for grad in first]
    if name == _UNSCALE:
        return _unscale(func, *args)
    if name.startswith("_foreach_"):
        return _one_by_one(func, args, kwargs) if len(first) > 1 else _write_or_read(func, name, args, kwargs)
    if isinstance(first, DistributedGrad):
        if name in ("detach", "alias"):
            return _made(first, _like(first), first.steps)
        if name in ("linalg_vector_norm", "norm") and _is_whole(first):
            dims = args[2] if len(args) > 2 else kwargs.get("dim")
            if not dims or len(dims) == first.dim():
                norm = _norm(first, args, kwargs)
                is_kept = args[3] if len(args) > 3 else kwargs.get("keepdim")
                return norm.reshape((1,) * first.dim()) if is_kept else norm
        if not func._schema.is_mutable and any(each.alias_info is not None for each in func._schema.returns):
            return _view(func, first, args[1:], kwargs)
    return _write_or_read(func, name, args, kwargs)


def _is_whole(value: Any) -> bool:
    return isinstance(value, DistributedGrad) and value.is_whole


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain() if isinstance(tensor, DistributedGrad) else tensor


def _made(grad: DistributedGrad, like: Tensor, steps: tuple[Callable[[Tensor], Tensor], ...]) -> DistributedGrad:
    made = DistributedGrad(grad.source, like, grad.device, steps)
    made.is_whole = grad.is_whole and like.numel() == grad.numel()
    return made


def _like(grad: Tensor) -> Tensor:
    return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="meta")


def _norm(grad: DistributedGrad, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    dtype = kwargs.get("dtype") or torch.promote_types(torch.float32, grad.dtype.to_real())
    return grad.source.norm(2.0 if order is None else float(order)).to(grad.device, dtype)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operation on one gradient at a time, so that only one is gathered."""
    count = len(args[0])
    out: list[Any] = []
    for at in range(count):
        one = [[each[at]] if isinstance(each, (list, tuple)) and len(each) == count else each for each in args]
        out += func(*one, **kwargs) or []
    return out if func._schema.returns else None


def _view(func: Any, grad: DistributedGrad, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(_like(grad), *args, **kwargs)

    def made(part: Tensor, pick: Callable[[Any], Tensor]) -> Tensor:
        return _made(grad, part, (*grad.steps, lambda whole: pick(func(whole, *args, **kwargs))))

    if isinstance(out, (tuple, list)):
        return [made(part, lambda parts, at=at: parts[at]) for at, part in enumerate(out)]  # type: ignore[misc]
    return made(out, lambda part: part)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type[Tensor]) -> Any:
    """Apply `change` to every `kind` in nested tuples, lists and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(each, change, kind) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(each, change, kind) for key, each in value.items()}
    return value


def _written(func: Any, name: str, args: tuple[Any, ...]) -> list[DistributedGrad]:
    found: list[Any] = []
    if name.startswith("c10d::"):  # their schemas do not mark written arguments
        found = [args[0]] if name.endswith("_") else []
    elif func._schema.is_mutable:
        found = [
            value
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    grads: list[DistributedGrad] = []
    _mapped(found, grads.append, DistributedGrad)
    return grads


def _write_or_read(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wholes: dict[GradSource, Tensor] = {}

    def plain(grad: DistributedGrad) -> Tensor:
        if name.startswith("c10d::") and grad.source.is_slice:
            raise StateError(
                f"{name}: a gradient of the optimizer's groups is this rank's slice. Gradients are averaged over the ranks "
                "already; for a collective of your own use `.grad` of model.parameters()"
            )
        if grad.source not in wholes:
            wholes[grad.source] = grad.source.values()
        return grad.of(wholes[grad.source])

    written = _written(func, name, args)
    if written and _changes_elements(func, name, args, kwargs, written):
        return written[0] if len(func._schema.returns) == 1 else None
    out = func(*_mapped(args, plain, DistributedGrad), **_mapped(kwargs, plain, DistributedGrad))
    if name.startswith("c10d::"):
        (out[-1] if isinstance(out, tuple) else out).wait()  # a later result would be lost
    for source in dict.fromkeys(grad.source for grad in written):
        source.write(wholes[source])
    if written and not name.startswith("c10d::"):
        return written[0] if len(func._schema.returns) == 1 else None
    if name in _ELEMENTWISE and out.is_floating_point():
        for each in args:
            if isinstance(each, DistributedGrad) and each.source.is_slice and each.is_whole and out.shape == each.shape:
                return DistributedGrad(each.source.derived(out), _like(out), out.device)
    return out


def _changes_elements(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[DistributedGrad]
) -> bool:
    """Run an in-place operation on this rank's elements, if it is elementwise. Returns whether it did."""
    target = written[0]
    if len(written) > 1 or name.removeprefix("_foreach_") not in _POINTWISE or target.steps:
        return False
    others: dict[int, Tensor] = {}

    def collect(value: Tensor) -> Tensor:
        if value is not target:
            others[id(value)] = _plain(value).detach()
        return value

    _mapped((args, kwargs), collect, Tensor)
    if any(each.dim() and each.shape != target.shape for each in others.values()):
        return False

    def run(elements: Tensor, part: Callable[[Tensor], Tensor]) -> None:
        def mine(value: Tensor) -> Tensor:
            if value is target:
                return elements
            other = others[id(value)]
            if other.dim():
                return part(other)
            return other.to(elements.device) if elements.device.type == "cpu" else other

        func(*_mapped(args, mine, Tensor), **_mapped(kwargs, mine, Tensor))

    target.source.change(run)
    return True


def _unscale(func: Any, grads: list[Tensor], found: Tensor, scale: Tensor) -> None:
    """Report overflows of any rank to a loss scaler: otherwise a rank without one would step while another skips."""
    for grad in grads:
        if isinstance(grad, DistributedGrad):
            found.copy_(torch.maximum(found, grad.source.overflow().to(found.device, found.dtype)))
            values = grad.plain()
            func([values], found, scale)
            grad.source.write(values)
        else:
            func([grad], found, scale)
