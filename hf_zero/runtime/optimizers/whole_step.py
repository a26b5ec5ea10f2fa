"""The optimizer's step over parameters of true shape whose master and state rest in host memory or on disk.

One parameter after another: its master, gradient and state come to where the model computes, the user's optimizer steps over
them (by `shadow_optimizer.Twin`), and they go down again. Where the device is the CPU they are stepped where they are, or in
the buffer that they were read to. From disk one is read while another is updated and a third is written: three are in host
memory. A parameter's update depends on that parameter alone (`supported_optimizers`), so the order does not matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.inflight import DONE, Inflight, together
from ...tiers.array import OnDisk, Shaped, Values, is_array
from ...tiers.pool import Storage
from ...tiers.tier import padded
from ..values.flat_param import Flat
from ..values.offloaded_shard import DiskShard
from ..values.span_values import Staging
from ..values.state_shard import MASTER, Shard
from .shadow_optimizer import Twin


@dataclass(eq=False)
class Claimed:
    """One shard, with the gradient as it was when the step began."""

    flat: Flat
    shard: Shard
    grad: Tensor
    coefficient: Tensor | None
    move: Inflight | None
    present: list[bool]
    """By place in the span, whether the parameter has a gradient."""


@dataclass(eq=False)
class _Whole:
    """One parameter under way. `values`: master (`MASTER`) and arrays of its state in host memory, in their shapes."""

    index: int
    param: nn.Parameter
    at: int
    """Its first element in the shard."""
    values: dict[str, Tensor]
    single: dict[str, Any]
    """The rest of its state."""
    buffer: Tensor | None = None
    """Scratch memory that it was read to."""
    move: Inflight = DONE
    """The read; later the write."""
    written: list[Tensor] = field(default_factory=list)
    """What the write reads from."""

    def give_back(self, buffers: list[Tensor]) -> None:
        self.written.clear()
        if self.buffer is not None:
            buffers.append(self.buffer)
            self.buffer = None


class WholeSteps:
    """Steps over the wholes of one shard after another.

    Args:
        own: told of bytes of host memory that are taken here; negative: given up.
        land: returns when nothing that was handed to `staging` is under way.
    """

    def __init__(
        self, storage: Storage, staging: Staging, own: Callable[[int], None], land: Callable[[], None]
    ) -> None:
        self._storage, self._staging, self._own, self._land = storage, staging, own, land
        self._buffers: list[Tensor] = []  # free ones; there are three at most, each as large as the largest needs
        self._largest_bytes = 0

    def forget(self) -> None:
        """After an error, and at the end: what is free is not counted any more."""
        self._buffers.clear()

    def _buffer(self, nbytes: int) -> Tensor:
        self._largest_bytes = max(self._largest_bytes, nbytes)
        while self._buffers:
            buffer = self._buffers.pop()
            if buffer.numel() >= self._largest_bytes:
                return buffer
            self._own(-buffer.numel())
        self._own(self._largest_bytes)
        return self._storage.link.empty(self._largest_bytes, torch.uint8)

    def update(self, claim: Claimed, twin: Twin, states: dict[Any, dict[str, Any]], after: Any) -> None:
        """Update all parameters of the shard that this rank has whole, and carry them to where they rest.

        Args:
            claim: the shard, its gradient, what that is still to be multiplied by, and which parameters have one.
            twin: the optimizer over one parameter at a time.
            states: the optimizer's.
            after: what the device has to do before anything here; see `Link.mark`.

        Raises:
            TierError: bytes could not be moved.
        """
        flat, shard, present = claim.flat, claim.shard, claim.present
        coming = iter([index for index in flat.wholes or {} if present[index] or twin.steps_without_gradient])
        reading: _Whole | None = None
        writing: _Whole | None = None
        under_way: list[_Whole] = []
        try:
            reading = self._next(claim, coming, states, under_way)
            while reading is not None:
                whole, reading = reading, None
                whole.move.close()
                reading = self._next(claim, coming, states, under_way)
                part = claim.grad[whole.at : whole.at + whole.param.numel()] if present[whole.index] else None
                found = self._step(claim, whole, part, twin, after)
                flat.publish(shard, whole.at, whole.values[MASTER].view(-1), self._staging)
                if writing is not None:
                    self._finish(writing, under_way)
                writing = whole
                self._rest(shard, whole, found, states)
            if writing is not None:
                self._finish(writing, under_way)
        except BaseException:
            for whole in under_way:
                with contextlib.suppress(Exception):  # the step has failed already, for this or another reason
                    whole.move.close()
                whole.give_back(self._buffers)
            raise

    def _next(
        self, claim: Claimed, coming: Iterator[int], states: Mapping[Any, dict[str, Any]], under_way: list[_Whole]
    ) -> _Whole | None:
        """The next one: where it rests, or on its way into a buffer."""
        index, flat, shard = next(coming, None), claim.flat, claim.shard
        if index is None:
            return None
        param, low = (flat.wholes or {})[index], flat.span.bounds(flat.rank)[0]
        at = flat.span.slots[index].offset - low
        entries = states.get(param, {})
        at_rest: dict[str, Values] = {MASTER: shard.values[at : at + param.numel()]}
        at_rest |= {key: value for key, value in entries.items() if is_array(value)}
        single = {key: value for key, value in entries.items() if key not in at_rest}
        whole = _Whole(index, param, at, {}, single)
        under_way.append(whole)
        reads, start = [], 0
        stored = {key: value for key, value in at_rest.items() if isinstance(value, OnDisk)}
        if stored:
            need = sum(padded(value.numel() * value.element_size()) for value in stored.values())
            whole.buffer = self._buffer(need)
        for key, value in at_rest.items():
            shape = param.shape if key == MASTER else value.shape
            if isinstance(value, OnDisk) and whole.buffer is not None:
                nbytes = value.numel() * value.element_size()
                room = whole.buffer[start : start + nbytes].view(value.dtype)
                start += padded(nbytes)
                reads.append((value.flat if isinstance(value, Shaped) else value).begin_read(room))
                whole.values[key] = room.view(shape)
            elif isinstance(value, Tensor):
                whole.values[key] = value.view(shape) if key == MASTER else value
        whole.move = together(reads) if reads else DONE
        return whole

    def _step(self, claim: Claimed, whole: _Whole, grad: Tensor | None, twin: Twin, after: Any) -> dict[str, Any]:
        """The state as the optimizer leaves it: its arrays in host memory, of any shape. The master is in its place there."""
        flat, coefficient, values = claim.flat, claim.coefficient, whole.values
        link, group = self._storage.link, flat.span.spec.group
        if link.is_one_memory:
            part, lent = self._plain_gradient(flat, whole, grad, coefficient)
            state = {key: value for key, value in values.items() if key != MASTER}
            found = twin.step_whole(group, values[MASTER], part, state | whole.single)
            if lent is not None:
                self._storage.give_back(lent)
            return found
        with link.computing(after):
            up = {key: self._up(value) for key, value in values.items()}
            if grad is not None:
                grad = self._up(grad).to(flat.master_dtype).view(whole.param.shape)
                if coefficient is not None:
                    grad.mul_(coefficient.to(grad.device, grad.dtype))
            state = {key: value for key, value in up.items() if key != MASTER}
            single = {key: twin.single_state(group, key, value, flat.device) for key, value in whole.single.items()}
            found = twin.step_whole(group, up[MASTER], grad, state | single)
            moves = [link.down(up[MASTER].reshape(-1), values[MASTER].view(-1))]
            down: dict[str, Any] = {}
            for key, value in found.items():
                down[key] = value.to("cpu") if isinstance(value, Tensor) else value
                if is_array(value):
                    known = values.get(key)
                    if known is None or (known.shape, known.dtype) != (value.shape, value.dtype):
                        known = link.empty(value.numel(), value.dtype).view(value.shape)
                    down[key] = known
                    moves.append(link.down(value.detach().reshape(-1), known.view(-1)))
            for move in moves:
                move.close()
        return down

    def _plain_gradient(
        self, flat: Flat, whole: _Whole, grad: Tensor | None, coefficient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradient in the master's type, multiplied and in its shape, and scratch memory to be given back."""
        if grad is None:
            return None, None
        lent = None
        if grad.dtype != flat.master_dtype or coefficient is not None:
            lent = self._storage.scratch(grad.numel(), flat.master_dtype)
            grad = lent.copy_(grad)
        if coefficient is not None:
            grad.mul_(coefficient.to(grad.dtype))
        return grad.view(whole.param.shape), lent

    def _up(self, value: Tensor) -> Tensor:
        target = torch.empty(value.shape, dtype=value.dtype, device=self._storage.device)
        if value.numel():
            self._storage.link.up(value.reshape(-1), target.view(-1)).close()
        return target

    def _rest(self, shard: Shard, whole: _Whole, found: dict[str, Any], states: dict[Any, dict[str, Any]]) -> None:
        """In host memory everything is where it rests; to disk it starts to go."""
        if not isinstance(shard, DiskShard):
            if found:
                states[whole.param] = found
            return
        arrays = {key: value for key, value in found.items() if is_array(value) and value.numel()}
        whole.written = [whole.values[MASTER].view(-1), *(value.detach().reshape(-1) for value in arrays.values())]
        places = [OnDisk(shard.array)[whole.at : whole.at + whole.param.numel()]]
        places += [shard.new_state(whole.param, k, v.dtype, v.shape).flat for k, v in arrays.items()]
        whole.move = together([place.begin_write(values) for place, values in zip(places, whole.written)])
        kept = shard.keep_states(whole.param, arrays)
        if found:
            states[whole.param] = {key: kept.get(key, value) for key, value in found.items()}

    def _finish(self, whole: _Whole, under_way: list[_Whole]) -> None:
        whole.move.close()
        if whole.buffer is not None:
            self._land()  # values may still be on their way up from them
        whole.give_back(self._buffers)
        under_way.remove(whole)
