"""Units that stay gathered from a forward to its backward where `device_memory` has room: stage 3 sends 2 bytes instead of 3.

A kept unit takes its gathered bytes from its forward to its backward, and is brought in once a pass instead of twice. What a
byte of memory saves is the same for all units; those used last wait least, and are gone when gradients have added up. So the
last ones are kept, one after another, as long as the plan fits: how many is all that ranks have to agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import ZeroConfig
from ..core.layout import Layout
from .costs import Placement, Setup, memory_of, stays, uses_of
from .solve import PlanInputs


def keeps(config: ZeroConfig, world_size: int) -> bool:
    """Whether there may be kept units: a budget is given, and parameters come and go.

    Under `auto` the budget is for what it places, and the monitor moves that when batches grow: there is none to spare.
    """
    return config.device_memory is not None and not config.is_auto and not config.policy_for(world_size).keep_full


def candidates(layout: Layout, placements: Sequence[Placement], setup: Setup) -> list[int]:
    """Places in the layout of units that a pass brings in twice, those used last first; the same on every rank."""
    uses = uses_of(layout)
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


def kept_units(inputs: PlanInputs, placements: Sequence[Placement]) -> tuple[int, ...]:
    """As many candidates as the budgets have room for beside all else, activations of `inputs.batch` too; in their order."""
    if not keeps(inputs.config, inputs.world_size):
        return ()
    order = candidates(inputs.layout, placements, inputs.setup)
    low, high = 0, len(order)
    while low < high:  # memory grows with every unit
        count = (low + high + 1) // 2
        setup = replace(inputs.setup, kept=frozenset(order[:count]))
        fits = not inputs.budgets.excess(memory_of(inputs.layout, placements, setup, inputs.activations))
        low, high = (count, high) if fits else (low, count - 1)
    return tuple(order[:low])
