"""Methods of a sharded model, of its optimizer, and of a born model before: put on these instances, and taken off.

What would go past the engine does so no more: `zero_grad` is its own; moves, casts and resizes are refused; `copy.deepcopy`
of the model, or of a part, makes a plain one with whole values, on every rank; pickling is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..errors import ConfigError, LayoutError, StateError
from .build import Assembly
from .state_dict import StateDictCall, StateDictHooks
from .values.deferred import Birth, birth_of, no_pickle
from .values.deferred_parameter import opening_mode
from .values.reads import AsTheyAre, Unmasked
from .values.sharded import Sharded

RESIZE = "resize_token_embeddings"
_PACKAGE = __name__.partition(".")[0]


class Handle(Protocol):
    def remove(self) -> None: ...


class Patches:
    """Hooks and methods on instances. Of classes only the text of an AttributeError changes, see `renamed`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def method(self, target: object, name: str, method: Callable[..., Any]) -> None:
        own = target.__dict__
        self._undo.append(partial(_put_back, own, name, method, own.get(name, _MISSING)))
        own[name] = method

    def hooks(self, *handles: Handle) -> None:
        self._undo += [handle.remove for handle in handles]

    def take_off(self) -> None:
        while self._undo:
            self._undo.pop()()


_MISSING: Any = object()


def _put_back(own: dict[str, Any], name: str, method: Any, before: Any) -> None:
    """An instance has the attribute that it had before `method`, unless user code has replaced `method` since."""
    if own.get(name) is not method:
        return
    if before is _MISSING:
        del own[name]
    else:
        own[name] = before


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
        if type(module).named_modules is not nn.Module.named_modules:
            patches.method(module, "named_modules", partial(_named_modules, module))


def _named_modules(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The class's own, which may read parameters (PEFT's registers them again): one rank alone can list modules."""
    with AsTheyAre():
        return type(module).named_modules(module, *args, **kwargs)


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
        meet: all ranks, first: where one alone generates, transformers' all-reduces would meet others of another size on gloo.
    """

    def generate(stock: Callable[..., Any], takes: bool, *args: Any, **kwargs: Any) -> Any:
        if takes and sync():
            meet()
            kwargs["synced_gpus"] = (
                True  # also where Seq2SeqTrainer passes the False that is right for unsharded models
            )
        with buffers():
            return stock(*args, **kwargs)

    for module in model.modules():
        stock = module.__dict__.get("generate")
        if stock is None and callable(method := getattr(type(module), "generate", None)):
            stock = MethodType(method, module)
        if callable(stock):
            takes = "synced_gpus" in inspect.signature(stock).parameters
            patches.method(module, "generate", partial(generate, stock, takes))


@contextmanager
def no_sync(sharded: Sharded, accumulating: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """`model.no_sync()`, which is DDP's elsewhere: the engine's, and no step inside."""
    handles = []
    for optimizer in sharded.optimizers:
        handles.append(optimizer.register_step_pre_hook(_refuse_step))
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handles[-1].id, last=False)  # before anything of the step is done
    try:
        with accumulating():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_step(*_: Any) -> None:
    raise StateError(
        "optimizer.step() inside model.no_sync(): under DDP each rank makes a step of its own there (accelerate's LocalSGD "
        "does), and ranks of a sharded model hold parts of one. Step outside of it; without LocalSGD every step is of averages"
    )


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
                f"{moved.dtype} on {moved.device}): do it before it is sharded, or after "
                "zero.engine_of(model).detach()"
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
        f"{RESIZE}() on a sharded model would replace parameters that its optimizer has: resize before the model is sharded "
        "(before the Trainer trains; inside `with zero.Init():` if it was made there), or after zero.engine_of(model).detach()"
    )


# Copies ---------------------------------------------------------------------------------------------------------------


def _refuse_pickle(protocol: Any) -> Any:
    raise StateError(
        "a sharded model cannot be pickled (torch.save(model), a worker process): each rank has a part of it. Use engine.save("
        "folder), torch.save(model.state_dict()) with state_dict() called on every rank, or pickle a plain copy: "
        "copy.deepcopy(model) on every rank. Spawned workers of a DataLoader pickle its dataset, sampler and collate_fn: let "
        "these hold no model, only what they need of it (a tokenizer, the config)"
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


# Before a model is sharded -------------------------------------------------------------------------------------


class DeferredHooks(StateDictHooks):
    """Of all modules that were seen in one `zero.Init`.

    Args:
        inside: makes the context in which whole-parameter methods can run again.
    """

    def __init__(self, inside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._inside = inside

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredHooks:
        """Copies of a born module have the same ones."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A born model's pickle comes to its hooks before its parameters."""
        raise no_pickle()

    def put_on(self, module: nn.Module) -> None:
        """Once a module, where it or one inside it has born parameters."""
        if _is_deferred(module.__dict__.get("_apply")) or all(birth_of(param) is None for param in module.parameters()):
            return
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; `zero.shard` refuses it with a named error
            return
        module.register_forward_pre_hook(self._refuse_forward)
        self.register(module)
        module.__dict__["_apply"] = partial(self._apply, module)
        if hasattr(type(module), RESIZE):
            module.__dict__[RESIZE] = partial(self._resize, module)

    def _resize(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._inside():
            return getattr(type(module), RESIZE)(module, *args, **kwargs)

    def _refuse_forward(self, module: nn.Module, args: Any) -> None:
        if opening_mode() is not None:
            return  # parameters open as they are used
        for name, param in module._parameters.items():
            if param is not None and self.wire_of(param) is not None:
                raise StateError(
                    f"{type(module).__name__}.{name} (shape {tuple(param.shape)}) was born sharded and has no whole values "
                    "here: call zero.shard(model, …), accelerator.prepare(model) or hand the model to a Trainer before "
                    "running it"
                )

    def _apply(self, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`.to()`, `.half()`, `.cpu()` and the like, on the slices of closed parameters."""
        kind: Any = type(module)
        if opening_mode() is not None:  # it opens what `fn` is given
            inside: nn.Module = kind._apply(module, fn, recurse)
            return inside

        def moved(tensor: Tensor) -> Tensor:
            birth = birth_of(tensor)
            if birth is None or birth.is_open or not isinstance(tensor, nn.Parameter):
                return fn(tensor)
            return birth.move(tensor, fn)

        unmasked = Unmasked(module.parameters())  # torch assigns `.data`
        try:
            applied: nn.Module = kind._apply(module, moved, recurse)
        finally:
            unmasked.end()
        return applied

    # State dicts ----------------------------------------------------------------------------------------------------

    def wire_of(self, param: nn.Parameter) -> SoloWire | None:
        birth = birth_of(param)
        return None if birth is None or birth.is_open else birth.wire

    def gather(self, param: nn.Parameter, wire: SoloWire, call: StateDictCall) -> Mapping[nn.Parameter, Tensor]:
        birth = _birth(param)
        everywhere = self.agree_on_room(wire, call)
        with wire.watch.doing("state_dict()"), torch._C.DisableTorchFunction():
            whole = birth.read(param.shape)
            values = whole.cpu() if wire.rank == 0 or everywhere else whole.to("meta")
            return {param: self.given(values, wire, whole.device)}

    def open(self, param: nn.Parameter) -> Tensor:
        _birth(param).open(param, fill=False)
        return param.data

    def close(self, param: nn.Parameter, landing: Tensor) -> None:
        _birth(param).close(param)


def _birth(param: nn.Parameter) -> Birth:
    birth = birth_of(param)
    if birth is None:
        raise StateError("a born parameter was sharded while its state dict was made or loaded")
    return birth


def _is_deferred(value: Any) -> bool:
    return any(isinstance(getattr(each, "__self__", None), DeferredHooks) for each in wrapped(value))


def end_birth(model: nn.Module) -> None:
    """The model is not born any more: its deferred hooks are gone."""
    strip(model, _is_deferred)
