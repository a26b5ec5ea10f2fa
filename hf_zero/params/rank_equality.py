"""Check that deferred parameters are equal on all ranks: compare digests at each gather and at the end of `zero.Init`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ..comm.agreement import gather_if_different
from ..comm.wire import Wire
from ..errors import RankMismatchError, StateError
from .deferred import WRITTEN_LOCALLY, deferred_of


class ParameterDigest(NamedTuple):
    """The digest of a deferred parameter's values on one rank."""

    name: str
    digest: int | None
    is_used: bool


def check_equal(wire: Wire, what: str, mine: Sequence[ParameterDigest | None], *, unused: bool = False) -> None:
    """Compare the values of closed parameters over the ranks. A collective.

    Args:
        mine: in the same order on every rank; None: the parameter was deleted.
        unused: also compare parameters that no function has used. Their memory may be uninitialized.

    Raises:
        RankMismatchError: on every rank, with the first parameter that differs.
    """
    if wire.size == 1:
        return
    everyone = gather_if_different(wire, (what, [*mine]))
    if everyone is None:
        return
    _refuse_different("", [each for each, _ in everyone])
    for column in zip(*(theirs for _, theirs in everyone)):
        alive = [each for each in column if each is not None]
        if len(alive) < len(column):
            continue
        _refuse_different(f"{what}: the parameters that they use: ", [each.name for each in alive])
        digests = [each.digest for each in alive]
        if len(set(digests)) == 1 or WRITTEN_LOCALLY in digests or not (unused or any(each.is_used for each in alive)):
            continue
        rank = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise RankMismatchError(
            f"{what}: rank {rank} gave {alive[0].name} other values than rank 0, and each rank keeps only its own part of "
            "them. Every rank must compute the same values: seed the ranks alike inside zero.Init, load the same files, and "
            "change values of one rank with zero.GatheredParameters(p, modifier_rank=0)"
        )


def _refuse_different(what: str, values: Sequence[str]) -> None:
    for rank, each in enumerate(values):
        if each != values[0]:
            raise RankMismatchError(
                f"ranks differ inside zero.Init: {what}rank 0 has {values[0]}, rank {rank} has {each}. Every rank must run the "
                "same code inside it"
            )


def check_deferred_equal(model: nn.Module) -> None:
    """Compare a model's deferred parameters over the ranks before it is sharded. A collective if it has any.

    Raises:
        RankMismatchError: on every rank: values differ.
        StateError: `GatheredParameters` holds one open.
    """
    mine: list[ParameterDigest] = []
    wire: Wire | None = None
    for name, param in model.named_parameters():
        deferred = deferred_of(param)
        if deferred is not None and deferred.pins:
            raise StateError(
                f"zero.shard inside zero.GatheredParameters of {name!r}, whose edits would be lost. Call it after the block"
            )
        if deferred is not None and deferred.wire.size > 1:
            deferred.follow(param)
            wire = deferred.wire
            mine.append(ParameterDigest(f"parameter {name!r}", deferred.digest, deferred.is_used))
    if wire is not None:
        check_equal(wire, "zero.shard of a model built under zero.Init", mine, unused=True)
