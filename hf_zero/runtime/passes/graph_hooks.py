"""Hooks on the nodes of autograd's graph: where a backward begins, comes to a unit, is done with it, and ends.

Hooks stand on *nodes of the autograd graph*, not on tensors and not as autograd functions, so that the user's graph stays
as it was (in-place use of a unit's inputs and outputs included):

* pre-backward: a prehook on the nodes that made the host's outputs. It runs before the first backward operation of the
  unit: gather. Where a backward comes to the unit by another way, the saved tensors ask for it (`saved_tensors.SavedTensors`);
  that costs Python time per saved tensor, so it is on for the first backwards, and then for units that were seen to need it.
* post-backward: a prehook on the node that made the host's *youngest* input. Autograd runs the ready node that was made
  last, and AccumulateGrad before all others; so when the maker of the youngest input runs, every node made after it is
  done: all of the unit's, and the gradients of its parameters. Release and reduce.
* end of backward: an engine callback, for everything these miss: hosts whose inputs need no gradient (embeddings), units
  that another rank used and this one did not.

In which order units are reduced and gathered is the ranks' agreement (`backward_order`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ...comm.wire import SoloWire
from ...errors import StateError
from ..saved_tensors import in_backward_of_any
from ..values.reads import AsTheyAre
from ..values.unit import State
from .backward_order import BackwardOrder, Callbacks
from .pass_state import LEARNING, Pass
from .uses import Order, Trace, Use

_BEGIN, _FETCH = "begin", "fetch"


class Lead:
    """What hooks on a graph hold of a `Backward`: a weak reference, and whether a backward may do without it.

    Not the object itself: the garbage collector does not look into autograd's graph, so a module that keeps an activation
    would keep itself, its engine and all memory of that alive for ever.
    """

    def __init__(self, backward: Backward) -> None:
        self.backward: Callable[[], Backward | None] = weakref.ref(backward)
        self.dispensable = not backward.current.frees  # else parameters may be released

    def end(self) -> None:
        """The units of graphs that were made so far are no more."""
        self.backward = lambda: None

    def missing(self) -> None:
        """A backward comes to a unit that is no more.

        Raises:
            StateError: it needs the unit's parameters.
        """
        if not self.dispensable:
            raise StateError(
                "a backward goes through a sharded model that no longer exists, or whose parameters were put into other units "
                "since that forward: their values are gone. Keep the model (or its engine) until backward has ended, and run "
                "the forward again after a step or a change of the optimizer's groups"
            )


class Backward:
    """The backwards of one schedule, as their graphs tell of them.

    Attributes:
        sync: False inside `no_sync`. `defers`: gradients of backwards in there stay on this rank.
        sends: those of the backward under way, or of the last one, leave it.
        puts_off: those of the last backward inside `no_sync` did not.
        unsynced: some local gradients wait for a reduce. The same on every rank, as `no_sync` is.
        touched: uses whose backward is under way. `task`: autograd's number of that backward.
        handles: of the hooks on parameters.
    """

    def __init__(self, current: Pass, wire: SoloWire, callbacks: Callbacks) -> None:
        self.current, self.wire, self.callbacks = current, wire, callbacks
        self.sync, self.sends, self.unsynced = True, True, False
        self.puts_off = False
        self.defers = any(not t.unit.policy.reduce_each_backward for t in current.traces)
        self._seen = False  # since the last step
        self._again = False  # the backward under way makes a graph itself
        self.task = -1
        self.touched: list[Use] = []
        self.handles: dict[nn.Parameter, Any] = {}
        self._whys: dict[nn.Parameter, set[str]] = {}
        self.lead, self.order = Lead(self), self._begin_order()

    def set_out(self) -> None:
        """The units are new ones: so are what graphs refer to, and the order of backwards."""
        self.lead.end()
        self.lead = Lead(self)
        preemption = self.order.preemption
        self.order = self._begin_order()
        self.order.preemption = preemption

    def _begin_order(self) -> BackwardOrder:
        current = self.current
        current.forward = Order()
        current.order = BackwardOrder(current.traces, self.wire, self.callbacks, frees=current.frees)
        return current.order

    def used(self, trace: Trace, entry: Any) -> Use:
        """A forward with a graph; `entry` is the node whose backward comes right after it."""
        use = None if trace.use is None else trace.use()
        if use is None:
            # Uses before in this pass that made no graph (a frozen embedding, before a head with its weight) are not where its
            # backward ends: to reduce up to there would send units that backward has yet to come to.
            again = (trace.seen or trace.use is not None) and not self.current.in_backward
            if again or trace.noted != self.current.number:
                self.current.clock += 1
                trace.begun = trace.latest = self.current.clock
            use = Use(trace, trace.begun)
            trace.use = weakref.ref(use)
        use.forwards += 1
        trace.is_hooked = self.current.hooked is not None
        if entry is None:
            use.is_open = True
            self.notice(trace)
        else:
            if not use.events:
                trace.pending += 1
            use.events += 1
            use.left += 1
            # The hook owns the use, and the trace refers to it weakly: the use ends with its graph, whoever drops that.
            entry.register_prehook(partial(post_backward, self.lead, use))
        if trace.has_middle is None and self.order.fetches_late:
            self._find_middle(trace)
        return use

    def _find_middle(self, trace: Trace) -> None:
        """Hooks on the parameters whose gradients come when half and three quarters of the unit's are there, in the reverse
        order of their use. Two, for one may have no gradient in a backward."""
        mine = {param for flat in trace.unit.trained for param in flat.params if param.requires_grad}
        ordered = dict.fromkeys(param for module in trace.modules for param in module.parameters() if param in mine)
        numel = sum(param.numel() for param in ordered)
        trace.has_middle = bool(ordered)
        came = 0
        for param in reversed(ordered):
            before, came = came, came + param.numel()
            if any(4 * before < part * numel <= 4 * came for part in (2, 3)):
                self._hear(param, _FETCH)

    def _hear(self, param: nn.Parameter, why: str) -> None:
        """`_came` is called when this parameter has its gradient."""
        # One hook each: a program that freezes and unfreezes it in every step would get one more each time.
        if param not in self.handles:
            whys = self._whys[param] = set()
            # Weakly: the collector does not look into a tensor's hooks, and the schedule has the parameter.
            self.handles[param] = param.register_post_accumulate_grad_hook(partial(_came, weakref.ref(self), whys))
        self._whys[param].add(why)

    def notice(self, trace: Trace) -> None:
        """A backward may begin inside this unit and end there, past all nodes with hooks: its gradients tell of it."""
        if trace.noticed:
            return
        trace.noticed = True
        for flat in trace.unit.trained:
            for param in flat.params:
                if param.requires_grad:
                    self._hear(param, _BEGIN)

    def notice_again(self) -> None:
        """Other parameters are trained from now on: those are hooked, too."""
        for trace in self.current.traces:
            trace.noticed, trace.has_middle = False, None

    def begin(self) -> bool:
        """The first event of a backward. False for one inside a forward: that one sends nothing and ends nothing."""
        if self.current.in_backward:
            return True
        if self.current.running:
            return False
        self.current.in_backward = self._seen = True  # before what may raise below: `recover` looks for it
        self.task = torch._C._current_graph_task_id()
        self._again = torch.is_grad_enabled()
        # Alone, a reduce is an addition in place: nothing to put off.
        self.sends = self.sync or not self.defers or self.wire.size == 1
        if not self.sync:
            self.puts_off = not self.sends
        self.callbacks.before_backward()  # before the agreement, of which the edits that it finds are a part
        # Write back what user code has written since the forward, also through `.data`. After the next gather such a write
        # could not be told from gathered values.
        for trace in self.current.looks:
            trace.unit.look_over()
        self.order.begin(self.sync, self.sends, self.current.start_of)
        if self._again and self.current.frees:  # what it saves of parameters is not told to `Pass.saved`
            for trace in self.current.traces:
                if trace.uses or trace.kept or trace.noted:
                    trace.held = 2
        # Last: torch drops the callbacks of a backward that raises, so whatever `begin` has left behind then is `recover`'s.
        Variable._execution_engine.queue_callback(self._end)
        return True

    def bring(self, trace: Trace) -> None:
        """Backward reads a saved parameter of this unit."""
        gathered = trace.unit.state is State.GATHERED
        if gathered and trace.came:
            return
        if in_backward_of_any():
            trace.strict = True
            if self.begin():
                self.current.need(trace)
            else:
                self.current.hold_inside_forward(trace)
        elif not gathered:  # someone looks at a graph
            self.current.hold(trace, 1)

    def gather_lent(self, lent: list[Use]) -> None:
        """Backward enters a host that has read parameters of other units."""
        for use in lent:
            trace = use.trace()
            if trace is not None and trace.unit.state is not State.GATHERED:
                self.current.need(trace)

    def end_inner(self, use: Use) -> None:
        """The end of an inner backward (reentrant checkpointing), which an open use ran in."""
        trace = use.trace()
        if trace is None:
            return
        trace.in_backward = trace.in_open = False
        if self.current.in_backward and not trace.pending:
            self.passed(trace)
            trace.leave()

    def passed(self, trace: Trace) -> None:
        """Backward has come to where this unit was first used: its gradients are complete, and those of all used after it."""
        if not self.sends and not self.current.frees:
            trace.unit.hold()
        elif self.wire.size == 1:
            with AsTheyAre():
                if trace.unit.has_grads():
                    self.order.reduce(trace)
        else:
            self.order.agreed()
            if trace.joinable and trace.step >= self.order.walked and self.current.frees:
                # It has never been entered here: its output had no gradient on this rank, its input has others. On ranks that
                # have entered it the next unit was fetched before this one's reduce.
                self.order.stand_in(trace.step + 1)
            self.order.reduce_up_to(trace.place)

    def _end(self) -> None:
        """Whatever the node hooks missed; then every owner's gradient is complete."""
        self.current.tail = None
        if self.current.looks:
            self.current.end_looks()
        for trace in self.current.traces:
            trace.is_kept = False
            if not self._again:
                trace.held = 0
            if trace.is_parted or (self.current.frees and trace.unit.state is not State.SHARDED):
                trace.leave()
        # After the releases: what `finish` gathers for other ranks comes on top of what is there.
        with AsTheyAre():
            if self.sends:
                self.order.finish()
            else:
                self.order.finish_locally()
        for trace in self.current.traces:
            trace.noted = trace.noted if self._again else 0
        self.current.learning = max(0, self.current.learning - 1)
        for use in self.touched:  # of a graph that is kept, in its next backward
            use.left = use.events
            if not use.done:
                use.finish()
        self.touched.clear()
        self.unsynced = not self.sends
        self.callbacks.after_backward()
        self.current.in_backward = False  # not before: what is interrupted in there is a backward that broke off
        blind = None
        if self.sends:  # else it is this rank's own finding
            blind, self.order.blind = self.order.blind, None
        if blind is not None:
            raise StateError(
                f"the gradients of unit {blind.unit.name!r} are NaN: a backward came to it by a way that hf_zero did not "
                "see, while its parameters were released (a custom autograd Function that keeps a weight as an attribute of "
                "ctx? use ctx.save_for_backward). Call zero_grad() and run the step again: from now on this unit stays "
                "gathered until the end of backward"
            )

    @property
    def kept(self) -> frozenset[int]:
        """Places of the units that stay gathered from the next forward to its backward."""
        return frozenset(trace.at for trace in self.current.traces if trace.keeps)

    @property
    def parted(self) -> frozenset[int]:
        """Places of those that stay cut among the ranks of each node meanwhile."""
        return frozenset(trace.at for trace in self.current.traces if trace.parts)

    def stepped(self) -> None:
        """The optimizer has used this step's gradients."""
        self._seen = False

    def flush(self) -> None:
        """Reduce gradients that `no_sync` left on this rank, or a backward that passed no hook; a collective then."""
        if self.current.in_backward:
            self.recover()
        missed = not self._seen and any(trace.unit.has_grads() for trace in self.current.traces)
        if not self.unsynced and not missed:
            return
        self.unsynced, self._seen = False, True
        sync, self.sync, self.sends = self.sync, True, True
        try:
            with AsTheyAre():
                for trace in self.current.traces:
                    trace.local = trace.local or trace.unit.has_grads()
                self.order.begin(self.sync, self.sends, self.current.start_of)
                self.order.skip_gathers()
                self.order.finish()
        finally:
            self.sync = sync
        self.callbacks.after_backward()

    def recover(self) -> None:
        """Where a backward raised: nothing of it is left afterwards."""
        if self.current.in_backward and not in_backward_of_any():
            self.reset()

    def reset(self) -> None:
        """Forget the pass under way, after an exception in it: gradients, hooks' counts, transfers."""
        broke_off = self.current.in_backward
        self.current.tail = None
        self.touched.clear()
        self.order.forget()
        self.current.abandon()
        self.current.learning = LEARNING  # the exception may have come from a way to a unit that nobody knew
        self.current.forward = Order()
        for trace in self.current.traces:
            trace.running = trace.held = trace.noted = 0
            trace.local, trace.use = False, None
            trace.unit.settle()
            trace.unit.drop_grads(shards=False)
            trace.leave()
        self.unsynced = False
        if broke_off:
            self.collect()
            self.callbacks.broke_off()
        self.current.in_backward = False  # last: a reset that is interrupted is made again

    def collect(self) -> None:
        """An exception keeps the graph of its pass in a cycle, and that the uses of units. They end on all ranks now, and not
        when a collector comes by: until then ranks would send a unit's gradients at different moments of a backward."""
        self.current.raised = False
        gc.collect()


def _came(backward: weakref.ref[Backward], whys: set[str], _: nn.Parameter) -> None:
    """A parameter's gradient is there: maybe no node has told of this backward, or it is in the middle of a unit."""
    there = backward()
    if there is not None:
        if not there.current.in_backward:
            if _BEGIN in whys:
                there.begin()
        elif there.order.ahead is not None and _FETCH in whys:
            there.order.fetch()


def root_pre_backward(lead: Lead, lent: list[Use], *_: Any) -> None:
    backward = lead.backward()
    if backward is None:
        return
    # What a recomputation in a backward puts out has no such hook (`_root_post_forward`): another number is another backward.
    if backward.current.in_backward and backward.task != torch._C._current_graph_task_id():
        backward.reset()  # the backward before this one raised
    if backward.begin():
        backward.gather_lent(lent)


def pre_backward(lead: Lead, use: Use, is_open: bool, is_embedding: bool, lent: list[Use], *_: Any) -> None:
    backward, trace = lead.backward(), use.trace()
    if backward is None or trace is None:
        lead.missing()
        return
    if not (backward.current.in_backward or backward.begin()):
        backward.current.hold_inside_forward(trace)
        return
    if is_open:
        backward.touched.append(use)
    if is_open and torch._C._current_graph_task_id() != backward.task:
        Variable._execution_engine.queue_callback(partial(backward.end_inner, use))
    if is_embedding or not backward.current.frees:
        return
    trace.in_backward = True
    trace.in_open = trace.in_open or is_open
    backward.current.need(trace)
    if lent:
        backward.gather_lent(lent)


def post_backward(lead: Lead, use: Use, *_: Any) -> None:
    backward, trace = lead.backward(), use.trace()
    if backward is None or trace is None:
        return
    if not (backward.current.in_backward or backward.begin()):
        return
    if use.left == use.events:
        backward.touched.append(use)
    use.left -= 1
    if use.left > 0:
        return
    use.finish()
    trace.in_backward = trace.in_open
    if not use.is_open and not trace.pending:
        backward.passed(trace)
    if not trace.in_open and backward.current.frees and trace.unit.state is not State.SHARDED:
        if trace.pending:
            trace.release()
        else:
            trace.leave()


def bring(lead: Lead, owner: weakref.ref[Trace]) -> None:
    backward, trace = lead.backward(), owner()
    if backward is None or trace is None:
        lead.missing()
        return
    backward.bring(trace)
