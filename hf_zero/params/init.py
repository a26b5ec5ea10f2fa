"""`zero.Init`: models larger than one rank's memory are built as usual, and each rank keeps its slices.

Two of torch's official mechanisms, both gone at exit: the registration hooks of nn.Module see every new parameter, and a
`TorchFunctionMode` sees every torch function that is given one. A new parameter is whole until another module gets a
parameter or a child is attached; then it is closed (`runtime/deferred`). A function that reads or writes a closed one opens it
first, so that whatever a constructor does with values gives the plain result. What is open at once is never more than the
largest module's own parameters, or the arguments of one function.

Every rank runs the same program, drawing the same random numbers: that is what makes the values, and which parameters are
open, equal everywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..comm.agree import on_all_ranks
from ..comm.group_wire import home_device, open_wire
from ..comm.watch import STALL_S
from ..comm.wire import SoloWire, wire_device
from ..config import OFFLOADS, check_choice
from ..errors import ConfigError, RankMismatchError
from ..runtime.instance_methods import DeferredHooks
from ..runtime.values.deferred import Birth, birth_of, free_aliases
from ..runtime.values.deferred_parameter import (
    DeferredParameter,
    OpeningMode,
    makes_parameter,
    opening_mode,
    uses_values,
)
from ..runtime.values.deferred_spans import check_equal, seen
from ..runtime.values.ownership import OWNERS, adopt
from ..tiers.disk import Disk
from ..tiers.host import free_at_once, freeing_at_once
from ..tiers.tier import Meter
from . import EXTENSIONS

_TRIM_BYTES = 16 << 20  # most that closed parameters may leave in the allocator before it must give it back
_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
"""Whole parameters come and go between slices that stay: without this the holes make up most of a rank's memory."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that write every element of their first argument and read none.
_OVERWRITES = _words(
    "normal_ uniform_ zero_ fill_ copy_ random_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ trunc_normal_ "
    "zeros_ ones_ constant_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_"
)
# Methods that `init="fast"` calls on a slice in place of the whole.
_DRAWS = _words("normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ random_")
_ELEMENTWISE = _DRAWS | _words(
    "zero_ fill_ mul_ add_ sub_ div_ clamp_ clamp_min_ clamp_max_ erfinv_ trunc_ exp_ log_ sqrt_ abs_ neg_"
)


def _kaiming_uniform(tensor: Tensor, a: float, mode: Any, nonlinearity: Any) -> tuple[str, tuple[float, ...]]:
    std = nn.init.calculate_gain(nonlinearity, a) / math.sqrt(nn.init._calculate_correct_fan(tensor, mode))
    return "uniform_", (-math.sqrt(3.0) * std, math.sqrt(3.0) * std)


# The functions of nn.init that a mode is given as a whole (of the others it sees the methods that they call): the method
# that each calls, and its arguments, for a tensor of the parameter's shape.
_INITIALISERS: dict[Callable[..., Any], Callable[..., tuple[str, tuple[float, ...]]]] = {
    nn.init.uniform_: lambda tensor, a, b: ("uniform_", (a, b)),
    nn.init.normal_: lambda tensor, mean, std: ("normal_", (mean, std)),
    nn.init.constant_: lambda tensor, val: ("fill_", (val,)),
    nn.init.kaiming_uniform_: _kaiming_uniform,
}


class Init:
    """`with zero.Init(): model = …`: every model built or loaded inside is born sharded over the ranks.

    The model is of its plain type, its parameters of their true shape and type; each rank holds its equal part of every
    parameter, and buffers whole. `zero.shard`, `accelerator.prepare` and the Trainer take it from there. Every rank must
    run the same code inside, on one thread. Contexts inside one another are one; entering again later is allowed, and is
    how to change values of a born model (or use `zero.GatheredParameters`).

    Args:
        init: `exact`: values and random state afterwards are bit for bit those of the plain constructor, every rank drawing
            every number (rank 0's, where the ranks were seeded differently; each then has its own state again). `fast`: what
            initialises element by element is drawn by each rank for its own slice alone, and depends on the number of ranks;
            what does not (`orthogonal_`, `trunc_normal_`) is done as in `exact`.
        offload_params: as in the `ZeroConfig` that the model will be sharded with. With `disk` or `auto`, `from_pretrained`
            leaves the values of parameters where they are, in their safetensors files, until something changes or needs them;
            those that are frozen when `shard` puts them on disk are read from these files from then on, and never copied. The
            files must stay as they are; a change is an error. Parameters that are converted or cast in loading are read.
            With `disk`, slices that are computed rest in a file in `offload_dir` from the start.
        offload_dir: as in that `ZeroConfig`.
        enabled: False to do nothing.
        stall_s: as in that `ZeroConfig`.

    Raises:
        StateError: outside, before the model is sharded: code reads or writes values of a parameter.
        RankMismatchError: on every rank, at the end or where a parameter is used: the ranks computed different values, or use
            different parameters.

    Attributes:
        wire: the ranks.
        peak_numel: the most parameter elements that were whole at once so far.
        bytes_read: by this rank, of weight files, by what loads them; without the few bytes by which ranks compare their files.
        leaves_at_rest: whether values may stay in their files.
    """

    def __init__(
        self,
        *,
        init: str = "exact",
        offload_params: str = "none",
        offload_dir: str | None = None,
        enabled: bool = True,
        stall_s: float = STALL_S,
    ) -> None:
        if init not in ("exact", "fast"):
            raise ConfigError(f"zero.Init: init must be 'exact' or 'fast', found {init!r}")
        check_choice("zero.Init: offload_params", offload_params, OFFLOADS)
        self.init = init
        self.leaves_at_rest = offload_params in ("disk", "auto")
        self._stores, self._folder = offload_params == "disk", offload_dir
        self._store: Disk | None = None
        self.enabled = enabled
        self._stall_s = stall_s
        self.wire: SoloWire = SoloWire()
        self.peak_numel = 0
        self.bytes_read = 0
        self._depth = 0
        self._stack = ExitStack()
        self._thread = 0
        self._current: nn.Module | None = None  # whose parameters are being registered
        self._open: dict[int, tuple[nn.Parameter, Birth]] = {}  # least recently used first
        self._aliased: list[Birth] = []
        self._labels: list[tuple[str, weakref.ref[Birth]]] = []  # of all that were registered or used, in that order
        self._numbers: WeakKeyDictionary[Birth, int] = WeakKeyDictionary()  # places in `_labels`
        self._largest_numel = 0  # of the parameters that one module holds itself
        self._freed_bytes = 0
        self._seen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # torch's would ask half-made ones
        self._seed = 0
        self._own_random: list[Tensor] | None = None  # of this rank before, where it was not rank 0's
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        outer = entered()
        if outer is not None:
            outer._depth += 1
            return outer
        self.wire = open_wire(home_device(), self._stall_s)
        self.wire.watch.phase = "zero.Init"
        if self._stores:
            with on_all_ranks(self.wire, "zero.Init", kind=RankMismatchError):
                self._store = Disk(self._folder, self.wire.rank, Meter())
            free_at_once()  # in training, too: most of such a model is on disk
        self._own_random = None
        self.align_random_states()
        self._thread = threading.get_ident()
        if self.init == "fast":
            self._seed = int(torch.randint(0, 2**62, (), device="cpu").item())
            self._generators.clear()
        with ExitStack() as stack:
            stack.enter_context(freeing_at_once())
            stack.callback(self._leave)
            stack.callback(register_module_parameter_registration_hook(self._on_parameter).remove)
            stack.callback(register_module_module_registration_hook(self._on_module).remove)
            stack.enter_context(_Watch(self))
            for extension in EXTENSIONS:
                context = extension(self)
                if context is not None:
                    stack.enter_context(context)
            self._stack = stack.pop_all()
        self._depth = 1
        return self

    def __exit__(self, *error: Any) -> None:
        outer = entered() if self.enabled else None
        if outer is None:
            return
        outer._depth -= 1
        if outer._depth == 0:
            outer._stack.__exit__(*error)
            labels, outer._labels = outer._labels, []
            outer._numbers.clear()
            if error[0] is None:
                alive = [(label, birth()) for label, birth in labels]
                mine = [None if birth is None else seen(label, birth) for label, birth in alive]
                with outer.wire.watch.doing("the end of zero.Init"):
                    check_equal(outer.wire, "the end of zero.Init", mine, unused=False)

    def _leave(self) -> None:
        """Close everything; leave no traces but the guards of born models. Also after an exception; no communication."""
        self._current = None
        for module in list(self._seen):
            self._sweep(module)
        self._close_all()
        self._store = None  # what is born keeps it
        self._aliased.clear()  # what user code refers to is followed when the model is sharded
        hooks = DeferredHooks(Init)
        for module in list(self._seen):
            hooks.put_on(module)
        self._seen = WeakKeyDictionary()
        if self._own_random is not None:
            _set_random_states(self._own_random, wire_device(self.wire, torch.device("cpu")))
            self._own_random = None

    def align_random_states(self) -> None:
        """Where the ranks' random states differ, rank 0's is used on all until the context is left. A collective."""
        with self.wire.watch.doing("zero.Init"):
            own = _align_random_states(self.wire)
        if self._own_random is None:
            self._own_random = own

    # Registration -----------------------------------------------------------------------------------------------------

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self._seen[module] = True
            label = f"{type(module).__name__}.{name}"
            if param is None or not _can_be_born(param):
                birth = None if param is None else birth_of(param)
                if birth is not None:
                    self._number(birth, label)
                return
            if module is not self._current:
                self._close_all()
                self._current = module
            self._begin(param, label)
            own = [p for p in module._parameters.values() if p is not None and id(p) in self._open]
            self._largest_numel = max(self._largest_numel, _numel([*own, param]))
            if self.init == "fast":
                self._close_all()

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch._C.DisableTorchFunction():
            self._seen[parent] = True
            self._close_all()
            self._current = None
            pending = [child] if child is not None and child not in self._seen else []
            while pending:  # made without registration, as copies are
                module = pending.pop()
                self._seen[module] = True
                self._sweep(module)
                pending += [
                    inner for inner in module._modules.values() if inner is not None and inner not in self._seen
                ]

    def _sweep(self, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is not None and _can_be_born(param):
                self._begin(param, f"{type(module).__name__}.{name}")
                self._close_all()

    def _begin(self, param: nn.Parameter, label: str) -> None:
        """A plain parameter is born, open."""
        birth = Birth(self.wire, store=self._store, skips_first=self.init == "fast")
        adopt(param, birth)
        self._number(birth, label)
        self._open[id(param)] = (param, birth)
        self._note_peak()

    def _number(self, birth: Birth, label: str) -> int:
        """The place of a parameter among all that were registered or used here: the same on every rank."""
        if birth not in self._numbers:
            self._numbers[birth] = len(self._labels)
            self._labels.append((label, weakref.ref(birth)))
        return self._numbers[birth]

    # Open and closed --------------------------------------------------------------------------------------------------

    def _close_all(self) -> None:
        self._close_where(lambda: bool(self._open))
        self._aliased = free_aliases(self._aliased)

    def _close_where(self, more: Callable[[], bool], keep: Iterable[int] = ()) -> None:
        """Close the least recently used ones, `keep` apart, as long as `more` says so."""
        kept = set(keep)
        for key in [key for key in self._open if key not in kept]:
            if not more():
                return
            param, birth = self._open.pop(key)
            if not birth.pins and birth_of(param) is birth:  # else whoever has it closes it
                birth.close(param)
                if birth.has_alias:
                    self._aliased.append(birth)
                self._give_back(param.numel() * param.element_size())

    def _give_back(self, freed_bytes: int) -> None:
        """Host memory of closed parameters returns to the system, now and then."""
        self._freed_bytes += freed_bytes
        if self._freed_bytes >= _TRIM_BYTES and _malloc_trim is not None and self.wire.size > 1:
            self._freed_bytes = 0
            _malloc_trim(0)

    def _bring(self, found: list[tuple[nn.Parameter, Birth]], overwritten: nn.Parameter | None, what: str) -> None:
        """Open what the function `what` is about to use."""
        used = {id(param) for param, _ in found}
        limit = max(self._largest_numel, _numel(param for param, _ in found))
        others = {key: param for key, (param, _) in self._open.items() if key not in used}

        def too_much() -> bool:
            left = (param for key, param in others.items() if key in self._open)
            return _numel(left) + _numel(param for param, _ in found) > limit

        self._close_where(too_much, used)
        self._agree(what, [pair for pair in found if not pair[1].is_open and pair[0] is not overwritten])
        for param, birth in found:
            birth.open(param, fill=param is not overwritten)
            self._open.pop(id(param), None)
            self._open[id(param)] = (param, birth)
        self._note_peak()

    def _note_use(self, found: Iterable[tuple[nn.Parameter, Birth]]) -> None:
        """After `_agree`, which looks at how the values came to be."""
        for param, birth in found:
            birth.is_used = True
            self._number(birth, f"a parameter of shape {tuple(param.shape)}")

    def _agree(self, what: str, found: list[tuple[nn.Parameter, Birth]]) -> None:
        """Before values are gathered: every rank gathers the same ones. A collective where there are some.

        Raises:
            RankMismatchError: on every rank: one reads alone, or has written alone.
        """
        if found and self.wire.size > 1:
            mine = []
            for param, birth in found:
                number = self._number(birth, f"a parameter of shape {tuple(param.shape)}")
                mine.append(seen(f"{self._labels[number][0]} (parameter {number} inside zero.Init)", birth))
            with self.wire.watch.doing(f"{what} of {mine[0].name}"):
                check_equal(self.wire, f"{what} of {mine[0].name}", mine, unused=False)

    def _note_peak(self) -> None:
        self.peak_numel = max(self.peak_numel, _numel(param for param, _ in self._open.values()))

    # What the mode calls ----------------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function, born parameters among its arguments opened."""
        found: dict[int, tuple[nn.Parameter, Birth]] = {}
        uses = _find_born((args, kwargs), found)
        if not found or not uses_values(func):
            return func(*args, **kwargs)
        closed = [pair for pair in found.values() if not pair[1].is_open]
        name = getattr(func, "__name__", "")
        if not closed:
            if len(self._open) > 1:
                self._bring(list(found.values()), None, name)
            self._note_use(found.values())
            return func(*args, **kwargs)
        first: Any = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        alone = uses == 1 and any(first is param for param, _ in closed)
        if alone and self.init == "fast" and self._on_slice(func, name, first, args[1:], kwargs):
            return first
        overwrites = uses == 1 and (name in _OVERWRITES or name == "__set__")
        self._bring(list(found.values()), first if overwrites else None, name)
        self._note_use(found.values())
        if makes_parameter(func, 2):  # which wants a tensor of the class that it gave
            return nn.Parameter(first.detach().clone(), requires_grad=False)
        try:
            return func(*args, **kwargs)
        except BaseException:
            if overwrites:  # it may have written nothing
                for param, birth in closed:
                    birth.close(param, keep=False)
                    self._open.pop(id(param), None)
            raise

    def _on_slice(
        self, func: Callable[..., Any], name: str, param: nn.Parameter, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Initialise a closed parameter on this rank's slice alone; False where `func` is not element by element."""
        birth = birth_of(param)
        options = {key: value for key, value in kwargs.items() if value is not param}
        if birth is None or not param.numel() or options.pop("generator", None) is not None:
            return False
        if func in _INITIALISERS:
            name, rest = _INITIALISERS[func](birth.stand_in(param), *rest, **options)
            options.clear()
        elif name not in _ELEMENTWISE or any(isinstance(value, Tensor) for value in (*rest, *options.values())):
            return False
        own = birth.own
        if name in _DRAWS:
            options["generator"] = self._generator(own.device)
        getattr(own, name)(*rest, **options)
        options.pop("generator", None)
        self._note_use([(param, birth)])
        birth.note_write(f"{name} {rest} {options}", overwrites=name in _OVERWRITES)
        del own
        birth.settle()
        return True

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            seed = (self._seed + 0x9E3779B97F4A7C15 * (self.wire.rank + 1)) % 2**63
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


def entered() -> Init | None:
    """The outermost `Init` that is entered, if any."""
    mode = opening_mode()
    return mode.init if isinstance(mode, _Watch) else None


class _Watch(OpeningMode):
    """Sends every torch function through `Init.call`; inside that, torch functions are plain again."""

    def __init__(self, init: Init) -> None:
        super().__init__()
        self.init = init

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.init.call(func, args, kwargs or {})


def _find_born(value: Any, found: dict[int, tuple[nn.Parameter, Birth]]) -> int:
    """Born parameters in nested arguments, each once, into `found`; how often they occur."""
    if type(value) in (nn.Parameter, DeferredParameter):
        birth = birth_of(value)
        if birth is None:
            return 0
        found[id(value)] = (value, birth)
        return 1
    if isinstance(value, (tuple, list)):
        return sum(_find_born(inner, found) for inner in value)
    if isinstance(value, dict):
        return sum(_find_born(inner, found) for inner in value.values())
    return 0


def _can_be_born(param: nn.Parameter) -> bool:
    """Plain dense parameters with values, that no one holds yet. Others (quantised, not yet shaped) stay as they are."""
    if type(param) is not nn.Parameter or param.is_meta or param.layout is not torch.strided or param.is_quantized:
        return False
    return OWNERS.get(param) is None


def _numel(params: Iterable[Tensor]) -> int:
    return sum(param.numel() for param in params)


def _align_random_states(wire: SoloWire) -> list[Tensor] | None:
    """Every rank draws rank 0's numbers from here on. Returns this rank's own states where they were others."""
    if wire.size == 1:
        return None
    device = wire_device(wire, torch.device("cpu"))
    cuda = device.type == "cuda" and torch.cuda.is_initialized()
    with torch._C.DisableTorchFunction():
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]
        digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
        if len(set(wire.exchange(digest))) == 1:
            return None
        first: list[Tensor] = wire.exchange(states if wire.rank == 0 else None)[0]
        _set_random_states(first, device)
    return states


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and torch.cuda.is_initialized() and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
