"""Values that somebody else wrote: parameters between steps and in a forward, the optimizer's masters between steps.

What is looked at, and when:

* where whole parameters stay (stages 0 to 2) and the master is other memory than what is computed with (a low-
  precision copy, an offloaded master): a digest of this rank's slice, taken when it was made and compared before the
  next step and before anyone reads the masters. Where the master is that memory itself there is nothing to carry.
* `param.data = x`: the address of the parameter's values, before a forward, a step, and a reader of the masters; at
  stage 3 with every gather and release.
* at stage 3, a write while a parameter is released gathers its unit (`reads.ReleasedParameter`).
* at stage 3, a write in a forward: the version counter, at release; values of small frozen parameters that a module
  of the user's own holds (code books) are compared as well, since `param.data.add_(1)` moves no counter. Trained ones
  (first values made of the first batch) are compared in some steps: see `WriteWatch.before_forward`.
* the optimizer's tensors (a schedule-free optimizer's `eval()`, SAM, Lookahead): their version counters, and a sample
  of the values for writes through `.data`, before every forward and step.

What is found is carried over: elements that differ from what was shown go into the master, the others keep what the
master knows more precisely. Every rank carries its own slice, so the same edit has to be made on every rank. That it was is
part of the agreement at the start of the next backward (`Edits`): a number, in the bytes that are sent anyway.

Where weights are gathered as codes (`Flat.codec`), what is shown is coarser than many an edit: a decay of 1e-4 made by hand
would put the rounding of every element into its master. An element that is written by less than half the distance of two codes
moves its master by as much; one that is written by more sets it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..comm.codec import BLOCK_NUMEL
from ..errors import StateError
from ..tiers.array import fetch
from ..tiers.fingerprint import digest
from .flat_param import Flat, State
from .looks import changed, look, uncounted, watch
from .reads import AsTheyAre


class Step(Protocol):
    """An update under way in another thread."""

    def wait(self) -> None: ...

    @property
    def is_done(self) -> bool: ...


class Unit(Protocol):
    """A unit of parameters (`unit.Unit`), as far as it is needed here."""

    name: str
    flats: list[Flat]
    trained: list[Flat]
    state: State
    stepping: Step | None
    written: str | None

    @property
    def in_memory(self) -> bool: ...

    def finish_step(self) -> None: ...

    def close(self) -> None: ...

    def drop_parts(self) -> None: ...

    def look_over(self) -> None: ...


class Edits:
    """What programs have written to whole parameters of one engine, as torch counts writes, or by `param.data = x`.

    Attributes:
        found: by parameter, the digest of its values after the last write. A write that is seen twice changes nothing.
        mark: a number of 31 bits that depends on `found` alone.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.mark = 0

    def note(self, flat: Flat, index: int, values: Tensor) -> None:
        """`values`: the whole parameter's."""
        if flat.span.shards == 1:
            return
        with AsTheyAre():
            found = digest(values.detach().contiguous().view(-1))
        name = flat.span.slots[index].spec.name
        self.mark = (self.mark + _mark(name, found) - _mark(name, self.found.get(name))) & 0x7FFFFFFF
        self.found[name] = found


def _mark(name: str, found: int | None) -> int:
    return 0 if found is None else zlib.crc32(f"{name} {found}".encode())


@torch.no_grad()
def carry(flat: Flat, low: int = 0, high: int | None = None) -> None:
    """Elements [low, high) of `place`: those that the masters do not give go into them and `own`."""
    high = flat.span.slice_numel if high is None else high
    known = None if flat.codec is None else flat.expected()  # before anything is written: blocks have one scale
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
        if not was:
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
            "a sharded parameter keeps its shape; change it before the model is sharded, or after engine.detach()"
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
    for shard, at, numel, start in flat.pieces(index):
        mine = shard.values[at : at + numel]
        master = fetch(mine)
        new = value.reshape(-1)[start : start + numel].to(master.device)
        values = torch.where(new == master.to(new.dtype), master, new.to(master.dtype))
        if known is not None:
            values = _moved(flat, known, shard.start + at, new, master, values)
        mine.copy_(values)
        if flat.codec is None or flat.own is not flat.place:
            flat.publish(shard, at, values)


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
    """Before replaced `.data` is copied to where the values were: who keeps views of those (`backup = p.data`) keeps them."""
    if flat.known_references and flat.references > flat.known_references - len(replaced):
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


def carry_in_use(flat: Flat, unit: Unit) -> bool:
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
        unit.close()
        if replaced:
            part_from_views(flat, replaced)
        if written:
            carry(flat)
            note_written(flat, written)
        for low, high in () if written else changed(flat):
            carry(flat, low, high)
        for index in replaced:
            take_over(flat, unit.name, index)
    return bool(replaced or written)


def note_written(flat: Flat, written: Iterable[int]) -> None:
    """These parameters (places in `params`), which are whole, were written in place."""
    if flat.edits is not None:
        for index in written:
            flat.edits.note(flat, index, flat.views[index])


class WriteWatch:
    """When one engine looks for values that somebody else wrote, and who follows them.

    Args:
        units: the engine's own list: a unit in it is replaced where it is cut anew, see `restart`.
        release: returns with nothing gathered and all masters those of one step.
        refresh: after masters were written, whole parameters follow, where the stage keeps them. A collective.
        followed: then, with these spans; it may communicate.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        release: Callable[[], None],
        refresh: Callable[[], None],
        followed: Callable[[list[Flat]], None],
    ) -> None:
        self._model, self._units = model, units
        self._release, self._refresh, self._followed = release, refresh, followed
        self.edits = Edits()
        self.restart()

    def restart(self) -> None:
        """The units' spans are new."""
        self._samples_at: object = None
        self._forwards = {True: 0, False: 0}  # with a graph, and without
        self.looks = False
        """At all trained parameters, in the forward under way and what follows it."""
        self.counts_references = True
        """Before the next forward; set where tensors over whole parameters are new."""
        self.optimizer_wrote = False
        """A method of the optimizer that torch's optimizers do not have was called: it may have written its tensors."""
        self._unit_of = {flat: unit for unit in self._units for flat in unit.flats}
        self._flats = [*self._unit_of]
        for flat in self._flats:
            flat.edits = self.edits
        self._keeps = any(flat.keeps for flat in self._flats)  # all or none
        self._params = [param for flat in self._flats for param in flat.params]
        self._versions = [param._version for param in self._params]
        """Of these, before the last forward."""
        self._placed: list[Tensor] = []
        """Where whole parameters stay: they and what they are views of."""
        self._addresses: list[int] = []
        """Of these, when they were as they should be."""
        if self._keeps:
            self._placed = [
                *(param for flat in self._flats for param in flat.params),
                *(flat.full for flat in self._flats),
            ]
        else:
            watch(self._model, self._flats)

    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Masters have what was written to parameters afterwards; of these spans, or of all. Without communication.

        Of some spans it looks at no others: it is called for every parameter of a loop over the model's.
        """
        for flat in self._flats if flats is None else flats:
            self._settle(self._unit_of[flat], flat)

    def _settle(self, unit: Unit, flat: Flat, *, values: bool = True) -> None:
        if self._keeps and unit.state is State.GATHERED:
            carry_replaced(flat, unit.name)
            if values:
                carry_written(flat, unit.name)
        elif not self._keeps and unit.state is State.SHARDED:
            with AsTheyAre():
                replaced = flat.moved(flat.guards.addresses)
            if replaced:
                unit.finish_step()
                unit.close()
                unit.drop_parts()
                carry_given(flat, unit.name)
        elif not self._keeps:
            unit.look_over()

    def before_forward(self, now: object, *, values: bool) -> None:
        """What everybody computes with follows what was written. A collective where masters were.

        Trained parameters that were written through `.data` are looked for in forwards 1, 2, 4, ..., by two digests of all
        values, and where they are released in the backwards after those; there those of modules with such code (`names_data`),
        and such as were found, are looked at in every pass.

        Args:
            now: other than the last time: the optimizer's tensors are looked at closely.
            values: parameters, too: their step comes before `before_step`.
        """
        if self._keeps and not self._in_place():
            for unit in self._units:
                if unit.state is State.GATHERED:
                    for flat in unit.flats:
                        carry_replaced(flat, unit.name)
            self._note()
        if self._keeps and self.counts_references:
            self.counts_references = False
            for flat in self._flats:
                flat.known_references = flat.references
        if self._keeps:
            if values:
                self._values()
            versions = [param._version for param in self._params]
            if versions != self._versions:
                self._versions = versions
                for flat in self._flats:
                    note_written(flat, flat.counted())
        graph = torch.is_grad_enabled()
        count = self._forwards[graph] = self._forwards[graph] + 1
        if self.looks or not count & (count - 1):
            self._set_looks(not count & (count - 1))
        closely, self._samples_at = now != self._samples_at, now
        self.follow(closely)

    def follow(self, closely: bool = True) -> None:
        """What everybody computes with follows what was written to the optimizer's tensors. A collective where it was."""
        written = self._masters(closely)
        if not written:
            return
        if self._keeps:
            self.settle()
            self._refresh()
        else:
            self._release()
            for flat in written:
                flat.refresh()
        self._followed(written)

    def _set_looks(self, looks: bool) -> None:
        self.looks = looks
        for unit in self._units:
            for flat in unit.trained:
                flat.looked = {}
                flat.looks = [*flat.looks_always]
                if looks and not (self._keeps and flat.span.shards == 1):
                    flat.looks = range(len(flat.params))
                    if self._keeps and unit.state is State.GATHERED:  # others, as soon as they are
                        look(flat)

    def before_backward(self) -> None:
        """What was written so far counts before the step. Where whole parameters stay, writes through `.data` are told."""
        for unit in self._units:
            unit.written = None
            for flat in unit.trained if self._keeps else ():
                note_written(flat, uncounted(flat, set()))

    def before_step(self, *, in_backward: bool) -> None:
        """Masters and what is computed with are one before they are updated. Without communication.

        Args:
            in_backward: updates are under way since then, in another thread: a later write has nothing to be carried into.

        Raises:
            StateError: a parameter that is being updated was written; names it.
        """
        if self._keeps and in_backward:
            for unit in self._units:
                for flat in unit.trained if unit.state is State.GATHERED else ():
                    if unit.in_memory:
                        self._settle(unit, flat, values=flat.span.is_updated)
                    elif flat.span.is_updated:
                        late = flat.counted() or flat.moved(flat.addresses)
                        if late:
                            self._refuse_late(flat.span.slots[late[0]].spec.name)
            self._note()
        elif self._keeps and self._in_place():
            self._values()
        else:
            for unit in self._units:
                if in_backward and unit.written is not None:
                    self._refuse_late(unit.written)
                for flat in unit.flats:
                    self._settle(unit, flat, values=flat.span.is_updated)
            self._note()
        if self.looks and self._keeps:
            self._set_looks(False)  # they change now
        for flat in self._masters(True):
            flat.refresh()
            flat.stale = flat.stale or flat.keeps

    @staticmethod
    def _refuse_late(name: str) -> NoReturn:
        raise StateError(
            f"parameter {name!r} was written between the beginning of a forward and the step: with step_in_backward it is "
            "updated in backward already, and the write would be lost. Write parameters after optimizer.step(), or turn "
            "step_in_backward off"
        )

    def _in_place(self) -> bool:
        """Whether no parameter's `.data` was replaced since `_note`: one look at all addresses."""
        for flat in self._flats:
            if flat.pinned:
                return False
        return list(map(Tensor.data_ptr, self._placed)) == self._addresses

    def _note(self) -> None:
        """Every parameter is where it should be."""
        gathered = True
        for unit in self._units:
            gathered = gathered and unit.state is State.GATHERED
        for flat in self._flats:
            gathered = gathered and not flat.pinned
        self._addresses = list(map(Tensor.data_ptr, self._placed)) if self._keeps and gathered else []

    def _values(self) -> None:
        """What was written to whole parameters is carried over."""
        for unit in self._units:
            for flat in unit.trained:
                if flat.printed is not None and flat.span.is_updated and unit.state is State.GATHERED:
                    carry_written(flat, unit.name)

    def _masters(self, closely: bool) -> list[Flat]:
        found, wrote = [], self.optimizer_wrote
        counted, self.optimizer_wrote = wrote, False
        for unit in self._units:
            at_work = unit.stepping is not None and not unit.stepping.is_done
            for flat in unit.trained:
                if not flat.span.is_updated:
                    continue
                edited = False
                for shard in flat.shards:
                    if shard.seen is None or (at_work and shard.is_offloaded):
                        continue
                    if shard.master._version != shard.seen[0]:
                        edited = counted = True
                    elif closely and not shard.aliased and shard.edited():
                        edited = True
                if edited or wrote:
                    found.append(flat)
        if found and not counted and found[0].keeps and found[0].span.shards > 1:
            # Whether another rank sees it is not known: its part may be none of what was written.
            raise StateError(
                f"the optimizer's tensors ({found[0].span.spec.name!r} first) were written through `.data` since the "
                "last step: nothing counts such writes, so ranks cannot agree to carry them over. Write the tensors themselves "
                "under torch.no_grad(), or call engine.refresh() on every rank right afterwards"
            )
        return found
