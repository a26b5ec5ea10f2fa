"""One unit: its spans are gathered, waited for and released together.

    SHARDED --gather--> GATHERING --wait--> GATHERED --release--> SHARDED

`gather` does nothing unless the unit is SHARDED, so it may be called early (prefetch) or twice. Reducing gradients does not
depend on these states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from ..comm.inflight import DONE, Inflight
from ..errors import StateError, TierError
from ..tiers.disk import wait_for_transfers
from ..tiers.tier import Tier
from .bucket import have_local
from .context import Context
from .parameter import set_raw_grad, set_released
from .span import Span

if TYPE_CHECKING:
    from .host_step import UnitStep


class State(Enum):
    SHARDED = "SHARDED"
    GATHERING = "GATHERING"
    GATHERED = "GATHERED"


class Unit:
    """Parameters that move together.

    Attributes:
        name: of the module that hosts it, or of its first parameter.
        hosts: modules whose forward uses it.
        index: its number among the model's units.
        trained: spans whose gradients are reduced.
        step: an update of its offloaded spans by another thread; None if there is none.
        is_pinned: full parameters stay gathered, whatever passes do: `release` does nothing.
        ignores_writes: user code's writes to full parameters are not written back to the masters.
        allows_reads: operations read the parameters directly. Else each one passes through an observer first.
    """

    def __init__(
        self, name: str, index: int, hosts: Sequence[nn.Module], spans: Sequence[Span], context: Context
    ) -> None:
        self.name, self.index, self.hosts = name, index, list(hosts)
        self.spans = list(spans)
        self.trained = [span for span in spans if span.trainable]
        self.params = [param for span in spans for param in span.params]
        self.context, self.events = context, context.events
        self.state = State.GATHERED
        self.allows_reads = True
        self.step: UnitStep | None = None
        self.is_pinned = self.ignores_writes = False
        self._uses_disk = any(span.copy_tier is Tier.DISK and span.tier is not Tier.DEVICE for span in spans)
        self._loads: list[Inflight] = []
        self._gathers: list[Inflight] = []
        self._are_transfers_known = True
        """`_loads` and `_gathers` have every running transfer. False after Ctrl-C: reads may run that nothing waits for."""
        self._reduces: list[tuple[Span, Inflight, Tensor, Tensor]] = []
        for span in spans:
            span.attach_params(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value})"

    # Values -----------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start to gather the full parameters."""
        if self.state is State.SHARDED:
            self._run(self._gather, "gather")

    def _gather(self) -> None:
        if self.step is not None:
            self.wait_for_step()
        for event in self.events.before_gather:
            event(self)
        # Allocate all memory before the first message: an allocation that fails must leave nothing under way.
        for span in self.spans:
            span.open(f"gathering unit {self.name!r}")
        if not self._are_transfers_known:
            wait_for_transfers()
        self._are_transfers_known = False
        self._loads = [load for span in self.spans if (load := span.load_local()) is not DONE]
        if not self._uses_disk:
            self._send()
        self.state, self._are_transfers_known = State.GATHERING, True

    def _send(self) -> None:
        for number, load in enumerate(self._loads):
            try:
                load.wait()
            except TierError as error:
                # Other ranks wait for this slice: they get NaN, and every rank raises at the end of the pass.
                self._loads[number] = DONE
                self.context.record_failure(error)
                for span in self.spans:
                    span.local.fill_(float("nan") if span.local.is_floating_point() else 0)
        self._gathers = [span.gather() for span in self.spans if not span.is_persistent or span.is_old]

    def wait(self) -> None:
        """Wait until the full parameters are readable."""
        if self.state is State.GATHERED:
            return
        if self.state is State.SHARDED:
            raise StateError(f"unit {self.name!r}: wait() without gather()")
        self._run(self._wait, "wait for gather")
        for event in self.events.unit_gathered:
            event(self)

    def _wait(self) -> None:
        if self._uses_disk and not self._gathers:
            if not self._are_transfers_known:
                wait_for_transfers()
                self._loads = [load for span in self.spans if (load := span.load_local()) is not DONE]
            self._are_transfers_known = False
            self._send()
            self._are_transfers_known = True
        for transfer in (*self._loads, *self._gathers):
            transfer.close()  # must end first: from here on user code may write to the memory that was sent
        self._loads, self._gathers = [], []
        for span in self.spans:
            span.is_old = False
        self.state = State.GATHERED
        self.allow_reads()

    def allow_reads(self) -> None:
        """Allow reads of the full parameters, which stay until their use is over."""
        if not self.allows_reads:
            self.allows_reads = True
            set_released(self.params, False)

    def intercept_reads(self) -> None:
        """Intercept reads: the use of the full parameters is over. They may still be gathered."""
        if self.allows_reads and self.context.reshards and not self.is_pinned:
            set_released(self.params, True)
            self.allows_reads = False  # last: after a signal between the two the next call intercepts them again

    def intercept_all_reads(self) -> None:
        """Intercept reads of full parameters that the stage keeps, while they have no memory."""
        set_released(self.params, True)
        self.allows_reads = False

    def release(self) -> None:
        """Free the full parameters, unless the stage keeps them."""
        if self.state is State.SHARDED or not self.context.reshards or self.is_pinned:
            return
        if self.state is State.GATHERING:
            self.wait()
        for event in self.events.unit_released:
            event(self)
        self.close()

    def close(self) -> None:
        """Free the full parameters."""
        self.state = State.SHARDED
        # Parameters first: an operation on one whose buffer has no memory would crash the process.
        self.intercept_reads()
        for span in self.spans:
            span.close()

    def mark_old(self, spans: Sequence[Span] | None = None) -> None:
        """Mark gathered values as stale: the masters of these spans were written. The same on every rank."""
        for span in self.spans if spans is None else spans:
            span.is_old = True
        for span in () if self.context.reshards else self.spans:
            if span.is_old:
                self.state = State.SHARDED

    def wait_for_step(self) -> None:
        """Wait until no other thread updates the unit's spans.

        Raises:
            BaseException: the update failed, and no rank uses a disk; else see `Context.raise_failures`.
        """
        step = self.step
        if step is None:
            return
        if get_ident() == self.context.storage.meter.stepper_thread:
            raise StateError(
                "the optimizer reads the model in its step over offloaded state. Let it read its groups' parameters alone, or "
                "set offload_optimizer='none'"
            )
        started = time.perf_counter()
        error = step.wait()
        self.step = None  # not before: Ctrl-C may end the wait
        self.context.step_wait_s += time.perf_counter() - started
        if error is not None:
            self.context.record_failure(error, half_done=True)

    def sync_requires_grad(self, *, keeps: bool) -> bool:
        """Read `requires_grad` of the parameters again. The same on every rank.

        Args:
            keeps: ranks hold gradients that are not reduced, so spans that trained until now are still reduced.

        Returns:
            Whether a span whose parameters are all frozen still has gradients. It is reduced until it has none.
        """
        before = self.trained
        self.trained = []
        for span in self.spans:
            span.sync_requires_grad()
            if span.trainable or span.bucket.grad is not None or (keeps and span in before):
                self.trained.append(span)
        return not all(span.trainable for span in self.trained)

    # Gradients --------------------------------------------------------------------------------------------------------

    @property
    def has_local_grads(self) -> bool:
        return have_local([span.bucket for span in self.trained])

    def reduce(self) -> None:
        """Start to send this rank's gradients to their owners."""
        self._run(self._reduce, "reduce", of_gradients=True)

    def _reduce(self) -> None:
        if self._reduces:
            self.finish_reduce()
        if self.step is not None:
            self.wait_for_step()  # it reads the gradients that these are added to
        for event in self.events.before_reduce:
            event(self)
        self._reduces = [(span, *span.bucket.reduce()) for span in self.trained]

    def finish_reduce(self) -> None:
        """Wait until the owners' gradients are complete."""
        if not self._reduces:
            return
        self._run(self._finish_reduce, "wait for reduce", of_gradients=True)
        for event in self.events.unit_reduced:
            event(self)

    def _finish_reduce(self) -> None:
        while self._reduces:
            span, transfer, mean, source = self._reduces.pop(0)
            transfer.close()  # before the buffer is freed: other ranks read it
            del transfer, source  # before `add`, which may wait for a disk
            span.bucket.add(mean)

    @torch.no_grad()
    def hold(self) -> None:
        """Keep this rank's gradients for a later backward."""
        for span in self.trained:
            span.bucket.hold()

    def drop_gradients(self) -> None:
        """Wait for everything under way and forget all gradients, after a backward that failed."""
        wait_for_transfers()  # the next backward writes to the same places on disk
        for transfer in (*self._gathers, *(move for _, move, _, _ in self._reduces)):
            transfer.close()
        self._reduces = []
        if self.state is State.GATHERING:
            self.wait()
        for span in self.trained:
            span.bucket.clear()
            for segment in span.segments:
                set_raw_grad(segment.tensor, None)

    def _run(self, action: Callable[[], None], name: str, *, of_gradients: bool = False) -> None:
        """Run an action, under the unit's name in a profiler's trace.

        Args:
            of_gradients: gradients may have a graph (`create_graph`), which must not record the action.
        """
        builds_graph = of_gradients and torch.is_grad_enabled()
        named = self.named(name) if profiler._is_profiler_enabled else None
        try:
            if builds_graph:  # torch.no_grad() would take five calls
                torch._C._set_grad_enabled(False)
            action()
        finally:
            if builds_graph:
                torch._C._set_grad_enabled(True)
            if named is not None:
                named.__exit__(None, None, None)

    def named(self, what: str) -> AbstractContextManager[object]:
        """Begin a range of a profiler's trace, which the caller ends."""
        entered: AbstractContextManager[object] = profiler.record_function(f"hf_zero::{what} {self.name}")
        entered.__enter__()
        return entered


def have_gradients(units: Sequence[Unit]) -> bool:
    """Return whether some gradients were reduced and not cleared. The same on every rank."""
    return any(span.bucket.grad is not None for unit in units for span in unit.trained)
