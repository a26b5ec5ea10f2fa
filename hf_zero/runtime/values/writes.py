"""Values that somebody else wrote: parameters between steps and in a forward, the optimizer's masters between steps.

What is looked at, and when:

* where whole parameters stay (stages 0 to 2) and the master is other memory than what is computed with: a digest of this
  rank's slice, taken when it was made and compared before the next step and before anyone reads the masters.
* `param.data = x`: the address of the parameter's values, before a forward, a step, and a reader of the masters; at
  stage 3 with every gather and release.
* at stage 3, a write while a parameter is released gathers its unit (`reads.ReleasedParameter`).
* at stage 3, a write in a forward: the version counter, at release; values of small frozen parameters that a module of the
  user's own holds are compared as well. Trained ones are compared in some steps: see `WriteWatch.before_forward`.
* the optimizer's tensors (a schedule-free optimizer's `eval()`, SAM, Lookahead): their version counters, and a sample
  of the values for writes through `.data`, before every forward and step.

What is found is carried over (`carrying`). That ranks have made the same edits is part of the agreement at the start of the
next backward (`flat_param.Edits`): a number, in the bytes that are sent anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import StateError
from .carrying import carry_given, carry_replaced, carry_written, look, note_written, uncounted, watch
from .flat_param import Edits, Flat
from .reads import AsTheyAre
from .state_shard import Shard
from .unit import State, Unit


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
        self._addresses: list[Any] = []
        """Of these, and their strides, when they were as they should be."""
        if self._keeps:
            self._placed = [*self._params, *(flat.full for flat in self._flats)]
        else:
            watch(self._model, self._flats)

    def count_references(self) -> None:
        """Tensors over whole parameters are new, all of them ours. Before the program can take a view, or give one parameter
        the memory of another: who has such memory is found by one reference more, see `carrying.part_from_views`."""
        if self._keeps:
            for flat in self._flats:
                flat.known_references = flat.references

    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Masters have what was written to parameters afterwards; of these spans, or of all. Without communication.

        Of some spans it looks at no others: it is called for every parameter of a loop over the model's.
        """
        for flat in self._flats if flats is None else flats:
            self._settle(self._unit_of[flat], flat)

    def _settle(self, unit: Unit, flat: Flat, *, values: bool = True) -> None:
        if flat.wholes is not None:
            flat.settle_wholes()
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
            if flat.pinned or flat.casts:
                return False
        return [*map(Tensor.data_ptr, self._placed), *map(Tensor.stride, self._placed)] == self._addresses

    def _note(self) -> None:
        """Every parameter is where it should be."""
        gathered = True
        for unit in self._units:
            gathered = gathered and unit.state is State.GATHERED
        for flat in self._flats:
            gathered = gathered and not (flat.pinned or flat.casts)
        self._addresses = []
        if self._keeps and gathered:
            self._addresses = [*map(Tensor.data_ptr, self._placed), *map(Tensor.stride, self._placed)]

    def _values(self) -> None:
        """What was written to whole parameters is carried over."""
        for unit in self._units:
            for flat in unit.trained:
                if flat.printed is not None and flat.span.is_updated and unit.state is State.GATHERED:
                    carry_written(flat, unit.name)

    def _masters(self, closely: bool) -> list[Flat]:
        found: list[Flat] = []
        aliases: list[tuple[Flat, Shard]] = []
        wrote = self.optimizer_wrote
        counted, self.optimizer_wrote = wrote, False
        with AsTheyAre():
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
                        elif closely and shard.aliased:
                            aliases += ((flat, shard),)
                        elif closely and shard.edited():
                            edited = True
                    edited = edited or (closely and flat.wholes is not None and flat.has_moved_wholes)
                    if edited or wrote:
                        found.append(flat)
        # All at once, without a call for each.
        places = [*map(Tensor.data_ptr, [shard.master for _, shard in aliases])]
        if places != [shard.home for _, shard in aliases]:
            moved = [flat for (flat, shard), place in zip(aliases, places) if place != shard.home]
            found += [flat for flat in dict.fromkeys(moved) if flat not in found]
        if found and not counted and found[0].keeps and found[0].span.shards > 1:
            # Whether another rank sees it is not known: its part may be none of what was written.
            raise StateError(
                f"the optimizer's tensors ({found[0].span.spec.name!r} first) were written through `.data` since the "
                "last step: nothing counts such writes, so ranks cannot agree to carry them over. Write the tensors themselves "
                "under torch.no_grad(), or call engine.refresh() on every rank right afterwards"
            )
        return found
