"""One unit: its parameters brought in, waited for and released together, its gradients sent to their owners.

    SHARDED --gather--> GATHERING --wait--> GATHERED --release--> SHARDED

`gather` is a no-op unless SHARDED, so it may be called early (prefetch), late (on demand) or twice. `reduce` sends the
gradients to their owners and is independent of these states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import profiler

from ...comm.inflight import Inflight
from ...comm.wire import SoloWire
from ...config import StagePolicy
from ...core.layout import UnitLayout
from ...errors import OutOfMemoryError, StallError, StateError, TierError, ZeroError, is_told
from ...tiers.tier import Tier
from . import carrying
from .flat_param import Flat
from .reads import AsTheyAre, GatherOnRead, ParameterDict
from .span_values import SpanValues


class State(Enum):
    """Of a unit and all its spans, see above."""

    SHARDED = "SHARDED"
    GATHERING = "GATHERING"
    GATHERED = "GATHERED"


class Step(Protocol):
    """An update under way in another thread."""

    def wait(self) -> None: ...

    @property
    def is_done(self) -> bool: ...


class Unit:
    """Parameters that move together."""

    def __init__(self, layout: UnitLayout, flats: Sequence[Flat], wire: SoloWire, policy: StagePolicy) -> None:
        self.layout = layout
        self.name = layout.name
        self.flats = list(flats)
        self.trained = [flat for flat in flats if flat.span.trainable]
        self.wire = wire
        self.policy = policy
        self.gathered_bytes = layout.gathered_bytes
        self.state = State.GATHERED
        self._sends_late = any(flat.rest is Tier.DISK for flat in flats)
        """Gathers are issued in `wait`, when the disk has answered. By the plan, which is the same on every rank, and not by
        where this rank has moved something since: collectives have one order."""
        self.stepping: Step | None = None
        """The update of this unit that another thread is busy with."""
        self.written: str | None = None
        """A parameter that was written between passes, while its unit was there for somebody to read."""
        self.failure: TierError | None = None
        """Parameters could not be read from disk: what was computed since is worthless."""
        self.is_masked = False
        """Parameters are `reads.ReleasedParameter`: since a release, or a look between passes."""
        self.always_asks = False
        """Every access to a parameter is told to the schedule, also while the unit is gathered."""
        self.shows_whole = False
        """All parameters are pinned to whole values that are not this unit's to bring or release, see `unsharded`."""
        self.observer: Callable[[Unit], None] | None = None
        """Called before this rank's gradients leave, see `checks`."""
        self.are_saved: Callable[[SpanValues, int], bool] | None = None
        """Called at a release with a number of views that outlive it: whether all of them belong to graphs."""
        self._dictionaries: Sequence[ParameterDict] = ()
        self._brings: list[tuple[Flat, Inflight]] = []
        self._arrivals: list[Inflight] = []
        self._gathers: list[Inflight] = []
        self.has_parts = False
        """Spans have a `part`. Only while SHARDED."""
        self._comes_from_parts = False
        self._lent: list[Inflight] = []
        """Copies up that have arrived here; what they read in host memory may not be written before they are closed."""
        self._reduces: list[tuple[Flat, Inflight, Tensor, Tensor]] = []
        for flat in self.flats:
            flat.point(flat.views)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.state.value}, {self.layout.numel} elements)"

    def gather(self, *, from_parts: bool = False) -> None:
        """Start to bring the full parameters in.

        Args:
            from_parts: from what the ranks of this node have of it since its last release, where they have; on all ranks alike.
                Else that is old, and is given back.
        """
        if self.state is not State.SHARDED or self.shows_whole:
            return
        named = self._named("gather") if profiler._is_profiler_enabled else None
        if self._lent:
            self._lent = [inflight for inflight in self._lent if not inflight.ready]
        if self.stepping is not None:
            self.finish_step()
        if not self.policy.keep_full:
            for flat in self.flats:
                carrying.carry_given(flat, self.name)
        # All memory before the first message: where there is none, this raises with nothing on its way, and is SHARDED still.
        for flat in self.flats:
            if not flat.resident:
                flat.open(f"gathering unit {self.name!r}")
        if self.has_parts:
            if from_parts and (node := self.wire.node) is not None:
                for flat in self.flats:
                    if flat.part is not None:
                        self._gathers.append(flat.gather_part(node))
                self._comes_from_parts = True
            self.drop_parts()
        if not self._comes_from_parts:
            for flat in self.flats:  # once nothing can be refused any more: what is on its way must be waited for
                if flat.rest is not Tier.DEVICE:
                    self._brings.append((flat, flat.bring()))
            if not self._sends_late:
                self._send()
        self.state = State.GATHERING
        if named is not None:
            named.__exit__(None, None, None)

    def _named(self, what: str) -> profiler.record_function:
        """This unit's name in a profiler's trace, until the `__exit__` of what is returned; what raises meanwhile drops it.
        Called only while a profiler is on: steps without one make no call for it."""
        return profiler.record_function(f"hf_zero::{what} {self.name}").__enter__()

    def _send(self) -> None:
        """Start the gathers, once what rests on disk has arrived; what comes from host memory may still be on its way."""
        for flat, inflight in self._brings:
            if flat.rest is Tier.HOST:
                if flat.codec is not None:  # what is sent is made of it
                    inflight.wait()
                    self._lent.append(inflight)
                else:
                    self._arrivals.append(inflight)
                continue
            try:
                inflight.wait()
            except TierError as error:
                # Peers wait for this rank's part: they get NaN, and all ranks are told at the end of the pass.
                flat.place.fill_(float("nan") if flat.place.is_floating_point() else 0)
                flat.unread = True
                self.failure = self.failure or error
        if self._brings:
            self._brings.clear()
        for flat in self.flats:
            # `stale` is the same on all ranks, or some would wait here for a gather that others leave out.
            if flat.span.shards == 1 or (flat.resident and not flat.stale):
                continue
            if flat.codec is not None:
                self._gathers.append(flat.gather(self.wire))
                continue
            if flat.rest is Tier.DEVICE and isinstance(flat.own, Tensor):  # without a call for each
                self._gathers.append(self.wire.gather(flat.full, flat.own, flat.span.index, flat.span.cuts))
                continue
            with flat.storage.link.behind_up():
                self._gathers.append(self.wire.gather(flat.full, flat.place, flat.span.index, flat.span.cuts))

    def wait(self) -> None:
        """Full parameters are readable afterwards."""
        if self.state is State.GATHERED or self.shows_whole:
            return
        if self.state is not State.GATHERING:
            raise StateError(
                f"unit {self.name!r}: wait() in state {self.state.value}, allowed in GATHERING or GATHERED"
            )
        named = self._named("wait for gather") if profiler._is_profiler_enabled else None
        if self._sends_late and not self._comes_from_parts:
            self._send()
        self._comes_from_parts = False
        for inflight in self._arrivals:
            inflight.wait()
        self._lent += self._arrivals
        self._arrivals = []
        for inflight in self._gathers:
            inflight.close()  # from here on the program may write to what was sent: weights, or the optimizer's tensors
        self._gathers = []
        for flat in self.flats:
            flat.point(flat.views)
            if flat.shown_dtype is not None:
                flat.cast_shown()
            if self.policy.keep_full and (flat.stale or flat.rest is not Tier.DEVICE):
                flat.note()
            if flat.watched and not self.policy.keep_full:
                carrying.note_watched(flat)
            if flat.looks:
                carrying.look(flat)
            flat.stale = False
        self.state, self.is_masked = State.GATHERED, False
        if not self.always_asks:
            for each in self._dictionaries:
                each.__class__ = ParameterDict
        if named is not None:
            named.__exit__(None, None, None)

    def settle_read(self) -> None:
        """What is read from disk for it has arrived afterwards, its host buffers can serve others. By the plan, too."""
        if self._sends_late and self.state is State.GATHERING:
            self.wait()

    def drop_parts(self) -> None:
        """What this rank keeps of it for backward is given back."""
        self.has_parts = False
        for flat in self.flats:
            flat.drop_part()

    @property
    def is_old(self) -> bool:
        """Somebody has written to masters or parameters: a gather would bring in other values than the last."""
        released = self.state is State.SHARDED
        with AsTheyAre():
            return any(
                flat.moved(flat.guards.addresses if released else flat.addresses)
                or (not released and flat.was_written)
                or any(shard.edited(False) for shard in flat.shards)
                for flat in self.flats
            )

    def release(self, *, parts: bool = False, as_usual: bool = False) -> None:
        """Full parameters go away, unless the stage keeps them.

        Args:
            parts: this rank keeps its part of them, among those of its node. Not of values that somebody has written: what
                a gather brings in of these goes through the masters, and maybe through codes.
            as_usual: One graph waits for its backward, see `SpanValues.close`.
        """
        if self.state is State.SHARDED or self.policy.keep_full:
            return
        if self.state is State.GATHERING:
            try:
                self.wait()
            except StallError as error:
                if is_told(error):  # torch calls hooks after an error, too, and would warn of each that raises
                    return
                raise
        with AsTheyAre():  # masked, maybe: each look at a parameter here would be told as a read
            for flat in self.flats:
                if flat.casts:
                    carrying.carry_casts(flat, all_=False)
                    flat.point(flat.views)
                try:
                    if carrying.carry_in_use(flat, self.name, self.close):
                        parts = False
                except TierError as error:  # on this rank alone: told to all at the end of the pass
                    self.failure = self.failure or error
        if parts and (node := self.wire.node) is not None:
            try:
                for flat in self.flats:
                    flat.keep_part(node)
                self.has_parts = True
            except OutOfMemoryError:  # on this rank alone: told to all at the start of the backward
                self.drop_parts()
        # From here on Ctrl-C may end this anywhere: what is left open is opened again by the next gather. In the other order
        # the next release would take what released parameters show for values that somebody wrote.
        self.state, self.is_masked = State.SHARDED, True
        for each in self._dictionaries:
            each.__class__ = GatherOnRead
        for flat in self.flats:
            # Parameters first: one that showed a storage of no bytes would crash who reads it, and not show NaN.
            flat.point(flat.guards.shown)
            flat.close(self.are_saved, as_usual=as_usual)

    def set_masked(self, masked: bool) -> None:
        """Gathered: whether reads of parameters are told to the schedule all the same."""
        self.is_masked = masked
        for flat in self.flats:
            flat.set_masked(masked)

    @property
    def references(self) -> int:
        """How many tensors are views of what is gathered, ours among them."""
        return sum(flat.references for flat in self.flats)

    def look_over(self) -> None:
        """Where it stayed gathered after a forward, what was written since, also through `.data`, is carried over."""
        if self.state is not State.GATHERED or self.policy.keep_full:
            return
        self.close()
        with AsTheyAre():  # masked, maybe
            self._look_over()

    def _look_over(self) -> None:
        for flat in self.flats:
            if not flat.in_files and not flat.unread:
                if flat.casts:
                    carrying.carry_casts(flat)
                try:
                    replaced, written = flat.moved(flat.addresses), flat.counted()
                    for index in (*replaced, *written):
                        self.written = self.written or flat.span.slots[index].spec.name
                    if replaced:
                        carrying.part_from_views(flat, replaced)
                    carrying.carry(flat)
                    carrying.note_written(flat, written)
                    for index in replaced:
                        carrying.take_over(flat, self.name, index)
                except TierError as error:  # on this rank alone: told to all at the end of the pass
                    self.failure = self.failure or error

    def watch(self, dictionaries: Sequence[ParameterDict]) -> None:
        """These modules' parameters belong to this unit: while it is released, a read of one is told to the schedule."""
        self._dictionaries = dictionaries
        self._tell_reads()

    def ask_always(self) -> None:
        """Every access to a parameter is told to the schedule from now on, also while the unit is gathered."""
        if not self.always_asks:
            self.always_asks = True
            self._tell_reads()

    def _tell_reads(self) -> None:
        silent = self.shows_whole or (self.state is State.GATHERED and not self.always_asks)
        for each in self._dictionaries:
            each.__class__ = ParameterDict if silent else GatherOnRead

    def show_whole(self, whole: bool) -> None:
        """Its parameters have whole values from elsewhere from now on; or no longer. Sharded, where parameters are released."""
        if whole is not self.shows_whole:
            self.shows_whole = whole
            self._tell_reads()

    def gather_if_kept(self) -> None:
        """After the slices have been elsewhere: whole again, where the stage keeps that. A collective there."""
        if self.policy.keep_full:
            self.gather()
            self.wait()

    def close(self) -> None:
        """Wait until the device has taken what it is given: `own` may be written again."""
        if self._lent:
            lent, self._lent = self._lent, []
            for inflight in lent:
                inflight.close()

    @property
    def is_idle(self) -> bool:
        """Nothing of it is gathered for a pass, on its way or in a bucket: its optimizer state may change tiers."""
        gathered = self.state is State.GATHERED and not self.policy.keep_full
        if gathered or self.state is State.GATHERING or self._reduces:
            return False
        return not any(flat.in_use for flat in self.flats)

    @property
    def in_memory(self) -> bool:
        """All optimizer state rests on the device, undivided."""
        for flat in self.trained:  # noqa: SIM110 -- asked for often
            if not flat.in_memory:
                return False
        return True

    def finish_step(self) -> None:
        """An update that another thread is busy with is done afterwards.

        Raises:
            TierError: it failed.
        """
        step = self.stepping
        if step is None:
            return
        try:
            step.wait()
        except ZeroError:
            self.stepping = None  # told once
            raise
        self.stepping = None  # not before: a wait that Ctrl-C ends has not been

    def stepped(self, optimizer: int = 0) -> None:
        """After the optimizer's step: what is gathered is old. Updates of offloaded shards may still be under way.

        Args:
            optimizer: which one's; spans of others are as they were.
        """
        if self._lent:
            self.close()
        if self.has_parts:  # of the values before the step
            self.drop_parts()
        for flat in self.trained:
            if flat.span.optimizer == optimizer:
                flat.refresh_device()
                flat.stale = flat.stale or flat.span.is_updated
        if self.policy.keep_full:
            for flat in self.flats:
                if flat.stale:
                    self.state = State.SHARDED

    def updated(self) -> None:
        """The masters were written, here or on another rank: what is gathered is old. On every rank alike."""
        self.finish_step()
        self.close()
        if self.has_parts:
            self.drop_parts()
        for flat in self.flats:
            flat.refresh()
            flat.stale = True
        if self.policy.keep_full:
            self.state = State.SHARDED

    # Gradients ------------------------------------------------------------------------------------------------------

    def has_grads(self) -> bool:
        for flat in self.trained:  # noqa: SIM110 -- asked for often
            if flat.has_grads():
                return True
        return False

    def has_nan_grads(self) -> bool:
        """Whether a local gradient, not reduced yet, has a NaN."""
        return any(flat.has_nan_grads() for flat in self.trained)

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has had a gradient of it since the last `drop_grads`."""
        for flat in self.trained:  # noqa: SIM110 -- asked for often
            if True in flat.arrived:
                return True
        return False

    def arrived(self) -> list[bool]:
        """By parameter, span by span: whether this rank has had a gradient of it since the last `drop_grads`."""
        return [each for flat in self.trained for each in flat.arrived]

    def set_present(self, found: Sequence[int], start: int) -> int:
        """What `arrived` is on any rank, from `found[start]` on; returns where the next unit's begins."""
        for flat in self.trained:
            stop = start + len(flat.params)
            flat.set_present([bool(each) for each in found[start:stop]])
            start = stop
        return start

    @torch.no_grad()
    def hold(self) -> None:
        """The end of a backward inside `no_sync`, where nothing is sent."""
        if self.policy.keep_full:
            for flat in self.trained:
                flat.hold()
        else:
            with AsTheyAre():  # released by now, maybe
                for flat in self.trained:
                    flat.hold()

    def count_local(self) -> None:
        """The ledger has what backward has just left on the parameters, while what it left before is still on its way."""
        for flat in self.trained:
            if not flat.moving_bytes:  # else it has it already
                flat.count_local()
        self.trained[0].account.look()

    def look_local(self) -> None:
        """The ledger's peaks have what backward has left on the parameters so far, and the ledger does not have yet."""
        new = [flat for flat in self.trained if not (flat.moving_bytes or flat.waiting_bytes)]
        sizes = [each for flat in new for each in zip(flat.grad_bytes, flat.params)]
        account, nbytes = self.trained[0].account, sum([size for size, param in sizes if param.grad is not None])
        account.now["communication"] += nbytes
        account.look()
        account.now["communication"] -= nbytes

    def reduce(self) -> None:
        """Start to send the local gradients to their owners; `finish_reduce` ends it."""
        if torch.is_grad_enabled():  # a backward may be building a graph of itself
            with torch.no_grad():
                self.reduce()
            return
        named = self._named("reduce") if profiler._is_profiler_enabled else None
        if self._reduces:
            self.finish_reduce()
        # Its thread may still read the gradients that these are added to.
        if self.stepping is not None:
            self.finish_step()
        if self.observer is not None:
            self.observer(self)
        if self.policy.keep_full:
            self._reduce()
        else:
            with AsTheyAre():  # released by now, maybe
                self._reduce()
        if named is not None:
            named.__exit__(None, None, None)

    def _reduce(self) -> None:
        for flat in self.trained:
            if self.wire.size == 1:
                flat.add_local()
                continue
            source = flat.source(self.wire)
            mean = flat.allocate(flat.span.slice_numel, flat.master_dtype)
            flat.moving_bytes += mean.nbytes
            if flat.span.shards > 1:
                move = self.wire.reduce(source, mean, flat.span.index, flat.span.cuts)
            else:
                move = self.wire.average(source, mean, flat.span.index)
            self._reduces.append((flat, move, mean, source))

    def finish_reduce(self) -> None:
        """The owners' gradients are up to date afterwards."""
        if not self._reduces:
            return
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.finish_reduce()
            return
        named = self._named("wait for reduce") if profiler._is_profiler_enabled else None
        account = self.trained[0].account
        for flat, inflight, mean, _ in self._reduces:
            inflight.close()  # before the bucket goes: it is what the others read
            account.now["communication"] -= flat.moving_bytes
            flat.moving_bytes = 0
            flat.add_reduced(mean)
            flat.drop_bucket()
        self._reduces.clear()
        if named is not None:
            named.__exit__(None, None, None)

    def drop_grads(self, shards: bool, optimizer: int | None = None) -> None:
        """Forget local gradients, and with `shards` also the reduced ones.

        Args:
            optimizer: of its spans, and of those that are in none; None: of all.
        """
        for flat in self.trained:
            if optimizer is not None and flat.span.is_updated and flat.span.optimizer != optimizer:
                continue
            flat.drop_grads(local=not shards)
            if shards:
                flat.drop_master_grad()
                if self.wire.size == 1:
                    flat.drop_bucket()

    def settle(self) -> None:
        """Nothing of this unit is on the move afterwards."""
        for inflight in chain(self._gathers, (move for _, move, _, _ in self._reduces)):
            inflight.close()
        for flat, *_ in self._reduces:
            flat.drop_moving()
        self._reduces.clear()
        if self.state is State.GATHERING:
            self.wait()
        self.close()
