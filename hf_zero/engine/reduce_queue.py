"""Starts the reduces of one backward in the order that the ranks agreed on, one at a time while the backward runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from .unit import Unit


class ReduceQueue:
    """Units to reduce in order, and the one whose reduce is under way: only one unit's buffers are in memory."""

    def __init__(self) -> None:
        self._answer: Callable[[], Iterable[Unit]] | None = None
        self._order: deque[Unit] = deque()
        self._under_way: Unit | None = None

    def begin(self, answer: Callable[[], Iterable[Unit]] | None = None) -> None:
        """Begin the reduces of a backward.

        Args:
            answer: waits for the other ranks and returns the units in the agreed order. Called when the order is first needed.
        """
        self._answer, self._order = answer, deque()

    def agree(self) -> None:
        """Wait for the agreed order."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._order.extend(answer())

    def advance(self, left: Mapping[int, int]) -> None:
        """Reduce units in the agreed order, up to the first that the backward has not finished.

        Args:
            left: by number of the unit, how many uses the backward has not finished.
        """
        if self._answer is not None:
            self.agree()
        while self._order and not left.get(self._order[0].index):
            self.start(self._order.popleft())

    def start(self, unit: Unit) -> None:
        """Start to reduce one unit."""
        if not unit.trained:
            return
        for span in unit.trained:
            span.bucket.count_fresh()
        if self._under_way is not None:
            self._under_way.finish_reduce()
        unit.reduce()
        self._under_way = unit

    def finish(self) -> None:
        """Reduce the remaining units, and wait until all are reduced."""
        self.advance({})
        if self._under_way is not None:
            self._under_way.finish_reduce()
        self._under_way = None

    def reduce(self, units: Iterable[Unit]) -> None:
        """Reduce units that are not in the agreed order. A collective."""
        for unit in units:
            self.start(unit)
        self.finish()

    def drop(self) -> None:
        """Forget the reduces of a backward that raised."""
        self.begin()
        self._under_way = None
