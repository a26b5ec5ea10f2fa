"""When an engine looks for values that somebody else wrote (see `writes`), and who is to follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ..errors import StateError
from .flat_param import Flat
from .unit import State, Unit
from .writes import released, shown, values_of, watch


class Edits:
    """One engine's look-out."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._units = units
        self._samples_at: object = None
        self.optimizer_wrote = False
        """A method of the optimizer that torch's optimizers do not have was called: it may have written its tensors."""
        self._keeps = units[0].policy.keep_full
        flats = [flat for unit in units for flat in unit.flats]
        self._placed: list[Tensor] = []
        """Where whole parameters stay: they and what they are views of."""
        self._addresses: list[int] = []
        """Of these, when they were as they should be."""
        if self._keeps:
            self._placed = [*(param for flat in flats for param in flat.params), *(flat.full for flat in flats)]
        else:
            watch(model, flats)
        self._flats = flats

    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Masters have what was written to parameters afterwards; of these spans, or of all. Without communication."""
        wanted = None if flats is None else set(flats)
        for unit in self._units:
            for flat in unit.flats:
                if wanted is None or flat in wanted:
                    self._settle(unit, flat)

    def _settle(self, unit: Unit, flat: Flat, *, values: bool = True) -> None:
        if unit.policy.keep_full and unit.state is State.GATHERED:
            shown(flat, unit.name)
            if values:
                values_of(flat, unit.name)
        elif not unit.policy.keep_full and unit.state is State.SHARDED:
            if flat.moved(flat.guards.addresses):
                unit.finish_step()
                unit.close()
            released(flat, unit.name)

    def before_forward(self, now: object, *, values: bool) -> list[Flat]:
        """What everybody computes with follows what was written.

        Args:
            now: other than the last time: the optimizer's tensors are looked at closely.
            values: parameters, too: their step comes before `before_step`.

        Returns:
            Spans whose masters the user has written: they are to be published.
        """
        if self._keeps and not self._in_place():
            for unit in self._units:
                if unit.state is State.GATHERED:
                    for flat in unit.flats:
                        shown(flat, unit.name)
            self._note()
        if self._keeps and values:
            self._values()
            for flat in self._flats:
                flat.counted()  # known from here on, see `_refuse_late`
        closely, self._samples_at = now != self._samples_at, now
        return self._masters(closely)

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
                        self._refuse_late(flat)
            self._note()
        elif self._keeps and self._in_place():
            self._values()
        else:
            for unit in self._units:
                for flat in unit.flats:
                    self._settle(unit, flat, values=flat.span.is_updated)
            self._note()
        for flat in self._masters(True):
            flat.refresh()
            flat.stale = flat.stale or flat.keeps

    @staticmethod
    def _refuse_late(flat: Flat) -> None:
        late = flat.counted() or flat.moved(flat.addresses)
        if late:
            raise StateError(
                f"parameter {flat.span.slots[late[0]].spec.name!r} was written between the beginning of a forward and the "
                "step: with step_in_backward it is updated in backward already, and the write would be lost. Write "
                "parameters after optimizer.step(), or turn step_in_backward off"
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
                    values_of(flat, unit.name)

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
