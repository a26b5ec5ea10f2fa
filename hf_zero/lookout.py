"""When an engine looks for values that somebody else wrote (see `edits`), and who is to follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from .edits import released, shown, values_of, watch
from .errors import StateError
from .flat import Flat
from .unit import State, Unit


class Edits:
    """One engine's look-out."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._units = units
        self._samples_at: object = None
        self.optimizer_wrote = False
        """A method of the optimizer that torch's optimizers do not have was called: it may have written its tensors."""
        if not units[0].policy.keep_full:
            watch(model, [flat for unit in units for flat in unit.flats])

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
            if flat.moved(flat.guards.shown):
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
        for unit in self._units:
            if unit.policy.keep_full and unit.state is State.GATHERED:
                for flat in unit.flats:
                    shown(flat, unit.name)
                    if values and flat.span.is_updated:
                        values_of(flat, unit.name)
        closely, self._samples_at = now != self._samples_at, now
        return self._masters(closely)

    def before_step(self) -> None:
        """Masters and what is computed with are one before they are updated. Without communication."""
        for unit in self._units:
            for flat in unit.flats:
                self._settle(unit, flat, values=flat.span.is_updated)
        for flat in self._masters(True):
            flat.refresh()
            flat.stale = flat.stale or flat.keeps

    def _masters(self, closely: bool) -> list[Flat]:
        found, wrote = [], self.optimizer_wrote
        counted, self.optimizer_wrote = wrote, False
        for unit in self._units:
            at_work = unit.stepping is not None and not unit.stepping.is_done
            for flat in unit.trained:
                if not flat.span.is_updated:
                    continue
                edits = [shard.edited(closely) for shard in flat.shards if not (at_work and shard.is_offloaded)]
                if any(edits) or wrote:
                    found.append(flat)
                    counted = counted or "counted" in edits
        if found and not counted and found[0].keeps and found[0].span.shards > 1:
            # Whether another rank sees it is not known: its part may be none of what was written.
            raise StateError(
                f"the optimizer's tensors ({found[0].span.spec.name!r} first) were written through `.data` since the "
                "last step: nothing counts such writes, so ranks cannot agree to carry them over. Write the tensors themselves "
                "under torch.no_grad(), or call engine.refresh() on every rank right afterwards"
            )
        return found
