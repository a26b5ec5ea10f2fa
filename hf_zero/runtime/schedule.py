"""When a unit moves: hooks on its hosts, the order of a backward, prefetch, the end of a backward.

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

**All ranks reduce the same units in the same order, each once per backward.** At the start of a backward one small
all-reduce tells every rank which units any of them has used in forward and when first (`BackwardOrder`). Units used first are
reduced last. By autograd's rule a unit whose turn has passed is complete, so nobody waits for a unit that this rank did
not use: what is there is sent, zeros otherwise. At the end a second small all-reduce tells which parameters have a gradient on
any rank (the others have none, as in DDP), and which units got more gradients after their turn: these are reduced again.

At stage 3 the order of gathers in backward is agreed as well: units used last come first. A rank whose backward leaves a unit
out takes part in its gather and its reduce all the same (`backward_order`), since the others may need both.

Recomputation (activation checkpointing) runs the same forward hooks. In its non-reentrant form the unit is already in
backward then, and its forward leaves no second trace; in its reentrant form the recomputed forward is the only one that
has a graph, and its inputs are leaves: an engine callback of that inner backward ends the unit.

Everything here costs Python time per unit, never per parameter.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable, profiler

from ..comm.wire import SoloWire
from ..errors import StateError
from . import reads as on_read
from .backward_order import BackwardOrder
from .compiling import refuse_transformed
from .replicas import Options
from .saved_tensors import SavedTensors, in_backward_of_any, nodes_of, tensors_in, youngest_of
from .unit import State, Unit
from .uses import Host, Order, Trace, Use

LEARNING = 4
"""In so many backwards all saved tensors are looked at, to find units that a backward comes to by other ways than outputs."""


class Lead:
    """What hooks on a graph hold of a schedule: a weak reference, and whether backward may do without it.

    Not the schedule itself: the garbage collector does not look into autograd's graph, so a module that keeps an activation
    would keep itself, its engine and all memory of that alive for ever.
    """

    __slots__ = ("dispensable", "schedule")

    def __init__(self, schedule: Schedule) -> None:
        self.schedule: Callable[[], Schedule | None] = weakref.ref(schedule)
        self.dispensable = not schedule.frees  # else parameters may be released

    def end(self) -> None:
        """The units of graphs that were made so far are no more."""
        self.schedule = _nobody

    def lend(self, owners: Sequence[weakref.ref[Trace]], *, graph: bool) -> None:
        """Somebody reads released parameters of these units.

        Raises:
            StateError: their model is gone.
        """
        schedule = self.schedule()
        traces = [trace for owner in owners if (trace := owner()) is not None]
        if schedule is None or not traces:
            raise StateError(
                "a parameter is read whose sharded model no longer exists: its values are gone with it. Keep the model, or "
                "call engine.detach() first"
            )
        schedule.lend(traces, graph=graph)

    def rehomed(self, old: int, new: int) -> None:
        schedule = self.schedule()
        if schedule is not None:
            schedule._saved.rehome(old, new)

    def is_masked(self, owner: weakref.ref[Trace]) -> bool:
        trace = owner()
        return trace is not None and trace.unit.is_masked

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


def _nobody() -> None:
    return None


@dataclass(frozen=True)
class Callbacks:
    """What a schedule calls, in the order of a step.

    Attributes:
        before_forward: the model's forward begins with these arguments, and no part of it is under way. The units may be cut
            anew in it.
        before_backward: the first event of a backward, before the ranks agree on its order.
        after_reduce: all gradients of a unit are with their owners; once per unit and backward that syncs.
        ask: at the end of a backward that reduces, on every rank; `BackwardOrder.answered` says if any said yes.
        after_backward: every owner's gradients are complete, and everything is released.
        broke_off: a backward was left by an exception, maybe a while ago; a part of its gradients is with their owners.
        options: of the optimizer; the ranks agree on them at the start of a backward.
    """

    options: Options
    before_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], None] = lambda args, kwargs: None
    before_backward: Callable[[], None] = lambda: None
    after_reduce: Callable[[Unit], None] | None = None
    ask: Callable[[], bool] = lambda: False
    after_backward: Callable[[], None] = lambda: None
    broke_off: Callable[[], None] = lambda: None


class Schedule:
    """Installs the hooks on one model and runs its units."""

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[tuple[Unit, list[nn.Module]]],
        wire: SoloWire,
        callbacks: Callbacks,
    ) -> None:
        self.model = model
        self.wire = wire
        self.callbacks = callbacks
        self.sync = True
        """False inside `no_sync`."""
        self.unsynced = False
        """Some local gradients wait for a reduce. The same on every rank, as `no_sync` is."""
        self._handles: list[Any] = []
        self._pass, self._clock = 1, 0
        self._forward = Order()
        self._in_backward = self._again = False  # _again: the backward under way makes a graph itself
        self._seen_backward = False  # since the last step
        self._raised = False  # the last forward
        self._task = -1
        self._with_graph = False  # the root's forward under way makes a graph
        self._running: list[Host] = []  # hosts whose forward is under way, innermost last
        self._hooked: Host | None = None  # in whose forward saved tensors pass through `_saved` just now
        self._learning = LEARNING
        self._tail: Trace | None = None  # its forward is done; its release waits for the next unit's need
        self._touched: list[Use] = []  # in the backward under way
        self._looks: dict[Trace, int] = {}  # units that were read between passes; references to their memory then
        self.traces: list[Trace] = []
        self._hosts: list[Host] = []
        for unit, modules in units:
            trace = Trace(unit, modules, len(self.traces))
            self.traces.append(trace)
            self._hosts += [Host(module, trace) for module in modules]
        self._guests: list[Host] = []  # modules inside hosts that act as hosts
        self.frees = any(not trace.unit.policy.keep_full for trace in self.traces)
        # Alone, a reduce is an addition in place: nothing to put off.
        self._defers = any(not t.unit.policy.reduce_each_backward for t in self.traces) and wire.size > 1
        self._root = Host(model, None)
        for host in self._hosts:
            self._hook(host, self._pre_forward, self._post_forward)
        hosts = {host.module for host in self._hosts}
        self._inner = [(m, host) for host in self._hosts for m in host.module.modules() if m not in hosts]
        self._readers = on_read.Readers()
        self._dictionaries = on_read.put_on(self._readable(), self._read) if self.frees else []
        self._trace_of: dict[nn.Module, Trace] = {}
        self._set_out()
        if self.frees:
            for trace in self.traces:
                # Recurrent layers keep their parameters in lists: nobody sees those read.
                if any(isinstance(inner, nn.RNNBase) for module in trace.modules for inner in module.modules()):
                    self._host_inside(trace)
        # The last to come first: the root may be a host, too, and its forward begins a new count.
        self._hook(self._root, self._root_pre_forward, self._root_post_forward)

    def _readable(self) -> Iterator[nn.Module]:
        """Modules that have parameters of a unit."""
        known = {param for trace in self.traces for flat in trace.unit.flats for param in flat.params}
        for module in self.model.modules():
            if any(param in known for param in module._parameters.values() if param is not None):
                yield module

    def _set_out(self) -> None:
        """The units are new ones: what graphs, saved tensors and reads of parameters refer to."""
        self._lead = Lead(self)
        self.order = BackwardOrder(
            self.traces,
            self.wire,
            self.callbacks.ask,
            self.callbacks.after_reduce,
            self.callbacks.options,
            frees=self.frees,
            defers=self._defers,
        )
        self._forward = Order()
        if not self.frees:
            return
        owner_of = {
            flat.full.untyped_storage()._cdata: weakref.ref(trace) for trace in self.traces for flat in trace.unit.flats
        }
        self._saved = SavedTensors(owner_of, partial(_bring, self._lead))
        trace_of = {param: trace for trace in self.traces for flat in trace.unit.flats for param in flat.params}
        watched: dict[Trace, list[on_read.ParameterDict]] = {trace: [] for trace in self.traces}
        for each in self._dictionaries:
            traces = {trace_of[param] for param in each.values() if param is not None and param in trace_of}
            if traces:  # a parameter of the module's may have been replaced since
                trace = self._trace_of[each.module] = min(traces, key=lambda trace: trace.at)
                watched[trace].append(each)
        for trace, dictionaries in watched.items():
            trace.unit.watch(dictionaries)
            for flat in trace.unit.flats:
                flat.mask(self._lead, weakref.ref(trace), released=trace.unit.state is State.SHARDED)
            trace.unit.is_masked = trace.unit.state is State.SHARDED

    def recut(self, units: Iterable[Unit]) -> None:
        """The same modules' units with other spans. Between passes, also as a forward begins.

        Hooks and what was learnt of each unit stay. Backwards over graphs that were made before are refused where parameters
        are released.
        """
        self._lead.end()
        heirs = {trace: trace.heir(unit) for trace, unit in zip(self.traces, units)}
        self.traces = list(heirs.values())
        for host in self._hosts + self._guests:
            if host.trace is not None:
                host.trace = heirs[host.trace]
        self._set_out()

    def _hook(self, host: Host, before: Callable[..., None], after: Callable[..., None]) -> None:
        module, add = host.module, self._handles.append
        add(module.register_forward_pre_hook(partial(before, host), prepend=True, with_kwargs=True))
        add(module.register_forward_hook(partial(after, host), always_call=True))

    def _host_inside(self, trace: Trace) -> None:
        """Someone calls modules inside this unit's hosts and goes around their forward: these act as hosts from now on."""
        if trace.opened:
            return
        trace.opened = True
        known = {host.module for host in self._hosts}
        for module, owner in self._trace_of.items():
            if owner is trace and module not in known:
                self._guests.append(Host(module, trace))
                self._hook(self._guests[-1], self._guest_pre_forward, self._guest_post_forward)

    def detach(self) -> None:
        """Take all hooks off the model. Its parameters are plain ones: a backward over an earlier graph needs no hooks."""
        self._lead.dispensable = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        on_read.take_off(self._dictionaries)
        self._dictionaries.clear()

    # Forward --------------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, host: Host, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward:
            if in_backward_of_any():
                self._enter(host)
                return  # the whole model is being recomputed
            self.reset()
        if self._root in self._running:  # an exception that no hook was told of
            self._abandon()
            self._raised = True
        if self._raised:
            self._collect()
        if not self._running:
            refuse_transformed()  # before masters are looked at, which have no memory there
            self.callbacks.before_forward(args, kwargs)
        self._look_over()
        self._with_graph = torch.is_grad_enabled()
        self._enter(host)
        self._new_pass()
        self._drop_holds(1)
        if self.frees:
            for trace in self.traces:
                trace.seen = trace.running = 0

    def _guest_pre_forward(self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if host.trace is not None and not host.trace.running:
            host.acting = True
            self._pre_forward(host, module, args, kwargs)

    def _guest_post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        if host.acting:
            host.acting = False
            self._post_forward(host, module, args, output)

    def _look_over(self) -> None:
        """Between passes: no backward has come to these, and the user may have written to them."""
        if self.frees:
            for trace in self.traces:
                if trace.unit.state is State.GATHERED:
                    trace.unit.look_over()

    def _new_pass(self) -> None:
        self._pass += 1
        for trace in self.traces:
            trace.use = None

    def _enter(self, host: Host) -> None:
        """A host's forward begins."""
        if not self._running:
            refuse_transformed()
        if self.frees and self._hooked is None and torch.is_grad_enabled():
            if not self._running:
                # A hook of others on a module inside a host may record its tensors: a backward may begin there.
                for module, owner in self._inner:
                    if owner.trace is not None and (module._forward_hooks or module._forward_pre_hooks):
                        owner.trace.strict = True
            strict = self._learning if host.trace is None else self._learning or host.trace.strict
            if strict:
                self._hooked = host  # first: hooks that nobody remembers would stay on
                if not self._saved.push():
                    self._hooked = None
        self._running.append(host)

    def _leave(self, host: Host) -> bool:
        """It is over, or has raised. False where that was noticed before."""
        if host not in self._running:
            return False
        while self._running.pop() is not host:  # an exception that no hook was told of
            pass
        if self._hooked is not None and self._hooked not in self._running:
            self._saved.pop()
            self._hooked = None
        borrowed, host.borrowed = host.borrowed, []
        for trace in borrowed:
            trace.running = max(0, trace.running - 1)
            if trace.noted:
                self._end_use(trace)
            if not trace.running and not self._in_backward and trace.seen >= trace.expected:
                self._leave_tail(trace)
                self._tail = trace
        return True

    def _collect(self) -> None:
        """An exception keeps the graph of its pass in a cycle, and that the uses of units. They end on all ranks now, and not
        when a collector comes by: until then ranks would send a unit's gradients at different moments of a backward.
        """
        self._raised = False
        gc.collect()

    def _abandon(self) -> None:
        """No forward is under way."""
        self._running.clear()
        if self._hooked is not None:
            self._saved.pop()
            self._hooked = None

    def _pre_forward(
        self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        trace = host.trace
        if trace is None:
            return
        if not self._running:  # a part of the model, called by itself
            if self._in_backward and not in_backward_of_any():
                self.reset()
            self._with_graph = torch.is_grad_enabled()
            if not self._in_backward:
                self._look_over()
                self._new_pass()
        self._enter(host)
        if profiler._is_profiler_enabled:  # else no call is made for it
            host.named.append(profiler.record_function(f"hf_zero::forward {trace.unit.name}").__enter__())
        trace.running += 1
        if self.frees:
            if not self._in_backward and self._tail is not None:
                self._leave_tail(trace)
            self._need(trace)
        if self._with_graph and not self._in_backward:
            self._note(trace)
        if not torch.is_grad_enabled() or not (self.frees or trace.unit.trained):
            return
        if self._in_backward and (trace.in_backward or trace.pending):
            return  # a non-reentrant recomputation: the first forward's hooks stand
        host.inputs = (args, kwargs) if self.frees else None
        tensors = tensors_in((args, kwargs))
        host.given = nodes_of(tensors)
        host.entry = youngest_of(tensors)
        host.use = self._used(trace, host.entry)

    def _note(self, trace: Trace) -> None:
        if trace.noted != self._pass:
            self._clock += 1
            trace.begun = trace.latest = self._clock
            if not trace.noted:
                trace.first = trace.begun
            trace.noted = self._pass

    def _begin_use(self, trace: Trace) -> None:
        self._clock += 1
        trace.begun = trace.latest = self._clock

    def _end_use(self, trace: Trace) -> None:
        self._clock += 1
        trace.latest = self._clock

    def _used(self, trace: Trace, entry: Any) -> Use:
        """A forward with a graph; `entry` is the node whose backward comes right after it."""
        use = None if trace.use is None else trace.use()
        if use is None:
            # Uses before in this pass that made no graph (a frozen embedding, before a head with its weight) are not where its
            # backward ends: to reduce up to there would send units that backward has yet to come to.
            again = (trace.seen or trace.use is not None) and not self._in_backward
            if again or trace.noted != self._pass:
                self._begin_use(trace)
            use = Use(trace, trace.begun)
            trace.use = weakref.ref(use)
        if entry is None:
            use.is_open = True
            self._notice(trace)
        else:
            if not use.events:
                trace.pending += 1
            use.events += 1
            use.left += 1
            entry.register_prehook(partial(_post_backward, self._lead, use))
        return use

    def _notice(self, trace: Trace) -> None:
        """A backward may begin inside this unit and end there, past all nodes with hooks: its gradients tell of it."""
        if trace.noticed:
            return
        trace.noticed = True
        for flat in trace.unit.trained:
            for param in flat.params:
                if param.requires_grad:
                    # Weakly: the collector does not look into a tensor's hooks, and the schedule has the parameter.
                    hook = partial(_came_unnoticed, weakref.ref(self))
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def notice_again(self) -> None:
        """Other parameters are trained from now on: `_notice` hooks them, too."""
        for trace in self.traces:
            trace.noticed = False

    def _post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        trace = host.trace
        if host.named:
            host.named.pop().__exit__(None, None, None)
        if trace is None or not self._leave(host):
            return
        trace.running = max(0, trace.running - 1)
        if trace.noted:
            self._end_use(trace)
        given, use, is_open, lent = host.given, host.use, host.entry is None, host.lent
        inputs = host.inputs
        host.given, host.use, host.entry, host.lent, host.inputs = [], None, None, [], None
        if use is not None and (self.frees or is_open):
            hook = partial(_pre_backward, self._lead, use, is_open, host.is_embedding, lent)
            found = tensors_in(output)
            nodes = nodes_of(found)
            # What is handed on is no use of the unit; what was put into a container that was handed in is one.
            for node in {*nodes, *nodes_of(tensors_in(inputs))}.difference(given):
                node.register_prehook(hook)
            frozen = found and is_open and not any(param.requires_grad for param in module.parameters())
            if not nodes and self.frees and not self._in_backward and not frozen:
                # Nobody can look into its output.
                trace.held = trace.held if self._hooked else 2
                trace.strict = True
            if trace.stays and not self._in_backward:
                trace.held = 2
        if trace.in_backward:
            return
        if self.frees and not self._in_backward:
            trace.seen += 1
            if trace.seen >= trace.expected and not trace.running:
                if self._tail is not None:
                    self._leave_tail(trace)
                self._tail = trace

    def _root_post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and sys.exc_info()[1] is not None:
            self._raised = True
        if not self._leave(host) or self._in_backward:
            return
        graph = torch.is_grad_enabled()
        lent, host.lent = host.lent, []
        if graph:
            hook = partial(_root_pre_backward, self._lead, lent)
            for node in nodes_of(tensors_in(output)):
                node.register_prehook(hook)
        if self.frees:
            self._forward.close()
            # The unit that ran last is the first that backward needs.
            self._tail = keep = self._tail if graph else None
            for trace in self.traces:
                if trace.seen:
                    trace.expected = trace.seen
                if trace is not keep and trace.unit.state is not State.SHARDED:
                    trace.release()

    def _leave_tail(self, trace: Trace) -> None:
        tail, self._tail = self._tail, None
        if tail is not None and tail is not trace and not tail.running:
            tail.release()

    def _drop_holds(self, least: int) -> None:
        """Units that were held for no longer than that are released."""
        if self._looks:
            self._end_looks()
        for trace in self.traces:
            if trace.held and trace.held <= least:
                trace.held = 0
                trace.unit.release()

    def _need(self, trace: Trace) -> None:
        """This unit now; and start on the one that comes next: at most two are gathered for use at any moment."""
        if self._in_backward:
            self.order.need(trace)
            return
        following = self._forward.note(trace.unit)
        unit = trace.unit
        if unit.state is State.SHARDED:
            unit.gather()
        if following is not None and following.state is State.SHARDED:
            following.gather()
        if unit.state is not State.GATHERED:
            unit.wait()

    # Reads by others ------------------------------------------------------------------------------------------------

    def _read(self, read: on_read.ParameterDict) -> None:
        """A parameter of a released unit, or of one that others have read before, is read.

        In a pass it is gathered, and stays until the forward of the innermost host under way is over (the reader, for all that
        can be known), backward included. Outside of one nothing happens: code that looks at a weight on one rank would
        wait for the others for ever. Between a forward and its backward with a graph (a loss function) counts as a pass.
        """
        trace = self._trace_of[read.module]
        if trace.unit.state is not State.GATHERED and self._readers.want_no_values():
            return
        if self._running:
            host = self._running[-1]
            if trace is host.trace or trace in host.borrowed:
                if trace.unit.state is not State.GATHERED:
                    self._need(trace)
                return
            if trace.running and not trace.borrowed and trace.unit.state is State.GATHERED:
                return  # inside one of its own hosts
            if on_read.is_read_by_itself(read.module):
                self._host_inside(trace)
            self._borrow(host, trace)
            return
        if trace.unit.state is State.GATHERED:
            return
        itself = on_read.is_read_by_itself(read.module)
        if itself:
            self._host_inside(trace)
        if self._in_backward or itself or (torch.is_grad_enabled() and any(each.uses for each in self.traces)):
            graph = torch.is_grad_enabled() or self._in_backward
            self._hold(trace, 2 if graph else 1)

    def lend(self, traces: Sequence[Trace], *, graph: bool) -> None:
        """Who has parameters of these released units computes with them; other than `_read`, no module was asked for them.

        In a forward or backward, and wherever a graph is made, as there. Else (moving averages, edits and looks between passes)
        they stay until the next forward, step, end of a backward or such look; what was written to them is carried over. A
        collective, so ranks must read alike.
        """
        if self._running or self._in_backward or graph:
            for trace in traces:
                self._looks.pop(trace, None)
                if not self._running:
                    self._hold(trace, 2)
                    self._notice(trace)
                elif trace is self._running[-1].trace or trace in self._running[-1].borrowed:
                    self._need(trace)
                else:
                    self._borrow(self._running[-1], trace)
                if trace.unit.is_masked:  # gathered for a look before
                    trace.unit.set_masked(False)
            return
        for trace, references in list(self._looks.items()):
            is_viewed = trace.unit.references > references
            if trace not in traces and trace.held == 1 and not is_viewed:
                del self._looks[trace]
                trace.held = 0
                trace.unit.look_over()
                trace.unit.release()
        for trace in traces:
            trace.held = max(trace.held, 1)
            trace.unit.gather()
        for trace in traces:
            trace.unit.wait()
            trace.unit.set_masked(True)
            if trace not in self._looks:
                self._looks[trace] = trace.unit.count_references()

    def _end_looks(self) -> None:
        """What was gathered for `lend` outside of passes may go.

        Raises:
            StateError: somebody keeps a view of it, which would have no memory then.
        """
        for trace, references in self._looks.items():
            if trace.unit.state is State.GATHERED and trace.unit.references > references:
                raise StateError(
                    f"a view of a parameter of unit {trace.unit.name!r} is still held that was taken between passes "
                    "(p.data, p.detach(), p[0]): the unit is released now, and its values with it. Keep a clone() instead, or "
                    "read inside zero.GatheredParameters"
                )
        self._looks.clear()

    def _borrow(self, host: Host, trace: Trace) -> None:
        if not self._in_backward:
            self._leave_tail(trace)
        trace.borrowed = True
        trace.weightless = False
        trace.unit.always_asks = True
        trace.running += 1
        trace.seen += 1
        host.borrowed.append(trace)
        self._need(trace)
        if self._with_graph and not self._in_backward:
            self._note(trace)
        if torch.is_grad_enabled() and not self._in_backward:
            host.lent.append(self._used(trace, host.entry))

    def _hold(self, trace: Trace, how: int) -> None:
        trace.held = max(trace.held, how)
        self._need(trace)
        if how == 2:
            self._note(trace)

    def _bring(self, trace: Trace) -> None:
        """Backward reads a saved parameter of this unit."""
        gathered = trace.unit.state is State.GATHERED
        if gathered and trace.came:
            return
        if in_backward_of_any():
            trace.strict = True
            if self._begin_backward():
                self._need(trace)
            else:
                self._hold_inside_forward(trace)
        elif not gathered:  # someone looks at a graph
            self._hold(trace, 1)

    # Backward -------------------------------------------------------------------------------------------------------

    def _gather_lent(self, lent: list[Use]) -> None:
        """Backward enters a host that has read parameters of other units."""
        for use in lent:
            trace = use.trace()
            if self.frees and trace is not None and trace.unit.state is not State.GATHERED:
                self._need(trace)

    def _hold_inside_forward(self, trace: Trace) -> None:
        """A backward inside a forward (forces from energies) needs this unit, and so does what is made of it."""
        trace.held = 2 if torch.is_grad_enabled() else max(trace.held, 1)
        trace.unit.gather()
        trace.unit.wait()

    def _begin_backward(self) -> bool:
        """The first event of a backward. False for one inside a forward: that one sends nothing and ends nothing."""
        if self._in_backward:
            return True
        if self._running:
            return False
        self._in_backward = self._seen_backward = True
        self._task = torch._C._current_graph_task_id()
        self._again = torch.is_grad_enabled()
        self.callbacks.before_backward()
        self.order.begin(self.sync)
        if self._again and self.frees:  # what it saves of parameters is not told to `_saved`
            for trace in self.traces:
                if trace.uses or trace.kept or trace.noted:
                    trace.held = 2
        Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def _end_inner(self, use: Use) -> None:
        """The end of an inner backward (reentrant checkpointing), which an open use ran in."""
        trace = use.trace()
        if trace is None:
            return
        trace.in_backward = trace.in_open = False
        if self._in_backward and not trace.pending:
            self._passed(trace)
            trace.release()

    def _passed(self, trace: Trace) -> None:
        """Backward has come to where this unit was first used: its gradients are complete, and those of all used after it."""
        if not self.sync and self._defers:
            trace.unit.hold()
        elif self.wire.size == 1:
            with on_read.AsTheyAre():
                if trace.unit.has_grads():
                    self.order.reduce(trace)
        else:
            self.order.agreed()
            self.order.reduce_up_to(trace.place)

    def _end_backward(self) -> None:
        """Whatever the node hooks missed; then every owner's gradient is complete."""
        self._tail = None
        if self._looks:
            self._end_looks()
        for trace in self.traces:
            trace.in_backward = trace.in_open = False
            if not self._again:
                trace.held = 0
            if self.frees and trace.unit.state is not State.SHARDED:
                trace.release()
        if self._defers and not self.sync:
            for trace in self.traces:
                trace.local = trace.local or trace.unit.has_grads()
                trace.unit.hold()
        else:
            with on_read.AsTheyAre():
                self.order.finish()
        for trace in self.traces:
            trace.noted = trace.noted if self._again else 0
        self._learning = max(0, self._learning - 1)
        for use in self._touched:  # of a graph that is kept, in its next backward
            use.left = use.events
            if not use.done:
                use.finish()
        self._touched.clear()
        self.unsynced = self._defers and (not self.sync)
        self.callbacks.after_backward()
        self._in_backward = False  # not before: what is interrupted in there is a backward that broke off
        blind, self.order.blind = self.order.blind, None
        if blind is not None:
            raise StateError(
                f"the gradients of unit {blind.unit.name!r} are NaN: a backward came to it by a way that hf_zero did not "
                "see, while its parameters were released (a custom autograd Function that keeps a weight as an attribute of "
                "ctx? use ctx.save_for_backward). Call zero_grad() and run the step again: from now on this unit stays "
                "gathered until the end of backward"
            )

    def stepped(self) -> None:
        """The optimizer has used this step's gradients."""
        self._seen_backward = False

    def flush(self) -> None:
        """Reduce gradients that `no_sync` left on this rank, or a backward that passed no hook; a collective then."""
        if self._in_backward:
            self.recover()
        missed = not self._seen_backward and any(trace.unit.has_grads() for trace in self.traces)
        if not self.unsynced and not missed:
            return
        self.unsynced, self._seen_backward = False, True
        sync, self.sync = self.sync, True
        try:
            for trace in self.traces:
                trace.local = trace.local or trace.unit.has_grads()
            self.order.begin(self.sync)
            self.order.skip_gathers()
            self.order.finish()
        finally:
            self.sync = sync
        self.callbacks.after_backward()

    def quiesce(self) -> None:
        """Before weights change: nothing gathered, nothing on the move. Recovers from a backward that raised."""
        if self._in_backward:
            self.recover()
        self._tail = None
        if self._looks:
            self._end_looks()
        self._look_over()
        for trace in self.traces:
            trace.held = 0
            if self.frees and trace.unit.state is not State.SHARDED:
                trace.unit.release()
            trace.unit.close()

    def recover(self) -> None:
        """Where a backward raised: nothing of it is left afterwards."""
        if self._in_backward and not in_backward_of_any():
            self.reset()

    def reset(self) -> None:
        """Forget the pass under way, after an exception in it: gradients, hooks' counts, transfers."""
        broke_off = self._in_backward
        self._tail = None
        self._touched.clear()
        self.order.forget()
        self._abandon()
        self._learning = LEARNING  # the exception may have come from a way to a unit that nobody knew
        self._forward = Order()
        for trace in self.traces:
            trace.in_backward = trace.in_open = trace.reduced = trace.local = False
            trace.running = trace.held = trace.noted = 0
            trace.use = None
            trace.unit.settle()
            trace.unit.drop_grads(shards=False)
            trace.unit.release()
        self.unsynced = False
        if broke_off:
            self._collect()
            self.callbacks.broke_off()
        self._in_backward = False  # last: a reset that is interrupted is made again


def _came_unnoticed(schedule: weakref.ref[Schedule], _: nn.Parameter) -> None:
    """A parameter's gradient is there, and maybe no node has told of a backward."""
    there = schedule()
    if there is not None and not there._in_backward:
        there._begin_backward()


# What hangs on a graph -------------------------------------------------------------------------------------------------


def _root_pre_backward(lead: Lead, lent: list[Use], *_: Any) -> None:
    schedule = lead.schedule()
    if schedule is None:
        return
    if schedule._in_backward and schedule._task != torch._C._current_graph_task_id():
        schedule.reset()  # the backward before this one raised
    if schedule._begin_backward():
        schedule._gather_lent(lent)


def _pre_backward(lead: Lead, use: Use, is_open: bool, is_embedding: bool, lent: list[Use], *_: Any) -> None:
    schedule, trace = lead.schedule(), use.trace()
    if schedule is None or trace is None:
        lead.missing()
        return
    if not (schedule._in_backward or schedule._begin_backward()):
        schedule._hold_inside_forward(trace)
        return
    if is_open:
        schedule._touched.append(use)
    if is_open and torch._C._current_graph_task_id() != schedule._task:
        Variable._execution_engine.queue_callback(partial(schedule._end_inner, use))
    if is_embedding or not schedule.frees:
        return
    trace.in_backward = True
    trace.in_open = trace.in_open or is_open
    schedule._need(trace)
    if lent:
        schedule._gather_lent(lent)


def _post_backward(lead: Lead, use: Use, *_: Any) -> None:
    schedule, trace = lead.schedule(), use.trace()
    if schedule is None or trace is None:
        return
    if not (schedule._in_backward or schedule._begin_backward()):
        return
    if use.left == use.events:
        schedule._touched.append(use)
    use.left -= 1
    if use.left > 0:
        return
    use.finish()
    trace.in_backward = trace.in_open
    if not use.is_open and not trace.pending:
        schedule._passed(trace)
    if not trace.in_open and schedule.frees and trace.unit.state is not State.SHARDED:
        trace.release()


def _bring(lead: Lead, owner: weakref.ref[Trace]) -> None:
    schedule, trace = lead.schedule(), owner()
    if schedule is None or trace is None:
        lead.missing()
        return
    schedule._bring(trace)
