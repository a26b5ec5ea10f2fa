"""Runs the optimizer's step over offloaded masters, in a background thread.

A copy of the optimizer steps over one block at a time, small enough for the processor's cache, and the new values go
to where gathers read them while they are in the cache (ZeRO-Offload, arXiv 2101.06840, section 4). State on disk passes
through a ring of slabs: one is read, one is updated, one is written (ZeRO-Infinity, arXiv 2104.07857, section 5.2).

Units are updated in the order in which the next forward needs them. `Unit.wait_for_step` returns when one is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.inflight import Inflight, Latch
from ..errors import StateError
from ..optimizers.optimizer_copy import OptimizerCopy, copy_value, is_elementwise, to_host
from ..tiers.array import OnDisk, Values
from ..tiers.storage import Storage
from ..tiers.tier import Meter, Tier
from .binding import Binding
from .context import Context
from .parameter import set_raw_grad
from .ring import GRAD, MASTER, Ring, SegmentUpdate, SlabMemory, without_error
from .schedule import Schedule
from .span import Span
from .unit import Unit


@dataclass(eq=False)
class UnitStep:
    """The running update of one unit."""

    updates: list[SegmentUpdate]
    optimizer_copy: OptimizerCopy
    states: dict[Any, dict[str, Any]]
    """The optimizer's `state` when the step began: user code may assign another dictionary."""
    after: Any
    """A mark in the device's work, after which full parameters and copies may be written."""
    gradient_offloads: list[Callable[[], None]]
    done: Latch = field(default_factory=Latch)
    error: BaseException | None = None

    def wait(self) -> BaseException | None:
        """Wait until the update has ended. Returns the exception that it raised, if any."""
        self.done.wait()
        return self.error


class Stepper:
    """The thread that updates masters in host memory and on disk, and its memory."""

    def __init__(self, context: Context, bindings: Sequence[Binding], schedule: Schedule) -> None:
        self._context, self._bindings, self._schedule = context, bindings, schedule
        self._storage: Storage = context.storage
        self._units = [unit for unit in context.units if any(span.tier is not Tier.DEVICE for span in unit.spans)]
        # The thread holds its initializer for life, and must not hold the engine.
        begin = partial(_begin_thread, context.storage.meter)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_zero step", initializer=begin)
        self._optimizer_copy: OptimizerCopy | None = None
        self._first_error: BaseException | None = None
        self._is_running = False  # an update may be running
        self._updated: set[Unit] = set()  # units that this step's backward has updated
        self._ring = Ring(self._storage, before_reuse=lambda: self._drain(0))
        self._publishing: deque[tuple[Inflight, Tensor | None]] = deque()
        if context.config.step_in_backward:
            context.events.unit_reduced.append(self.step_unit)
            context.events.before_gather.append(self._refuse_gather)

    # Around the optimizer's own step ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until no update runs.

        Raises:
            BaseException: see `Unit.wait_for_step`. No update runs then, either.
        """
        if self._is_running:
            failed: Exception | None = None
            for unit in self._units:
                try:
                    unit.wait_for_step()
                except Exception as error:
                    failed = failed or error
            self._is_running = False
            if failed is not None:
                raise failed

    def prepare(self, binding: Binding) -> None:
        """Hide the gradients of offloaded segments from the optimizer's own step, which follows."""
        self.wait()
        self._context.raise_failures("an optimizer's step over offloaded state")
        self._first_error = None
        if not self._updated:
            self._optimizer_copy = self._new_optimizer_copy(binding)
        self._context.hides_host_gradients = True
        for group in binding.segments:
            for segment in group:
                if segment.span.tier is not Tier.DEVICE:
                    set_raw_grad(segment.tensor, None)

    def begin(self, binding: Binding) -> None:
        """Start to update the offloaded segments that have a gradient, after the optimizer's own step."""
        optimizer_copy, self._optimizer_copy = self._optimizer_copy or self._new_optimizer_copy(binding), None
        self._context.hides_host_gradients = self._context.has_updated = False
        updated, self._updated = self._updated, set()
        after = self._storage.link.mark()
        # All must be announced before one begins, so that the disk reads ahead.
        steps = [self._announce(unit, binding, optimizer_copy, after) for unit in self._units if unit not in updated]
        for step in steps:
            self._start(step)
        for unit in self._units:
            for span in unit.trained:
                for segment in span.segments:
                    segment.show_grad()

    def _new_optimizer_copy(self, binding: Binding) -> OptimizerCopy:
        # On a CPU device the optimizer's own step is not fused by default, and results must be equal to the bit.
        return OptimizerCopy(binding.optimizer, fuse=self._context.device.type != "cpu")

    def step_unit(self, unit: Unit) -> None:
        """Update a unit whose gradients are complete, in a backward with `step_in_backward`.

        Raises:
            StateError: the unit was updated in this step before.
        """
        if unit not in self._units or not self._schedule.sync:
            return
        if unit in self._updated:
            raise StateError(
                f"unit {unit.name!r} received gradients after it was updated. With step_in_backward every backward but the "
                "last of a step must be inside engine.no_sync(). Set step_in_backward to False if they cannot"
            )
        self._optimizer_copy = self._optimizer_copy or self._new_optimizer_copy(self._bindings[0])
        self._updated.add(unit)
        self._context.has_updated = True
        self._agree_on_present(unit)
        for span in unit.trained:
            if len(set(span.bucket.present)) > 1:
                self._bindings[0].split(span)
        self._start(self._announce(unit, self._bindings[0], self._optimizer_copy, self._storage.link.mark()))
        for span in unit.trained:
            if span.tier is not Tier.DEVICE:
                span.bucket.grad = None
                span.bucket.count_grad()

    def _agree_on_present(self, unit: Unit) -> None:
        """Agree in the middle of a backward on which parameters have a gradient on any rank. A collective."""
        mine = [flag for span in unit.trained for flag in span.bucket.had_local]
        agreed = iter(self._context.wire.start_maximum(mine)())  # not of device memory: it would wait for the device
        for span in unit.trained:
            span.bucket.present = [next(agreed) > 0 for _ in span.params]

    def _refuse_gather(self, unit: Unit) -> None:
        if unit in self._updated and self._schedule.in_backward:
            raise StateError(
                f"unit {unit.name!r} is needed in a backward after step_in_backward updated it. Set step_in_backward to False"
            )

    def _announce(self, unit: Unit, binding: Binding, optimizer_copy: OptimizerCopy, after: Any) -> UnitStep | None:
        """Register the unit's update with its readers and with the ring. Returns None if there is nothing to update."""
        updates, gradient_offloads = [], []
        for span in unit.trained:
            if span.tier is Tier.DEVICE:
                continue
            bucket = span.bucket
            for segment in span.segments:
                number = binding.group_of.get(span.params[segment.members[0]]) if segment.members else None
                if number is not None and (segment.has_grad or binding.moves_all):
                    known = dict(binding.state_of(segment))
                    grad = bucket.grad if segment.has_grad else None
                    updates.append(SegmentUpdate(segment, number, grad, bucket.factor, known))
                    gradient_offloads.append(bucket.wait_for_offload)
        if not updates:
            return None
        unit.wait_for_step()
        step = UnitStep(updates, optimizer_copy, binding.optimizer.state, after, gradient_offloads)
        unit.step = step
        self._is_running = True
        for update in updates:
            if isinstance(update.span.master, OnDisk):
                self._ring.announce(update)
        return step

    def _start(self, step: UnitStep | None) -> None:
        if step is not None:
            self._pool.submit(self._run, step)

    def forget(self) -> None:
        """Forget failures and updates in a backward: all values were loaded."""
        self._first_error, self._optimizer_copy = None, None
        self._updated.clear()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    # In the thread ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, step: UnitStep) -> None:
        try:
            if self._first_error is not None:
                raise StateError("an earlier unit's update failed") from self._first_error
            for wait in step.gradient_offloads:
                wait()
            for update in step.updates:
                if isinstance(update.span.master, OnDisk) and update.segment.numel:
                    self._update_on_disk(step, update)
                else:
                    self._update_in_host(step, update)
            self._drain(0)
            self._ring.finish_writes(0)
        except BaseException as error:
            step.error = error
            if self._first_error is None:
                self._first_error = error
            self._abandon()
        finally:
            step.updates.clear()
            step.done.set()

    def _update_in_host(self, step: UnitStep, update: SegmentUpdate) -> None:
        segment = update.segment

        def memory(_: str, dtype: torch.dtype) -> Tensor:
            return self._storage.link.empty(segment.numel, dtype, pin=False)

        if segment.numel:
            master = cast(Tensor, update.span.master)[segment.as_slice]
            grad = None if update.grad is None else cast(Tensor, update.grad)[segment.as_slice]
        else:
            master = torch.empty(0, dtype=update.span.master_dtype, device="cpu")
            grad = None if update.grad is None else torch.empty_like(master)
        entries = self._update(step, update, segment.start, master, grad, update.known, memory)
        self._keep_state(step, update, entries)

    def _update_on_disk(self, step: UnitStep, update: SegmentUpdate) -> None:
        segment = update.segment
        kept: dict[str, Any] = {}
        for slab in self._ring.slabs_of(update):
            slot, numel = self._ring.next(slab), slab.stop - slab.start
            values = slot.values
            master, grad = values.pop(MASTER), values.pop(GRAD, None)
            if update.factor is not None and grad is not None:
                grad.mul_(update.factor)
            single = {name: value for name, value in update.known.items() if name not in values}

            def memory(name: str, dtype: torch.dtype, slot: SlabMemory = slot, numel: int = numel) -> Tensor:
                return slot.get(name, numel, dtype)

            entries = self._update(step, update, slab.start, master, grad, {**single, **values}, memory)
            targets: list[tuple[OnDisk, Tensor]] = [(_on_disk(update.span.master)[slab.as_slice], master)]
            for name, value in entries.items():
                # A matrix's arrays of other shapes stay in host memory.
                if is_elementwise(name, value, numel) and (not segment.is_matrix or value.shape == segment.shape):
                    kept[name] = self._state_array(update, name, value.dtype)
                    targets.append((kept[name][slab.in_segment], value.view(-1)))
                else:
                    kept[name] = value
            self._ring.write(slot, targets)
        self._keep_state(step, update, kept)

    @staticmethod
    def _state_array(update: SegmentUpdate, name: str, dtype: torch.dtype) -> OnDisk:
        """Return the array that stores a state of a segment."""
        before = update.known.get(name)
        if isinstance(before, OnDisk):
            return before
        return update.span.state_on_disk(name, dtype)[update.segment.as_slice]

    @staticmethod
    def _keep_state(step: UnitStep, update: SegmentUpdate, entries: dict[str, Any]) -> None:
        if entries:
            dict.setdefault(step.states, update.segment.tensor, {}).update(entries)  # past the guard, which waits

    def _update(
        self,
        step: UnitStep,
        update: SegmentUpdate,
        start: int,
        master: Tensor,
        grad: Tensor | None,
        entries: dict[str, Any],
        memory: Callable[[str, torch.dtype], Tensor],
    ) -> dict[str, Any]:
        """Update `master`, elements of the slice from `start` on, block by block. Returns the state.

        Args:
            memory: makes memory for a new element-wise state.
        """
        if update.segment.is_matrix:
            return self._update_matrix(step, update, start, master, grad, entries, memory)
        numel, group, optimizer_copy, sizes = master.numel(), update.group, step.optimizer_copy, self._storage.sizes
        width = sizes.block_numel if optimizer_copy.is_fused(group) else sizes.loop_numel
        names = [name for name, value in entries.items() if is_elementwise(name, value, numel)]
        has_moments = {"exp_avg", "exp_avg_sq", "step"} <= set(entries) and not master.is_complex()
        kernel = optimizer_copy.kernels[group] if has_moments and grad is not None else None
        count = to_host(entries["step"]) + 1 if kernel is not None else None
        out: dict[str, Any] = {name: entries[name] for name in names}
        for low in range(0, max(numel, 1), width):  # an empty segment needs one block, which creates its state
            here = slice(low, min(low + width, numel))
            values, part = master[here], None if grad is None else grad[here]
            if kernel is not None and count is not None and part is not None:
                kernel(values, part, entries["exp_avg"][here], entries["exp_avg_sq"][here], count)
                self._publish(update.span, start + low, values, step.after)
                continue
            state = {name: copy_value(value) for name, value in entries.items() if name not in names}
            state |= {name: out[name][here] for name in names}
            for name, value in optimizer_copy.step(group, values, part, state).items():
                if not is_elementwise(name, value, values.numel()):
                    out[name] = value
                    continue
                if name not in out:
                    out[name] = memory(name, value.dtype)
                target = out[name][here]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)
            self._publish(update.span, start + low, values, step.after)
        return {**entries, "step": count} if kernel is not None else out

    def _update_matrix(
        self,
        step: UnitStep,
        update: SegmentUpdate,
        start: int,
        master: Tensor,
        grad: Tensor | None,
        entries: dict[str, Any],
        memory: Callable[[str, torch.dtype], Tensor],
    ) -> dict[str, Any]:
        """Update one parameter of true shape on the device: updates of matrices are bound by arithmetic, not by traffic."""
        shape, device, link = update.segment.shape, self._context.device, self._storage.link
        state = dict(entries)
        for name, value in entries.items():
            if isinstance(value, Tensor):
                is_slab = isinstance(update.known.get(name), OnDisk)
                moves = value.dim() > 0 or _is_state_of_one(name, value, shape)
                state[name] = value.view(shape).to(device) if is_slab else value.to(device) if moves else value
        with link.computing(step.after):
            values = master.view(shape).to(device)
            part = None if grad is None else grad.view(shape).to(device)
            found = step.optimizer_copy.step(update.group, values, part, state)
            if values.data_ptr() != master.data_ptr():
                master.view(shape).copy_(values)
            out: dict[str, Any] = {}
            for name, value in found.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    out[name] = copy_value(value)  # not a view of a slab's memory
                    continue
                home = entries.get(name)
                if not isinstance(home, Tensor) or home.numel() != value.numel() or home.dtype != value.dtype:
                    is_like_master = value.shape == shape
                    home = memory(name, value.dtype) if is_like_master else link.empty(value.numel(), value.dtype)
                home = home.view(value.shape)
                if home.data_ptr() != value.data_ptr():
                    home.copy_(value)
                out[name] = home
        self._publish(update.span, start, master, step.after)
        return out

    # Publication to gathers ---------------------------------------------------------------------------------------------

    def _publish(self, span: Span, start: int, values: Tensor, after: Any) -> None:
        """Copy new values of the master to the memory from which gathers read, if that is not the master."""
        home = span.publish_target
        if home is None or not values.numel():
            return
        target = home[start : start + values.numel()]
        is_on_device = span.copy is None or span.copy_tier is Tier.DEVICE
        if isinstance(target, Tensor) and (self._storage.link.shares_memory or not is_on_device):
            target.copy_(values)
            return
        memory = None
        if values.dtype != target.dtype or isinstance(target, OnDisk):
            # Must be a copy: the next slab may be read into the buffer before this write has ended.
            memory = self._storage.scratch(values.numel(), target.dtype)
            values = memory.copy_(values)
        move = (
            target.begin_write(values)
            if isinstance(target, OnDisk)
            else self._storage.link.copy_to_device(values, target, after)
        )
        self._publishing.append((move, memory))
        self._drain(self._storage.sizes.lanes)

    def _drain(self, most: int) -> None:
        """Wait until at most `most` transfers are under way."""
        while len(self._publishing) > most:
            move, memory = self._publishing.popleft()
            try:
                move.close()
            finally:
                if memory is not None:
                    self._storage.release_scratch(memory)

    def _abandon(self) -> None:
        """Wait for all transfers after an error, and drop slabs that were read ahead."""
        for move, _ in self._publishing:
            without_error(move.close)
        self._publishing.clear()
        self._ring.abandon()


def _is_state_of_one(name: str, value: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a 0-dim state belongs to a 0-dim parameter's one element, and is not a count."""
    return name != "step" and value.shape == torch.Size(shape)


def _begin_thread(meter: Meter) -> None:
    meter.stepper_thread = threading.get_ident()


def _on_disk(values: Values) -> OnDisk:
    return cast(OnDisk, values)
