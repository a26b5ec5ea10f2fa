"""Values that somebody else wrote to parameters: found by versions, addresses and digests, and carried into the masters.

Elements that differ from what was shown go into the master, the others keep what the master knows more precisely. Every rank
carries its own slice, so the same edit has to be made on every rank. `writes` says when an engine looks.

Where weights are gathered as codes (`Flat.codec`), what is shown is coarser than many an edit: a decay of 1e-4 made by hand
would put the rounding of every element into its master. An element that is written by less than half the distance of two codes
moves its master by as much; one that is written by more sets it.

Writes through `.data` torch does not count. Frozen parameters that a module of the user's own holds (code books) are compared
in every pass, this rank's elements with the masters; trained ones whole, since all ranks have to find the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from ...comm.codec import BLOCK_NUMEL
from ...errors import StateError
from ...tiers.array import fetch
from ...tiers.fingerprint import digest
from .flat_param import Flat
from .reads import AsTheyAre

WATCHED_NUMEL = 1 << 22
"""Frozen parameters of a module of the user's own are compared at every release up to this size."""
_PLAIN_NAMES = frozenset({"Conv1D"})
_AT_FIRST = frozenset({"__init__", "init_weights", "_init_weights", "reset_parameters", "_reset_parameters"})
"""What is called when a module is made."""


@torch.no_grad()
def carry(flat: Flat, low: int = 0, high: int | None = None) -> None:
    """Elements [low, high) of `place`: those that the masters do not give go into them and `own`."""
    high = flat.span.slice_numel if high is None else high
    known = None if flat.codec is None else flat.expected()  # before anything is written: blocks have one scale
    width = flat.storage.sizes.block_numel
    for shard in flat.shards:
        if shard.aliased and flat.own is flat.place:
            continue
        was = shard.edited(False)  # asked before `target` is written below, which counts as a write to the master
        for at in range(max(low, shard.start), min(high, shard.stop), width):
            stop = min(at + width, high, shard.stop)
            target = shard.values[at - shard.start : stop - shard.start]
            master = fetch(target)
            shown = flat.place[at:stop].to(master.device)
            expected = master.to(flat.compute_dtype) if known is None else known[at:stop].to(master.device)
            differs = shown != expected
            if known is not None:  # one value that is not finite makes all of its block NaN
                differs &= ~(shown.isnan() & expected.isnan())
            if master.device.type == "cpu" and not bool(differs.any()):
                continue
            values = torch.where(differs, shown.to(master.dtype), master)
            if known is not None:
                values = _moved(flat, known, at, shown, master, values)
            target.copy_(values)
            if known is None or flat.own is not flat.place:  # else it shows what was written, on all ranks
                flat.publish(shard, at - shard.start, values)
        if not was:  # else `WriteWatch.follow` has still to see that the optimizer's tensors were written
            shard.note()
    if known is not None:
        flat.remember()


def _moved(flat: Flat, known: Tensor, at: int, new: Tensor, master: Tensor, values: Tensor) -> Tensor:
    """`values`, what elements from `at` on of the slice are to be; those that were written by less than a rounding are moved.

    Args:
        known: what the whole slice showed.
        new: what was written.
    """
    if flat.codec is None:
        return values
    stop, first = at + new.numel(), at // BLOCK_NUMEL * BLOCK_NUMEL
    last = -(-stop // BLOCK_NUMEL) * BLOCK_NUMEL
    step = flat.codec.step(known[first:last])[at - first : stop - first].to(master.device, master.dtype)
    change = new.to(master.dtype) - known[at:stop].to(master.device, master.dtype)
    moved = torch.where(change.abs() < step / 2, master + change, values)
    return torch.where(new == master.to(new.dtype), master, moved)  # the exact value, read from somewhere


@torch.no_grad()
def take_over(flat: Flat, unit: str, index: int, *, is_guard: bool = False) -> None:
    """`param.data = x`: this rank's elements go into the masters, all of x into what the parameter points at again."""
    param, target = flat.params[index], (flat.guards.shown if is_guard else flat.views)[index]
    name = flat.span.slots[index].spec.name
    with AsTheyAre():
        value = param.data
        param.data = target
    if flat.edits is not None:
        flat.edits.note(flat, index, value)
    if value.shape != target.shape:
        raise StateError(
            f"parameter {name!r} of unit {unit!r} was given `.data` of {tuple(value.shape)}, expected {tuple(target.shape)}: "
            "a sharded parameter keeps its shape. Change it before the model is sharded, or after "
            "zero.engine_of(model).detach()"
        )
    was = [shard.edited(False) for shard in flat.shards]  # `target` may be a master's memory
    known = None if flat.codec is None else flat.expected()  # before `target`, which may be part of it, is written
    if not is_guard:
        target.copy_(value)
    _put(flat, index, value, known)
    if not is_guard:
        flat.remember()
    for shard, edited in zip(flat.shards, was):
        if not edited:
            shard.note()


@torch.no_grad()
def put(flat: Flat, index: int, value: Tensor) -> None:
    """A parameter's whole value: this rank's elements go into the masters. An element that has not changed keeps its digits."""
    was = [shard.edited(False) for shard in flat.shards]
    _put(flat, index, value)
    for shard, edited in zip(flat.shards, was):
        if not edited:
            shard.note()


def _put(flat: Flat, index: int, value: Tensor, known: Tensor | None = None) -> None:
    """`known`: what the slice showed, where that were not the masters as they are."""
    for shard, piece in flat.pieces(index):
        mine = shard.values[piece.here]
        master = fetch(mine)
        new = value.reshape(-1)[piece.there].to(master.device)
        values = torch.where(new == master.to(new.dtype), master, new.to(master.dtype))
        if known is not None:
            values = _moved(flat, known, shard.start + piece.start, new, master, values)
        mine.copy_(values)
        if flat.codec is None or flat.own is not flat.place:
            flat.publish(shard, piece.start, values)


def carry_replaced(flat: Flat, unit: str) -> None:
    """Where whole parameters are: `param.data` that someone has replaced is carried over."""
    moved = flat.moved(flat.addresses)
    if moved:
        part_from_views(flat, moved)
        carry_written(flat, unit)
        for index in moved:
            take_over(flat, unit, index)
        flat.note_place()


def part_from_views(flat: Flat, replaced: list[int]) -> None:
    """Before replaced `.data` is copied to where the values were: who keeps views of those (`backup = p.data`) keeps them.

    What a parameter was given may be such a view itself (`p.data = p.data.t()`, two parameters that change places): it would be
    overwritten before, or while, it is read.
    """
    with AsTheyAre():
        is_own = any(flat.has_memory_of(flat.params[index]) for index in replaced)
    if is_own or (flat.known_references and flat.references > flat.known_references - len(replaced)):
        flat.leave_storage()
        flat.known_references = flat.references + len(replaced)


def carry_written(flat: Flat, unit: str) -> None:
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


def carry_given(flat: Flat, unit: str) -> None:
    """Where parameters are released: replaced `.data` is carried over."""
    with AsTheyAre():
        for index in flat.moved(flat.guards.addresses):
            take_over(flat, unit, index, is_guard=True)


def carry_in_use(flat: Flat, unit: str, close: Callable[[], None]) -> bool:
    """Before a release: what was written while the parameters were there is carried over.

    Returns:
        Whether torch counts a write, or `param.data` was replaced: what a gather brings in may be other than what is shown.
    """
    if flat.unread:
        flat.unread = False
        return False
    replaced, written = flat.moved(flat.addresses), flat.counted()
    if flat.looked:
        written += uncounted(flat, {*replaced, *written})
    if replaced or written or flat.watched:
        close()
        if replaced:
            part_from_views(flat, replaced)
        if written:
            carry(flat)
            note_written(flat, written)
        for low, high in () if written else changed(flat):
            carry(flat, low, high)
        for index in replaced:
            take_over(flat, unit, index)
    return bool(replaced or written)


def carry_casts(flat: Flat, *, all_: bool = True) -> None:
    """What was written to parameters that are shown in another type (`Flat.show_in`) is carried over.

    Args:
        all_: also what torch does not count.
    """
    with AsTheyAre():
        if flat.casts and (all_ or flat.was_written or flat.has_replaced_casts):
            note_written(flat, [index for index in flat.merge_casts() if index not in flat.pinned])


def note_written(flat: Flat, written: Iterable[int]) -> None:
    """These parameters (places in `params`), which are whole, were written in place."""
    if flat.edits is not None:
        for index in written:
            flat.edits.note(flat, index, flat.views[index])


# Writes that torch does not count -----------------------------------------------------------------------------------


def look(flat: Flat) -> None:
    """Values are there: what `uncounted` compares with."""
    with AsTheyAre():
        flat.looked = {index: digest(flat.views[index].reshape(-1)) for index in flat.looks}


def uncounted(flat: Flat, known: Set[int]) -> list[int]:
    """Parameters (places in `params`) that were written since, through `.data`. Such are looked at in every step from now on.

    Whole parameters are compared, and not this rank's elements: which were written all ranks have to find alike.

    Args:
        known: to be written, or to point elsewhere.
    """
    with AsTheyAre():
        found = [
            index
            for index, was in flat.looked.items()
            if index not in known and digest(flat.views[index].reshape(-1)) != was
        ]
    flat.looked = {}
    flat.looks_always.update(found)
    return found


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
    """Parameters that a forward may write through `.data`.

    Of frozen ones small ones, of modules that are not torch's layers; of trained ones those of modules whose code says so.
    """
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, []).append(module)
    says = {kind: names_data(kind) for kind in {type(module) for module in model.modules()}}
    writers = {module for module in model.modules() if says[type(module)]}
    for flat in flats:
        flat.watched, flat.watched_digests = [], []
        if flat.span.trainable:
            flat.looks_always.update(
                i for i, param in enumerate(flat.params) if not writers.isdisjoint(owners.get(param, ()))
            )
        elif not flat.in_files:
            flat.watched = list(_joined(flat, [any(map(_is_own, owners.get(param, ()))) for param in flat.params]))


def names_data(kind: type[nn.Module]) -> bool:
    """Whether code of a module's class, other than torch's, has an attribute `data`: it may write its parameters by it."""
    for each in kind.__mro__:
        for name, value in vars(each).items() if not each.__module__.startswith("torch.") else ():
            code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
            if code is not None and name not in _AT_FIRST and "data" in code.co_names:
                return True
    return False


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
