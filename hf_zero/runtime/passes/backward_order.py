"""The order of one backward, which all ranks share: who is gathered and reduced next, and what the ranks tell each other.

Units are reduced in the order of their first use, the last one first, each once. Where parameters are released, units
are gathered in the order of their last use. A rank whose backward leaves a unit out takes part in both all the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ...comm.wire import SoloWire
from ...plan.plan import Kept
from ..preemption import Preemption
from ..replicas import Options
from ..spare_room import SpareRoom
from ..values.unit import State, Unit
from .uses import Trace

_WAITS = 0x2AAAAAAA  # far from any number of steps
"""What ranks whose gradients wait add to what all ranks must have alike."""


@dataclass(frozen=True)
class Callbacks:
    """What a schedule calls, in the order of a step.

    Attributes:
        before_forward: the model's forward begins with these arguments, and no part of it is under way. The units may be cut
            anew in it.
        before_part: the forward of a part begins, which a program calls by itself.
        before_look: parameters of released units are read between passes.
        before_backward: the first event of a backward, before the ranks agree on its order.
        after_reduce: all gradients of a unit are with their owners; once per unit and backward that syncs.
        ask: at the end of a backward that reduces, on every rank; `BackwardOrder.answered` says if any said yes.
        after_backward: every owner's gradients are complete, and everything is released.
        broke_off: a backward was left by an exception, maybe a while ago; a part of its gradients is with their owners.
        options: of the optimizer; the ranks agree on them at the start of a backward.
        spare: for how many units there is room from a forward to its backward; None: no budget was given.
    """

    options: Options
    before_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], None]
    before_part: Callable[[], None]
    before_look: Callable[[], None]
    before_backward: Callable[[], None]
    after_reduce: Callable[[Unit], None] | None
    ask: Callable[[], bool]
    after_backward: Callable[[], None]
    broke_off: Callable[[], None]
    spare: SpareRoom | None


class BackwardOrder:
    """Of one schedule.

    Args:
        frees: whether units are released after their use.

    Attributes:
        answered: whether `Callbacks.ask` was true on any rank.
        preemption: what is told whether any rank was asked to end.
        reducing: the unit whose gradients are on their way.
        ahead: a unit that backward is in, and the one that it needs next: fetched when that reduce is over, see `fetch`.
        fetches_late: units may be put off so. Where a reduce's end is a collective itself, its place is before the next one.
        walked: how many of the units, in the order of their gathers, this rank has passed or entered.
        blind: the unit that was not there in this backward and had NaN for gradients; the same on every rank after `finish`.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        wire: SoloWire,
        callbacks: Callbacks,
        *,
        frees: bool,
    ) -> None:
        self._traces, self._wire, self._frees = traces, wire, frees
        self._ask, self._after_reduce = callbacks.ask, callbacks.after_reduce
        self._options, self._spare = callbacks.options, callbacks.spare
        self.fetches_late = frees and wire.size > 1 and wire.ends_alone
        self.answered = False
        self.preemption: Preemption | None = None
        self.blind: Trace | None = None
        self._sync = self._sends = True
        self._unseen: Trace | None = None  # it has gradients, and was not gathered in the backward under way
        self.reducing: Trace | None = None
        self.ahead: tuple[Unit, Trace] | None = None
        self._late: list[Trace] = []  # reduces that another rank may start only at the end of its backward
        self._agreement: Callable[[], list[int]] | None = None
        self._order: list[Trace] = []  # agreed: units in the order of their reduces
        self._walk: list[Trace] = []  # and of their gathers, where units are released
        self._turn = self.walked = 0  # how far these have come
        self._used = 0  # the length of the first: no call for it at each unit

    def begin(self, sync: bool, sends: bool, start_of: Callable[[int], int]) -> None:
        """Start to tell all ranks which units this one has used, and when; `agreed` has the answer.

        Args:
            sync: it is the last backward of a step.
            sends: gradients are reduced in it; else they wait on this rank for one that does.
            start_of: what the clock was when the pass began in which a use did.
        """
        self._sync, self._sends = sync, sends
        there = self._there() if self._frees else 0
        for trace in self._traces:
            trace.in_backward = trace.in_open = trace.unstepped = False
            # Kept from forward, on every rank: it is not gathered again.
            trace.came = trace.sent = trace.entered = trace.unit.state is not State.SHARDED
            trace.place = trace.step = -1
        self._turn = self.walked = self._used = 0
        self._order, self._walk = [], []
        self._unseen = self.ahead = None
        if not self._frees and (self._wire.size == 1 or not sends):
            self._agreement = None
            return
        waiting = any(trace.uses or trace.noted or trace.local for trace in self._traces)
        uses_of: list[tuple[int, int, int]] = []
        for trace in self._traces:
            # If none waits, all have had a backward: it is one over a graph that was kept.
            uses = trace.uses if waiting else trace.kept
            first = min(uses) if uses else trace.first if trace.noted or trace.local else 0
            uses_of += ((first, first if first > trace.latest else trace.latest, len(uses)),)  # no call for each
        # Clocks of ranks have other readings: what is compared is the time since the first pass began that this backward may
        # come to. Not since its first use: another rank may have dropped the graph of that one.
        base = start_of(min([first for first, _, _ in uses_of if first], default=1))
        numbers: list[int] = []
        for first, latest, passes in uses_of:  # the last of the four: it is not used here
            numbers += (first - base, latest - base, passes, 0) if first else (0, 0, 0, 1)
        if self._frees:
            numbers += (there, -there)
        if self._spare is not None:
            room = self._spare.room()
            numbers += (-room.whole, -room.count)
        # Steps made, the optimizer's options, what is sent: whether all ranks have the same of these is one maximum and one
        # minimum.
        alike = (self._wire.watch.step + self._options.mark() + (0 if sends else _WAITS)) & 0x7FFFFFFF
        numbers += (alike, -alike)
        self._agreement = self._wire.start_maximum(numbers)

    def agreed(self) -> None:
        """Once a backward: `_order` has the units in the order of their reduces, the last to be used first; `_walk` in that of
        their gathers."""
        answer, self._agreement = self._agreement, None
        if answer is None:
            return
        # Read once, and before the first gather or reduce of the backward: all collectives after it follow from its numbers.
        numbers, at = answer(), 0
        if numbers[-2] != -numbers[-1]:
            self._options.explain(self._wire, self._sends)
        used: list[Trace] = []
        for trace in self._traces:
            first, latest, passes, unused = numbers[at : at + 4]
            at += 4
            if first:
                used += (trace,)
                trace.agreed_first, trace.agreed_latest, trace.everywhere = first, latest, not unused
                trace.joinable = passes == 1 and not trace.weightless
        # `used` is in the units' order, and a reversed sort leaves equal ones as they are.
        self._order = sorted(used, key=attrgetter("agreed_first"), reverse=True)
        self._used = len(used)
        for place, trace in enumerate(self._order):
            trace.place = place
        # Ranks have other units than each other from their forwards: each of these is gathered from all ranks. Before anybody
        # asks `came`: a rank that has a unit would not take part in the gather of one that has not.
        if self._frees and numbers[at] != -numbers[at + 1]:
            for trace in self._traces:
                trace.leave()
                trace.came = trace.sent = trace.entered = trace.unit.state is not State.SHARDED
        if self._spare is not None:  # from the next forward on
            least_whole, least_count = numbers[at + 2 : at + 4]
            kept, parts = self._spare.first(Kept(-least_whole, -least_count))
            for trace in self._traces:
                trace.keeps, trace.parts = trace.at in kept, trace.at in parts
                if trace.keeps:  # else who reads a parameter meanwhile would not be known in a second backward
                    trace.unit.ask_always()
        if self._frees:
            self._walk = sorted(used, key=attrgetter("agreed_latest"), reverse=True)
            for step, trace in enumerate(self._walk):
                trace.step = step

    def _there(self) -> int:
        """Which units are here from a forward, whole or by parts, as one number of 31 bits. Ranks may differ in it: a block, or
        the whole last forward, may have run without a graph on one of them, or have been given other values."""
        for trace in self._traces:
            if (trace.is_kept or trace.unit.has_parts) and trace.unit.is_old:
                trace.leave()
        units = [trace.unit for trace in self._traces]
        found = [1 if unit.state is not State.SHARDED else 2 if unit.has_parts else 0 for unit in units]
        return zlib.crc32(bytes(found)) & 0x7FFFFFFF

    def need(self, trace: Trace) -> None:
        """Backward enters this unit: it is there afterwards. The one that comes next is on its way, or is fetched in the middle
        of this one's backward: with the bucket that is on its way just now there would be one buffer more."""
        if self._agreement is not None:
            self.agreed()
        if self.ahead is not None and self.ahead[0] is not trace.unit:  # else it is computed again, or another host's
            self.fetch()
        following = None
        if trace.joinable:
            if self.walked < trace.step:
                self.stand_in(trace.step)
            if self.walked <= trace.step:
                self.walked = trace.step + 1
            following = self._next_in_walk()
        trace.unit.settle_read()
        self._leave_used_after(trace)
        trace.came = trace.sent = trace.entered = True
        unit = trace.unit
        if unit.state is State.SHARDED:
            unit.gather(from_parts=True)
        trace.is_parted = False  # should this backward need it once more, it comes from all ranks
        if following is not None and following.unit.state is State.SHARDED:
            if self.reducing is not None and trace.has_middle and self.fetches_late:
                self.ahead = unit, following
            else:
                self._send(following)
        if unit.state is not State.GATHERED:
            unit.wait()
        elif unit.is_masked:
            unit.set_masked(False)

    def fetch(self) -> None:
        """Start on the unit that comes next, once the reduce under way is over and its bucket is gone.

        Called in the middle of a unit's backward; where no hook has told of that, before the next collective: so gathers and
        reduces have one order on all ranks.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        now, following = ahead
        if self.reducing is not None:
            now.look_local()  # beside the bucket that is about to go
            self._end_reduce()
        if following.unit.state is State.SHARDED and not following.sent:  # as `_send`, without a call
            following.sent = True
            following.unit.gather(from_parts=True)

    @staticmethod
    def _send(trace: Trace) -> None:
        """This rank's part in the gather of a unit, once in a backward: whether or not it will enter it itself."""
        if not trace.sent:
            trace.sent = True
            trace.unit.gather(from_parts=True)

    def _next_in_walk(self) -> Trace | None:
        """What all ranks gather next in this backward."""
        for trace in self._walk[self.walked :]:
            if trace.joinable and not trace.came:
                return trace
            if not trace.weightless and not trace.came:
                return None
        return None

    def stand_in(self, step: int) -> None:
        """Backward has passed the units before this step of the walk without a use of them, here: other ranks may need this
        one's part of them."""
        while self.walked < step:
            trace = self._walk[self.walked]
            self.walked += 1
            if not trace.joinable or self._wire.size == 1:
                continue
            if self.ahead is not None:
                self.fetch()
            stays, trace.came = trace.came, True
            following = self._next_in_walk()
            # Collectives in the order in which `need` has them on other ranks.
            trace.unit.settle_read()
            self._leave_used_after(trace)
            if not stays:
                self._send(trace)
                trace.is_parted = False
            if following is not None:
                self._send(following)
            # Other ranks have it until the last of its uses in this backward: one that ran twice this rank may have to enter
            # yet.
            if not stays and not trace.ran_twice:
                trace.release()
            if self.walked < len(self._walk):
                self._leave_used_after(self._walk[self.walked])

    def _leave_used_after(self, trace: Trace) -> None:
        """Backward is in a use of this unit: units that were used only after it are complete. They leave before it enters."""
        while self._turn < self._used and self._order[self._turn].agreed_first > trace.agreed_latest:
            self.reduce_up_to(self._turn)

    def reduce_up_to(self, place: int) -> None:
        while self._turn <= place:
            trace = self._order[self._turn]
            self._turn += 1
            trace.in_backward = trace.in_open = False
            if not trace.unit.trained or (self._wire.size == 1 and not trace.unit.has_grads()):
                trace.leave()
            elif self._sends:
                self.reduce(trace)
            else:
                self._wait(trace)

    def reduce(self, trace: Trace) -> None:
        """Its backward is over: its parameters leave, its gradients are on their way."""
        if self._frees:
            self._suspect(trace)
        trace.unit.count_local()  # before the parameters leave: both are there at this moment
        trace.leave()
        if self.ahead is not None:
            self.fetch()
        if self.reducing is not None:
            self._end_reduce()
        self.reducing = trace
        trace.unit.reduce()
        trace.unstepped = True

    def _end_reduce(self) -> None:
        """The reduce under way is waited for, but where another rank may send at its backward's end only: to wait for that here
        would be to wait for a rank that may need this one's part of a gather before it gets there."""
        previous, self.reducing = self.reducing, None
        if previous is not None:
            if previous.everywhere:
                self._finish_reduce(previous)
            else:
                self._late.append(previous)

    def _wait(self, trace: Trace) -> None:
        """Its backward is over: its parameters leave, its gradients wait on this rank for a backward that sends."""
        if self._frees:
            self._suspect(trace)
        trace.local = trace.local or trace.unit.has_grads()
        if self._frees:
            trace.leave()
        trace.unit.hold()

    def _suspect(self, trace: Trace) -> None:
        """Gradients of a unit that was not there in this backward: where NaN follow, they were made of its released values."""
        if self._unseen is None and not trace.entered and not trace.weightless and trace.unit.has_grads():
            self._unseen = trace
        if self._unseen is not None and self.blind is None and trace.unit.has_nan_grads():
            self.blind = self._unseen
            self.blind.stays = True

    def _finish_reduce(self, trace: Trace) -> None:
        trace.unit.finish_reduce()
        # With another pass of it to come there may be more. Whether other ranks have gradients of it is known at the end.
        if self._after_reduce is not None and trace.unit.has_arrived and not trace.pending:
            self._step(trace)

    def _step(self, trace: Trace) -> None:
        if self._after_reduce is not None and self._sync and trace.unstepped:
            trace.unstepped = False
            self._after_reduce(trace.unit)

    def _finish_reduces(self) -> None:
        late, self._late = self._late, []
        if self.reducing is not None:
            late.append(self.reducing)
            self.reducing = None
        for trace in late:
            self._finish_reduce(trace)
        if late:  # all gradients are at rest now: the ledger's bytes on the device may be the highest
            late[-1].unit.trained[0].account.look()

    def finish_locally(self) -> None:
        """The end of a backward that sends nothing: what no hook has come to, and gathers that other ranks may need."""
        if self._frees:
            self.agreed()
            self.stand_in(len(self._walk))
        for trace in self._traces:
            if trace.unit.trained:
                self._wait(trace)

    def finish(self) -> None:
        """What no hook has sent. Then: which parameters have a gradient on any rank, and what came after its turn."""
        if self._wire.size == 1:
            for trace in reversed(self._traces):
                if trace.unit.has_grads():
                    self.reduce(trace)
                trace.unit.set_present(trace.unit.arrived(), 0)
            self._finish_reduces()
            if self.preemption is not None:
                self.preemption.agreed |= self.preemption.signalled
        else:
            self.agreed()
            self.stand_in(len(self._walk))
            self.reduce_up_to(self._used - 1)
            self._finish_reduces()
            self._agree_on_gradients()
        for trace in self._traces:
            trace.local = False
            if self._after_reduce is not None:
                self._step(trace)

    def _agree_on_gradients(self) -> None:
        """A parameter without a gradient on any rank has none. A unit with gradients that came after its turn has another."""
        asked, ends = self._ask(), self.preemption
        while True:
            blind = self.blind
            # The same length on every rank and in every round: by unit, by parameter, then what was asked.
            flags: list[int] = [trace.unit.has_grads() for trace in self._traces]
            for trace in self._traces:
                flags += trace.unit.arrived()
            flags += (asked, ends is not None and ends.signalled, 0 if blind is None else 1 + blind.at)
            found = self._wire.start_maximum(flags, at_end=True)()
            more = [trace for trace in self._traces if found[trace.at]]
            if not more:
                break
            for trace in more:
                self.reduce(trace)
            self._finish_reduces()
        self.answered = bool(found[-3])
        if ends is not None and found[-2]:
            ends.agreed = True
        if found[-1]:
            self.blind = self._traces[found[-1] - 1]
        start = len(self._traces)
        for trace in self._traces:
            start = trace.unit.set_present(found, start)

    def skip_gathers(self) -> None:
        """Nothing is to be gathered in this backward: it has been already, or gradients alone are sent."""
        self.agreed()
        self.walked = len(self._walk)

    def forget(self) -> None:
        """After an exception in a backward. Its agreement is read, for other ranks may wait for this one's part."""
        self.reducing = self.ahead = None
        self._late.clear()
        self.agreed()
