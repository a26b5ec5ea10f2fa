"""Deferred parameters become those of an engine: checks before, and the first values of a span."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...comm.wire import SoloWire
from ...core.layout import Span
from ...core.precision import dtype_of
from ...errors import ConfigError, RankMismatchError, StateError
from ...tiers.array import DiskArray, FilePieces
from ...tiers.pool import Storage
from .deferred import GUARDED, OWN, Birth, birth_of, end_deferred
from .ownership import OWNERS


class Seen(NamedTuple):
    """A deferred parameter as one rank saw it.

    Args:
        print: `Birth.print`.
        is_used: `Birth.is_used`.
    """

    name: str
    print: int | None
    is_used: bool


def seen(name: str, birth: Birth) -> Seen:
    return Seen(name, birth.print, birth.is_used)


def check_equal(wire: SoloWire, what: str, mine: Sequence[Seen | None], *, unused: bool) -> None:
    """Every rank closed these parameters with the same values. A collective.

    Args:
        mine: in the same order on every rank; None: the parameter is gone.
        unused: whether to compare parameters that no function was given, which may hold uninitialised memory.

    Raises:
        RankMismatchError: on every rank, with the first parameter that differs.
    """
    if wire.size == 1:
        return
    found = hashlib.blake2b(repr((what, mine)).encode(), digest_size=16).hexdigest()
    if len(set(wire.exchange(found))) == 1:
        return
    everyone: list[tuple[str, list[Seen | None]]] = wire.exchange((what, list(mine)))
    whats = [each for each, _ in everyone]
    if len(set(whats)) > 1:
        raise RankMismatchError(
            f"ranks differ inside zero.Init: {_differing(whats)}. Every rank must run the same code inside it"
        )
    for column in zip(*(theirs for _, theirs in everyone)):
        alive = [each for each in column if each is not None]
        if len(alive) < len(column):
            continue
        names, prints = [each.name for each in alive], [each.print for each in alive]
        if len(set(names)) > 1:
            raise RankMismatchError(
                f"{what}: ranks differ in the parameters that they use: {_differing(names)}. Every rank must run the same code "
                "inside zero.Init"
            )
        if len(set(prints)) == 1 or OWN in prints or not (unused or any(each.is_used for each in alive)):
            continue
        ranks = [rank for rank, each in enumerate(prints) if each != prints[0]]
        raise RankMismatchError(
            f"{what}: rank {ranks[0]} gave {names[0]} other values than rank 0 ({len(ranks)} of {len(prints)} ranks differ), "
            "and each rank keeps only its own part of them. Every rank must compute the same values: seed the ranks alike "
            "inside zero.Init, load the same files, and change values of one rank with zero.GatheredParameters(p, "
            "modifier_rank=0). Where processors of different kinds round differently, load the model with from_pretrained"
        )


def _differing(values: Sequence[str]) -> str:
    rank = next(rank for rank, each in enumerate(values) if each != values[0])
    return f"rank 0 has {values[0]}, rank {rank} has {values[rank]}"


def check_ready(names: Mapping[nn.Parameter, list[str]], wire: SoloWire) -> None:
    """Deferred parameters of this rank can be sharded.

    Raises:
        StateError: one was written to while it was closed, or a trained parameter was computed from values that were missing.
        ConfigError: they were deferred on another number of ranks.
    """
    is_any = any(isinstance(owner, Birth) for owner in OWNERS.values())
    for param, (name, *_) in names.items():
        birth = birth_of(param)
        if birth is not None:
            birth.check_guard(param, name)
            if birth.wire.size not in (1, wire.size):
                raise ConfigError(
                    f"this model was born under zero.Init() on {birth.wire.size} ranks and is to be sharded on {wire.size}: "
                    "build it in the process group that trains it"
                )
            birth.follow(param)
        if is_any and param.requires_grad and _has_nan(param, birth):
            raise StateError(
                f"parameter {name!r} holds NaN, and this process has parameters that zero.Init deferred: it was probably "
                "computed from one whose values were not there. Compute it inside `with zero.Init():` on every rank, or from "
                "zero.full_parameter"
            )


def _has_nan(param: nn.Parameter, birth: Birth | None) -> bool:
    """Of values in memory that were not read from a file."""
    if param.dtype not in GUARDED or param.is_meta or param.layout is not torch.strided:
        return False
    if birth is None or birth.is_open:
        values = param.detach()
    elif birth.is_used and birth.is_in_memory:
        values = birth.own
    else:
        return False
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.numel() > 0 and bool(values.max().isnan())


def check_alike(names: Mapping[nn.Parameter, list[str]], wire: SoloWire) -> None:
    """The deferred parameters of a model have the same values on every rank. A collective where there are some.

    Raises:
        RankMismatchError: on every rank.
    """
    births = [(name, birth_of(param)) for param, (name, *_) in names.items()]
    mine = [seen(f"parameter {name!r}", birth) for name, birth in births if birth is not None and birth.wire.size > 1]
    if mine:
        check_equal(wire, "zero.shard of a model built under zero.Init", mine, unused=True)


def poured(span: Span, params: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The whole span's, in the master dtype, on the device; what was born gives its own up."""
    whole = torch.zeros(span.numel, dtype=dtype_of(span.spec.master_dtype), device=device)
    for slot, param in zip(span.slots, params):
        birth, place = birth_of(param), whole[slot.offset : slot.stop].view(slot.spec.shape)
        room = whole[slot.offset :]
        values = param.detach() if birth is None or birth.is_open else birth.read(slot.spec.shape, room)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)
        if birth is not None:
            end_deferred(param)
    whole[span.used_numel :].zero_()
    return whole


def left_in_files(span: Span, params: Sequence[nn.Parameter], wire: SoloWire, storage: Storage) -> DiskArray | None:
    """This rank's slice of a frozen span, where its values are at rest in the model's own files: no copy is made of them. A
    collective for parameters with an origin."""
    births = [birth for param in params if (birth := birth_of(param)) is not None and birth.origin is not None]
    if span.trainable or len(births) < len(params):
        return None
    if not all(wire.exchange(all(birth.at_rest for birth in births))):
        return None  # some rank was given its part, and may have written to it
    origins = {slot.spec.name: birth.origin for slot, birth in zip(span.slots, births)}
    parts = [
        (part.start, origin[part.there])
        for part in span.overlaps((wire.shard_group or wire).rank if span.shards > 1 else 0)
        if (origin := origins[part.source.spec.name]) is not None
    ]
    for param in params:
        end_deferred(param)
    dtype = dtype_of(span.spec.master_dtype)
    pieces = FilePieces(span.slice_numel, dtype, parts, storage.meter)
    return DiskArray(storage.disk, span.slice_numel, dtype, pieces)
