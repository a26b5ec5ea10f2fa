"""Values that somebody else wrote: parameters between steps and in a forward, the optimizer's masters between steps.

What is looked at, and when:

* where whole parameters stay (stages 0 to 2) and the master is other memory than what is computed with (a low-
  precision copy, an offloaded master): a digest of this rank's slice, taken when it was made and compared before the
  next step and before anyone reads the masters. Where the master is that memory itself there is nothing to carry.
* `param.data = x`: the address of the parameter's values, before a forward, a step, and a reader of the masters; at
  stage 3 with every gather and release.
* at stage 3, a write while a parameter is released: its guard, and its version counter. It cannot be carried, and
  raises.
* at stage 3, a write in a forward: the version counter, at release; values of small frozen parameters that a module
  of the user's own holds (code books) are compared as well, since `param.data.add_(1)` moves no counter. Other writes
  through `.data` inside a forward are not seen there.
* the optimizer's tensors (a schedule-free optimizer's `eval()`, SAM, Lookahead): their version counters, and a sample
  of the values for writes through `.data`, before every forward and step.

What is found is carried over: elements that differ from what was shown go into the master, the others keep what the
master knows more precisely. Every rank carries its own slice: as under data parallel training, the same edit is made
on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from ..errors import StateError
from ..tiers.array import fetch
from ..tiers.fingerprint import digest
from .flat_param import Flat

WATCHED_NUMEL = 1 << 22
"""Frozen parameters of a module of the user's own are compared at every release up to this size."""
_PLAIN_NAMES = frozenset({"Conv1D"})


class Holding(Protocol):
    """A unit, as far as it is needed here."""

    @property
    def name(self) -> str: ...

    def close(self) -> None: ...


@torch.no_grad()
def carry(flat: Flat, low: int = 0, high: int | None = None) -> None:
    """Of this rank's place in `full`, elements [low, high): those that the masters do not give go into them and `own`."""
    high = flat.span.slice_numel if high is None else high
    width = flat.storage.sizes.block_numel
    for shard in flat.shards:
        if shard.aliased and flat.own is flat.place:
            continue
        was = shard.edited(False)
        for at in range(max(low, shard.start), min(high, shard.stop), width):
            stop = min(at + width, high, shard.stop)
            target = shard.values[at - shard.start : stop - shard.start]
            master = fetch(target)
            shown = flat.place[at:stop].to(master.device)
            differs = shown != master.to(flat.compute_dtype)
            if master.device.type == "cpu" and not bool(differs.any()):
                continue
            values = torch.where(differs, shown.to(master.dtype), master)
            target.copy_(values)
            flat.publish(shard, at - shard.start, values)
        if not was:
            shard.note()


@torch.no_grad()
def take_over(flat: Flat, unit: str, index: int, *, is_guard: bool = False) -> None:
    """`param.data = x`: this rank's elements go into the masters, all of x into what the parameter points at again."""
    param, target = flat.params[index], (flat.guards.shown if is_guard else flat.views)[index]
    value, name = param.data, flat.span.slots[index].spec.name
    param.data = target
    if value.shape != target.shape:
        raise StateError(
            f"parameter {name!r} of unit {unit!r} was given `.data` of {tuple(value.shape)}, expected {tuple(target.shape)}: "
            "a sharded parameter keeps its shape; change it before the model is sharded, or after engine.detach()"
        )
    was = [shard.edited(False) for shard in flat.shards]
    if not is_guard:
        target.copy_(value)
    for shard, at, numel, start in flat.pieces(index):
        mine = shard.values[at : at + numel]
        master = fetch(mine)
        new = value.reshape(-1)[start : start + numel].to(master.device)
        values = torch.where(new == master.to(new.dtype), master, new.to(master.dtype))
        mine.copy_(values)
        flat.publish(shard, at, values)
    for shard, edited in zip(flat.shards, was):
        if not edited:
            shard.note()


def shown(flat: Flat, unit: str) -> None:
    """Where whole parameters are: `param.data` that someone has replaced is carried over."""
    moved = flat.moved(flat.addresses)
    if moved:
        values_of(flat, unit)
        for index in moved:
            take_over(flat, unit, index)
        flat.note_place()


def values_of(flat: Flat, unit: str) -> None:
    """Where whole parameters stay: what was written to them is carried over."""
    if flat.printed is None or digest(flat.place) == flat.printed:
        return
    if any(shard.edited() for shard in flat.shards if not shard.aliased):
        raise StateError(
            f"parameters of unit {unit!r} ({flat.span.spec.name!r}, …) and the optimizer's own tensors of them were both "
            "written since the last step: there is no telling which counts. Write one of them, or call engine.refresh() between"
        )
    carry(flat)
    flat.note_place()


def released(flat: Flat, unit: str) -> None:
    """Where parameters are released: replaced `.data` is carried over; other writes are lost.

    Raises:
        StateError: something was written in place; names the parameter.
    """
    replaced = flat.moved(flat.guards.addresses)
    for index in replaced:
        take_over(flat, unit, index, is_guard=True)
    for index in flat.counted():
        if index not in replaced:
            flat.guards.refuse(unit, index)


def in_use(flat: Flat, unit: Holding) -> None:
    """Before a release: what was written while the parameters were there is carried over."""
    if flat.unread:
        flat.unread = False
        return
    replaced, written = flat.moved(flat.addresses), flat.counted()
    if replaced or written or flat.watched:
        unit.close()
        if written:
            carry(flat)
        for low, high in () if written else changed(flat):
            carry(flat, low, high)
        for index in replaced:
            take_over(flat, unit.name, index)


def note_watched(flat: Flat) -> None:
    """After a gather: what `changed` compares with. A master that rests elsewhere is not read from there to be compared."""
    if flat.watched:
        flat.watched_digests = [] if flat.in_memory else [digest(flat.place[low:high]) for low, high in flat.watched]


def changed(flat: Flat) -> list[tuple[int, int]]:
    """Watched stretches that may hold other values than the masters."""
    if not flat.watched_digests:
        return flat.watched
    found = zip(flat.watched, flat.watched_digests)
    return [(low, high) for (low, high), was in found if digest(flat.place[low:high]) != was]


def watch(model: nn.Module, flats: Sequence[Flat]) -> None:
    """Frozen parameters that a forward may write through `.data`: small ones, of modules that are not torch's layers."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    for flat in flats:
        flat.watched, flat.watched_digests = [], []
        if not flat.span.trainable and not flat.in_files:
            flat.watched = list(_joined(flat, [any(map(_is_own, owners.get(param, ()))) for param in flat.params]))


def _is_own(module: nn.Module) -> bool:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return not type(module).__module__.startswith("torch.nn.") and type(module).__name__ not in _PLAIN_NAMES


def _joined(flat: Flat, wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """This rank's elements of them in its slice, in as few stretches as there are."""
    slots = {id(slot) for slot, is_ in zip(flat.span.slots, wanted) if is_ and slot.spec.numel <= WATCHED_NUMEL}
    low = high = -1
    for part in flat.span.overlaps(flat.rank):
        if id(part.source) not in slots:
            continue
        if part.start != high:
            if high > low:
                yield low, high
            low = part.start
        high = part.stop
    if high > low:
        yield low, high
