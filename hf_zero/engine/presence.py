"""Agrees at the end of every backward that reduces which parameters have a gradient on some rank.

A parameter that has a gradient on no rank keeps its value and its optimizer state, as in plain training: the optimizer must
not see zeros for it. Segments are split here, and only here, so that each has a gradient as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from .binding import Binding
from .bucket import have_local
from .context import Context
from .parameter import raw_grad
from .reduce_queue import ReduceQueue
from .segments import runs_of
from .span import Span


class Presence:
    """Agrees on gradients that are present.

    Args:
        reduce_queue: reduces units that were not in the agreed order.
        bindings: optimizers whose segments are split.
    """

    def __init__(self, context: Context, reduce_queue: ReduceQueue, bindings: Sequence[Binding]) -> None:
        self._context, self._reduce_queue, self._bindings = context, reduce_queue, bindings
        self._mine = self._flags()
        """By unit, this rank's flags in the agreement that made `_agreed`."""
        self._agreed = [list(flags) for flags in self._mine]

    def agree(self) -> None:
        """Agree on gradients that are present, after the reduces of a backward. A collective."""
        units, events, wire = self._context.units, self._context.events, self._context.wire
        self._wait_for_offloads()
        are_late = have_local([span.bucket for unit in units for span in unit.trained])
        late = [are_late and unit.has_local_grads for unit in units]
        mine = self._flags()
        changed = [flags != before for flags, before in zip(mine, self._mine)]
        marks = [values_for_max() for values_for_max in events.values_for_max]
        sent = [mark for each in marks for mark in each]
        found = wire.start_maximum([*late, *changed, *sent, self._context.severity], at_end=True)()
        self._context.raise_failures("backward", found.pop())
        start = 2 * len(units)
        for check, each in zip(events.check_max_values, marks):
            check(found[start : start + len(each)])
            start += len(each)
        late_units = [unit for unit, flag in zip(units, found) if flag]
        if late_units:
            self._reduce_queue.reduce(late_units)
            self._wait_for_offloads()
        numbers = [number for number, flag in enumerate(found[len(units) : 2 * len(units)]) if flag]
        if numbers:
            for number in numbers:
                self._agreed[number] = [False] * len(mine[number])
            for theirs in wire.exchange({number: mine[number] for number in numbers}):
                for number, flags in theirs.items():
                    self._agreed[number] = [old or new for old, new in zip(self._agreed[number], flags)]
            self._mine = mine
        for unit, flags in zip(units, self._agreed):
            start = 0
            for span in unit.trained:
                stop = start + len(span.params)
                span.bucket.present = flags[start:stop] if span.bucket.grad is not None else [False] * (stop - start)
                for segment in span.segments:
                    segment.is_cleared = False
                self.fit(span)
                start = stop

    def _wait_for_offloads(self) -> None:
        """Wait until offloaded gradients are stored."""
        if self._context.config.offloads:
            for unit in self._context.units:
                for span in unit.trained:
                    span.bucket.wait_for_offload()

    def _flags(self) -> list[list[bool]]:
        """Return by unit whether this rank has had a gradient of each trained parameter since `zero_grad`."""
        out: list[list[bool]] = []
        for unit in self._context.units:
            flags: list[bool] = []
            for span in unit.trained:
                arrived = span.bucket.had_local
                if False in arrived:
                    arrived = [old or raw_grad(param) is not None for old, param in zip(arrived, span.params)]
                flags += arrived
            out += (flags,)
        return out

    def fit(self, span: Span) -> None:
        """Split a span's segments so that each has a gradient as a whole or not at all, and show the gradients."""
        bucket = span.bucket
        present = bucket.present
        if True not in present:
            bucket.grad = None
            bucket.count_grad()
        elif False in present and any(len(runs_of(segment, present.__getitem__)) > 1 for segment in span.segments):
            for binding in self._bindings:
                if span in binding.spans:
                    binding.split(span)
        for segment in span.segments:
            segment.show_grad()
