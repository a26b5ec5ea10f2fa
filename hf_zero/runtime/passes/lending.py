"""Somebody reads a parameter of a released unit: the unit is gathered, and here is for how long.

`reads` notices it: code that asks a module for its parameter (`Lending.read`), or computes with a parameter that it has
(`Lending.lend`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ...errors import StateError
from ..saved_tensors import SavedTensors
from ..values import reads as on_read
from ..values.unit import State
from .graph_hooks import Backward, bring
from .uses import Host, Trace


class Loans:
    """What released parameters hold of a `Lending`: a weak reference. Graphs keep parameters; see `graph_hooks.Lead`."""

    def __init__(self, lending: Lending) -> None:
        self.lending = weakref.ref(lending)

    def lend(self, owners: Sequence[weakref.ref[Trace]], *, graph: bool) -> None:
        """Somebody reads released parameters of these units.

        Raises:
            StateError: their model is gone.
        """
        lending = self.lending()
        traces = [trace for owner in owners if (trace := owner()) is not None]
        if lending is None or not traces:
            raise StateError(
                "a parameter is read whose sharded model no longer exists: its values are gone with it. Keep the model, or "
                "call zero.engine_of(model).detach() first"
            )
        lending.lend(traces, graph=graph)

    def rehomed(self, old: int, new: int) -> None:
        lending = self.lending()
        if lending is not None:
            lending.current.saved.rehome(old, new)

    def is_masked(self, owner: weakref.ref[Trace]) -> bool:
        trace = owner()
        return trace is not None and trace.unit.is_masked


class Lending:
    """Of one schedule whose units are released.

    Args:
        host_inside: has modules inside a unit's hosts act as hosts, see `Schedule`.

    Attributes:
        trace_of: module -> the unit whose parameters it has.
    """

    def __init__(self, model: nn.Module, backward: Backward, host_inside: Callable[[Trace], None]) -> None:
        self.current, self._backward, self._host_inside = backward.current, backward, host_inside
        self.trace_of: dict[nn.Module, Trace] = {}
        self._readers = on_read.Readers()
        self._loans = Loans(self)
        known = {param for trace in self.current.traces for flat in trace.unit.flats for param in flat.params}
        readable = [module for module in model.modules() if not known.isdisjoint(module._parameters.values())]
        self._dictionaries = on_read.put_on(readable, self.read)
        self.set_out()

    def set_out(self) -> None:
        """The units are new ones: what saved tensors and reads of parameters refer to."""
        traces = self.current.traces
        owner_of = {
            flat.full.untyped_storage()._cdata: weakref.ref(trace) for trace in traces for flat in trace.unit.flats
        }
        self.current.saved = SavedTensors(owner_of, partial(bring, self._backward.lead), Trace.record)
        trace_of = {param: trace for trace in traces for flat in trace.unit.flats for param in flat.params}
        watched: dict[Trace, list[on_read.ParameterDict]] = {trace: [] for trace in traces}
        for each in self._dictionaries:
            found = {trace_of[param] for param in each.values() if param is not None and param in trace_of}
            if found:  # a parameter of the module's may have been replaced since
                trace = self.trace_of[each.module] = min(found, key=lambda trace: trace.at)
                watched[trace].append(each)
        for trace, dictionaries in watched.items():
            trace.unit.watch(dictionaries)
            for flat in trace.unit.flats:
                flat.mask(self._loans, weakref.ref(trace), released=trace.unit.state is State.SHARDED)
            trace.unit.is_masked = trace.unit.state is State.SHARDED

    def detach(self) -> None:
        on_read.take_off(self._dictionaries)
        self._dictionaries.clear()

    def read(self, read: on_read.ParameterDict) -> None:
        """A parameter of a released unit, or of one that others have read before, is read.

        In a pass (also between a forward with a graph and its backward) it is gathered, and stays until the forward of the
        innermost host under way is over, backward included. Outside of one nothing happens: code that looks at a weight on one
        rank would wait for the others for ever.
        """
        if not torch._C._is_torch_function_enabled():  # inside `AsTheyAre`
            return
        trace = self.trace_of[read.module]
        if trace.unit.state is not State.GATHERED and self._readers.want_no_values():
            return
        if self.current.running:
            host = self.current.running[-1]
            if trace is host.trace or trace in host.borrowed:
                if trace.unit.state is not State.GATHERED:
                    self.current.need(trace)
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
        if (
            self.current.in_backward
            or itself
            or (torch.is_grad_enabled() and any(each.uses for each in self.current.traces))
        ):
            graph = torch.is_grad_enabled() or self.current.in_backward
            self.current.hold(trace, 2 if graph else 1)

    def lend(self, traces: Sequence[Trace], *, graph: bool) -> None:
        """Who has parameters of these released units computes with them; other than `read`, no module was asked for them.

        In a forward or backward, and wherever a graph is made, as there. Else (moving averages, edits and looks between passes)
        they stay until the next forward, step, end of a backward or such look; what was written to them is carried over. A
        collective, so ranks must read alike.
        """
        if self.current.running or self.current.in_backward or graph:
            for trace in traces:
                self.current.looks.pop(trace, None)
                if not self.current.running:
                    self.current.hold(trace, 2)
                    self._backward.notice(trace)
                elif trace is self.current.running[-1].trace or trace in self.current.running[-1].borrowed:
                    self.current.need(trace)
                else:
                    self._borrow(self.current.running[-1], trace)
            return
        self._backward.callbacks.before_look()
        for trace in list(self.current.looks):
            if trace not in traces and trace.held == 1 and not self.current.is_viewed(trace):
                del self.current.looks[trace]
                trace.held = 0
                trace.unit.look_over()
                trace.unit.release()
        for trace in traces:
            trace.held = max(trace.held, 1)
            trace.unit.gather()
        for trace in traces:
            trace.unit.wait()
            trace.unit.set_masked(True)
            if trace not in self.current.looks:
                for flat in trace.unit.flats:  # all references are ours
                    flat.known_references = flat.references
                self.current.looks[trace] = trace.unit.references

    def _borrow(self, host: Host, trace: Trace) -> None:
        if not self.current.in_backward:
            self.current.leave_tail(trace)
        trace.borrowed = True
        trace.weightless = False
        trace.unit.always_asks = True
        trace.running += 1
        trace.seen += 1
        host.borrowed.append(trace)
        self.current.need(trace)
        if self.current.with_graph and not self.current.in_backward:
            self.current.note(trace)
        if torch.is_grad_enabled() and not self.current.in_backward:
            host.lent.append(self._backward.used(trace, host.entry))
