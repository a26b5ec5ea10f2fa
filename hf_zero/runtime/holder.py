"""Who has a parameter's values: a sharded model, in some place, or its birth; those values whole, or this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agree import read
from ..comm.wire import SoloWire
from ..core.layout import Extent, Slot
from ..tiers.array import Values
from .deferred import HOLDERS, Birth
from .flat_param import Flat
from .pieces import extents, is_sliced
from .sharded import Sharded
from .state_shard import Shard, assembled
from .unit import Unit

Of = Callable[[Shard], Values | None]
"""What of a shard is meant: master, gradient, a state."""


def master_of(shard: Shard) -> Values:
    return shard.values


def gradient_of(shard: Shard) -> Values | None:
    return shard.whole_grad()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sharded model has one parameter."""

    sharded: Sharded
    unit: Unit
    flat: Flat
    index: int

    @property
    def slot(self) -> Slot:
        return self.flat.span.slots[self.index]

    @property
    def wire(self) -> SoloWire:
        return self.sharded.wire

    def parts(self) -> Iterator[tuple[int, Extent[Slot]]]:
        """Which rank owns which elements, in order."""
        return self.flat.span.owners(self.slot)

    def whole(self, of: Of) -> Tensor:
        """The parameter's value of what the ranks' shards hold, as a new tensor of its shape; a collective."""
        mine = read(self.wire, lambda: self.local(of), may_fail=self.flat.storage.uses_disk)
        whole = torch.empty(self.slot.spec.numel, dtype=mine.dtype, device=self.flat.device)
        for rank, part in self.parts():
            piece = whole[part.there]
            if rank == self.flat.rank:
                piece.copy_(mine)
            if self.flat.span.shards > 1:
                self.wire.broadcast(piece.view(torch.uint8), rank)
        return whole.view(self.slot.spec.shape)

    def local(self, of: Of) -> Tensor:
        """This rank's elements of the parameter, on the span's device; maybe a view. A gap is zeros."""
        device = self.flat.device
        for rank, part in self.parts():
            if rank == self.flat.rank:
                found = assembled(self.flat.shards, of, part.start, part.numel, device)
                return torch.zeros(part.numel, dtype=self.flat.master_dtype, device=device) if found is None else found
        sample = next((value for shard in self.flat.shards if (value := of(shard)) is not None), None)
        return torch.empty(0, dtype=self.flat.master_dtype if sample is None else sample.dtype, device=device)

    def write(self, of: Of, value: Tensor) -> None:
        """This rank's elements of the parameter get the values of `value`, 1-D."""
        for rank, part in self.parts():
            if rank == self.flat.rank:
                for shard, piece in extents([part], self.flat.shards):
                    target = of(shard)
                    if target is not None:
                        done = piece.source_start - part.source_start
                        target[piece.here].copy_(value[done : done + piece.numel])

    @property
    def own_numel(self) -> int:
        return sum(part.numel for rank, part in self.parts() if rank == self.flat.rank)

    def own_part(self, value: Tensor) -> Tensor:
        """Of a whole value, what this rank owns."""
        for rank, part in self.parts():
            if rank == self.flat.rank:
                return value.detach().reshape(-1)[part.there]
        return value.detach().reshape(-1)[:0]

    def written(self) -> None:
        """The master is new: whole parameters follow, where the stage keeps them. A collective there."""
        self.unit.release()
        self.unit.updated()
        if self.unit.policy.keep_full:
            self.unit.gather()
            self.unit.wait()

    def state(self, name: str) -> tuple[Any, bool]:
        """One shard's value of an optimizer state, and whether it has one value per element."""
        optimizer = self.sharded.optimizer
        if optimizer is None:
            return None, False
        if self.flat.wholes:
            return self.flat.whole_entries(optimizer)[self.index].get(name), False
        for shard in self.flat.shards:
            value = shard.entries(optimizer).get(name)
            if value is not None:
                return value, is_sliced(self.flat, shard, name, value)
        return None, False

    def state_of(self, name: str) -> Of:
        optimizer = self.sharded.optimizer
        return lambda shard: None if optimizer is None else shard.entries(optimizer).get(name)


def holder_of(param: nn.Parameter) -> Place | Birth | None:
    holder = HOLDERS.get(param)
    if holder is None or isinstance(holder, Birth):
        return holder
    sharded: Sharded | None = holder()
    return None if sharded is None else Place(sharded, *sharded.places[param])
