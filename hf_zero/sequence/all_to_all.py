"""The ranks that share one sample, and a differentiable all-to-all between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..comm.group_wire import GroupWire
from ..comm.inflight import Count
from ..comm.wire import Wire

TAG = 1 << 16
"""Message tag, above the tags of spans, so that it never matches a gather or reduce."""
KIND = "sequence"
"""Kind of these messages in `traffic`."""


class SequenceGroup:
    """Neighbouring ranks; this rank has part `index` of `size`. Creating a group is a collective if `size` is above 1.

    Args:
        wire: the wire of all ranks.
    """

    def __init__(self, wire: Wire, size: int) -> None:
        self.size, self.index = size, wire.rank % size
        self.wire: Wire = Wire()
        if size > 1:
            world = cast(GroupWire, getattr(wire, "world", wire))
            ranks = range(world.size)
            self.wire = group = world.subgroup([ranks[first : first + size] for first in ranks[::size]])
            world.traffic.kinds.setdefault(KIND, Count())
            group.gather_kind = group.reduce_kind = KIND
            mine = ", ".join(map(str, ranks[world.rank - self.index :][:size]))
            world.watch.groups[KIND] = f" within the group of one sequence (ranks {mine})"
            world.watch.units[TAG] = "attention"

    def swap(self, tensors: tuple[Tensor, ...], split: int, joined: int) -> tuple[Tensor, ...]:
        """Send each rank its part along dimension `split`; join the parts that arrive along dimension `joined`.

        All tensors travel in one message per rank. They have one dtype.
        """
        parts = [tensor.unflatten(split, (self.size, -1)).movedim(split, 0) for tensor in tensors]
        sent = torch.cat([part.flatten(1) for part in parts], 1)
        landing = torch.empty_like(sent)
        cast(GroupWire, self.wire).all_to_all(sent.view(-1), landing.view(-1), TAG).close()
        arrived = landing.split([part[0].numel() for part in parts], 1)
        return tuple(
            each.reshape(part.shape).movedim(0, joined).flatten(joined, joined + 1)
            for each, part in zip(arrived, parts)
        )


class AllToAll(torch.autograd.Function):
    """`SequenceGroup.swap` with gradients of any order: the backward swaps the other way."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, split: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group, joined, split
        return group.swap(tensors, split, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *AllToAll.apply(*ctx.arguments, *gradients)


def all_to_all(group: SequenceGroup, split: int, joined: int, *tensors: Tensor) -> list[Tensor]:
    """Return `tensors` after `SequenceGroup.swap`; those of one dtype travel together."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        which = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        swapped = AllToAll.apply(group, split, joined, *(tensors[number] for number in which))
        found.update(zip(which, swapped))
    return [found[number] for number in range(len(tensors))]
