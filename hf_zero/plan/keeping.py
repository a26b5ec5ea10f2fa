"""Units that stay gathered from a forward to its backward where `device_memory` has room: stage 3 sends 2 bytes instead of 3.

A kept unit takes its gathered bytes from its forward to its backward, and is brought in once a pass instead of twice. What a
byte of memory saves is the same for all units; those used last wait least, and are gone when gradients have added up. So the
last ones are kept, one after another, as long as the plan fits: how many is all that ranks have to agree on.

Where parameters are sharded over several nodes of L ranks, a unit may be kept by parts: each rank of a node has 1/L of what was
gathered, and backward's gather stays in the node (Wang et al., "ZeRO++", arXiv 2306.10209, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..config import ZeroConfig
from ..core.layout import Layout
from .costs import Placement, Setup, memory_of, stays
from .solve import PlanInputs


def keeps(config: ZeroConfig, world_size: int) -> bool:
    """Whether there may be kept units: a budget is given, and parameters come and go.

    Under `auto` the budget is for what it places, and the monitor moves that when batches grow: there is none to spare.
    """
    return config.device_memory is not None and not config.is_auto and not config.policy_for(world_size).keep_full


def candidates(layout: Layout, placements: Sequence[Placement], setup: Setup) -> list[int]:
    """Places in the layout of units that a pass brings in twice, those used last first; the same on every rank."""
    uses = layout.uses()
    end = max((use.last for use in uses), default=0)
    found = [
        at
        for at, (unit, use) in enumerate(zip(layout.units, uses))
        if use.first
        and use.is_reached
        and use.last < end
        and not all(stays(span, placements[span.index], setup.policy) for span in unit.spans)
    ]
    return sorted(found, key=lambda at: uses[at].last, reverse=True)


@dataclass(frozen=True, slots=True)
class Kept:
    """Of the candidates, in their order: the first `whole` stay gathered; of the others up to `count` parts are kept."""

    whole: int = 0
    count: int = 0

    def into(self, setup: Setup, order: Sequence[int]) -> Setup:
        """`setup` with these, of the candidates in `order`."""
        return replace(
            setup, kept=frozenset(order[: self.whole]), parts=frozenset(order[self.whole : max(self.whole, self.count)])
        )


def room_for(inputs: PlanInputs, placements: Sequence[Placement]) -> Kept:
    """As many candidates as the budgets have room for beside all else, activations of `inputs.batch` too.

    Where parameters are sharded over several nodes: first parts of as many as there is room for, since a part saves the bytes
    between nodes, which are the slow ones, for a node's share of the memory; then as many of these whole.
    """
    if not keeps(inputs.config, inputs.world_size):
        return Kept()
    order = candidates(inputs.layout, placements, inputs.setup)
    count = 0
    if inputs.setup.node_ranks > 1 and _can_be_parted(inputs.layout, placements, inputs.setup, order):
        count = _most(len(order), lambda count: _fits(inputs, placements, order, Kept(0, count)))
    whole = _most(len(order), lambda whole: _fits(inputs, placements, order, Kept(whole, count)))
    return Kept(whole, max(whole, count))


def _can_be_parted(layout: Layout, placements: Sequence[Placement], setup: Setup, order: Sequence[int]) -> bool:
    """Whether what comes and goes of all candidates is cut among the ranks: a span that one rank has whole is not gathered."""
    spans = (span for at in order for span in layout.units[at].spans)
    return all(span.shards > 1 or stays(span, placements[span.index], setup.policy) for span in spans)


def _fits(inputs: PlanInputs, placements: Sequence[Placement], order: Sequence[int], kept: Kept) -> bool:
    memory = memory_of(inputs.layout, placements, kept.into(inputs.setup, order), inputs.activations)
    return not inputs.budgets.excess(memory)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits; memory grows with every unit."""
    low, high = 0, limit
    while low < high:
        count = (low + high + 1) // 2
        low, high = (count, high) if fits(count) else (low, count - 1)
    return low
