"""How many units may stay gathered from a forward to its backward: the plan's answer, with activations as batches show them.

Activations are not known when the plan is made. They are estimated from the shape of the largest batch so far; each rank says
at the start of a backward for how many units it has room, and the least of these numbers holds from the next forward on.
There are two numbers, of whole units and of units by parts, and the least of each fits on every rank: more of one never
makes room for the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..plan.outline import Architecture, Batch
from ..plan.plan import Kept, Plan, candidates, room_for
from .values.sharded import Sharded


class BatchWatch:
    """What the inputs of a model's forwards tell of activations; nothing where its architecture is not known."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        names = (name for name, _ in model.named_parameters())
        self._architecture = Architecture.of(getattr(model, "config", None), names)

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch | None:
        if self._architecture is None:
            return None
        shape = next((t.shape for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1), None)
        if shape is None:
            return None
        checkpointing = any(
            getattr(module, "gradient_checkpointing", False) is True for module in self._model.modules()
        )
        return Batch(max(1, shape[0]), max(1, shape[1]), checkpointing, architecture=self._architecture)


class SpareRoom:
    """Of one sharded model for which `plan.plan.keeps` is true."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self._batch: Batch | None = None
        self._of: tuple[Plan, Batch | None] | None = None
        self._room = Kept()

    def expect(self, batch: Batch) -> None:
        """A forward of it begins that backward follows."""
        if self._batch is None or batch.tokens > self._batch.tokens:
            self._batch = batch

    def room(self) -> Kept:
        """For how many units, on this rank."""
        plan = self._sharded.plan
        if self._of is None or self._of[0] is not plan or self._of[1] is not self._batch:
            self._of = plan, self._batch
            self._room = room_for(replace(plan.inputs, batch=self._batch), plan.placements)
        return self._room

    def first(self, kept: Kept) -> tuple[frozenset[int], frozenset[int]]:
        """The units to be kept, whole and by parts, by their places in the layout."""
        plan = self._sharded.plan
        setup = plan.inputs.setup
        setup = kept.into(setup, candidates(plan.layout, plan.placements, setup))
        return setup.kept, setup.parts
