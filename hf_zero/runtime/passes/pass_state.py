"""The pass under way, forward or backward: whose forwards run, which units they need, what stays beyond its use."""

from __future__ import annotations

import time
from bisect import bisect_left

import torch
from torch import nn

from ...errors import StateError
from ..saved_tensors import SavedTensors
from ..values.unit import State
from .backward_order import BackwardOrder
from .uses import Host, Order, Trace

_PASSES = 256
_LETTING_GO = 50
"""Milliseconds in which a collective that has ended lets go of its tensors."""
LEARNING = 4
"""In so many backwards all saved tensors are looked at, to find units that a backward comes to by other ways than outputs."""


class Pass:
    """Of one schedule, which begins it; what knows the graph and what hears of reads share it.

    Attributes:
        traces: the model's units. `frees`: some of them are released between their uses.
        order: of backwards. `forward`: of the last forward.
        saved: the saved tensors of graphs, where units are released.
        inner: modules inside hosts, with their host.
        number: of this pass; `clock` orders the uses of units. Both only grow.
        in_backward: from the first event of a backward to its end.
        with_graph: the root's forward under way makes a graph.
        raised: an exception has ended the last forward.
        running: hosts whose forward is under way, innermost last.
        hooked: in whose forward saved tensors pass through `saved` just now.
        learning: backwards to come in which all saved tensors are looked at.
        tail: its forward is done; its release waits for the next unit's need.
        looks: units that were read between passes, each with the references to its memory then.
    """

    order: BackwardOrder
    saved: SavedTensors

    def __init__(self, traces: list[Trace], inner: list[tuple[nn.Module, Host]]) -> None:
        self.traces, self.inner = traces, inner
        self.frees = any(not trace.unit.policy.keep_full for trace in traces)
        self.number, self.clock = 1, 0
        self._starts = [0]  # what the clock was when the last passes began
        self.forward = Order()
        self.in_backward = self.with_graph = self.raised = False
        self.running: list[Host] = []
        self.hooked: Host | None = None
        self.learning = LEARNING
        self.tail: Trace | None = None
        self.looks: dict[Trace, int] = {}
        self._viewed: set[Trace] = set()

    def begin(self) -> None:
        """A forward that is in no other of the model's."""
        self.number += 1
        self._starts += (self.clock,)
        del self._starts[:-_PASSES]
        # Else a second forward would add its hosts to the first one's use, and their backwards be taken for one.
        for trace in self.traces:
            trace.use = None
            if trace.unexplained:
                trace.unexplained = False
                self.learning = LEARNING

    def enter(self, host: Host) -> None:
        """A host's forward begins."""
        if self.frees and self.hooked is None and torch.is_grad_enabled():
            if not self.running:
                # A hook of others on a module inside a host may record its tensors: a backward may begin there.
                for module, owner in self.inner:
                    if owner.trace is not None and (module._forward_hooks or module._forward_pre_hooks):
                        owner.trace.strict = True
            # In a backward it is a recomputation: its graph is a new one each time, and is gone through at once.
            strict = self.learning or self.in_backward or (host.trace is not None and host.trace.strict)
            if strict:
                self.hooked = host  # first: hooks that nobody remembers would stay on
                if not self.saved.push():
                    self.hooked = None
        if host in self.running:
            host.begin_inner()
        elif host.outer:  # an exception has ended them
            host.outer.clear()
        self.running.append(host)

    def leave(self, host: Host) -> None:
        """It is over, or has raised. It is one of `running`: who is not has no forward, or one that `abandon` has ended."""
        while self.running.pop() is not host:  # an exception that no hook was told of
            pass
        if self.hooked is not None and self.hooked not in self.running:
            self.saved.pop()
            self.hooked = None
        borrowed, host.borrowed = host.borrowed, []
        for trace in borrowed:
            trace.running = max(0, trace.running - 1)
            if trace.noted:
                self.end_use(trace)
            if not trace.running and not self.in_backward:
                self.end_hosts(trace)

    def abandon(self) -> None:
        """No forward is under way."""
        self.running.clear()
        if self.hooked is not None:
            self.saved.pop()
            self.hooked = None

    def note(self, trace: Trace) -> None:
        """It takes part in this pass."""
        if trace.noted != self.number:
            self.clock += 1
            trace.begun = trace.latest = self.clock
            if not trace.noted:
                trace.first = trace.begun
            trace.noted = self.number

    def start_of(self, first: int) -> int:
        """What the clock was when the pass began in which a use did, at `first`."""
        place = bisect_left(self._starts, first)
        return self._starts[place - 1] if place else first - 1

    def end_use(self, trace: Trace) -> None:
        self.clock += 1
        trace.latest = self.clock

    def need(self, trace: Trace) -> None:
        """This unit now; and start on the one that comes next: at most two are gathered for use at any moment."""
        if self.in_backward:
            self.order.need(trace)
            return
        # This one before the next one, also where both are hints: gathers have the same order on all ranks.
        following = self.forward.note(trace.unit)
        unit = trace.unit
        if unit.state is State.SHARDED:
            unit.gather()
        if following is not None and following.state is State.SHARDED:
            following.gather()
        if unit.state is not State.GATHERED:
            unit.wait()
        elif unit.is_masked:
            unit.set_masked(False)

    def end_hosts(self, trace: Trace) -> None:
        """No forward that needs this unit is under way any more, and it is not released yet."""
        # Whoever reads a weight of it from here on (a penalty, a tied head) has to be noticed: it is released as soon as
        # another unit is needed, and what a graph has saved of a read that nobody knows of is NaN in the backward.
        if self.with_graph and trace.unit.state is State.GATHERED:
            trace.unit.set_masked(True)
        if trace.seen >= trace.expected:
            if self.tail is not None:
                self.leave_tail(trace)
            self.tail = trace

    def leave_tail(self, trace: Trace) -> None:
        """Another unit is needed: what waited for that is released."""
        tail, self.tail = self.tail, None
        if tail is not None and tail is not trace and not tail.running:
            tail.release()

    def hold(self, trace: Trace, how: int) -> None:
        """It is there, and stays: see `Trace.held`."""
        trace.held = max(trace.held, how)
        self.need(trace)
        if how == 2:
            self.note(trace)

    def hold_inside_forward(self, trace: Trace) -> None:
        """A backward inside a forward (forces from energies) needs this unit, and so does what is made of it."""
        trace.held = 2 if torch.is_grad_enabled() else max(trace.held, 1)
        trace.unit.gather()
        trace.unit.wait()

    def drop_holds(self) -> None:
        """Units that were held until the next forward or step are released."""
        self.look_over()  # first: a release carries over what torch counts, this also what was written through `.data`
        if self.looks:
            self.end_looks()
        for trace in self.traces:
            if trace.held == 1:
                trace.held = 0
                trace.unit.release()

    def end_looks(self) -> None:
        """What was gathered for `Lending.lend` outside of passes may go.

        Raises:
            StateError: somebody keeps a view of it, which would have no memory then.
        """
        for trace in self.looks:
            if trace.unit.state is State.GATHERED and self.is_viewed(trace):
                raise StateError(
                    f"a view of a parameter of unit {trace.unit.name!r} is still held that was taken between passes "
                    "(p.data, p.detach(), p[0]): the unit is released now, and its values with it. Keep a clone() instead, or "
                    "read inside zero.GatheredParameters"
                )
        self.looks.clear()
        self._viewed.clear()

    def is_viewed(self, trace: Trace) -> bool:
        """Somebody keeps a view of this unit, which is one of `looks`.

        A collective of the program's (`dist.broadcast(p.data, 0)`) lets go of its tensor in a thread of its own, some time
        after it has ended, on each rank at another moment.
        """
        references = self.looks[trace]
        if trace.unit.references <= references:
            return False
        for _ in range(0 if trace in self._viewed else _LETTING_GO):
            time.sleep(1e-3)
            if trace.unit.references <= references:
                return False
        self._viewed.add(trace)
        return True

    def look_over(self) -> None:
        """Between passes: no backward has come to these, and the user may have written to them."""
        if self.frees:
            for trace in self.traces:
                if trace.unit.state is State.GATHERED:
                    trace.unit.look_over()
