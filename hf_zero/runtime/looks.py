"""Which parameters somebody has written through `.data`, which torch does not count: their values, before and after.

Frozen ones that a module of the user's own holds (code books) are compared in every pass, this rank's elements with the
masters. Trained ones are compared whole, since all ranks have to find the same (`writes.WriteWatch.before_forward` says when).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set

from torch import nn

from ..tiers.fingerprint import digest
from .flat_param import Flat
from .reads import AsTheyAre

WATCHED_NUMEL = 1 << 22
"""Frozen parameters of a module of the user's own are compared at every release up to this size."""
_PLAIN_NAMES = frozenset({"Conv1D"})
_AT_FIRST = frozenset({"__init__", "init_weights", "_init_weights", "reset_parameters", "_reset_parameters"})
"""What is called when a module is made."""


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
