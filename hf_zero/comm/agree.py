"""A start that is the same on every rank: same structure or a named error, same values or rank 0's."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import ZeroConfig
from ..core.layout import ParamSpec
from ..errors import CheckpointError, RankMismatchError, TierError, ZeroError
from .wire import SoloWire, wire_device

T = TypeVar("T")


@contextmanager
def on_errors(wire: SoloWire, what: str) -> Iterator[None]:
    """A refusal on one rank is a refusal on all: no rank goes on to wait for one that has left.

    Raises:
        ZeroError: this rank's own.
        RankMismatchError: where only other ranks refused; names the first and its reason.
    """
    mine: ZeroError | None = None
    try:
        yield
    except ZeroError as error:
        mine = error
    for rank, theirs in enumerate(wire.exchange(None if mine is None else str(mine))):
        if mine is not None:
            raise mine
        if theirs is not None:
            raise RankMismatchError(f"{what}: rank {rank} refused, and this rank did not: {theirs}")


def together(
    wire: SoloWire, what: str, work: Callable[[], T], *, answer: bool = True, kind: type[ZeroError] = CheckpointError
) -> list[T]:
    """Do `work`, which must not communicate, on every rank; where it fails on one it fails on all.

    Returns:
        Every rank's result in rank order; with `answer=False` only this rank's.

    Raises:
        ZeroError: this rank's own refusal.
        CheckpointError (or `kind`): any other failure, here or elsewhere, a disk's among them; names the first rank that
            failed, and how.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # any failure must reach the other ranks, which would wait for this one
        failure = error
    report = None if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        reports = wire.exchange((report, result if answer and failure is None else None))
    except RuntimeError as error:  # the process group's own
        raise failure or kind(f"{what}: the other ranks cannot be reached ({error})") from error
    if isinstance(failure, ZeroError) and not isinstance(failure, TierError):
        raise failure
    for rank, (theirs, _) in enumerate(reports):
        if theirs is not None:
            raise kind(f"{what} failed on rank {rank}: {theirs}") from failure
    return [value for _, value in reports] if answer else [result]


def read(wire: SoloWire, values: Callable[[], T], *, may_fail: bool) -> T:
    """This rank's values on their way into a collective; where getting them may fail, one rank's failure is everyone's.

    Args:
        may_fail: some may rest on disk, here or elsewhere. The same on every rank: it decides whether there is a collective.

    Raises:
        TierError: on every rank.
    """
    if not may_fail:
        return values()
    return together(wire, "reading values from disk", values, answer=False, kind=TierError)[0]


def same_structure(
    wire: SoloWire,
    config: ZeroConfig,
    mixed_precision: str | None,
    specs: list[list[ParamSpec]],
    originals: list[list[nn.Parameter]],
    names: dict[nn.Parameter, list[str]],
) -> None:
    """Compare settings, parameters and optimizer groups over the ranks.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
    """
    if wire.size == 1:
        return
    lines = [f"config {sorted(config.to_dict().items())}", f"mixed_precision {mixed_precision}"]
    lines += [
        f"parameter {spec.name!r} shape {spec.shape} dtype {spec.dtype} trainable {spec.trainable} "
        f"optimizer group {spec.group} tied to {spec.names[1:]} in unit {number}"
        for number, unit in enumerate(specs)
        for spec in unit
    ]
    lines += [f"optimizer group {i} of {[names[p][0] for p in group]}" for i, group in enumerate(originals)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = wire.exchange(digest)
    if len(set(digests)) == 1:
        return
    everyone: list[list[str]] = wire.exchange(lines)
    for rank, theirs in enumerate(everyone[1:], start=1):
        if theirs != everyone[0]:
            raise RankMismatchError(_first_difference(everyone[0], theirs, rank))


def same_answer(wire: SoloWire, mine: bool, what: str) -> None:
    """Raises:
    RankMismatchError: on every rank, where ranks answer `what` differently.
    """
    answers: list[bool] = wire.exchange(mine)
    for rank, theirs in enumerate(answers):
        if theirs is not answers[0]:
            raise RankMismatchError(f"ranks differ in {what}: rank 0 says {answers[0]}, rank {rank} says {theirs}")


def _first_difference(first: list[str], other: list[str], rank: int) -> str:
    for mine, theirs in zip(first, other):
        if mine != theirs:
            return f"ranks differ: rank 0 has {mine}, rank {rank} has {theirs}. Build the same model and settings everywhere"
    longer, where = (first, 0) if len(first) > len(other) else (other, rank)
    return (
        f"ranks differ: rank 0 has {len(first)} entries, rank {rank} has {len(other)}; only rank {where} has "
        f"{longer[min(len(first), len(other))]}. Build the same model and settings everywhere"
    )


def same_values(wire: SoloWire, named: Iterable[tuple[str, Tensor]], fingerprint: Callable[[Tensor], Tensor]) -> None:
    """Make every tensor equal to rank 0's; warns with the first that was not.

    Args:
        named: the same names in the same order on every rank.
        fingerprint: of a tensor, as a tensor of the same shape for all: other values give another.
    """
    if wire.size == 1:
        return
    values = list(named)
    if not values:
        return
    prints = torch.stack([fingerprint(value) for _, value in values]).cpu()
    everyone: list[Tensor] = wire.exchange(prints)
    differs = torch.zeros(len(values), dtype=torch.bool)
    for theirs in everyone[1:]:
        differs |= (theirs != everyone[0]).any(dim=1)
    if not bool(differs.any()):
        return
    wrong = [item for item, bad in zip(values, differs.tolist()) if bad]
    warnings.warn(
        f"{len(wrong)} of {len(values)} parameters differ between ranks, {wrong[0][0]!r} first; rank 0's values are "
        "used (seed every rank alike before building the model to avoid this)",
        stacklevel=4,
    )
    for _, value in wrong:
        sent = value.contiguous().to(wire_device(wire, value.device))
        wire.broadcast(sent)
        with torch.no_grad():
            value.copy_(sent)
