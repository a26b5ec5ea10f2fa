"""Full parameters for a while: of some (`GatheredParameters`), of a model's (`unsharded`).

They work alike for parameters of an engine, at every stage and precision, and for those created under `zero.Init` that no
engine has yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from ..engine.context import Context
from ..engine.engine import engine_of
from ..engine.parameter import Place, place_of
from ..engine.span import Span
from ..engine.unsharded import Hold
from ..errors import ConfigError, StateError
from ..tiers.fingerprint import fingerprint


class GatheredParameters:
    """Gather full parameters: `with zero.GatheredParameters(params, modifier_rank=0):`. A collective at entry and exit.

    Inside, every rank has full values, in the parameters' own dtypes, from the master weights. All parameters of the units of
    `params` are readable; edits of `params` alone are checked and kept. In nested contexts the outer one decides for the
    parameters that it has. Plain parameters are left alone.

    Args:
        params: a parameter, several, or a module for all of its parameters.
        modifier_rank: whose edits are kept, on every rank. None: no rank may edit.
        enabled: False to do nothing.

    Raises:
        StateError: at exit, on every rank: a parameter was edited without `modifier_rank`. All values are then as they were,
            as after any exception inside.

    Example:
        >>> with zero.GatheredParameters(model.lm_head, modifier_rank=0), torch.no_grad():
        ...     if rank == 0:
        ...         model.lm_head.weight[new_token] = model.lm_head.weight.mean(0)
    """

    _open: ClassVar[list[GatheredParameters]] = []
    """Contexts that are entered and not left, the outermost first."""

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
        self._modifier_rank = modifier_rank
        self._groups: list[_Group] = []

    def __enter__(self) -> None:
        outer = {id(param) for context in self._open for group in context._groups for param in group.params}
        found: dict[int, tuple[Context, list[nn.Parameter]]] = {}
        for param in self._params:
            place = place_of(param)
            if place is not None and id(param) not in outer:
                context = place.unit.context
                found.setdefault(id(context), (context, []))[1].append(param)
        try:
            for context, params in found.values():
                last = context.wire.size - 1
                if self._modifier_rank is not None and not 0 <= self._modifier_rank <= last:
                    raise ConfigError(f"modifier_rank must be None or one of 0 to {last}, found {self._modifier_rank}")
                self._groups.append(_Group(context, params))
        except BaseException:
            self._leave({})
            raise
        self._open.append(self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._open.remove(self)
        kept: dict[Span, list[int]] = {}
        try:
            if kind is None:
                for group in self._groups:
                    group.keep_edits(self._modifier_rank, kept)
        finally:
            self._leave(kept)

    def _leave(self, kept: dict[Span, list[int]]) -> None:
        for group in self._groups:
            group.end(kept)
        self._groups.clear()


class _Group:
    """The parameters of one engine that a `GatheredParameters` has gathered."""

    def __init__(self, context: Context, params: list[nn.Parameter]) -> None:
        self.context, self.params = context, params
        self._places: list[Place] = [place for param in params if (place := place_of(param)) is not None]
        units = list(dict.fromkeys(place.unit for place in self._places))
        with context.wire.watch.doing("GatheredParameters"):
            self.hold = Hold(context, units, "GatheredParameters", apart=True)
        self._apart = [unit for unit in units if not unit.is_apart]
        for unit in self._apart:
            unit.is_apart = True
        self._is_free = context.is_unsharded  # its edits are the outer context's, also without `modifier_rank`
        self._prints = self._fingerprints()

    def _fingerprints(self) -> list[list[int]]:
        return [fingerprint(place.span.view(place.index)).tolist() for place in self._places]

    @torch.no_grad()
    def keep_edits(self, modifier: int | None, kept: dict[Span, list[int]]) -> None:
        """Give the masters what `modifier` wrote. A collective. Adds to `kept` what was written.

        Raises:
            StateError: a rank wrote without being allowed to.
        """
        wire = self.context.wire
        if modifier is None and self._is_free:
            return
        with wire.watch.doing("GatheredParameters"):
            edited = [now != before for now, before in zip(self._fingerprints(), self._prints)]
            for rank, theirs in enumerate(everyone := wire.exchange(edited)):
                if modifier is None and any(theirs):
                    place = self._places[theirs.index(True)]
                    raise StateError(
                        f"parameter {place.span.name_of(place.index)!r} was edited inside GatheredParameters on rank {rank}; "
                        "the edit is discarded. Pass modifier_rank to keep one rank's edits"
                    )
            written = [place for place, flags in zip(self._places, zip(*everyone)) if any(flags)]
            for span, index in ((place.span, place.index) for place in written):
                values = span.view(index).view(-1)
                if wire.size > 1 and modifier is not None:
                    wire.broadcast(values.view(torch.uint8), modifier)
                part = span.part_of(index)
                if part is not None:
                    span.write(part.start, values[part.there].to(span.master_dtype))
                kept.setdefault(span, []).append(index)

    def end(self, kept: dict[Span, list[int]]) -> None:
        self.hold.end(kept)
        for unit in self._apart:
            unit.is_apart = False
            for event in self.context.events.unit_unsharded:
                event(unit)


@contextmanager
def unsharded(model: nn.Module, *, in_compute_dtype: bool = False) -> Iterator[None]:
    """Gather the whole model: `with zero.unsharded(model):`. A collective at its beginning and its end.

    For phases of generation, averages of weights, `merge_and_unload`, and code that reads `named_parameters()`. Weights are
    gathered once, from the masters; forwards and `generate` inside gather nothing. What is written to parameters inside is
    kept, also after an exception: make the same edit on every rank. `state_dict()`, saving and the accessors inside see it.
    Backwards, optimizer steps and loads are refused. A nested context of the same model does nothing, and `GatheredParameters`
    inside gathers nothing. A model without an engine is left alone.

    Args:
        in_compute_dtype: weights as forwards use them: under bf16 and fp16 half the memory, and no cast in each forward. Use it
            for generation. False: in their own dtypes, as they are saved.

    Raises:
        OutOfMemoryError: on every rank, at the beginning: how much is missing where.
        StateError: the model was created under zero.Init and has no engine yet.
        RankMismatchError: at the end, on every rank: the ranks have made different edits.
    """
    engine = engine_of(model)
    if engine is None:
        yield
        return
    with engine.unsharded(in_compute_dtype=in_compute_dtype):
        yield
