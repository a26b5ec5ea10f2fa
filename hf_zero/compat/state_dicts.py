"""Implements `state_dict()` and `load_state_dict()` of a sharded model and of its parts.

`state_dict()` returns full CPU tensors in the parameters' own dtypes, from the masters. These are copies and cannot be written
(`StateDictEntry`). Ranks other than 0 get meta tensors if their host memory has no room. It is a collective, except where full
parameters have the masters' values: at stages 0 to 2 in the parameters' own dtype. Tied parameters are one tensor.

The copies replace the modules' parameters while the stock method runs, so that hooks and overrides of user code see values.
`load_state_dict()` gives the stock method temporary memory, one module at a time, and assigns the result to `param.data`.

Inside `zero.unsharded` an entry is the parameter's own memory, as in PyTorch, on every rank, where parameters are in their
own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.patching import Patches
from ..core.precision import dtype_of
from ..core.state_dict_entry import state_dict_entry, with_own_storage
from ..engine.build import full_values
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of, raw_data
from ..engine.span import Span
from ..errors import RankMismatchError, StateError
from ..plan.machine import free_host_bytes

Holder = tuple[nn.Module, str, nn.Parameter]
"""A module, and the name under which it has a sharded parameter."""
Call = Callable[..., Any]

_SHARE = 8
"""Ranks other than 0 get values if this multiple of their bytes fits into free host memory."""


class StateDicts(Observer):
    """Makes and loads state dicts of modules whose parameters are sharded."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._wire = engine, engine.context, engine.context.wire
        self._patches = Patches()
        for module in engine.model.modules():
            if next(module.parameters(), None) is not None:
                self._patches.method(module, "state_dict", partial(partial, self._state_dict, module))
                self._patches.method(module, "load_state_dict", partial(partial, self._load, module))

    def detach(self) -> None:
        self._patches.restore()

    # Saving -----------------------------------------------------------------------------------------------------------

    def _state_dict(self, module: nn.Module, stock: Call, *args: Any, **kwargs: Any) -> Any:
        holders = _holders(module)
        if not holders:  # also inside the call for a module around this one: its parameters are replaced already
            return stock(*args, **kwargs)
        params = {param for _, _, param in holders}
        spans = {_span_of(param) for param in params}
        if self._context.is_unsharded and all(span.full.dtype == _own_dtype(span) for span in spans):
            if kwargs.get("keep_vars"):
                return stock(*args, **kwargs)
            values = {param: with_own_storage(raw_data(param)) for param in params}
        else:
            values = self._copies(params)
        with _replaced(holders, values):
            return stock(*args, **kwargs)

    @torch.no_grad()
    def _copies(self, params: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return entries of these parameters. A collective, unless full parameters have all values."""
        needed = _SHARE * sum(param.numel() * param.element_size() for param in params)
        has_room = self._wire.rank == 0 or needed <= free_host_bytes(self._wire.size)
        found: dict[nn.Parameter, Tensor] = {}
        places = [place for param in params if (place := place_of(param)) is not None]
        order = {place.unit.index: place.unit for place in places}
        mine = {place.span for place in places}
        spans = [span for index in sorted(order) for span in order[index].spans if span in mine]
        self._context.check()
        with self._wire.watch.operation("state_dict()"):
            if not self._context.is_unsharded:
                self._engine.follow_writes()  # full parameters may lack user code's writes to the optimizer's tensors
            if not all(map(self._is_shown, spans)):
                # Ranks must meet first: these gathers would match those of a forward on another rank.
                self._engine.exchange(None)
                self._engine.finish_step()
            for span in spans:
                whole = None if self._is_shown(span) else full_values(span)
                for index in [index for index, param in enumerate(span.params) if param in params]:
                    slot = span.layout.slots[index]
                    dtype = dtype_of(slot.spec.dtype)
                    if not has_room:
                        value = torch.empty(slot.spec.shape, dtype=dtype, device="meta")
                    elif whole is None:
                        value = span.view(index).to("cpu", copy=True)
                    else:
                        value = whole[slot.offset : slot.stop].view(slot.spec.shape).to("cpu", dtype, copy=True)
                    found[span.params[index]] = state_dict_entry(value, is_moved=span.device.type != "cpu")
        return found

    def _is_shown(self, span: Span) -> bool:
        """Return whether full parameters have the masters' values in their own dtype. The same on every rank."""
        is_own = span.full.dtype == _own_dtype(span) and span.codec is None and not span.buffer_depth
        return is_own and not self._context.reshards and not span.is_old and not span.unit.is_pinned

    # Loading ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # it reads version counters of tensors that it allocates
    def _load(
        self, module: nn.Module, stock: Call, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        holders = _holders(module)
        if not holders:
            return stock(state_dict, strict=strict, assign=assign)
        if assign:
            raise StateError("load_state_dict(assign=True) would replace sharded parameters. Load without assign")
        self._context.refuse_unsharded("load_state_dict()")
        self._engine.quiesce()
        spreads = self._from_rank_0(state_dict)
        loads = Patches()
        for each in dict.fromkeys(each for each, _, _ in holders):
            loads.method(each, "_load_from_state_dict", partial(partial, self._load_module, each, spreads))
        try:
            found = stock(state_dict, strict=strict, assign=assign)
        finally:
            loads.restore()
        self._context.raise_failures("load_state_dict()")
        coded = {_span_of(param): None for _, _, param in holders if _span_of(param).codec is not None}
        if coded:  # full parameters must have the codes' values, as after every gather
            self._engine.refresh([*coded])
        return found

    def _from_rank_0(self, state: Mapping[str, Any]) -> bool:
        """Return whether some rank has no values, so that rank 0 must send its own. A collective.

        Raises:
            RankMismatchError: rank 0 has none.
        """
        with self._wire.watch.operation("load_state_dict()"):
            is_meta = self._wire.exchange(any(isinstance(value, Tensor) and value.is_meta for value in state.values()))
        if is_meta[0]:
            raise RankMismatchError("load_state_dict: rank 0's tensors are on the meta device. It must have the values")
        return any(is_meta)

    def _load_module(
        self, module: nn.Module, spreads: bool, stock: Call, state: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Load one module's own parameters and buffers."""
        holders = [each for each in _holders(module, recurse=False) if each[0] is module]
        landings: dict[nn.Parameter, Tensor] = {}
        wanted = set()
        for _, name, param in holders:
            span, shape = _span_of(param), tuple(param.shape)
            landing = nn.Parameter(torch.empty(shape, dtype=span.master_dtype, device=span.device), requires_grad=False)
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and tuple(value.shape) in (shape, shape or (1,)):
                wanted.add(param)
                if spreads:
                    state[prefix + name] = self._spread(value, landing)
            landings[param] = landing
        before = {param: landing._version for param, landing in landings.items()}
        with _replaced(holders, landings):
            stock(state, prefix, *args)
        for param, written in landings.items():
            # Custom loaders may write under other names, or past torch's version counter.
            if param in wanted or written._version != before[param]:
                param.data = written.detach()

    def _spread(self, value: Tensor, landing: Tensor) -> Tensor:
        """Return rank 0's value. A collective."""
        sent = landing.detach().to(self._wire.device or landing.device, copy=True)
        if self._wire.rank == 0:
            sent.copy_(value.reshape(sent.shape))
        self._wire.broadcast(sent)
        return sent


def _holders(module: nn.Module, *, recurse: bool = True) -> list[Holder]:
    """Return the modules inside this one that hold sharded parameters, each with name and parameter."""
    return [
        (each, name, param)
        for each in (module.modules() if recurse else (module,))
        for name, param in each._parameters.items()
        if param is not None and place_of(param) is not None
    ]


@contextmanager
def _replaced(holders: Iterable[Holder], values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Give modules these values in place of their parameters inside the block."""
    holders = list(holders)
    tables: dict[int, Any] = {id(each): each._parameters for each, _, _ in holders}
    try:
        for each, name, param in holders:
            tables[id(each)][name] = values[param]
        yield
    finally:
        for each, name, param in holders:
            tables[id(each)][name] = param


def _own_dtype(span: Span) -> torch.dtype:
    return dtype_of(span.layout.spec.dtype)


def _span_of(param: Tensor) -> Span:
    place = place_of(param)
    if place is None:
        raise StateError(
            "load_state_dict() came to a parameter that is not sharded any more. Detach the engine after it"
        )
    return place.span
