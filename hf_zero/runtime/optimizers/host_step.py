"""The optimizer's step over what does not rest on the device, in a thread of its own.

The user's optimizer is never asked to step over these shards itself: a *twin* of it (same class, same options, no hooks) steps
over one stretch of memory at a time, as large as the caches like, so that a gradient's up-cast, the update and the
parameter's down-cast touch memory once (ZeRO-Offload, arXiv 2101.06840, §4; the blocks are ours). What rests on disk is read,
updated and written in a ring of `Sizes.slabs` host buffers: while one record, a slab or a parameter of true shape, is updated,
the next is read and the last is written (ZeRO-Infinity, arXiv 2104.07857, §5.2).

Units are updated in the order they are given; each is done, with its parameters where they rest, when its `Step.wait`
returns. An element's update depends on that element alone, so results are those of one step over everything.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.inflight import DONE, Inflight, Latch
from ...errors import StateError, TierError, ZeroError
from ...tiers.array import OnDisk, OnDone, fetch, in_memory
from ...tiers.host import Link
from ...tiers.pool import Storage
from ..values.flat_param import Flat
from ..values.offloaded_shard import DiskShard
from ..values.state_shard import GRADIENT, MASTER, is_elementwise
from ..values.unit import Unit
from .shadow_optimizer import Twin, copied
from .whole_step import Claimed, Whole, wholes_of


class Slab(NamedTuple):
    """Of a shard on disk, what is read, updated and written at a time."""

    shard: DiskShard
    start: int
    """Its first element."""
    grad: OnDisk | None
    """None: it is in memory."""

    @staticmethod
    def of(claim: Claimed, shard: DiskShard, start: int) -> Slab:
        return Slab(shard, start, claim.grad if isinstance(claim.grad, OnDisk) else None)

    @property
    def nbytes(self) -> int:
        """Of the buffer that it is read to."""
        return self.shard.slab_bytes(self.grad)

    def read(self, buffer: Tensor, on_done: OnDone) -> Inflight:
        return self.shard.read(self.start, buffer, self.grad, on_done)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return self.shard.views(self.start, buffer, self.grad)


class Buffers:
    """Host memory that goes round: at most `most` buffers, made when needed, each as large as the largest that was asked for.

    Args:
        own: told of bytes that are taken here; negative: given up.

    Attributes:
        free: those that nobody uses; who has done with one appends it.
    """

    def __init__(self, link: Link, most: int, own: Callable[[int], None]) -> None:
        self._link, self._most, self._own = link, most, own
        self.free: list[Tensor] = []
        self._made = self._nbytes = 0

    def take(self, nbytes: int) -> Tensor | None:
        """One of `nbytes` at least, uint8; None while all are in use."""
        self._nbytes = max(self._nbytes, nbytes)
        while self.free:
            buffer = self.free.pop()
            if buffer.numel() >= self._nbytes:
                return buffer
            self._made -= 1
            self._own(-buffer.numel())
        if self._made == self._most:
            return None
        self._made += 1
        self._own(self._nbytes)
        return self._link.empty(self._nbytes, torch.uint8)

    def forget(self) -> None:
        """All are made anew: after an error, which may have taken some out of the round."""
        self.free.clear()
        self._made = 0


@dataclass(eq=False)
class Step:
    """One unit's update under way."""

    claims: list[Claimed]
    twin: Twin
    optimizer: torch.optim.Optimizer
    states: dict[Any, dict[str, Any]]
    """The optimizer's, as of then: a program may give it others while this goes on."""
    after: Any
    stepper: Stepper
    moving: int = 0  # transfers out of host buffers that have not been waited for
    worked: bool = False
    done: Latch = field(default_factory=Latch)
    error: BaseException | None = None

    def wait(self) -> None:
        """Return when masters, states and parameters are where they rest.

        Raises:
            TierError: bytes could not be moved; the optimizer's step is half done then.
            StateError: so it is; the optimizer raised.
        """
        if not self.done.is_set:
            started = time.perf_counter()
            self.done.wait()
            self.stepper.wait_s += time.perf_counter() - started
        if self.error is not None:
            if isinstance(self.error, ZeroError):
                raise self.error
            self.stepper.check()  # the user's optimizer raised
            raise self.error

    @property
    def is_done(self) -> bool:
        return self.done.is_set

    def settle(self) -> None:
        if self.worked and self.moving == 0:
            self.done.set()


class Stepper:
    """The thread that updates offloaded shards, and its memory.

    Attributes:
        failure: what broke a step; nothing is updated after it until `recover`.
        wait_s: how long others have waited for the thread.
        memory_bytes: host memory of the ring and the blocks, in use or not.
    """

    def __init__(self, storage: Storage, threads: int | None) -> None:
        self.storage = storage
        self._sizes = storage.sizes
        self.failure: BaseException | None = None
        self.wait_s = 0.0
        self.memory_bytes = 0
        # A function that knows nothing of this object: an idle thread must not keep it.
        start = partial(torch.set_num_threads, threads) if threads is not None else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_zero step", initializer=start)
        self._lock = threading.Lock()
        self._queued = 0
        self._ahead: deque[Slab | Whole] = deque()  # what will be needed, in order
        self._reading: deque[tuple[Slab | Whole, Tensor, Inflight]] = deque()
        self._leaving: deque[tuple[Step, Inflight, Tensor | None, Buffers | None]] = deque()
        self._woken = Event()  # a transfer of a record has ended
        self._records = Buffers(storage.link, self._sizes.slabs, self._own)
        self._lanes = Buffers(storage.link, self._sizes.lanes, self._own)
        self._scratch: Tensor | None = None
        self._current: Step | None = None

    def _own(self, nbytes: int) -> None:
        """Buffers were made; negative: given up."""
        self.memory_bytes += nbytes
        self.storage.ledger.host.add("staging", nbytes)

    def begin(
        self, units: Iterable[Unit], optimizer: torch.optim.Optimizer, index: int, twin: Twin, after: Any
    ) -> None:
        """Start to update these units' offloaded shards that have gradients; `unit.stepping` says when each is done.

        Args:
            index: which of the model's optimizers it is; the others' spans stay as they are.

        Raises:
            StateError: an earlier step broke.
        """
        self.check()
        for unit in units:
            mine = [flat for flat in unit.trained if flat.span.is_updated and flat.span.optimizer == index]
            claims = [claim for flat in mine for claim in _claims(flat, twin)]
            if not claims:
                continue
            step = Step(claims, twin, optimizer, optimizer.state, after, self)
            unit.stepping = step  # units are updated in turn: one of another optimizer's, under way, is done before it
            with self._lock:
                self._queued += 1
                for claim in claims:
                    if isinstance(claim.shard, DiskShard):
                        if claim.flat.wholes is not None:
                            self._ahead.extend(wholes_of(claim, twin, step.states))
                        else:
                            self._ahead.extend(Slab.of(claim, claim.shard, start) for start in claim.shard.slabs)
            self._pool.submit(self._run, step)

    def check(self) -> None:
        if self.failure is not None:
            reason = str(self.failure)
            if not isinstance(self.failure, ZeroError):
                reason = f"{type(self.failure).__name__}: {reason}"
            raise StateError(
                f"an optimizer step broke off half done ({reason}): this model's state is not of "
                "one step. Load the last checkpoint (engine.load, or resume) to go on"
            ) from self.failure

    def fail(self, reason: str) -> None:
        """Refuse further steps, for a reason from outside."""
        self.failure = self.failure or TierError(reason)

    def recover(self) -> None:
        self.failure = None

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._records.forget()
        self._lanes.forget()

    # In the thread ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, step: Step) -> None:
        self.storage.meter.stepper_thread = threading.get_ident()
        try:
            if self.failure is not None:
                self.check()
            self._current = step
            for claim in step.claims:
                if claim.move is not None:
                    claim.move.close()
                self._update(step, claim)
                claim.shard.note()
                if self.storage.transient:
                    claim.shard.release_buffer()
        except BaseException as error:
            step.error = error
            self.failure = self.failure or error
        finally:
            with self._lock:
                self._queued -= 1
                idle = self._queued == 0
            step.claims.clear()
            self._current = None
            self._drain(0 if idle or step.error else self._sizes.slabs)
            if step.error is not None:
                self._abandon()
            step.worked = True  # not before: who has waited may load, and step again
            step.settle()

    def _update(self, step: Step, claim: Claimed) -> None:
        shard, flat, state = claim.shard, claim.flat, step.states
        if flat.wholes is not None:
            for whole in wholes_of(claim, step.twin, state):
                buffer = self._next(whole) if isinstance(shard, DiskShard) else None
                values = whole.values(buffer)
                found = whole.step(values, step.twin, self.storage, step.after)
                flat.publish(shard, whole.part.start, values[MASTER].view(-1), self)
                self._leave(step, whole.rest(values, found, self._woken.set), buffer, self._records)
            return

        if not shard.numel:  # there is nothing to move, but its steps are counted as any other's
            entries = {key: in_memory(value) for key, value in shard.entries(step.optimizer).items()}
            group = flat.span.spec.group
            grad = fetch(claim.grad)
            shard.put(step.optimizer, shard.master, step.twin.step(group, grad.new_empty(0), grad, entries))
            return

        if not isinstance(shard, DiskShard):
            entries = self._blocks(step, claim, shard.plain, fetch(claim.grad), 0, dict(state.get(shard.master, {})))
            if entries:
                state[shard.master] = entries
            return
        scalars = {key: value for key, value in state.get(shard.master, {}).items() if not isinstance(value, OnDisk)}
        for start in shard.slabs:
            slab = Slab.of(claim, shard, start)
            buffer = self._next(slab)
            views = slab.views(buffer)
            master = views.pop(MASTER)
            grad = views.pop(GRADIENT) if slab.grad is not None else fetch(claim.grad[start : start + master.numel()])
            entries = self._blocks(step, claim, master, grad, start, {**scalars, **views})
            states = {key: value for key, value in entries.items() if is_elementwise(key, value, master.numel())}
            written = shard.write(start, {MASTER: master, **states}, self._woken.set)
            self._leave(step, written, buffer, self._records)
        kept = {key: value for key, value in entries.items() if key not in states}
        kept |= shard.keep_states(shard.master, states)
        if kept:
            state[shard.master] = kept

    def _blocks(
        self, step: Step, claim: Claimed, master: Tensor, grad: Tensor, start: int, entries: dict[str, Any]
    ) -> dict[str, Any]:
        """Update `master`, elements `start` and on of the shard, by `grad`, and carry it to where the parameters rest: block by
        block, while it is in the cache."""
        shard, group, numel = claim.shard, claim.flat.span.spec.group, master.numel()
        goes_out, on_disk = not shard.aliased, isinstance(shard, DiskShard)
        plain = grad.dtype == master.dtype and claim.coefficient is None
        if not step.twin.fused[group]:
            width = self._sizes.loop_numel
        elif plain:
            width = self._sizes.plain_numel if goes_out or on_disk else numel
        else:
            width = self._sizes.block_numel
        kernel = step.twin.kernels[group] if entries else None
        names = [key for key, value in entries.items() if is_elementwise(key, value, numel)]
        if kernel is not None:
            names, count = ["exp_avg", "exp_avg_sq"], entries["step"] + 1
        out: dict[str, Any] = {}
        at = 0
        for values, part, *states in zip(*(e.split(width) for e in (master, grad, *(entries[key] for key in names)))):
            if not plain:
                part = self._cast(part, claim.coefficient, master.dtype)
            if kernel is not None:
                kernel(values, part, states[0], states[1], count)
            else:
                known = dict(zip(names, states))
                state = {key: known[key] if key in known else copied(value) for key, value in entries.items()}
                found = step.twin.step(group, values, part, state)
                for key, value in found.items():
                    if not is_elementwise(key, value, values.numel()):
                        out[key] = value
                        continue
                    if key not in out:
                        whole = values.numel() == numel and not on_disk
                        out[key] = value if whole else self._place(key, entries, value, numel, on_disk)
                    target = out[key][at : at + values.numel()]
                    if target.data_ptr() != value.data_ptr():
                        target.copy_(value)
            if goes_out:
                claim.flat.publish(shard, start + at, values, self)
            if on_disk:
                self._keep_going()
            at += values.numel()
        return out if kernel is None else {**entries, "step": count}

    def _cast(self, grad: Tensor, coefficient: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self._scratch is None or self._scratch.dtype != dtype:
            self._own(self._sizes.block_numel * dtype.itemsize - (0 if self._scratch is None else self._scratch.nbytes))
            self._scratch = torch.empty(self._sizes.block_numel, dtype=dtype, device="cpu")
        out = self._scratch[: grad.numel()]
        if coefficient is None:
            return out.copy_(grad)
        if grad.dtype == dtype:
            return torch.mul(grad, coefficient.to(dtype), out=out)
        return out.copy_(grad).mul_(coefficient.to(dtype))

    def _place(self, key: str, entries: dict[str, Any], value: Tensor, numel: int, on_disk: bool) -> Tensor:
        """Memory for all of an element-wise state: what it has, else new; page-aligned where it will be written to disk."""
        known = entries.get(key)
        if isinstance(known, Tensor) and known.numel() == numel:
            return known
        if on_disk:
            return self.storage.link.empty(numel, value.dtype, travels=False)
        return torch.empty(numel, dtype=value.dtype, device="cpu")

    # Ring of records ---------------------------------------------------------------------------------------------------

    def _next(self, record: Slab | Whole) -> Tensor:
        """Memory that has been read to. While it is waited for, what is written makes room for what is read after it."""
        while True:
            self._woken.clear()
            self._keep_going()
            if not self._reading:
                if not self._leaving:
                    raise StateError("values on disk were asked for that nobody announced")
                self._drain(len(self._leaving) - 1)
            elif self._reading[0][2].ready:
                break
            else:
                started = time.perf_counter()
                self._woken.wait()
                self.storage.meter.waited("read", time.perf_counter() - started)
        found, buffer, read = self._reading.popleft()
        if found != record:
            raise StateError("values on disk came in another order than they were asked for")
        read.close()
        return buffer

    def _keep_going(self) -> None:
        """Buffers that have been written are read to again, with what is needed next."""
        while self._leaving and self._leaving[0][1].ready:
            self._drain(len(self._leaving) - 1)
        while True:
            with self._lock:
                if not self._ahead:
                    return
                record = self._ahead[0]
            buffer = self._records.take(record.nbytes)
            if buffer is None:
                return
            with self._lock:
                self._ahead.popleft()
            self._reading.append((record, buffer, record.read(buffer, self._woken.set)))

    # Ways out ---------------------------------------------------------------------------------------------------------

    def up(self, values: Tensor, target: Tensor) -> None:
        """Values in host memory to the device: straight, or cast through one of two blocks."""
        step = self._current
        if step is None:
            raise StateError("values go up outside a step")
        link, width = self.storage.link, self._sizes.block_numel
        if values.dtype == target.dtype:
            self._leave(step, link.up(values, target, step.after))
            return
        for low in range(0, values.numel(), width):
            part = values[low : low + width]
            while (lane := self._lanes.take(width * target.dtype.itemsize)) is None:
                self._drain(len(self._leaving) - 1)
            cast = lane.view(target.dtype)[: part.numel()].copy_(part)
            self._leave(step, link.up(cast, target[low : low + part.numel()], step.after), lane, self._lanes)

    def _leave(self, step: Step, move: Inflight, memory: Tensor | None = None, home: Buffers | None = None) -> None:
        """First in, first out: what was sent from a buffer before the buffer itself is written is over when that is free."""
        if move is not DONE:
            step.moving += 1
            self._leaving.append((step, move, memory, home))
        elif memory is not None and home is not None:
            home.free.append(memory)

    def _drain(self, most: int) -> None:
        """Wait until at most that many transfers are under way."""
        while len(self._leaving) > max(0, most):
            step, move, memory, home = self._leaving.popleft()
            try:
                move.close()
            except BaseException as error:
                step.error = step.error or error
                self.failure = self.failure or error
            step.moving -= 1
            if memory is not None and home is not None:
                home.free.append(memory)
            step.settle()

    def _abandon(self) -> None:
        """After an error: nothing is read ahead."""
        with self._lock:
            self._ahead.clear()
        for _, _, read in self._reading:
            with contextlib.suppress(Exception):  # the step has failed already, for this or another reason
                read.close()
        self._reading.clear()
        self._records.forget()  # nothing is on the move any more
        self._lanes.forget()
        self._own((0 if self._scratch is None else self._scratch.nbytes) - self.memory_bytes)


def _claims(flat: Flat, twin: Twin) -> Iterable[Claimed]:
    # In backward nobody knows yet which parameters have none on any rank: that is zeros then, as for all of a span.
    present = [True] * len(flat.params) if flat.storage.transient else flat.present
    for shard in flat.shards:
        found = shard.claim()
        if found is not None:
            yield Claimed(flat, shard, *found, present)
        elif flat.wholes and twin.steps_without_gradient and shard.is_offloaded:
            yield Claimed(flat, shard, torch.empty(0, device="cpu"), None, None, [False] * len(flat.params))
