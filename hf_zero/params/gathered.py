"""Gather full parameters inside a block: some (`GatheredParameters`) or a whole model's (`unsharded`).

`GatheredParameters` works the same at every stage and precision, and for parameters that no engine has yet (`zero.Init`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..engine.context import Context
from ..engine.parameter import Place, place_of
from ..engine.span import Span
from ..engine.unit import Unit
from ..engine.write_back import write_back
from ..errors import ConfigError, StateError
from ..tiers.fingerprint import fingerprint
from .deferred import Deferred, deferred_of
from .engine import Engine, engine_of
from .unsharded import PinnedUnits


class GatheredParameters:
    """Gather full parameters: `with zero.GatheredParameters(params, modifier_rank=0):`. A collective at entry and exit.

    Inside, every rank has full values, in the parameters' own dtypes, from the master weights. All parameters of the units of
    `params` are readable; only edits of `params` are checked and kept. In nested contexts the outer one decides for its
    parameters. Plain parameters do not change.

    Args:
        params: a parameter, several, or a module for all of its parameters.
        modifier_rank: the rank whose edits all ranks keep. None: no rank may edit.
        enabled: False to do nothing.

    Raises:
        StateError: at exit, on every rank: a parameter was edited without `modifier_rank`. All values are then restored,
            as after any exception inside.

    Example:
        >>> with zero.GatheredParameters(model.lm_head, modifier_rank=0), torch.no_grad():
        ...     if rank == 0:
        ...         model.lm_head.weight[new_token] = model.lm_head.weight.mean(0)
    """

    _open: ClassVar[list[GatheredParameters]] = []
    """Entered contexts, outermost first."""

    def __init__(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, nn.Parameter):
            params = [params]
        self._params = list({id(param): param for param in params}.values()) if enabled else []
        for each in self._params:
            if not isinstance(each, Tensor):
                raise ConfigError(f"GatheredParameters takes a module or its parameters, found a {type(each).__name__}")
        self._modifier_rank = modifier_rank
        self._groups: list[_Sharded | _Created] = []

    def __enter__(self) -> None:
        outer = {id(param) for context in self._open for group in context._groups for param in group.params}
        found: dict[int, tuple[Context | None, list[nn.Parameter]]] = {}
        with torch._C.DisableTorchFunction():
            for param in self._params:
                place, deferred = place_of(param), deferred_of(param)
                if id(param) not in outer and (place is not None or deferred is not None):
                    context = None if place is None else place.unit.context
                    found.setdefault(id(context), (context, []))[1].append(param)
            try:
                for context, params in found.values():
                    group = _Created(params) if context is None else _Sharded(context, params)
                    last = group.wire.size - 1
                    if self._modifier_rank is not None and not 0 <= self._modifier_rank <= last:
                        raise ConfigError(
                            f"modifier_rank must be None or one of 0 to {last}, found {self._modifier_rank}"
                        )
                    self._groups.append(group)
                    with group.wire.watch.operation("GatheredParameters"):
                        group.gather()
                    group.fingerprints = _fingerprints(group)
            except BaseException:
                self._leave()
                raise
        self._open.append(self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open.remove(self)
        with torch._C.DisableTorchFunction():
            try:
                if kind is None:
                    for group in self._groups:
                        _keep_edits(group, self._modifier_rank)
            finally:
                self._leave()

    def _leave(self) -> None:
        for group in self._groups:
            group.end()
        self._groups.clear()


@torch.no_grad()
def _keep_edits(group: _Sharded | _Created, modifier: int | None) -> None:
    """Keep the edits of rank `modifier`. A collective.

    Raises:
        StateError: an edit without `modifier_rank`, or a changed shape.
    """
    wire = group.wire
    if modifier is None and group.is_free:
        return
    with wire.watch.operation("GatheredParameters"):
        edited = [now != before for now, before in zip(_fingerprints(group), group.fingerprints)]
        everyone: list[tuple[str, list[bool]]] = wire.exchange((group.check_shapes(), edited))
        for rank, (reason, theirs) in enumerate(everyone):
            if reason and (modifier is None or rank == modifier):
                raise StateError(
                    f"{reason} inside GatheredParameters on rank {rank}; the edit is discarded: edit values in place only"
                )
            if modifier is None and any(theirs):
                raise StateError(
                    f"{group.name(theirs.index(True))} was edited inside GatheredParameters on rank {rank}; the edit is "
                    "discarded. Pass modifier_rank to keep one rank's edits"
                )
        for number, flags in enumerate(zip(*(theirs for _, theirs in everyone))):
            if any(flags) and modifier is not None:
                values = group.full(number).contiguous()
                if wire.size > 1:
                    wire.broadcast(values.view(-1).view(torch.uint8), modifier)
                group.keep(number, values)


def _fingerprints(group: _Sharded | _Created) -> list[list[int]]:
    return [fingerprint(group.full(number)).tolist() for number in range(len(group.params))]


class _Sharded:
    """Parameters of one engine.

    Attributes:
        is_free: an outer `unsharded` accepts edits, even without `modifier_rank`.
    """

    fingerprints: list[list[int]]

    def __init__(self, context: Context, params: list[nn.Parameter]) -> None:
        self.params, self.wire, self._context = params, context.wire, context
        self._places: list[Place] = [place for param in params if (place := place_of(param)) is not None]
        self.is_free = context.is_unsharded
        self._kept: dict[Span, list[int]] = {}
        self._units: PinnedUnits | None = None
        self._apart: list[Unit] = []

    def gather(self) -> None:
        units = list(dict.fromkeys(place.unit for place in self._places))
        for span in [span for unit in units for span in unit.spans]:
            for event in self._context.events.master_read:
                event(span)
        self._apart = [unit for unit in units if not unit.ignores_writes]
        for unit in self._apart:
            unit.ignores_writes = True
        self._units = PinnedUnits(self._context, units, "GatheredParameters", apart=True)

    def full(self, number: int) -> Tensor:
        """Return the full values of one parameter, with user code's edits."""
        place = self._places[number]
        return place.span.view(place.index)

    def check_shapes(self) -> str:
        return ""  # a sharded parameter keeps its shape

    def name(self, number: int) -> str:
        place = self._places[number]
        return f"parameter {place.span.name_of(place.index)!r}"

    def keep(self, number: int, values: Tensor) -> None:
        """Write full values, equal on all ranks, to the master; `values` is the result of `full`, edited in place."""
        span, index = self._places[number].span, self._places[number].index
        write_back(span, index, values.view(-1))
        self._kept.setdefault(span, []).append(index)

    def end(self) -> None:
        if self._units is not None:
            self._units.end(self._kept)
        for unit in self._apart:
            unit.ignores_writes = False
            for event in self._context.events.writes_dropped:  # a unit of an outer context: these writes are handled
                event(unit)


class _Created:
    """Parameters created under `zero.Init`."""

    fingerprints: list[list[int]]
    is_free = False

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self._sources: list[Deferred] = [each for param in params if (each := deferred_of(param)) is not None]
        self.wire = max((each.wire for each in self._sources), key=lambda wire: wire.size)
        self._pinned: dict[int, Deferred] = {}
        self._kinds = [(param.shape, param.dtype) for param in params]

    def gather(self) -> None:
        for number, (param, deferred) in enumerate(zip(self.params, self._sources)):
            deferred.close(param)  # the values to restore, if it is open now
            deferred.open(param)
            if deferred.wire.size == 1:
                param.data = param.data.clone()  # its memory is the values to restore
            deferred.pins += 1
            self._pinned[number] = deferred

    def full(self, number: int) -> Tensor:
        values, (shape, dtype) = self.params[number].data, self._kinds[number]
        is_same = values.shape == shape and values.dtype == dtype
        return values if is_same else torch.empty(shape, dtype=dtype, device=values.device)

    def check_shapes(self) -> str:
        """Return an error if a parameter's shape or dtype has changed; else an empty string."""
        for number, (param, kind) in enumerate(zip(self.params, self._kinds)):
            if (param.shape, param.dtype) != kind:
                return f"{self.name(number)} has another shape or dtype: {param.dtype} {tuple(param.shape)}"
        return ""

    def name(self, number: int) -> str:
        return f"a parameter of shape {tuple(self.params[number].shape)}"

    def keep(self, number: int, values: Tensor) -> None:
        self.params[number].data = values
        deferred = self._pinned.pop(number)
        deferred.pins -= 1
        deferred.close(self.params[number])

    def end(self) -> None:
        for number, deferred in self._pinned.items():
            deferred.pins -= 1
            deferred.close(self.params[number], keep=False)
        self._pinned.clear()


@contextmanager
def unsharded(model: nn.Module, *, in_compute_dtype: bool = False) -> Iterator[None]:
    """Gather the whole model: `with zero.unsharded(model):`. A collective at entry and exit.

    For phases of generation, averages of weights, `merge_and_unload`, and code that reads `named_parameters()`. Weights are
    gathered once, from the masters; forwards and `generate` inside gather nothing. Edits inside are kept,
    also after an exception: make the same edit on every rank. `state_dict()`, saving and the accessors inside see it.
    Backwards, optimizer steps and loads are refused. A nested context of the same model does nothing, and `GatheredParameters`
    inside gathers nothing. A model without an engine does not change.

    Args:
        in_compute_dtype: gather weights in the dtype of forwards: under bf16 and fp16 half the memory, and no casts. Use it
            for generation. False: gather them in their own dtypes, as they are saved.

    Raises:
        OutOfMemoryError: on every rank, at entry: the full parameters do not fit.
        StateError: the model was created under zero.Init and has no engine yet.
        RankMismatchError: on every rank, at exit: the ranks made different edits.
    """
    engine = engine_of(model)
    if engine is None:
        if any(deferred_of(param) is not None for param in model.parameters()):
            raise StateError(
                "zero.unsharded: the model was created under zero.Init() and is not sharded yet. Shard it first, or use "
                "zero.GatheredParameters(model)"
            )
        yield
        return
    if not isinstance(engine, Engine):
        raise StateError("zero.unsharded: hf_zero.engine.shard built the core alone. Build the engine by zero.shard")
    with engine.unsharded(in_compute_dtype=in_compute_dtype):
        yield
