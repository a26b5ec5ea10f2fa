"""Methods of a sharded model and of its optimizer that are not their classes': put on these instances, and taken off.

What would go past the engine does so no more: `zero_grad` is its own; moves, casts and resizes are refused; `copy.deepcopy`
of the model, or of a part, makes a plain one with whole values, on every rank; pickling is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigError, LayoutError, StateError
from .build import Assembly
from .sharded import Sharded

RESIZE = "resize_token_embeddings"
_PACKAGE = __name__.partition(".")[0]


class Handle(Protocol):
    def remove(self) -> None: ...


class Patches:
    """Hooks and methods on instances; their classes and other instances stay as they are."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def method(self, target: object, name: str, method: Callable[..., Any]) -> None:
        target.__dict__[name] = method
        self._undo.append(partial(target.__dict__.pop, name, None))

    def hooks(self, *handles: Handle) -> None:
        self._undo += [handle.remove for handle in handles]

    def take_off(self) -> None:
        while self._undo:
            self._undo.pop()()


def put_on(
    patches: Patches,
    model: nn.Module,
    assembly: Assembly,
    zero_grad: Callable[..., None],
    settle: Callable[[], None],
) -> None:
    """
    Args:
        settle: returns when nothing is gathered or on the move.
    """
    patches.method(model, "zero_grad", zero_grad)
    for module in model.modules():
        if hasattr(type(module), RESIZE):
            patches.method(module, RESIZE, _refuse_resize)
        if next(module.parameters(), None) is not None:
            patches.method(module, "_apply", partial(_apply, module, assembly.sharded))
            patches.method(module, "__deepcopy__", partial(_plain_copy, module, assembly, settle))
            patches.method(module, "__reduce_ex__", _refuse_pickle)


def generate_together(
    patches: Patches,
    model: nn.Module,
    buffers: Callable[[], AbstractContextManager[None]],
    sync: Callable[[], bool],
    meet: Callable[[], object],
) -> None:
    """`generate` of several ranks, as of a model that is not wrapped in DDP, which has none: buffers are each rank's own.

    Args:
        buffers: a context in which none are sent.
        sync: whether parameters are released: a rank that stops generating early would leave the others waiting for its parts.
        meet: all ranks, first: on gloo transformers' own all-reduces would meet other ranks' of another size, which ends the
            process, where one rank alone generates.
    """
    for module in model.modules():
        stock = getattr(type(module), "generate", None)
        if callable(stock):
            takes = "synced_gpus" in inspect.signature(stock).parameters
            asks = sync if takes else lambda: False
            patches.method(module, "generate", partial(_generate, partial(stock, module), buffers, asks, meet))


def _generate(
    stock: Callable[..., Any],
    buffers: Callable[[], AbstractContextManager[None]],
    sync: Callable[[], bool],
    meet: Callable[[], object],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if sync():
        meet()
        kwargs["synced_gpus"] = True  # also where Seq2SeqTrainer passes the False that is right for unsharded models
    with buffers():
        return stock(*args, **kwargs)


class Accumulating(Protocol):
    """An engine, as `no_sync` needs it."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...

    def no_sync(self) -> AbstractContextManager[None]: ...


@contextmanager
def no_sync(engine: Accumulating) -> Iterator[None]:
    """`model.no_sync()`, which is DDP's elsewhere."""
    handles = []
    for optimizer in engine.optimizers:
        handles.append(optimizer.register_step_pre_hook(_refuse_step))
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handles[-1].id, last=False)  # before anything of the step is done
    try:
        with engine.no_sync():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_step(*_: Any) -> None:
    raise StateError(
        "optimizer.step() inside model.no_sync(): under DDP each rank makes a step of its own there (accelerate's LocalSGD "
        "does), and ranks of a sharded model hold parts of one. Step outside of it; without LocalSGD every step is of averages"
    )


def around_own_methods(
    optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None], patches: Patches
) -> None:
    """Around every method that this optimizer has and torch's base class has not: `eval`, `train`, `first_step`, …

    Static and class methods are left alone: they have no optimizer to change, and are not to be called with one.
    """
    for name in dir(type(optimizer)):
        if name.startswith("_") or hasattr(torch.optim.Optimizer, name) or name in optimizer.__dict__:
            continue
        method = inspect.getattr_static(type(optimizer), name)
        if inspect.isfunction(method):
            told = partial(_between, before, partial(method, optimizer), after)
            told.__wrapped__ = method  # type: ignore[attr-defined]  # another optimizer of its class has the method itself
            patches.method(optimizer, name, told)


def _between(
    before: Callable[[], None], method: Callable[..., Any], after: Callable[[], None], *args: Any, **kwargs: Any
) -> Any:
    before()
    try:
        return method(*args, **kwargs)
    finally:
        after()


def _apply(module: nn.Module, sharded: Sharded, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`.to()`, `.half()`, `.cpu()` and the like, of the model or a part of it: only what leaves every parameter as it is.

    Parameters that were added since are no part of the model that was sharded: they follow.
    """
    asked = set(module.parameters())
    for flat in sharded.flats:
        if asked.isdisjoint(flat.params):
            continue
        probe = torch.zeros((), dtype=flat.compute_dtype, device=flat.device)
        moved = fn(probe)
        if moved.dtype != probe.dtype or moved.device != probe.device:
            raise LayoutError(
                f"a sharded model cannot be moved or cast, nor can a part of it (from {probe.dtype} on {probe.device} to "
                f"{moved.dtype} on {moved.device}): do it before it is sharded, or call engine.detach() first"
            )
    for each in module.modules() if recurse else (module,):
        if any(param in sharded.names for param in each._parameters.values()):
            _move_own_buffers(each, fn)
        else:
            nn.Module._apply(each, fn, recurse=False)
    return module


def move_buffers(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        _move_own_buffers(module, fn)


def _move_own_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)


def _refuse_resize(*args: Any, **kwargs: Any) -> Any:
    raise ConfigError(
        f"{RESIZE}() on a sharded model would replace parameters behind the engine's back: resize before the model is "
        "sharded (inside `with zero.Init():` if it was born there), or call engine.detach() first"
    )


# Copies ---------------------------------------------------------------------------------------------------------------


def refuse_copy(what: str) -> StateError:
    return StateError(
        f"{what} cannot be copied or pickled: it holds what this process shares with the other ranks. Copy the model instead "
        "(copy.deepcopy(model) on every rank gives a plain one), save with engine.save(folder) or model.state_dict()"
    )


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), a worker process): each rank has a part of it. Use engine.save("
        "folder), torch.save(model.state_dict()) with state_dict() called on every rank, or pickle a plain copy: "
        "copy.deepcopy(model) on every rank"
    )


def _plain_copy(module: nn.Module, assembly: Assembly, settle: Callable[[], None], memo: dict[int, Any]) -> nn.Module:
    """torch's own deepcopy of the module without what is the engine's, parameters given as already copied. A collective."""
    settle()
    wanted = {param for param in module.parameters() if id(param) not in memo}
    with assembly.sharded.wire.watch.doing("copy.deepcopy() of a sharded model"):
        for param, value in assembly.whole_values(wanted):
            memo[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
    taken = strip(module, _is_ours)
    try:
        out: nn.Module = copy.deepcopy(module, memo)
    finally:
        for table, before in reversed(taken):
            table.clear()
            table.update(before)
    return out


def strip(root: nn.Module, ours: Callable[[Any], bool]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Take hooks and attributes off modules.

    Returns:
        The tables that they were in, each with what it had been.
    """
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def drop(table: dict[Any, Any], keys: set[Any]) -> None:
        if keys:
            taken.append((table, dict(table)))
            for key in keys:
                del table[key]

    for module in root.modules():
        gone: set[Any] = set()
        flags: list[dict[Any, Any]] = []
        for name, table in list(module.__dict__.items()):
            if isinstance(table, dict) and name.endswith("_hooks"):
                found = {key for key, value in table.items() if ours(value)}
                drop(table, found)
                gone |= found
            elif isinstance(table, dict) and "_hooks_" in name:  # which of them take keywords, or are always called
                flags.append(table)
        for table in flags:
            drop(table, gone & set(table))
        drop(module.__dict__, {key for key, value in module.__dict__.items() if ours(value)})
    return taken


def wrapped(value: Any) -> Iterator[Any]:
    """A hook or a method, and what it is wrapped around, from the outside in."""
    for _ in range(8):
        yield value
        inner = [getattr(value, name) for name in ("func", "__func__", "hook") if callable(getattr(value, name, None))]
        if not inner:
            return
        value = inner[0]


def _is_ours(value: Any) -> bool:
    """A hook, a method or an object of this package, however it is wrapped."""
    if isinstance(value, (Tensor, nn.Module, Mapping)):
        return False
    for each in wrapped(value):
        names = (
            getattr(each, "__module__", None),
            type(each).__module__,
            type(getattr(each, "__self__", None)).__module__,
        )
        if any(isinstance(name, str) and name.partition(".")[0] == _PACKAGE for name in names):
            return True
    return False
