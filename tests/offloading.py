"""For tests of offloading: plans that split every span between tiers, small blocks and records, cases that meet pairwise."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_zero import stepping, unit
from hf_zero.costs import Placement, together
from hf_zero.engine import Engine
from hf_zero.layout import ALIGN_NUMEL, Span
from hf_zero.tiers import Tier
from tests.common import Case, Result

BLOCK_NUMEL, SLAB_NUMEL = 1536, 2048
"""So small that the spans of tiny models make several blocks and records, with shorter ones at the end."""
_ROTATED = (
    (Tier.DEVICE, Tier.HOST, Tier.DISK),
    (Tier.HOST, Tier.DISK, Tier.DEVICE),
    (Tier.DISK, Tier.DEVICE),
    (Tier.DISK, Tier.HOST),
    (Tier.HOST, Tier.DEVICE),
)


def split(span: Span) -> tuple[tuple[Tier, int], ...]:
    """Stretches of about equal length in tiers that change from span to span."""
    if not span.is_updated:
        return ()
    tiers = _ROTATED[span.index % len(_ROTATED)]
    length = span.slice_numel // len(tiers) // ALIGN_NUMEL * ALIGN_NUMEL
    if not length:
        return ((tiers[0], span.slice_numel),)
    lengths = [length] * (len(tiers) - 1)
    return tuple(zip(tiers, [*lengths, span.slice_numel - sum(lengths)]))


@contextlib.contextmanager
def mixed(case: Case) -> Iterator[None]:
    """Engines made inside split spans as `split` says, where the case asks for it."""
    if case.offload_optimizer != "mixed":
        yield
        return
    plain = Engine._new_plan

    def planned(engine: Engine, *args: Any) -> Any:
        plan = plain(engine, *args)
        placements = []
        for span, placement in zip(plan.layout.spans, plan.placements):
            stretches = split(span)
            # Frozen spans and those of another type than their masters stay where the settings want them.
            placements.append(Placement(together(placement.parameters, span, stretches), stretches))
        return replace(plan, placements=tuple(placements))

    Engine._new_plan = planned  # type: ignore[method-assign]
    try:
        yield
    finally:
        Engine._new_plan = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    shard = importlib.import_module("hf_zero.shard")  # the package's attribute of that name is the function
    before = shard.SLAB_NUMEL, stepping.BLOCK_NUMEL, unit.BLOCK_NUMEL
    shard.SLAB_NUMEL, stepping.BLOCK_NUMEL, unit.BLOCK_NUMEL = SLAB_NUMEL, BLOCK_NUMEL, BLOCK_NUMEL
    try:
        yield
    finally:
        shard.SLAB_NUMEL, stepping.BLOCK_NUMEL, unit.BLOCK_NUMEL = before


def unequal(ours: Result, reference: Result) -> list[str]:
    """What differs by a bit, on this rank."""
    out = [name for name in ("losses", "norms", "scale") if getattr(ours, name) != getattr(reference, name)]
    if list(ours.params) != list(reference.params) or list(ours.state) != list(reference.state):
        return [*out, "names"]
    out += [name for name, value in ours.params.items() if not same(value, reference.params[name])]
    for index, entries in reference.state.items():
        mine = ours.state[index]
        if list(mine) != list(entries):
            out.append(f"state {index}: {list(mine)} against {list(entries)}")
        else:
            out += [f"state {index} {key}" for key in entries if not same(mine[key], entries[key])]
    return out


def same(mine: Any, theirs: Any) -> bool:
    """Equal values, and of tensors equal types and shapes; on the meta device there are no values."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(mine == theirs)
    if (mine.dtype, mine.shape, mine.device) != (theirs.dtype, theirs.shape, theirs.device):
        return False
    return mine.is_meta or torch.equal(mine, theirs)


def pairwise(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Few combinations in which every two values of different dimensions meet, wherever one allowed combination has both.

    Greedy: each further combination has as many new pairs as any; of equals the first in the product's order.
    """
    everything = [c for c in (dict(zip(dimensions, v)) for v in itertools.product(*dimensions.values())) if allowed(c)]
    pairs = [set(itertools.combinations(combination.items(), 2)) for combination in everything]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & left))
        chosen.append(everything[best])
        left -= pairs[best]
    return chosen
