"""The tape: which units the forwards since the last step used, in order, and which of these uses a backward can reach.

A use is one call of code that reads a unit (`Schedule.begin_use`), in a forward that builds a graph. It opens when the call
begins and closes when it ends, on one clock. Autograd runs nodes in descending order of their creation. So a backward enters
uses in descending order of `closed`, and has finished a use when it enters another that closed before the first one opened.

Hooks on the graph own a `Token`, to which the tape refers weakly: once the token is freed, no backward can reach the use.
Ranks may free it at different times. So at stage 3 they agree at the start of each backward (`start_agreement`), and no rank
removes a use by itself. At stages 0 to 2 each rank removes its own, and they agree on units only. `clear` empties the tape at
the optimizer's step, and after a backward that raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..comm.wire import Wire
    from .unit import Unit

_MASK_BITS = 30
"""The number of uses per unit that one agreement covers. If tokens of later uses were freed, the ranks exchange all masks."""
HIGHEST = (1 << 31) - 1
"""The highest integer that an agreement can send."""


class Use:
    """One forward of one unit."""

    __slots__ = (
        "__weakref__", "closed", "index", "is_done", "is_entered", "is_listed", "is_lookup", "opened", "reads", "token",
    )  # fmt: skip

    def __init__(self, unit: Unit, opened: int, *, is_lookup: bool = False) -> None:
        # The unit's number only: a graph that outlives the engine must not hold it.
        self.index, self.opened, self.closed = unit.index, opened, opened
        self.is_lookup = is_lookup
        """The unit is an embedding; the same on every rank."""
        self.reads = not is_lookup
        """Its backward needs the values. That of a lookup does not, unless `forward` did more, on any rank."""
        self.token: weakref.ref[Token] | None = None
        self.is_listed = False
        """On the tape, and reachable as the ranks agreed in this backward."""
        self.is_entered = self.is_done = False

    @property
    def is_reachable(self) -> bool:
        return self.token is not None and self.token() is not None


class Token:
    """Owned by the hooks of a use's graph: it is freed with the graph."""

    __slots__ = ("__weakref__", "use")

    def __init__(self, use: Use) -> None:
        self.use = use


Calls = list[tuple[Use | None, int, bool, AbstractContextManager[object] | None]]
"""Uses of one unit that are open, the innermost last, each with the first sequence number of its graph, whether it is in a
backward, and its name in a profiler's trace."""


class Walk:
    """One backward's walk over the listed uses, beginning with the one that closed last.

    Attributes:
        entered: uses that the backward has entered and not finished.
        left: by number of the unit, how many uses the backward has not finished.
    """

    def __init__(self, uses: Sequence[Use] = ()) -> None:
        listed = [use for use in uses if use.is_listed]
        self.left = dict.fromkeys([use.index for use in listed], 0)
        for use in listed:
            use.is_entered = use.is_done = False
            self.left[use.index] += 1
        self._order = sorted(listed, key=attrgetter("closed"), reverse=True)
        self._at = 0
        self.entered: list[Use] = []

    def up_to(self, last: Use | None = None) -> Iterator[Use]:
        """Mark uses as entered and yield them, up to `last` or to the end."""
        while self._at < len(self._order):
            use = self._order[self._at]
            self._at += 1
            if not use.is_entered:
                use.is_entered = True
                yield use
            if use is last:
                return

    @property
    def ahead(self) -> list[Use]:
        """Return the uses that the backward has not entered, the next one first."""
        return self._order[self._at :]

    @property
    def next(self) -> Use | None:
        return self._order[self._at] if self._at < len(self._order) else None

    def enter(self, use: Use) -> list[Use]:
        """Enter a use. Returns entered uses that the backward has passed: they opened after this one closed."""
        over = [earlier for earlier in self.entered if earlier.opened > use.closed]
        self.entered.append(use)
        return over

    def finish(self, use: Use) -> None:
        """Finish a use: all its nodes have run."""
        use.is_done = True
        self.entered.remove(use)
        self.left[use.index] -= 1

    def is_in(self, index: int) -> bool:
        """Return whether a use of this unit is entered and not finished."""
        return any(use.index == index for use in self.entered)

    def needs(self, index: int) -> bool:
        """Return whether the backward reads this unit's values now, or in the next use."""
        for use in (*self.entered, *self._order[self._at : self._at + 1]):  # noqa: SIM110 -- called for every unit
            if use.index == index and use.reads:
                return True
        return False


class Tape:
    """The uses since the last step, in the order in which they opened."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.clock = 0

    def open(self, unit: Unit, *, is_lookup: bool) -> Use:
        self.clock += 1
        use = Use(unit, self.clock, is_lookup=is_lookup)
        self.uses.append(use)
        return use

    def close(self, use: Use) -> Token:
        """Close a use whose forward has ended. Returns the token that the hooks of its graph must own."""
        self.clock += 1
        use.closed = self.clock
        token = Token(use)
        use.token = weakref.ref(token)
        return token

    def clear(self) -> None:
        for use in self.uses:
            use.is_listed = False
        self.uses, self.clock = [], 0

    def list_reachable(self) -> None:
        """List the uses that a backward on this rank can reach; the tape forgets the others."""
        self.uses = [use for use in self.uses if use.is_reachable]
        for use in self.uses:
            use.is_listed = True

    # Agreement --------------------------------------------------------------------------------------------------------

    def start_agreement(
        self, wire: Wire, units: Sequence[Unit], *, each_use: bool, mark: int, refuse: Callable[[], None]
    ) -> Callable[[], list[Unit]]:
        """Start to agree on the uses that this backward may reach. A collective.

        Args:
            each_use: agree on each use: full parameters are released, so the ranks must gather in the same order, and their
                tapes have the same uses. Else agree on units only: ranks may have used different ones.
            mark: must be the same on every rank, 0 to 2^31 - 1.
            refuse: called on every rank if it is not.

        Returns:
            A function that waits for the agreement, marks the uses of this tape (`is_listed`) and returns the units to reduce,
            in order.
        """
        begin = self._agree_on_uses if each_use else self._agree_on_units
        return begin(wire, units, [mark, HIGHEST - mark], refuse)

    def _agree_on_units(
        self, wire: Wire, units: Sequence[Unit], marks: Sequence[int], refuse: Callable[[], None]
    ) -> Callable[[], list[Unit]]:
        first = [0] * len(units)
        self.list_reachable()
        for use in self.uses:
            index = use.index
            first[index] = first[index] or use.opened
        answer = wire.start_maximum([*first, *marks])

        def units_in_order() -> list[Unit]:
            agreed = answer()
            if agreed.pop() != HIGHEST - agreed.pop():
                refuse()
            last_first = [index for index in reversed(range(len(units))) if agreed[index]]  # also where two are equal
            order = sorted(last_first, key=agreed.__getitem__, reverse=True)
            return [units[index] for index in order]

        return units_in_order

    def _agree_on_uses(
        self, wire: Wire, units: Sequence[Unit], marks: Sequence[int], refuse: Callable[[], None]
    ) -> Callable[[], list[Unit]]:
        masks, seen = [0] * len(units), [0] * len(units)
        numbers: list[tuple[Use, int]] = []
        has_further = False
        for use in self.uses:
            index, number = use.index, seen[use.index]
            numbers.append((use, number))
            seen[index] += 1
            if use.is_reachable:
                masks[index] |= 1 << number
            elif number >= _MASK_BITS:
                has_further = True
        every = (1 << _MASK_BITS) - 1
        # The maximum of the masks and of their complements: equal on every rank exactly if the two are complements.
        first, others = [every & mask for mask in masks], [every & ~mask for mask in masks]
        if has_further:  # no complements, so that all ranks exchange
            first[0] = others[0] = every
        reads = bool([use for use in self.uses if use.is_lookup and use.reads])
        answer = wire.start_maximum([*first, *others, reads, *marks])

        def units_in_order() -> list[Unit]:
            found = answer()
            if found.pop() != HIGHEST - found.pop():
                refuse()
            if found.pop():  # all ranks gather for it, in one order
                for use in self.uses:
                    use.reads = True
            agreed = masks
            if [every & ~low for low in found[len(units) :]] != found[: len(units)]:
                agreed = [0] * len(units)
                for theirs in wire.exchange(masks):
                    agreed = [mine | other for mine, other in zip(agreed, theirs)]
            for use, number in numbers:
                use.is_listed = bool(agreed[use.index] >> number & 1)
            self.uses = [use for use in self.uses if use.is_listed]
            opened: dict[int, int] = {}
            for use in self.uses:
                opened.setdefault(use.index, use.opened)
            return [units[index] for index in sorted(opened, key=opened.__getitem__, reverse=True)]

        return units_in_order
