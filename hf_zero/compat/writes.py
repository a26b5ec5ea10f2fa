"""User code writes parameters: the master weights follow, and the optimizer continues from the written values.

The engine writes through its buffers, never through a parameter. So a parameter's version counter changes only when user
code writes it in place, and one sum of counters by unit tells whether it did. Counters are compared before written values
could be lost: before a release, a gather, a step, a save, and before masters are read.

Torch does not count writes through `param.data`. Reading `data` marks the parameter: a digest of its values is compared at
the same points, as long as a view of the values may exist outside the engine.

The ranks make the same edits. A digest of all edits is part of the agreement that ends each backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..engine.written import keep
from ..errors import RankMismatchError, StateError
from ..tiers.fingerprint import fingerprint
from ..tiers.tier import Tier

_version = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_MOST = 0x7FFFFFFF


class Writes(Observer):
    """Finds writes to parameters and carries them into the masters."""

    def attach(self, engine: Engine) -> None:
        self._context, self._units = engine.context, engine.units
        self._starts: dict[Span, int] = {}
        """By span, the index of its first parameter in its unit's `params`."""
        for unit in self._units:
            start = 0
            for span in unit.spans:
                self._starts[span] = start
                start += len(span.params)
        self._versions = [_versions(unit.params) for unit in self._units]
        self._totals = [sum(versions) for versions in self._versions]
        self._marked: dict[Unit, dict[Span, dict[int, list[int]]]] = {}
        """By unit and span, parameters whose `data` was read, with digests of their values."""
        self._shown: dict[Span, Tensor] = {}
        """After a write to a span that is gathered as codes: what `local` shows until the next gather."""
        self._mark = 0
        self._edits: dict[str, list[int]] = {}
        """By parameter, the digest of its values after the last write."""

    # When -------------------------------------------------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any) -> None:
        self._find_all()

    def before_backward(self) -> None:
        self._find_all()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._find_all()

    def before_save(self) -> None:
        self._find_all()

    def before_gather(self, unit: Unit) -> None:
        if not self._context.frees:  # the gather overwrites this rank's slice
            self._find(unit)

    def unit_resharded(self, unit: Unit) -> None:
        self._find(unit)
        self._forget(unit)

    def unit_unsharded(self, unit: Unit) -> None:
        """All values are the masters': what was written before is in them, or was dropped on purpose."""
        self._forget(unit)
        if self._total(unit) != self._totals[unit.index]:
            self._see(unit)
        for span, found in self._marked.get(unit, {}).items():
            found.update(zip(found, _digests(span, found)))

    def writes_dropped(self, unit: Unit) -> None:
        self._see(unit)
        for span, found in self._marked.get(unit, {}).items():
            found.update(zip(found, _digests(span, found)))

    def master_read(self, span: Span) -> None:
        if self._is_readable(span.unit):
            self._find(span.unit)

    def data_read(self, param: Tensor, values: Tensor) -> None:
        place = place_of(param)
        if place is None or not self._is_readable(place.unit):
            return
        span = place.span
        if span.layout.shards == 1 and span.is_alias:
            return  # user code writes the master itself
        marked = self._marked.setdefault(place.unit, {}).setdefault(span, {})
        if place.index not in marked:
            marked.update(zip([place.index], _digests(span, [place.index])))

    def data_assigned(self, param: Tensor, values: Tensor) -> None:
        place = place_of(param)
        if place is None or place.unit.is_apart:
            return
        span, unit = place.span, place.unit
        # The assigned values replace what was written in place before.
        at, now = self._starts[span] + place.index, _versions([span.params[place.index]])[0]
        self._totals[unit.index] += now - self._versions[unit.index][at]
        self._versions[unit.index][at] = now
        self._refuse_late(span, [place.index])
        self._note(span, [place.index], [values])
        marked = self._marked.get(unit, {}).get(span, {})
        if place.index in marked:
            marked.update(zip([place.index], _digests(span, [place.index])))
        if span.codec is not None and span.is_readable:
            self._shown[span] = span.local.clone()

    # What -------------------------------------------------------------------------------------------------------------

    def _is_readable(self, unit: Unit) -> bool:
        return not self._context.frees or unit.state is State.GATHERED

    def _find_all(self) -> None:
        for unit in self._units:
            if self._is_readable(unit):
                self._find(unit)

    def _find(self, unit: Unit) -> None:
        """Carry what was written to a unit's parameters, which are readable, since the last call."""
        if unit.is_apart:
            return
        if self._total(unit) != self._totals[unit.index]:
            self._find_counted(unit)
        if unit in self._marked:
            self._find_uncounted(unit)

    def _find_counted(self, unit: Unit) -> None:
        before, now = self._versions[unit.index], self._see(unit)
        for span in unit.spans:
            start = self._starts[span]
            stop = start + len(span.params)
            written = [at for at, (old, new) in enumerate(zip(before[start:stop], now[start:stop])) if old != new]
            if written:
                self._keep(span, written)
                marked = self._marked.get(unit, {}).get(span, {})
                both = [index for index in written if index in marked]
                marked.update(zip(both, _digests(span, both)))

    @staticmethod
    def _total(unit: Unit) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum(map(_version, unit.params))

    def _see(self, unit: Unit) -> list[int]:
        """Writes up to now are known."""
        now = self._versions[unit.index] = _versions(unit.params)
        self._totals[unit.index] = sum(now)
        return now

    def _find_uncounted(self, unit: Unit) -> None:
        spans = self._marked[unit]
        for span, marked in [*spans.items()]:
            now = dict(zip(marked, _digests(span, marked)))
            written = [index for index in marked if now[index] != marked[index]]
            if written:
                self._keep(span, written)
            if span.has_outside_views:
                marked.update(now)
            else:
                del spans[span]
        if not spans:
            del self._marked[unit]

    def _keep(self, span: Span, written: list[int]) -> None:
        self._refuse_late(span, written)
        keep(span, written, self._shown.get(span))
        self._note(span, written, [span.view(index) for index in written])
        if span.codec is not None:
            self._shown[span] = span.local.clone()

    def _refuse_late(self, span: Span, written: list[int]) -> None:
        if self._context.has_updated and span.trainable and span.tier is not Tier.DEVICE:
            raise StateError(
                f"parameter {span.name_of(written[0])!r} was written between the beginning of a backward and the step. With "
                "step_in_backward it is updated in the backward already, and the write would be lost. Write parameters after "
                "optimizer.step(), or set step_in_backward to False"
            )

    def _forget(self, unit: Unit) -> None:
        if self._shown:
            for span in unit.spans:
                self._shown.pop(span, None)
        if self._context.frees:
            self._marked.pop(unit, None)

    # All ranks --------------------------------------------------------------------------------------------------------

    def _note(self, span: Span, written: list[int], values: list[Tensor]) -> None:
        if span.layout.shards == 1:
            return
        for index, found in zip(written, _prints(values)):
            name = span.name_of(index)
            self._mark += _mark(name, found) - _mark(name, self._edits.get(name))
            self._edits[name] = found

    def tell(self) -> list[int]:
        """Return a number that is the same on every rank where the same was written, and its complement."""
        mark = self._mark & _MOST
        return [mark, _MOST - mark]

    def told(self, highest: list[int]) -> None:
        """
        Raises:
            RankMismatchError: ranks wrote other values.
        """
        if sum(highest) == _MOST:
            return
        everyone: list[dict[str, list[int]]] = self._context.wire.exchange(self._edits)
        for rank, theirs in enumerate(everyone):
            for name in dict.fromkeys([*everyone[0], *theirs]):
                if theirs.get(name) != everyone[0].get(name):
                    _refuse(name, rank)


def _refuse(name: str, rank: int) -> NoReturn:
    raise RankMismatchError(
        f"parameter {name!r} is not on rank {rank} what it is on rank 0: user code wrote other values, or wrote it on some "
        "ranks only, since the last backward. Make the same edit on every rank: seed alike, or broadcast the values"
    )


def _versions(params: Iterable[Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_version, params))


def _mark(name: str, found: list[int] | None) -> int:
    return 0 if found is None else zlib.crc32(f"{name} {found}".encode())


def _digests(span: Span, indices: Iterable[int]) -> list[list[int]]:
    return _prints([span.view(index) for index in indices])


def _prints(values: list[Tensor]) -> list[list[int]]:
    """A digest of each, with one wait for the device."""
    if not values:
        return []
    found: list[list[int]] = torch.stack([fingerprint(each.detach()) for each in values]).tolist()
    return found
