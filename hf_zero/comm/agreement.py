"""Agreement between ranks: shared errors, equal structure, equal first values."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import ZeroConfig
from ..core.layout import ParamSpec
from ..errors import CheckpointError, RankMismatchError, StallError, TierError, ZeroError
from .wire import RankStatus, Wire

T = TypeVar("T")


class RankReport:
    """One rank's report to the others in an `on_all_ranks` block.

    Attributes:
        local: this rank's report: any value that pickles, set inside the block.
        by_rank: the reports of all ranks, in rank order, after the block.
    """

    def __init__(self) -> None:
        self.local: Any = None
        self.by_rank: list[Any] = []


@contextmanager
def on_all_ranks(wire: Wire, what: str, *, kind: type[ZeroError] = CheckpointError) -> Iterator[RankReport]:
    """Run a block on every rank; if it fails on one rank, it fails on all. Ends with a collective.

    The block must not communicate, except through nested blocks. If one rank leaves it while others are in a nested block, it
    fails on all.

    Args:
        what: the action, for messages.
        kind: error class if another rank failed, and for failures here that this package did not raise. With
            `RankMismatchError` this rank's own failure is raised unchanged.

    Raises:
        ZeroError: this rank failed. KeyboardInterrupt and SystemExit are raised unchanged too.
        CheckpointError: (or `kind`) another rank failed, or cannot be reached; names the first one and its error.
        RankMismatchError: no rank failed, but one has left the block while others are in a nested block.
    """
    report = RankReport()
    failure: BaseException | None = None
    with wire.watch.operation(what):
        try:
            yield report
        except BaseException as error:  # Ctrl-C too: the other ranks wait for this one, which may continue
            failure = error
        depth = len(wire.watch.operations) - 1  # of the enclosing operation
        if isinstance(failure, ZeroError) and failure.known_at <= depth:
            raise failure
        # Must reach the exchange after any other failure: the other ranks wait there.
        reason = None if failure is None else ": ".join(filter(None, (type(failure).__name__, str(failure))))
        try:
            statuses = wire.exchange_statuses(RankStatus(depth, reason, report.local if failure is None else None))
        except StallError:
            if failure is not None:
                raise failure from None
            raise
        except RuntimeError as error:  # from the process group
            raise failure or kind(f"{what}: the other ranks cannot be reached ({error})") from error
        mismatch = wire.mismatch(statuses)
    if mismatch is None:
        report.by_rank = [each.value for each in statuses]
        return
    if failure is not None and (
        not isinstance(failure, Exception)
        or kind is RankMismatchError
        or (isinstance(failure, ZeroError) and not isinstance(failure, TierError))
    ):
        if isinstance(failure, ZeroError) and mismatch.known_at < depth:
            failure.known_at = mismatch.known_at
        raise failure
    if mismatch.known_at < depth:
        raise mismatch from failure
    for rank, each in enumerate(statuses):
        if each.reason is not None:
            raise kind(f"{what} failed on rank {rank}: {each.reason}") from failure
    raise mismatch


def read_on_all_ranks(wire: Wire, values: Callable[[], T], *, may_fail: bool) -> T:
    """Return this rank's values for a collective. If reading them fails on one rank, it fails on all.

    Args:
        may_fail: some rank's values may be on disk. Must be equal on every rank: it decides whether ranks communicate.

    Raises:
        TierError: on every rank.
    """
    if not may_fail:
        return values()
    with on_all_ranks(wire, "reading values from disk", kind=TierError):
        found = values()
    return found


def check_same_structure(
    wire: Wire,
    config: ZeroConfig,
    mixed_precision: str | None,
    specs: list[list[ParamSpec]],
    optimizers: Sequence[torch.optim.Optimizer],
    names: dict[nn.Parameter, list[str]],
) -> None:
    """Compare settings, parameters and optimizer groups over the ranks.

    Raises:
        RankMismatchError: on every rank, with the first difference.
    """
    if wire.size == 1:
        return
    lines = [f"{name}={value!r}" for name, value in config.to_dict().items()]
    lines += [f"mixed_precision={mixed_precision!r}"]
    lines += [
        f"parameter {spec.name!r} shape {spec.shape} dtype {spec.dtype} trainable {spec.trainable} "
        f"optimizer {spec.optimizer if spec.optimizer >= 0 else 'none'} tied to {spec.names[1:]} in unit {number}"
        for number, unit in enumerate(specs)
        for spec in unit
    ]
    lines += [
        f"optimizer group {i}{_which(number)} ({type(optimizer).__name__}) of {[names[p][0] for p in group['params']]}"
        for number, optimizer in enumerate(optimizers)
        for i, group in enumerate(optimizer.param_groups)
    ]
    check_same_lines(gather_if_different(wire, lines) or [])


def gather_if_different(wire: Wire, mine: T) -> list[T] | None:
    """Return the values of all ranks if they differ, else None. A collective that sends digests of `repr` first."""
    digest = hashlib.sha256(repr(mine).encode()).digest()
    return wire.exchange(mine) if len(set(wire.exchange(digest))) > 1 else None


def check_same_lines(everyone: Sequence[list[str]]) -> None:
    """Compare lines of all ranks, in rank order.

    Raises:
        RankMismatchError: with the first difference.
    """
    for rank, theirs in enumerate(everyone[1:], start=1):
        if theirs != everyone[0]:
            raise RankMismatchError(_first_difference(everyone[0], theirs, rank))


def _which(optimizer: int) -> str:
    """Return the optimizer's number for a message; empty for the first."""
    return f" of optimizer {optimizer}" if optimizer else ""


def _first_difference(first: list[str], other: list[str], rank: int) -> str:
    for mine, theirs in zip(first, other):
        if mine != theirs:
            return f"ranks differ: rank 0 has {mine}, rank {rank} has {theirs}. Build the same model and settings everywhere"
    longer, where = (first, 0) if len(first) > len(other) else (other, rank)
    return (
        f"ranks differ: rank 0 has {len(first)} entries, rank {rank} has {len(other)}; only rank {where} has "
        f"{longer[min(len(first), len(other))]}. Build the same model and settings everywhere"
    )


def broadcast_differing_values(
    wire: Wire, named: Iterable[tuple[str, Tensor]], fingerprint: Callable[[Tensor], Tensor]
) -> None:
    """Broadcast rank 0's values of the tensors that differ; warn with the name of the first.

    Args:
        named: the same names in the same order on every rank.
        fingerprint: maps a tensor to a digest tensor, of one shape for all.
    """
    if wire.size == 1:
        return
    values = list(named)
    if not values:
        return
    prints = torch.stack([fingerprint(value) for _, value in values]).cpu()
    everyone: list[Tensor] = wire.exchange(prints)
    differs = torch.zeros(len(values), dtype=torch.bool, device="cpu")
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
        sent = value.contiguous().to(wire.device or value.device)
        wire.broadcast(sent)
        with torch.no_grad():
            value.copy_(sent)
