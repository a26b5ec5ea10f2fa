"""When a unit moves: hooks on its hosts, prefetch, the ends of forwards.

**All ranks reduce the same units in the same order, each once per backward** (`backward_order`; docs/DESIGN.md, "Which units
take part"). At stage 3 the order of gathers in backward is agreed as well.

Recomputation (activation checkpointing) runs the same forward hooks. In its non-reentrant form the unit is already in
backward then, and its forward leaves no second trace; in its reentrant form the recomputed forward is the only one that
has a graph, and its inputs are leaves: an engine callback of that inner backward ends the unit.

Everything here costs Python time per unit, never per parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from ...comm.wire import SoloWire
from ..saved_tensors import in_backward_of_any, nodes_of, tensors_in, youngest_of
from ..values.unit import State, Unit
from .backward_order import Callbacks
from .compiling import refuse_transformed
from .graph_hooks import Backward, pre_backward, root_pre_backward
from .lending import Lending
from .pass_state import Pass
from .uses import Host, Trace

_CALL = nn.Module._call_impl.__code__


def calls_itself(module: nn.Module) -> bool:
    """Whether the call of this module that a pre-hook sees is inside another call of it, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls == 2


class Schedule:
    """Installs the hooks on one model and runs its units."""

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[tuple[Unit, list[nn.Module]]],
        wire: SoloWire,
        callbacks: Callbacks,
    ) -> None:
        traces: list[Trace] = []
        self._hosts: list[Host] = []
        for unit, modules in units:
            trace = Trace(unit, modules, len(traces))
            traces.append(trace)
            self._hosts += [Host(module, trace) for module in modules]
        hosts = {host.module for host in self._hosts}
        inner = [(m, host) for host in self._hosts for m in host.module.modules() if m not in hosts]
        self._current = Pass(traces, inner)
        self.backward = Backward(self._current, wire, callbacks)
        self._handles: list[Any] = []
        for host in self._hosts:
            self._hook(host, self._pre_forward, self._post_forward)
        self._lending = Lending(model, self.backward, self._host_inside) if self._current.frees else None
        if self._lending is not None:
            for trace in traces:
                # Recurrent layers keep their parameters in lists: nobody sees those read.
                if any(isinstance(inner, nn.RNNBase) for module in trace.modules for inner in module.modules()):
                    self._host_inside(trace)
        # The last to come first: the root may be a host, too, and its forward begins a new count.
        self._hook(Host(model, None), self._root_pre_forward, self._root_post_forward)

    def recut(self, units: Iterable[Unit]) -> None:
        """The same modules' units with other spans. Between passes, also as a forward begins. Hooks and what was learnt of each
        unit stay. Backwards over graphs that were made before are refused where parameters are released."""
        heirs = {trace: trace.heir(unit) for trace, unit in zip(self._current.traces, units)}
        self._current.traces = list(heirs.values())
        for host in self._hosts:
            if host.trace is not None:
                host.trace = heirs[host.trace]
        self.backward.set_out()
        if self._lending is not None:
            self._lending.set_out()

    def _hook(self, host: Host, before: Callable[..., None], after: Callable[..., None]) -> None:
        module, add = host.module, self._handles.append
        add(module.register_forward_pre_hook(partial(before, host), prepend=True, with_kwargs=True))
        add(module.register_forward_hook(partial(after, host), always_call=True))

    def _host_inside(self, trace: Trace) -> None:
        """Someone calls modules inside this unit's hosts and goes around their forward: these act as hosts from now on."""
        if trace.opened or self._lending is None:
            return
        trace.opened = True
        known = {host.module for host in self._hosts}
        for module, owner in self._lending.trace_of.items():
            if owner is trace and module not in known:
                self._hosts.append(Host(module, trace))
                self._hook(self._hosts[-1], self._guest_pre_forward, self._post_forward)

    def detach(self) -> None:
        """Take all hooks off the model. Its parameters are plain ones: a backward over an earlier graph needs no hooks."""
        self.backward.lead.dispensable = True
        for handle in (*self._handles, *self.backward.handles.values()):
            handle.remove()
        self._handles.clear()
        self.backward.handles.clear()
        if self._lending is not None:
            self._lending.detach()

    def _root_pre_forward(self, host: Host, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._current.in_backward:
            if in_backward_of_any():
                self._current.enter(host)
                return  # the whole model is being recomputed
            self.backward.reset()
        if host in self._current.running:
            if calls_itself(module):
                self._current.enter(host)
                return
            self._current.abandon()  # after an exception that no hook was told of
            self._current.raised = True
        if self._current.raised:
            self.backward.collect()
        if not self._current.running:
            refuse_transformed()  # before masters are looked at, which have no memory there
            self.backward.callbacks.before_forward(args, kwargs)
        self._current.drop_holds()
        self._current.with_graph = torch.is_grad_enabled()
        self._current.enter(host)
        self._current.begin()
        if self._current.frees:
            for trace in self._current.traces:
                trace.seen = trace.running = 0

    def _guest_pre_forward(self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if host.trace is not None and not host.trace.running:  # else the unit is there for a host around this module
            self._pre_forward(host, module, args, kwargs)

    def _pre_forward(
        self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        trace = host.trace
        if trace is None:
            return
        if not self._current.running:  # a part of the model, called by itself
            if self._current.in_backward and not in_backward_of_any():
                self.backward.reset()
            refuse_transformed()
            self._current.with_graph = torch.is_grad_enabled()
            if not self._current.in_backward:
                self.backward.callbacks.before_part()
                self._current.look_over()
                self._current.begin()
        self._current.enter(host)
        if profiler._is_profiler_enabled:  # else no call is made for it
            host.named.append(profiler.record_function(f"hf_zero::forward {trace.unit.name}").__enter__())
        trace.running += 1
        if self._current.frees:
            if not self._current.in_backward and self._current.tail is not None:
                self._current.leave_tail(trace)
            self._current.need(trace)
        if self._current.with_graph and not self._current.in_backward:
            self._current.note(trace)
        if not torch.is_grad_enabled() or not (self._current.frees or trace.unit.trained):
            return
        if self._current.in_backward and (trace.in_backward or trace.pending):
            return  # a non-reentrant recomputation: the first forward's hooks stand
        host.inputs = (args, kwargs) if self._current.frees else None
        tensors = tensors_in((args, kwargs))
        # Now, and not in the hook after the forward: that may write its inputs in place, whose nodes are others then.
        host.given = nodes_of(tensors)
        host.entry = youngest_of(tensors)
        host.use = self.backward.used(trace, host.entry)

    def _post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        trace = host.trace
        if host.named:
            host.named.pop().__exit__(None, None, None)
        if trace is None or host not in self._current.running:
            return
        self._current.leave(host)
        if trace.running:
            trace.running -= 1
        if trace.noted:
            self._current.end_use(trace)
        given, use, is_open, lent = host.given, host.use, host.entry is None, host.lent
        inputs = host.inputs
        host.given, host.use, host.entry, host.lent, host.inputs = [], None, None, [], None
        if host.outer:
            host.end_inner()
        if use is not None and (self._current.frees or is_open):
            hook = partial(pre_backward, self.backward.lead, use, is_open, host.is_embedding, lent)
            found = tensors_in(output)
            nodes = nodes_of(found)
            # What is handed on is no use of the unit; what was put into a container that was handed in is one.
            for node in {*nodes, *nodes_of(tensors_in(inputs))}.difference(given):
                node.register_prehook(hook)
            frozen = found and is_open and not any(param.requires_grad for param in module.parameters())
            if not nodes and self._current.frees and not self._current.in_backward and not frozen:
                # Nobody can look into its output.
                trace.held = trace.held if self._current.hooked else 2
                trace.strict = True
            if trace.stays and not self._current.in_backward:
                trace.held = 2
        if self._current.frees and not self._current.in_backward:
            if trace.keeps and torch.is_grad_enabled():  # not before a reentrant recomputation, see docs/LIMITS.md
                trace.is_kept = True
            elif trace.parts and torch.is_grad_enabled():
                trace.is_parted = True
            trace.seen += 1
            if not trace.running:
                self._current.end_hosts(trace)

    def _root_post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        if output is None and sys.exc_info()[1] is not None:
            self._current.raised = True
        if host not in self._current.running:
            return
        self._current.leave(host)
        lent, host.lent = host.lent, []
        if host.outer:
            host.end_inner()
            host.lent += lent
            return
        if self._current.in_backward:
            return
        graph = torch.is_grad_enabled()
        if graph:
            hook = partial(root_pre_backward, self.backward.lead, lent)
            for node in nodes_of(tensors_in(output)):
                node.register_prehook(hook)
        if self._current.frees:
            self._current.forward.close()
            # The unit that ran last is the first that backward needs.
            self._current.tail = keep = self._current.tail if graph else None
            for trace in self._current.traces:
                if trace.seen:
                    trace.expected = trace.seen
                if trace is not keep and trace.unit.state is not State.SHARDED:
                    trace.release()

    def end_looks(self) -> None:
        """What was gathered for reads between passes is released, and what was written to it is carried over.

        Raises:
            StateError: somebody keeps a view of it.
        """
        if self._current.looks:
            self._current.drop_holds()

    def quiesce(self) -> None:
        """Before weights change: nothing gathered, nothing on the move. Recovers from a backward that raised."""
        if self._current.in_backward:
            self.backward.recover()
        self._current.tail = None
        if self._current.looks:
            self._current.end_looks()
        self._current.look_over()
        for trace in self._current.traces:
            trace.held, trace.is_kept = 0, False
            if trace.is_parted or (self._current.frees and trace.unit.state is not State.SHARDED):
                trace.leave()
            trace.unit.close()
