"""Pinned units: full parameters from the masters that stay gathered, whatever forwards and backwards run.

A span uses a temporary buffer where its usual one has another dtype than the parameters or rounded values (a wire format).
That buffer is dropped at the end; only explicit edits are written back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..comm import agreement
from ..config import size_text
from ..core.precision import dtype_of
from ..engine.context import Context
from ..engine.span import Span
from ..engine.unit import State, Unit
from ..errors import OutOfMemoryError, RankMismatchError, StateError
from ..tiers.fingerprint import digest


class PinnedUnits:
    """Keeps units gathered, from creation to `end`. A collective. Skips units that are already pinned.

    Args:
        what: the operation, for error messages.
        exact: gather in the parameters' own dtype, not in the one that forwards use.
        apart: use temporary buffers even where the stage keeps full parameters, so that edits can be dropped.

    Raises:
        OutOfMemoryError: on every rank: one rank's device has too little memory.
    """

    def __init__(
        self, context: Context, units: Iterable[Unit], what: str, *, exact: bool = True, apart: bool = False
    ) -> None:
        self._context = context
        self.units = [unit for unit in units if not unit.is_pinned]
        self._known: dict[Span, int] = {}
        self._hidden: dict[Span, int] = {}
        if not self.units:  # the same on every rank
            return
        wanted: list[tuple[Span, torch.dtype]] = []
        for unit in self.units:
            for span in unit.spans:
                for event in context.events.master_read:
                    event(span)
            unit.wait_for_step()
            unit.release()
            for span in unit.spans:
                dtype = dtype_of(span.layout.spec.dtype) if exact else span.full.dtype
                if dtype != span.full.dtype or span.codec is not None or (apart and span.is_persistent):
                    wanted.append((span, dtype))
        free = context.free_bytes()
        try:
            with agreement.on_all_ranks(context.wire, what, kind=OutOfMemoryError):
                self._check_memory(what, wanted, free)
                for span, dtype in wanted:
                    self._hidden[span] = span.buffer_depth
                    span.push_buffer(dtype, what, masters=True)
            self._gather({span for span, _ in wanted})
            context.raise_failures(what)
        except BaseException:
            self.end({})
            raise
        if not apart:
            self._known = {span: digest(span.full) for unit in self.units for span in unit.spans}

    def _check_memory(self, what: str, wanted: Sequence[tuple[Span, torch.dtype]], free: int) -> None:
        needed = sum(span.layout.numel * dtype.itemsize for span, dtype in wanted)
        others = {span for span, _ in wanted}
        needed += sum(
            span.full_bytes
            for unit in self.units
            for span in unit.spans
            if not span.is_persistent and span not in others
        )
        if needed > free:
            budget = "" if self._context.config.device_memory is None else " of its device_memory"
            raise OutOfMemoryError(
                f"{what}: full parameters take {size_text(needed)} of {self._context.device}, {size_text(needed - free)} more "
                f"than is free on rank {self._context.wire.rank}{budget}. Pass in_compute_dtype=True under bf16 or fp16, "
                "offload optimizer state, or gather some parameters by zero.GatheredParameters"
            )

    def _gather(self, fresh: set[Span]) -> None:
        for unit in self.units:
            unit.mark_old([span for span in unit.spans if span in fresh])
            unit.gather()
        for unit in self.units:
            unit.wait()
            unit.is_pinned = True

    def written(self) -> dict[Span, Sequence[int]]:
        """Copy edits of full parameters to the masters. Returns the edited spans, with all their parameters."""
        found: dict[Span, Sequence[int]] = {}
        for unit in self.units:
            for span in unit.spans:
                if digest(span.full) != self._known[span]:
                    span.keep_writes()
                    found[span] = range(len(span.params))
        return found

    def refuse_writes(self) -> None:
        """
        Raises:
            StateError: user code wrote full parameters as well as the optimizer's tensors.
        """
        for span, known in self._known.items():
            if not span.master_is_local and digest(span.full) != known:
                raise StateError(
                    f"{span.name_of(0)!r}, or a parameter of the same span, and the optimizer's tensors of them were both "
                    "written inside zero.unsharded, so neither write can count alone. Write one of the two"
                )

    def renew(self) -> None:
        """Gather again after a write to the masters. A collective."""
        if self._context.reshards:
            for unit in self.units:
                unit.state = State.SHARDED
                unit.gather()
            for unit in self.units:
                unit.wait()
        self._known = {span: digest(span.full) for span in self._known}

    def end(self, kept: Mapping[Span, Sequence[int]]) -> None:
        """Release the units.

        Args:
            kept: span -> indices of edited parameters, whose masters have the new values.
        """
        for unit in self.units:
            unit.is_pinned = False
            if not self._context.reshards:
                self._hide(unit, kept)
            # The masters have the edits to keep: a release must not find them, or the dropped ones, again.
            for event in self._context.events.writes_dropped:
                event(unit)
            for span in unit.spans:
                # Views that user code took inside would crash the process after a resize of their memory.
                if span.is_freed_in_place and span.has_outside_views:
                    span.move_to_new_storage()
            unit.release()
            self._hide(unit, {})  # if the unit could not be gathered
            coded = [span for span in unit.spans if span.codec is not None and kept.get(span)]
            if coded and not self._context.reshards:  # show decoded values, as after every gather
                unit.mark_old(coded)
                unit.gather()
                unit.wait()

    def _hide(self, unit: Unit, kept: Mapping[Span, Sequence[int]]) -> None:
        for span in unit.spans:
            if span in self._hidden:
                span.pop_buffers(kept.get(span, ()), self._hidden[span])


def same_on_all_ranks(context: Context) -> None:
    """Compare full parameters over the ranks. A collective.

    Raises:
        RankMismatchError: on every rank: they differ; names the first span.
    """
    spans = [span for unit in context.units for span in unit.spans]
    everyone = context.wire.exchange([digest(span.full[: span.layout.used_numel]) for span in spans])
    for rank, found in enumerate(everyone):
        for span, theirs, first in zip(spans, found, everyone[0]):
            if theirs != first:
                raise RankMismatchError(
                    f"the parameters of the span of {span.name_of(0)!r} were written inside zero.unsharded with other values "
                    f"on rank {rank} than on rank 0. Make the same edit on every rank, or edit inside "
                    "zero.GatheredParameters(params, modifier_rank=0)"
                )
