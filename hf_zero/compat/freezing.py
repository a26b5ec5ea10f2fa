"""Follows parameters that user code freezes or unfreezes between two steps.

A span that was frozen at build has a master, segments and a bucket like any other, so it can begin to train. A span whose
parameters are all frozen sends nothing. If only some of them are, `presence` splits the segments.

Changes are recorded as user code makes them, and applied when the next forward or backward begins. Gradients that exist by
then are still reduced and used, as in torch. A digest of all flags is part of the agreement at the start of each backward: if
ranks differ, all of them raise.

Flags of the tensors in optimizer groups (`group["params"]`) also set those of the model's parameters, but only for whole
groups, because tensors in groups differ between ranks.
"""

from __future__ import annotations

import zlib
from typing import Any

from torch import nn

from ..engine.binding import Binding
from ..engine.engine import Engine
from ..engine.observer import Observer
from ..engine.parameter import place_of
from ..engine.unit import Unit
from ..errors import LayoutError

_ADVICE = "Set requires_grad of the model's own parameters instead (module.requires_grad_(False))"


class Freezing(Observer):
    """Follows `requires_grad` of a model's parameters and of the tensors in its optimizers' groups."""

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._changed: dict[Unit, None] = {}
        self._marks = {unit: _mark_of(unit) for unit in engine.units}
        self._frozen_by_group: set[nn.Parameter] = set()

    # Events -----------------------------------------------------------------------------------------------------------

    def requires_grad_set(self, param: nn.Parameter) -> None:
        place = place_of(param)
        if place is not None:
            self._changed[place.unit] = None

    def before_forward(self, args: Any, kwargs: Any) -> None:
        self._follow()

    def before_part(self, unit: Unit) -> None:
        self._follow()

    def before_backward(self) -> None:
        self._follow()

    # Changes ----------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Apply changes since the last pass. No communication."""
        for binding in self._engine.bindings:
            for group in range(len(binding.segments)):
                self._follow_group(binding, group)
        if not self._changed:
            return
        if self._engine.config.step_in_backward:
            self._refuse_frozen()
        changed, self._changed = self._changed, {}
        keeps = self._engine.schedule.holds_gradients
        for unit in changed:
            if unit.sync_requires_grad(keeps=keeps):
                self._changed[unit] = None  # frozen with gradients: checked again until it has none
            self._marks[unit] = _mark_of(unit)
        for binding in self._engine.bindings:
            for segments, params in zip(binding.segments, binding.originals):
                for segment in [each for each in segments if not each.members]:  # of no span's list
                    segment.tensor.requires_grad_(any(param.requires_grad for param in params))
                    segment.sync_requires_grad()
        marks = b"".join(mark.to_bytes(4, "little") for mark in self._marks.values())
        self._engine.context.requires_grad_digest = zlib.crc32(marks) & 0x7FFFFFFF

    def _refuse_frozen(self) -> None:
        for unit in self._changed:
            for span in unit.spans:
                for index, param in enumerate(span.params):
                    if span.layout.trainable and not param.requires_grad:
                        raise LayoutError(
                            f"{span.name_of(index)!r} was frozen in the middle of training. step_in_backward updates a unit "
                            "before the others have their gradients, and does not support that. Freeze before the model is "
                            "sharded, or set step_in_backward to False"
                        )

    # Optimizer groups -------------------------------------------------------------------------------------------------

    def _follow_group(self, binding: Binding, number: int) -> None:
        """Set the flags of the model's parameters to those that user code set on a group's tensors.

        Raises:
            LayoutError: user code set them on some of the tensors only.
        """
        segments, params = binding.segments[number], binding.originals[number]
        changed = [segment for segment in segments if segment.tensor.requires_grad is not segment.trains]
        if not changed:
            return
        trains = changed[0].tensor.requires_grad
        # Parameters that user code froze one by one must stay frozen when it unfreezes the group.
        followers = [param for param in params if param in self._frozen_by_group] if trains else []
        followers = followers or params
        for segment in segments:
            members = {segment.span.params[index] for index in segment.members} or {*params}
            if segment.tensor.requires_grad is not trains and not members.isdisjoint(followers):
                raise LayoutError(
                    f"requires_grad of some tensors in group {number} of {type(binding.optimizer).__name__} was set. On every "
                    f"rank these are parts of other parameters. {_ADVICE}"
                )
        if trains:
            self._frozen_by_group.difference_update(followers)
        else:
            self._frozen_by_group.update(param for param in params if param.requires_grad)
        for param in followers:
            param.requires_grad = trains
        for segment in changed:
            segment.sync_requires_grad()


def _mark_of(unit: Unit) -> int:
    return zlib.crc32(bytes(param.requires_grad for param in unit.params))
