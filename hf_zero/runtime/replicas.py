"""What every rank must have alike, compared: options of the optimizer's groups and what programs have written to parameters
always, values where `debug=True`.

The former travel as a number in the agreement at the start of each backward, in one with the step's (`Options.mark`). Values
are compared by fingerprints (`tiers.fingerprint`); only where these differ do the ranks exchange what they have.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm.wire import SoloWire
from ..errors import RankMismatchError
from ..tiers.array import in_memory
from ..tiers.fingerprint import fingerprint
from .buffers import Buffers
from .saved_tensors import in_backward_of_any
from .values.flat_param import Edits, Flat
from .values.reads import AsTheyAre
from .values.sharded import Sharded
from .values.unit import State, Unit

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
_PLAIN = _NUMBERS | {tuple}
_SHORT_NUMEL = 16
"""Tensors of so many elements are options (`lr`) and counters (`step`), compared by value."""

_GIVEN, _WRITTEN = "value given", "weight written"
_EVERYWHERE = (_GIVEN, _WRITTEN)
"""Kinds of things that a rank without one differs in: others are not there where a rank did not use a unit."""

Named = tuple[str, str]
"""What kind of thing, one of `_CAUSES`; which one."""

_CAUSES = {
    "option": "Set it on every rank: a scheduler that steps on one rank alone, a branch on the rank, a random search "
    "without a seed, a sum over optimizer.state, which has this rank's slices (zero.full_optimizer_state(param, name) gives "
    "whole states)",
    "flag": "Freeze and unfreeze parameters on every rank alike",
    "count": "The optimizer has made other steps there: its state was loaded or changed on some ranks alone",
    "buffer": "It was written through `.data`, which torch does not count, so it was not sent before this forward: write "
    "to the buffer itself, or on every rank alike",
    _WRITTEN: "Ranks hold parts of one model: write to its parameters on every rank alike (random numbers by a "
    "generator with the same seed), or inside zero.GatheredParameters(params, modifier_rank=0)",
    "weight before the step": "Write parameters on every rank alike, or inside zero.GatheredParameters(params, "
    "modifier_rank=0)",
    "weight after the step": "It was the same everywhere before this step: an optimizer that draws random numbers or asks for "
    "the rank, or bytes that the network or the memory changed",
    "gathered weight": "All ranks were sent the same slices: bytes that the network or the memory changed",
    "weight after a forward": "A forward has written to it with what this rank alone has seen: use a buffer, or write the "
    "same on every rank",
    _GIVEN: "`param.data = x` had another x there: assign the same on every rank, or use zero.set_full_parameter",
}
"""What a difference in this kind of thing comes from, and what to do."""


def first_difference(everyone: Sequence[Mapping[Named, Any]]) -> tuple[Named, dict[int, Any]] | None:
    """Of what ranks have under the same name, the first that is not the same on all; rank -> value."""
    names = dict.fromkeys(name for mine in everyone for name in mine)
    for name in names:
        found = {rank: mine.get(name) for rank, mine in enumerate(everyone) if name in mine or name[0] in _EVERYWHERE}
        if len({repr(value) for value in found.values()}) > 1:
            return name, found
    return None


def odd_ones(found: Mapping[int, Any]) -> list[int]:
    """Ranks that have another value than most; where no value is had by most, other than the first rank's."""
    counted = Counter(repr(value) for value in found.values())
    usual = max(counted, key=lambda value: (counted[value], value == repr(found[min(found)])))
    return [rank for rank, value in found.items() if repr(value) != usual]


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Options:
    """The options of the optimizers' groups that are plain values or short tensors in host memory: `lr`, `betas`, …

    Args:
        sharded: whose optimizers, which may be others later.
        edits: what programs have written to parameters: part of the mark.
    """

    def __init__(self, sharded: Sharded, edits: Edits) -> None:
        self._sharded, self._edits = sharded, edits
        self._seen: list[Any] = []
        self._mark = 0
        self._again = True  # some may change in place

    def mark(self) -> int:
        """A number: other options or edits give another. In every backward: a few calls where nothing has changed."""
        optimizers, edits = self._sharded.optimizers, self._edits.mark
        if not optimizers:
            return edits
        now = [v for each in optimizers for group in each.param_groups for v in group.values() if type(v) in _PLAIN]
        if self._again or now != self._seen:
            self._seen, self._again = now, False
            self._mark = zlib.crc32(repr(self.named()).encode()) & 0x7FFFFFFF
        return self._mark + edits

    def named(self) -> dict[Named, Any]:
        out: dict[Named, Any] = {}
        optimizers = self._sharded.optimizers
        groups = [(n, i, group) for n, each in enumerate(optimizers) for i, group in enumerate(each.param_groups)]
        for number, index, group in groups:
            which = f" of optimizer {number}" if len(optimizers) > 1 else ""
            for key, value in group.items():
                if key in ("params", "param_names"):
                    continue
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    continue  # reading it would wait for the device in every backward
                self._again = self._again or type(value) not in _PLAIN
                plain = _plain(value)
                if plain is not None:
                    out["option", f"{key!r} of the optimizer's group {index}{which}"] = plain[0]
        return out

    def explain(self, wire: SoloWire, sends: bool) -> NoReturn:
        """Ranks have other options, edits or numbers of steps, or only some reduce gradients; all know. A collective.

        Raises:
            RankMismatchError: with the first difference.
        """
        written = {(_WRITTEN, f"parameter {name!r}"): found for name, found in self._edits.found.items()}
        told = wire.exchange((wire.watch.step, self.named() | written, sends))
        steps = [step for step, *_ in told]
        if len(set(steps)) > 1:
            raise RankMismatchError(
                f"ranks average the gradients of different steps: rank {wire.rank} has made {wire.watch.step} optimizer steps, "
                f"others from {min(steps)} to {max(steps)}. Call optimizer.step() on every rank or on none, and use "
                "no_sync for the same micro-batches; their parameters may differ now, so go on from the last checkpoint"
            )
        waiting = [rank for rank, (*_, each) in enumerate(told) if not each]
        if 0 < len(waiting) < len(told):
            raise RankMismatchError(
                f"ranks disagree in no_sync: this backward of step {wire.watch.step} leaves its gradients on rank(s) "
                f"{', '.join(map(str, waiting))}, inside no_sync(defer=True), and sends them on the others. Use no_sync, with "
                "the same `defer`, for the same micro-batches on every rank"
            )
        refuse_difference([named for _, named, _ in told], wire.watch.step)
        raise RankMismatchError("ranks have other options in their optimizer's groups: set the same on every rank")


def _plain(value: Any) -> tuple[Any] | None:
    """In a tuple of one; None for what cannot be compared between processes."""
    if type(value) in _NUMBERS:
        return (value,)
    if isinstance(value, Tensor):
        return (value.tolist(),) if value.numel() <= _SHORT_NUMEL and not value.is_meta else None
    if isinstance(value, (tuple, list)):
        inner = [_plain(each) for each in value]
        return None if None in inner else ([each[0] for each in inner if each is not None],)
    return None


def refuse_difference(
    everyone: Sequence[Mapping[Named, Any]], step: int, written: Sequence[Mapping[str, bool]] = ()
) -> None:
    """
    Args:
        written: by rank, the names of weights, and whether they were written since the last step.

    Raises:
        RankMismatchError: ranks have other values under one name; with these where they are short, and the likely cause.
    """
    difference = first_difference(everyone)
    if difference is None:
        return
    (kind, name), found = difference
    odd = odd_ones(found)
    usual = next(rank for rank in found if rank not in odd)
    value, others = repr(found[usual]), repr(found[odd[0]])
    values = f" ({value} on rank {usual}, {others} on rank {odd[0]})" if kind in ("option", "flag", "count") else ""
    writers = [rank for rank, mine in enumerate(written) if mine.get(name)]
    note = f"It was written on {ranks_text(writers)} since the last step. " if writers else ""
    raise RankMismatchError(
        f"ranks differ in step {step}: {name} is not on {ranks_text(odd)} what it is on rank {usual}{values}. "
        f"{note}{_CAUSES[kind]}"
    )


class Replicas:
    """What of one sharded model all ranks must have alike, looked at in `debug` on several ranks. Looking sends nothing.

    Values of ranks are compared in `compare`, where every rank is in every step: forwards may differ in number.
    """

    def __init__(self, sharded: Sharded, buffers: Buffers) -> None:
        self._sharded, self._buffers = sharded, buffers
        self._in_pass: dict[Named, Any] = {}
        self._after: dict[str, Any] = {}  # weights as they were after the last step that was looked at

    def before_forward(self, graph: bool) -> None:
        """After rank 0's buffers were sent, and before parameters that were replaced are carried over."""
        self._look_for_replaced()
        if self._sharded.config.step_in_backward and not self._in_pass:  # at the step owners have new slices already
            self._in_pass |= {("weight before the step", name): value for name, value in self._weights().items()}
        if graph and self._buffers.are_sent and not any(kind == "buffer" for kind, _ in self._in_pass):
            for name, ((shape, dtype), value) in self._buffers.prints().items():
                # Another shape or type is another name: such ones each rank keeps for itself, as has been said.
                self._in_pass["buffer", f"buffer {name!r} ({dtype} {shape})"] = value

    def gathered(self, unit: Unit) -> None:
        """Where parameters are released, a forward of the unit begins."""
        self._look_at(unit, "gathered weight")

    def used(self, unit: Unit) -> None:
        """It is over, and the unit is still there."""
        if unit.state is State.GATHERED:
            self._look_at(unit, "weight after a forward")

    def _look_at(self, unit: Unit, kind: str) -> None:
        if unit.policy.keep_full or unit.shows_whole or in_backward_of_any():
            return
        for flat in unit.flats:
            for slot in flat.span.slots:
                name = (kind, _parameter(slot.spec.name, unit))
                if name not in self._in_pass:
                    self._in_pass[name] = _print(flat.full[slot.offset : slot.stop])

    def _look_for_replaced(self) -> None:
        """Where parameters are released, `param.data = x` is carried over by slices: each rank's own x counts for a part."""
        for unit in self._sharded.units:
            if unit.state is State.SHARDED and not unit.policy.keep_full and not unit.shows_whole:
                with AsTheyAre():  # on this rank alone, maybe
                    for flat in unit.flats:
                        for index in flat.moved(flat.guards.addresses):
                            name = flat.span.slots[index].spec.name
                            self._in_pass[_GIVEN, _parameter(name, unit)] = _print(flat.params[index].data)

    def before_step(self, values: bool) -> tuple[dict[Named, Any], dict[str, Any]]:
        """What to compare, and weights that were written since the last step. Nothing is under way.

        Args:
            values: weights and buffers, too, not only what is small.
        """
        self._look_for_replaced()
        found: dict[Named, Any] = {
            ("flag", f"requires_grad of {_parameter(slot.spec.name, unit)}"): param.requires_grad
            for unit in self._sharded.units
            for flat in unit.flats
            for slot, param in zip(flat.span.slots, flat.params)
        }
        found |= dict(self._counts())
        written: dict[str, Any] = {}
        if values:
            weights = {} if self._sharded.config.step_in_backward else self._weights()
            written = {name: value != self._after[name] for name, value in weights.items() if name in self._after}
            found |= {("weight before the step", name): value for name, value in weights.items()}
            found |= self._in_pass
        self._in_pass, self._after = {}, {}
        return found, written

    def after_step(self) -> dict[Named, Any]:
        self._after = self._weights()
        return {("weight after the step", name): value for name, value in self._after.items()}

    def _weights(self) -> dict[str, Any]:
        """Where whole parameters stay."""
        return {
            _parameter(slot.spec.name, unit): _print(param.data)
            for unit in self._sharded.units
            if unit.policy.keep_full
            for flat in unit.flats
            for slot, param in zip(flat.span.slots, flat.params)
        }

    def _counts(self) -> Iterator[tuple[Named, Any]]:
        """States of the optimizer that are one value for a parameter (`step`)."""
        for unit in self._sharded.units:
            for flat in unit.trained:
                optimizer = self._sharded.optimizer_of(flat)
                if optimizer is not None:
                    for name, key, value in _single_states(flat, optimizer):
                        plain = _plain(value)
                        if plain is not None:
                            yield ("count", f"the optimizer's {key!r} of {_parameter(name, unit)}"), plain[0]

    def compare(self, step: int, found: Mapping[Named, Any], written: Mapping[str, bool] | None = None) -> None:
        """A collective.

        Raises:
            RankMismatchError: on every rank, with the first difference.
        """
        wire = self._sharded.wire
        if len(set(wire.exchange(zlib.crc32(repr(sorted(found.items())).encode())))) == 1:
            return
        told = wire.exchange((dict(found), dict(written or {})))
        refuse_difference([named for named, _ in told], step, [mine for _, mine in told])


def _single_states(flat: Flat, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """Parameter, name of the state, value."""
    if flat.wholes is not None:
        if not flat.span.cuts:  # else each has one owner: there is nothing to compare
            for index, entries in flat.whole_entries(optimizer).items():
                for key, value in entries.items():
                    yield flat.span.slots[index].spec.name, str(key), in_memory(value)
        return
    for key, elementwise in flat.state_names(optimizer).items():
        if not elementwise:
            yield flat.span.spec.name, key, flat.state(optimizer, key)


def _parameter(name: str, unit: Unit) -> str:
    return f"parameter {name!r} of unit {unit.name!r}"


def _print(values: Tensor) -> list[int]:
    prints: list[int] = fingerprint(values.detach()).tolist() if values.numel() else []
    return prints
