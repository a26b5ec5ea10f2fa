"""Writes user code's edits of parameters back to the master weights, so that the optimizer continues from them.

The engine writes through its buffers, never through a parameter. So a parameter's version counter changes only when user
code writes it in place, and one sum of counters shows whether it did. Counters are compared before written values could be
lost: before a release, a gather, a step, a save, and before masters are read.

Torch does not count writes through `param.data`. Reading `data` marks the parameter: a digest of its values is compared at
the same points, as long as a view of the values may exist outside the engine.

All ranks must make the same edits. A digest of all edits is part of the agreement at the end of each backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..engine.write_back import write_back_in_place
from ..errors import RankMismatchError, StateError
from ..tiers.fingerprint import fingerprint
from ..tiers.tier import Tier

_version = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_MOST = 0x7FFFFFFF


class Writes(Observer):
    """Finds writes to parameters and writes them back to the masters."""

    def attach(self, engine: Engine) -> None:
        self._engine, self._context, self._units = engine, engine.context, engine.units
        self._params = [param for unit in self._units for param in unit.params]
        self._versions = {span: _versions(span.params) for unit in self._units for span in unit.spans}
        self._totals = [sum(_versions(unit.params)) for unit in self._units]
        self._marked: dict[Span, dict[int, list[int]]] = {}
        """By span, parameters whose `data` was read, with digests of their values."""
        self._shown: dict[Span, Tensor] = {}
        """By span that is gathered as codes, the values of `local` after a write, until the next gather."""
        self._mark = 0
        self._edits: dict[str, list[int]] = {}
        """By parameter, the digest of its values after the last write."""

    # Events -----------------------------------------------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any) -> None:
        if self._marked:  # must run before the graph holds views, too
            self.before_save()

    def before_backward(self) -> None:
        self.before_save()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_save()

    def before_save(self) -> None:
        """Write all edits back to the masters."""
        if self._context.reshards:
            for unit in self._units:
                if unit.state is State.GATHERED:
                    self._find_writes(unit)
            return
        with torch._C.DisableTorchFunctionSubclass():
            total = sum(map(_version, self._params))
        if self._marked or total != sum(self._totals):
            for unit in self._units:
                self._find_writes(unit)

    def before_load(self) -> None:
        """Forget edits: ranks that made different ones get the same values."""
        self._mark = 0
        self._edits.clear()

    def unit_released(self, unit: Unit) -> None:
        self._find_writes(unit)
        for span in unit.spans if self._marked or self._shown else ():
            self._marked.pop(span, None)
            self._shown.pop(span, None)

    def unit_gathered(self, unit: Unit) -> None:
        for span in unit.spans if self._shown else ():
            self._shown.pop(span, None)
        if self._marked:
            self._record_digests(unit)

    def masters_written(self, unit: Unit) -> None:
        # A master in the memory of `local` has the writes already, so a digest cannot find them.
        self._find_writes(unit, [span for span in unit.spans if not span.master_is_local])
        self.writes_dropped(unit)

    def writes_dropped(self, unit: Unit) -> None:
        self._record_versions(unit)
        self._record_digests(unit)

    def master_read(self, span: Span) -> None:
        if not self._context.reshards or span.unit.state is State.GATHERED:
            self._find_writes(span.unit)

    def data_read(self, param: Tensor, values: Tensor) -> None:
        place = place_of(param)
        if place is None or (self._context.reshards and place.unit.state is not State.GATHERED):
            return
        span, index = place.span, place.index
        if span.layout.shards == 1 and span.master_is_local:
            return  # user code writes the master itself
        marked = self._marked.setdefault(span, {})
        if index not in marked:
            [marked[index]] = _fingerprints([span.view(index)])

    def data_assigned(self, param: Tensor, values: Tensor) -> None:
        place = place_of(param)
        if place is None or place.unit.ignores_writes:
            return
        span, index = place.span, place.index
        # The assigned values replace earlier writes in place.
        [self._versions[span][index]] = _versions([param])
        self._record_edit(span, [index], [values.to(span.view(index))])

    # Finding writes ---------------------------------------------------------------------------------------------------

    def _find_writes(self, unit: Unit, spans: Sequence[Span] | None = None) -> None:
        """Find and write back edits of a unit's parameters, which must be readable, since the last call.

        Args:
            spans: the spans of the unit to check; None: all.
        """
        if unit.ignores_writes:
            return
        spans = unit.spans if spans is None else spans
        with torch._C.DisableTorchFunctionSubclass():
            total = sum(map(_version, unit.params))
        if total != self._totals[unit.index]:
            changed = [(span, self._rewritten(span)) for span in spans]
            alone = [self._same_everywhere(span, written) for span, written in changed]
            self._record_versions(unit)  # before `write_back_in_place`, which may read masters
            for (span, written), noted in zip(changed, alone):
                self._write_back(span, written, noted)
        for span in spans if self._marked else ():
            if span in self._marked:
                marked = self._marked[span]
                written = [index for index, found in _digests(span, marked) if found != marked[index]]
                self._write_back(span, written, self._same_everywhere(span, written))
                if not span.has_outside_views:
                    del self._marked[span]

    def _record_versions(self, unit: Unit) -> None:
        """Record the version counters: only later writes are new."""
        for span in unit.spans:
            self._versions[span] = _versions(span.params)
        self._totals[unit.index] = sum(sum(self._versions[span]) for span in unit.spans)

    def _record_digests(self, unit: Unit) -> None:
        """Record digests of marked parameters: only later writes are new."""
        for span in unit.spans if self._marked else ():
            if span in self._marked:
                self._marked[span] = dict(_digests(span, self._marked[span]))

    def _rewritten(self, span: Span) -> list[int]:
        """Return the parameters that were written in place since the last call, by their version counters."""
        return [index for index, (a, b) in enumerate(zip(self._versions[span], _versions(span.params))) if a != b]

    def _same_everywhere(self, span: Span, written: Sequence[int]) -> list[int]:
        """Return those of the written parameters that have equal values on all ranks if user code made the same edit.

        The others share memory with the optimizer's tensors, which user code also wrote: each rank sees only its own part.

        Raises:
            StateError: user code also wrote the optimizer's tensors of these parameters, which are separate memory.
        """
        both = {*self._engine.with_group_writes([span.params[index] for index in written])} if written else set()
        if both and not span.master_is_local:
            first = next(index for index in written if span.params[index] in both)
            raise StateError(
                f"parameter {span.name_of(first)!r} and tensors of its optimizer group were written, and no forward or step "
                "came in between, so neither write can count alone. Write one of the two, or call engine.refresh() between"
            )
        return [index for index in written if span.params[index] not in both]

    def _write_back(self, span: Span, written: Sequence[int], noted: list[int]) -> None:
        if written:
            write_back_in_place(span, written, self._shown.get(span))
        if noted:
            self._record_edit(span, noted, [span.view(index) for index in noted])

    def _record_edit(self, span: Span, written: list[int], values: list[Tensor]) -> None:
        """Record edits of these parameters, whose values the masters already have.

        Raises:
            StateError: the parameters were updated before they were written.
        """
        if self._context.has_updated and span.trainable and span.tier is not Tier.DEVICE:
            raise StateError(
                f"parameter {span.name_of(written[0])!r} was written between the beginning of a backward and the step. With "
                "step_in_backward it is updated in the backward already, and the write would be lost. Write parameters after "
                "optimizer.step(), or set step_in_backward to False"
            )
        if span.codec is not None and span.is_readable:
            self._shown[span] = span.local.clone()
        marked = self._marked.get(span, {})
        for index, found in zip(written, _fingerprints(values)) if marked or span.layout.shards > 1 else ():
            if index in marked:
                marked[index] = found
            name = span.name_of(index)
            self._mark += _mark(name, found) - _mark(name, self._edits.get(name))
            self._edits[name] = found

    # All ranks --------------------------------------------------------------------------------------------------------

    def values_for_max(self) -> list[int]:
        """Return a digest that is equal on ranks that made the same edits, and its complement."""
        mark = self._mark & _MOST
        return [mark, _MOST - mark]

    def check_max_values(self, highest: list[int]) -> None:
        """
        Raises:
            RankMismatchError: ranks wrote other values.
        """
        if sum(highest) == _MOST or self._context.layout.shards == 1:
            return
        everyone: list[dict[str, list[int]]] = self._context.wire.exchange(self._edits)
        for rank, theirs in enumerate(everyone):
            for name in dict.fromkeys([*everyone[0], *theirs]):
                if theirs.get(name) != everyone[0].get(name):
                    raise RankMismatchError(
                        f"ranks differ in step {self._context.wire.watch.step}: parameter {name!r} is not on rank {rank} what "
                        "it is on rank 0: user code wrote other values, or wrote it on some ranks only, since the last "
                        "backward. Make the same edit on every rank: seed alike, or broadcast the values"
                    )


def _versions(params: Iterable[Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_version, params))


def _mark(name: str, found: list[int] | None) -> int:
    return 0 if found is None else zlib.crc32(f"{name} {found}".encode())


def _digests(span: Span, indices: Collection[int]) -> Iterable[tuple[int, list[int]]]:
    return zip(indices, _fingerprints([span.view(index) for index in indices]))


def _fingerprints(values: Sequence[Tensor]) -> list[list[int]]:
    """Return a digest of each tensor, with one wait for the device."""
    found: list[list[int]] = torch.stack([fingerprint(each.detach()) for each in values]).tolist()
    return found
