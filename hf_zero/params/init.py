"""`zero.Init`: build models larger than one rank's memory as usual; each rank keeps its part of every parameter.

It uses two public mechanisms of torch, both removed at exit: registration hooks of nn.Module see every new parameter, and a
`TorchFunctionMode` sees every torch function. A new parameter is full until another module registers a parameter or a child is
attached; then it is closed (`deferred`). A function that reads or writes a closed parameter opens it first, so constructors
compute the same values as without `zero.Init`. At most the parameters of the largest module, or the arguments of one function,
are open at once.

Every rank runs the same code and draws the same random numbers, so values and open parameters are equal on all ranks.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves

from ..comm.agreement import gather_if_different, on_all_ranks
from ..comm.group_wire import open_wire
from ..comm.process_group import home_device
from ..comm.watch import STALL_S
from ..comm.wire import Wire
from ..config import OFFLOADS, check_choice, suggest_names
from ..core.lazy_import import LazyFunction
from ..engine.parameter import place_of, set_source
from ..errors import RankMismatchError
from ..tiers.disk import Disk
from ..tiers.host import return_freed_memory, returning_freed_memory
from ..tiers.tier import Meter
from .deferred import Deferred, deferred_of
from .deferred_parameter import DeferredParameter, InitMode, copy_deferred, current_init, is_new_parameter, needs_values
from .rank_equality import ParameterDigest, check_equal

Pair = tuple[nn.Parameter, Deferred]
_FROM_PRETRAINED = LazyFunction("transformers", "huggingface.from_pretrained", "patched_loading")

_REGISTER = nn.Module.register_parameter
_TRIM_BYTES = 16 << 20
"""Bytes that closed parameters may leave in the allocator before `malloc_trim` returns them."""
_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc

OVERWRITES = frozenset(
    {
        "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_",
        "bernoulli_", "trunc_normal_", "zeros_", "ones_", "constant_", "xavier_uniform_", "xavier_normal_",
        "kaiming_uniform_", "kaiming_normal_", "orthogonal_",
    }
)  # fmt: skip
"""Functions that write every element of their first argument and read none."""


@suggest_names()
class Init:
    """Create models sharded: `with zero.Init(): model = …`.

    The model keeps its type, and parameters show their true shape and dtype. Each rank holds its equal part of every
    parameter, and full buffers. `zero.shard`, `accelerator.prepare` and the Trainer continue from there. Every rank runs the
    same code inside, on one thread. A nested context is part of the outer one. To change values of a deferred model
    later, enter another one or use `zero.GatheredParameters`.

    Values, and the random state afterwards, equal those of the plain constructor bit for bit. Every rank draws every number. If
    ranks were seeded differently, all use rank 0's state inside and their own again afterwards.

    Args:
        offload_params: as in the `ZeroConfig` that the model will be sharded with. With `disk` or `auto`, `from_pretrained`
            leaves values in their safetensors files until something changes or needs them. If `shard` places frozen ones on
            disk, training reads them from these files. The files must not change; a change is an error. With `disk`,
            computed parts are stored in a file in `offload_dir` from the start.
        offload_dir: as in that `ZeroConfig`.
        enabled: False to do nothing.
        stall_s: as in that `ZeroConfig`.

    Raises:
        StateError: outside the context, before the model is sharded: user code accesses values of a parameter.
        RankMismatchError: on every rank, at exit or where a parameter is used: the ranks computed different values, or used
            different parameters.

    Attributes:
        wire: the ranks.
        peak_numel: the largest number of parameter elements that were full at once so far.
        bytes_read: bytes of weight files that this rank has read.
        leaves_at_rest: whether values may stay in their files.

    Example:
        >>> with zero.Init():
        ...     model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
        >>> engine = zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(stage=3))
    """

    def __init__(
        self,
        *,
        offload_params: str = "none",
        offload_dir: str | None = None,
        enabled: bool = True,
        stall_s: float = STALL_S,
    ) -> None:
        check_choice("zero.Init: offload_params", offload_params, OFFLOADS)
        self.leaves_at_rest = offload_params in ("disk", "auto")
        self._stores, self._folder = offload_params == "disk", offload_dir
        self._store: Disk | None = None
        self.enabled, self._stall_s = enabled, stall_s
        self.wire: Wire = Wire()
        self.peak_numel = self.bytes_read = 0
        self._depth = self._thread = 0
        self._stack = ExitStack()
        self._current: nn.Module | None = None  # the module whose parameters are being registered
        self._open: dict[int, Pair] = {}  # least recently used first
        self._aliased: weakref.WeakSet[Deferred] = weakref.WeakSet()  # closed, while user code refers to full memory
        self._session = object()
        self._known: list[weakref.ref[Deferred]] = []  # registered or used, in that order
        self._largest_numel = 0  # in one module, without its children
        self._freed_bytes = 0
        self._seen: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._own_random: list[Tensor] | None = None  # this rank's state before, if it differed from rank 0's

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        outer: Init | None = current_init()
        if outer is not None:
            outer._depth += 1
            return outer
        self.wire = open_wire(home_device(), self._stall_s)
        self.wire.watch.phase = "zero.Init"
        if self._stores:
            with on_all_ranks(self.wire, "zero.Init", kind=RankMismatchError):
                self._store = Disk(self._folder, self.wire.rank, Meter())
            return_freed_memory()  # also in training: most of such a model is on disk
        self._own_random, self._session = None, object()
        self.align_random_states()
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(returning_freed_memory())
            stack.callback(self._leave)
            stack.callback(register_module_parameter_registration_hook(self._on_parameter).remove)
            stack.callback(register_module_module_registration_hook(self._on_module).remove)
            stack.enter_context(InitMode(self))
            if (patched_loading := _FROM_PRETRAINED.if_installed()) is not None:  # even if imported inside
                stack.enter_context(patched_loading(self))
            self._stack = stack.pop_all()
        self._depth = 1
        return self

    def __exit__(self, *error: Any) -> None:
        outer: Init | None = current_init() if self.enabled else None
        if outer is None:
            return
        outer._depth -= 1
        if outer._depth == 0:
            outer._stack.__exit__(*error)
            known, outer._known = outer._known, []
            if error[0] is None:
                alive = [each() for each in known]
                mine = [
                    None if each is None else ParameterDigest(each.label, each.digest, each.is_used) for each in alive
                ]
                with outer.wire.watch.operation("the end of zero.Init"):
                    check_equal(outer.wire, "the end of zero.Init", mine)

    def _leave(self) -> None:
        """Close everything, also after an exception. No communication."""
        self._current = None
        for module in list(self._seen):
            self._defer_unregistered(module)
        self._close_all()
        self._store = None  # deferred parameters keep it open
        self._aliased.clear()
        self._seen = weakref.WeakKeyDictionary()
        if self._own_random is not None:
            _set_random_states(self._own_random, self.wire.device or torch.device("cpu"))
            self._own_random = None

    def align_random_states(self) -> None:
        """Use rank 0's random state on all ranks until the context is left, where states differ. A collective."""
        with self.wire.watch.operation("zero.Init"):
            own = _align_random_states(self.wire)
        if self._own_random is None:
            self._own_random = own

    # Registration -----------------------------------------------------------------------------------------------------

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self._seen[module] = True
            if nn.Module.register_parameter is not _REGISTER:
                return  # `init_empty_weights` of accelerate and PEFT replaces it by a meta parameter
            label = f"{type(module).__name__}.{name}"
            if param is None or not _can_be_deferred(param):
                known = None if param is None else deferred_of(param)
                if known is not None:
                    self._number(known, label)
                return
            if module is not self._current:
                self._close_all()
                self._current = module
            self._begin(param, label)
            own = [p for p in module._parameters.values() if p is not None and id(p) in self._open]
            self._largest_numel = max(self._largest_numel, _numel({id(p): p for p in (*own, param)}.values()))

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self._seen[parent] = True
            self._close_all()
            self._current = None
            pending = [child] if child is not None and child not in self._seen else []
            while pending:  # created without registration, as copies are
                module = pending.pop()
                self._seen[module] = True
                self._defer_unregistered(module)
                pending += [each for each in module._modules.values() if each is not None and each not in self._seen]

    def _defer_unregistered(self, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is not None and _can_be_deferred(param):
                self._begin(param, f"{type(module).__name__}.{name}")
                self._close_all()

    def _begin(self, param: nn.Parameter, label: str) -> None:
        """Defer a plain parameter, and leave it open."""
        deferred = Deferred(self.wire, device=param.device, store=self._store)
        set_source(param, deferred)
        copy_deferred(param)
        self._number(deferred, label)
        self._open[id(param)] = (param, deferred)
        self._update_peak()

    def _number(self, deferred: Deferred, label: str = "") -> None:
        """Number a parameter by its first registration or use: the same on every rank."""
        if deferred.session is not self._session:
            deferred.session = self._session
            name = label or deferred.label.partition(" (")[0]
            deferred.label = f"{name} (parameter {len(self._known)} inside zero.Init)"
            self._known.append(weakref.ref(deferred))

    # Open and closed --------------------------------------------------------------------------------------------------

    def _close_all(self) -> None:
        self._close()
        for each in [*self._aliased]:
            if not each.has_alias:
                self._aliased.discard(each)

    def _close(self, keep: Collection[int] = (), limit_numel: int = -1) -> None:
        """Close least recently used parameters, except `keep`, until the others have at most `limit_numel` elements."""
        others = {key: pair for key, pair in self._open.items() if key not in keep}
        left = _numel(param for param, _ in others.values())
        for key, (param, deferred) in others.items():
            if left <= limit_numel:
                break
            left -= param.numel()
            del self._open[key]
            if not deferred.pins and deferred_of(param) is deferred:
                deferred.close(param)
                if deferred.has_alias:
                    self._aliased.add(deferred)
                self._freed_bytes += param.numel() * param.element_size()
        # Parts too small for `returning_freed_memory` to map leave holes in malloc's heap.
        if self._freed_bytes >= _TRIM_BYTES and _malloc_trim is not None and self.wire.size > 1:
            self._freed_bytes = 0
            _malloc_trim(0)

    def _open_arguments(self, found: list[Pair], overwritten: nn.Parameter | None, what: str) -> None:
        """Open the parameters that the function `what` is about to use."""
        used = {id(param) for param, _ in found}
        self._close(used, max(0, self._largest_numel - _numel(param for param, _ in found)))
        self._agree(what, [each for param, each in found if not each.is_open and param is not overwritten])
        for param, deferred in found:
            deferred.open(param, fill=param is not overwritten)
            self._open.pop(id(param), None)
            self._open[id(param)] = (param, deferred)
        self._update_peak()

    def _agree(self, what: str, found: list[Deferred]) -> None:
        """Check that every rank gathers the same values. A collective if there are any.

        Raises:
            RankMismatchError: on every rank: one rank reads, or has written, alone.
        """
        if found and self.wire.size > 1:
            for each in found:
                self._number(each)
            mine = [ParameterDigest(each.label, each.digest, each.is_used) for each in found]
            what = f"{what} of {mine[0].name}"
            with self.wire.watch.operation(what):
                check_equal(self.wire, what, mine)

    def _update_peak(self) -> None:
        self.peak_numel = max(self.peak_numel, _numel(param for param, _ in self._open.values()))

    # Torch functions --------------------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one torch function, with the deferred parameters among its arguments opened."""
        found: dict[int, Pair] = {}
        uses = 0
        for each in tree_leaves((args, kwargs)):
            deferred = deferred_of(each) if type(each) in (nn.Parameter, DeferredParameter) else None
            if (
                deferred is not None and not deferred.pins
            ):  # inside `GatheredParameters` each rank may do something else
                found[id(each)] = (each, deferred)
                uses += 1
        if not found or not (needs_values(func) or getattr(func, "__name__", "") == "untyped_storage"):
            return func(*args, **kwargs)
        pairs = list(found.values())
        closed = [pair for pair in pairs if not pair[1].is_open]
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        is_alone = uses == 1 and any(first is param for param, _ in closed)
        overwrites = is_alone and (name in OVERWRITES or name == "__set__")
        if closed or len(self._open) > 1:
            self._open_arguments(pairs, first if overwrites else None, name)
        for param, deferred in pairs:
            deferred.is_used = True
            self._number(deferred, f"a parameter of shape {tuple(param.shape)}")
        if closed and is_new_parameter(func, 2):  # it requires a tensor of the class that it passed
            return nn.Parameter(first.detach().clone(), requires_grad=False)
        try:
            return func(*args, **kwargs)
        except BaseException:
            if overwrites:  # it may have written nothing
                for param, deferred in closed:
                    deferred.close(param, keep=False)
                    self._open.pop(id(param), None)
            raise


def _can_be_deferred(param: nn.Parameter) -> bool:
    """Return whether a parameter is plain and dense, with values. Others (quantized, without a shape) stay as they are."""
    if type(param) is not nn.Parameter or param.is_meta or param.layout is not torch.strided or param.is_quantized:
        return False
    return deferred_of(param) is None and place_of(param) is None


def _numel(params: Iterable[Tensor]) -> int:
    return sum(param.numel() for param in params)


def _align_random_states(wire: Wire) -> list[Tensor] | None:
    """Set rank 0's random states on every rank. Returns this rank's own states if ranks differed."""
    if wire.size == 1:
        return None
    device = wire.device or torch.device("cpu")
    cuda = device.type == "cuda" and torch.cuda.is_initialized()
    with torch._C.DisableTorchFunction():
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]
        everyone = gather_if_different(wire, [state.numpy().tobytes() for state in states])
        if everyone is None:
            return None
        _set_random_states([torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in everyone[0]], device)
    return states


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and torch.cuda.is_initialized() and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
