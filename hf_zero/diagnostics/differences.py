"""Say which values differ between ranks that must have them alike, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RankMismatchError

Named = tuple[str, str]
"""The kind of value, one of `CAUSES`, and which one."""

CAUSES = {
    "option": "Set it on every rank: a scheduler that steps on one rank alone, a branch on the rank, a random search "
    "without a seed, a sum over optimizer.state, which has this rank's slices (zero.full_optimizer_state(param, name) gives "
    "whole states)",
    "flag": "Freeze and unfreeze parameters on every rank alike",
    "count": "The optimizer has made other steps there: its state was loaded or changed on some ranks alone",
    "buffer": "It was written through `.data`, which torch does not count, so it was not sent before this forward: write "
    "to the buffer itself, or on every rank alike",
    "weight before the step": "Write parameters on every rank alike, or inside zero.GatheredParameters(params, "
    "modifier_rank=0)",
    "weight after the step": "It was the same everywhere before this step: an optimizer that draws random numbers or asks for "
    "the rank, or bytes that the network or the memory changed",
    "gathered weight": "All ranks were sent the same slices: bytes that the network or the memory changed",
    "weight after a forward": "A forward has written to it with what this rank alone has seen: use a buffer, or write the "
    "same on every rank",
}
"""The cause of a difference in this kind of value, and what to do."""

_SHORT = frozenset({"option", "flag", "count"})
"""Kinds whose values fit into a message."""


def refuse_difference(
    everyone: Sequence[Mapping[Named, Any]], step: int, written: Sequence[Mapping[str, bool]] = ()
) -> None:
    """Compare what the ranks have under the same names; a rank may lack a name.

    Args:
        everyone: by rank.
        written: by rank, names of weights, and whether they were written since the last step.

    Raises:
        RankMismatchError: two ranks differ; the message has the first difference.
    """
    for name in dict.fromkeys(name for mine in everyone for name in mine):
        found = {rank: mine[name] for rank, mine in enumerate(everyone) if name in mine}
        if len({repr(value) for value in found.values()}) > 1:
            break
    else:
        return
    kind, what = name
    odd = _odd_ranks(found)
    usual = next(rank for rank in found if rank not in odd)
    shown = f" ({found[usual]!r} on rank {usual}, {found[odd[0]]!r} on rank {odd[0]})" if kind in _SHORT else ""
    writers = [rank for rank, mine in enumerate(written) if mine.get(what)]
    note = f"It was written on {ranks_text(writers)} since the last step. " if writers else ""
    raise RankMismatchError(
        f"ranks differ in step {step}: {what} is not on {ranks_text(odd)} what it is on rank {usual}{shown}. "
        f"{note}{CAUSES[kind]}"
    )


def _odd_ranks(found: Mapping[int, Any]) -> list[int]:
    """Return ranks that have another value than most; without a majority, other than the first rank's."""
    counted = Counter(repr(value) for value in found.values())
    usual = max(counted, key=lambda value: (counted[value], value == repr(found[min(found)])))
    return [rank for rank, value in found.items() if repr(value) != usual]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 1`, or `ranks 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
