"""Which parameters have a gradient, agreed at the end of every backward that reduces.

A parameter without a gradient on every rank keeps its value and its optimizer state, as in plain training: the optimizer
must not see zeros for it. Segments are split here, and only here, so that each has a gradient as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .context import Context
from .parameter import raw_grad
from .segments import runs_of
from .span import Span
from .unit import Unit

Flags = list[bool]


class Presence:
    """Agrees on gradients that are present.

    Args:
        reduce_late: reduces units that no rank reduced in order. A collective.
        split: splits segments of a span in runs of members, and shows their gradients.
    """

    def __init__(
        self, context: Context, reduce_late: Callable[[Sequence[Unit]], None], split: Callable[[Span], None]
    ) -> None:
        self._context, self._reduce_late, self._split = context, reduce_late, split
        self._mine: list[Flags] = [self._flags(unit) for unit in context.units]
        """By unit, the flags of this rank that `_agreed` was made of."""
        self._agreed: list[Flags] = [list(flags) for flags in self._mine]

    def agree(self) -> None:
        """After the reduces of a backward. A collective."""
        units = self._context.units
        self._land()
        late = [unit.has_local_grads if unit.trained else False for unit in units]
        mine = [self._flags(unit) for unit in units]
        changed = [flags != before for flags, before in zip(mine, self._mine)]
        events = self._context.events
        told = [tell() for tell in events.tell]
        found = self._context.wire.start_maximum(
            [
                *map(int, late),
                *map(int, changed),
                *(value for values in told for value in values),
                self._context.severity,
            ],
            at_end=True,
        )()
        self._context.raise_failures("backward", found.pop())
        start = 2 * len(units)
        for hear, values in zip(events.told, told):
            hear(found[start : start + len(values)])
            start += len(values)
        del found[2 * len(units) :]
        if any(found[: len(units)]):
            self._reduce_late([unit for unit, flag in zip(units, found) if flag])
            self._land()
        if any(found[len(units) :]):
            numbers = [number for number, flag in enumerate(found[len(units) :]) if flag]
            for number in numbers:
                self._agreed[number] = [False] * len(mine[number])
            for theirs in self._context.wire.exchange({number: mine[number] for number in numbers}):
                for number, flags in theirs.items():
                    self._agreed[number] = [old or new for old, new in zip(self._agreed[number], flags)]
            self._mine = mine
        for unit, flags in zip(units, self._agreed):
            start = 0
            for span in unit.trained:
                self.set(span, flags[start : start + len(span.params)])
                start += len(span.params)

    def _land(self) -> None:
        """Gradients are where they are stored."""
        if self._context.config.offloads:
            for unit in self._context.units:
                for span in unit.trained:
                    span.bucket.land()

    @staticmethod
    def _flags(unit: Unit) -> Flags:
        """By parameter of the trained spans: whether this rank has had a gradient of it since the last `zero_grad`."""
        flags: Flags = []
        for span in unit.trained:
            arrived = span.bucket.arrived
            if all(arrived):
                flags += arrived
            else:
                flags += [old or raw_grad(param) is not None for old, param in zip(arrived, span.params)]
        return flags

    def set(self, span: Span, present: Flags) -> None:
        """These parameters of a span have a gradient from now on. The same on every rank."""
        bucket = span.bucket
        if bucket.grad is None:
            present = [False] * len(present)
        if present != bucket.present:
            bucket.present = present
            self.fit(span)
        for segment in span.segments:
            segment.is_cleared = False
            segment.show_grad()

    def fit(self, span: Span) -> None:
        """Let every segment of a span have a gradient as a whole, or none."""
        bucket = span.bucket
        present = bucket.present
        if not any(present):
            bucket.grad = None
            bucket.count_grad()
        elif not all(present) and any(len(runs_of(segment, present.__getitem__)) > 1 for segment in span.segments):
            self._split(span)
        for segment in span.segments:
            segment.show_grad()
