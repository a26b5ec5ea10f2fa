"""One parameter of true shape whose master and state rest in host memory or on disk, and the optimizer's step over it.

Its master, gradient and state come to where the model computes, the user's optimizer steps over them (by
`shadow_optimizer.Twin`), and they go down again. Where the device is the CPU they are stepped where they are, or in the buffer
that they were read to. A parameter's update depends on that parameter alone (`supported_optimizers`), so the order of
parameters does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.inflight import DONE, Inflight, together
from ...tiers.array import OnDisk, OnDone, Values, fetch, is_array
from ...tiers.host import Link
from ...tiers.pool import Storage
from ...tiers.tier import padded
from ..values.flat_param import Flat
from ..values.offloaded_shard import DiskShard
from ..values.state_shard import GRADIENT, MASTER, Shard
from .shadow_optimizer import Twin


@dataclass(eq=False)
class Claimed:
    """One shard, with the gradient as it was when the step began."""

    flat: Flat
    shard: Shard
    grad: Values
    coefficient: Tensor | None
    move: Inflight | None
    present: list[bool]
    """By place in the span, whether the parameter has a gradient."""


@dataclass(frozen=True)
class Whole:
    """One parameter of true shape of a claimed shard. While it is updated, one buffer has all of it that rests on disk."""

    claim: Claimed
    index: int
    """Its place in the span."""
    states: dict[Any, dict[str, Any]] = field(compare=False, repr=False)
    """The optimizer's."""

    @property
    def param(self) -> nn.Parameter:
        return (self.claim.flat.wholes or {})[self.index]

    @property
    def part(self) -> slice:
        """Its elements in the shard."""
        flat = self.claim.flat
        at = flat.span.slots[self.index].offset - flat.span.bounds(flat.rank)[0]
        return slice(at, at + self.param.numel())

    @cached_property
    def _entries(self) -> dict[str, Any]:
        return self.states.get(self.param, {})

    @cached_property
    def _at_rest(self) -> dict[str, Values]:
        """Master (`MASTER`), arrays of its state, and the gradient (`GRADIENT`) if that is on disk."""
        grad = self.claim.grad
        stored = {GRADIENT: grad[self.part]} if isinstance(grad, OnDisk) and self.claim.present[self.index] else {}
        arrays = {key: value for key, value in self._entries.items() if is_array(value)}
        return {MASTER: self.claim.shard.values[self.part], **arrays, **stored}

    @property
    def nbytes(self) -> int:
        """Of the buffer: each array from a page's start."""
        return sum(padded(_nbytes(value)) for value in self._at_rest.values() if isinstance(value, OnDisk))

    def values(self, buffer: Tensor | None) -> dict[str, Tensor]:
        """Master and arrays of its state in host memory, in their shapes; of what rests on disk the places in `buffer`."""
        out, start = {}, 0
        for key, value in self._at_rest.items():
            shape = self.param.shape if key in (MASTER, GRADIENT) else value.shape
            if isinstance(value, Tensor):
                out[key] = value.view(shape) if key == MASTER else value
            elif buffer is not None:
                out[key] = buffer[start : start + _nbytes(value)].view(value.dtype).view(shape)
                start += padded(_nbytes(value))
        return out

    def read(self, buffer: Tensor, on_done: OnDone) -> Inflight:
        """Start to fill `buffer`: uint8, of `nbytes` at least."""
        places = self.values(buffer)
        stored = [(key, value) for key, value in self._at_rest.items() if isinstance(value, OnDisk)]
        return together([value.begin_read(places[key].view(value.shape), on_done) for key, value in stored])

    def step(self, values: dict[str, Tensor], twin: Twin, storage: Storage, after: Any) -> dict[str, Any]:
        """Update what `values` has, in place.

        Args:
            after: what the device has to do before; see `Link.mark`.

        Returns:
            The state as the optimizer leaves it: its arrays in host memory, of any shape.
        """
        flat, link = self.claim.flat, storage.link
        group = flat.span.spec.group
        single = {key: value for key, value in self._entries.items() if key not in values}
        with link.computing(after):
            here = values if link.is_one_memory else {key: _up(value, storage) for key, value in values.items()}
            grad, lent = self._gradient(storage, here.get(GRADIENT))
            state = {key: value for key, value in here.items() if key not in (MASTER, GRADIENT)}
            state |= {key: twin.single_state(group, key, value, flat.device) for key, value in single.items()}
            found = twin.step(group, here[MASTER], grad, state)
            if lent is not None:
                storage.give_back(lent)
            return found if link.is_one_memory else _down(here[MASTER], found, values, link)

    def _gradient(self, storage: Storage, read: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Where the step is made: in the master's type, multiplied, in the parameter's shape; and scratch memory to be given
        back.

        Args:
            read: the gradient, if it was on disk.
        """
        claim, dtype = self.claim, self.claim.flat.master_dtype
        lent: Tensor | None = None
        if not claim.present[self.index]:
            return None, None
        is_shared = read is None and storage.link.is_one_memory  # others still read it
        if read is not None:
            grad = read.view(-1)
        else:
            grad = fetch(claim.grad[self.part])
            grad = grad if storage.link.is_one_memory else _up(grad, storage)
        if not storage.link.is_one_memory:
            grad = grad.to(dtype)
        elif grad.dtype != dtype or (claim.coefficient is not None and is_shared):
            grad = lent = storage.scratch(grad.numel(), dtype).copy_(grad)
        if claim.coefficient is not None:
            grad.mul_(claim.coefficient.to(grad.device, grad.dtype))
        return grad.view(self.param.shape), lent

    def rest(self, values: dict[str, Tensor], found: dict[str, Any], on_done: OnDone) -> Inflight:
        """The updated master, in `values`, and the state `found` go to where they rest: to disk they start to go."""
        shard, move = self.claim.shard, DONE
        if isinstance(shard, DiskShard):
            arrays = {key: value for key, value in found.items() if is_array(value) and value.numel()}
            places = [shard.new_state(self.param, k, v.dtype, v.shape) for k, v in arrays.items()]
            writes = [OnDisk(shard.array)[self.part].begin_write(values[MASTER].view(-1), on_done)]
            writes += [p.begin_write(v.detach().contiguous(), on_done) for p, v in zip(places, arrays.values())]
            move = together(writes)
            found = found | shard.keep_states(self.param, arrays)
        if found:
            self.states[self.param] = found
        return move


def wholes_of(claim: Claimed, twin: Twin, states: dict[Any, dict[str, Any]]) -> Iterator[Whole]:
    """Those of a claimed shard that a step changes."""
    for index in claim.flat.wholes or {}:
        if claim.present[index] or twin.steps_without_gradient:
            yield Whole(claim, index, states)


def _nbytes(values: Values) -> int:
    return values.numel() * values.element_size()


def _up(value: Tensor, storage: Storage) -> Tensor:
    target = torch.empty(value.shape, dtype=value.dtype, device=storage.device)
    if value.numel():
        storage.link.up(value.reshape(-1), target.view(-1)).close()
    return target


def _down(master: Tensor, found: dict[str, Any], values: dict[str, Tensor], link: Link) -> dict[str, Any]:
    """A master and its state, from the device: to their places in `values` where these fit."""
    moves = [link.down(master.reshape(-1), values[MASTER].view(-1))]
    down: dict[str, Any] = {}
    for key, value in found.items():
        if not is_array(value):
            down[key] = value.to("cpu") if isinstance(value, Tensor) else value
            continue
        known = values.get(key)
        if known is None or (known.shape, known.dtype) != (value.shape, value.dtype):
            known = link.empty(value.numel(), value.dtype).view(value.shape)
        down[key] = known
        moves.append(link.down(value.detach().reshape(-1), known.view(-1)))
    for move in moves:
        move.close()
    return down
