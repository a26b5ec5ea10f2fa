"""When a unit moves: hooks on its hosts, the order of the last step, prefetch, the end of a backward.

Hooks stand on *nodes of the autograd graph*, not on tensors and not as autograd functions, so that the user's graph stays
as it was (in-place use of a unit's inputs and outputs included):

* pre-backward: a prehook on the node that made an output (and on its base's, where the output is a view: autograd
  replaces the view's node when the base is written to, never the base's). It runs before the first backward operation of
  the unit: gather.
* post-backward: a prehook on the node that made the unit's *youngest* input. Autograd runs the ready node that was made
  last, and AccumulateGrad before all others; so when the maker of the youngest input runs, every node made after it is
  done: all of the unit's, and the gradients of its parameters. Reduce and release.
* end of backward: an engine callback, for everything these miss: hosts whose inputs need no gradient (embeddings), unused
  parameters (zeros), units that another rank used and this one did not.

Recomputation (activation checkpointing) runs the same forward hooks. In its non-reentrant form the unit is already in
backward then, and its forward leaves no second trace; in its reentrant form the recomputed forward is the only one that
has a graph, and its inputs are leaves: the engine callback of that inner backward ends the unit.

Everything here costs Python time per unit, never per parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .discover import is_plain_embedding
from .unit import Unit


class Order:
    """The order in which units were needed in the last pass; only ever a hint."""

    def __init__(self) -> None:
        self._now: list[Unit] = []
        self._last: list[Unit] = []

    def note(self, unit: Unit) -> Unit | None:
        """Record that `unit` is needed now; answers which one was needed next, last time."""
        now, last = self._now, self._last
        if not now or now[-1] is not unit:
            now.append(unit)
        place = len(now)
        return last[place] if place < len(last) and last[place - 1] is unit else None

    def close(self) -> None:
        if self._now:
            self._last, self._now = self._now, []


class Host:
    """One module whose forward uses one unit's parameters."""

    __slots__ = ("acting", "given", "is_embedding", "is_open", "module", "trace")

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self.module = module
        self.trace = trace
        self.acting = False  # of a guest: its own forward brought the unit in
        self.is_open = False  # the last forward's inputs need no gradient: no post-backward will come
        self.given: list[Any] = []  # during its forward: the nodes that made its inputs
        self.is_embedding = is_plain_embedding(module)


class Trace:
    """What the schedule remembers of one unit between forward and backward."""

    __slots__ = (
        "expected", "final", "in_backward", "in_open", "open", "pending", "ready", "reduced", "running", "seen", "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, hosts: int) -> None:
        self.unit = unit
        self.expected = hosts  # host forwards in a pass, as of the last one
        self.seen = 0  # in this pass so far
        self.pending: dict[int, int] = {}  # pass -> host forwards whose post-backward will come
        self.open: set[int] = set()  # passes with a host forward whose post-backward will not come
        self.in_backward = False
        self.in_open = False  # also in that of an open host that needs weights: it ends with all of backward
        self.ready = self.reduced = False  # in this backward
        self.final = False  # and who wants to know has been told that all gradients are there
        self.running = 0  # hosts whose forward is under way


class Schedule:
    """Installs the hooks on one model and runs its units."""

    def __init__(self, model: nn.Module, units: Iterable[tuple[Unit, list[nn.Module]]]) -> None:
        self.model = model
        self.sync = True
        """False inside `no_sync`."""
        self.unsynced = False
        """Some local gradients wait for a reduce. The same on every rank, as `no_sync` is."""
        self.after_backward: Callable[[], None] = lambda: None
        self.before_forward: Callable[[], None] = lambda: None
        self.after_reduce: Callable[[Unit], None] | None = None
        """Called once per backward that syncs, when all of a unit's gradients are with their owners."""
        self._handles: list[Any] = []
        self._pass = 0
        self._forward, self._backward = Order(), Order()
        self._in_backward = False
        self._task = -1
        self._tail: Trace | None = None  # its forward is done; its release waits for the next unit's need
        self._reducing: Trace | None = None
        # The order in which all ranks send gradients, whatever order they come in: a unit that one rank skips must not
        # make it wait for another unit than its peers do. Backward's order, until the first backward shows a better one.
        self._turns: list[Trace] = []
        self._turn = 0
        self._came: list[Trace] | None = []  # in the first backward; None once agreed
        self.traces: list[Trace] = []
        hosts: list[Host] = []
        for unit, modules in units:
            trace = Trace(unit, len(modules))
            self.traces.append(trace)
            hosts += [Host(module, trace) for module in modules]
        self._turns = [trace for trace in reversed(self.traces) if trace.unit.trained]
        self.frees = any(not trace.unit.policy.keep_full for trace in self.traces)
        # Alone, a reduce is an addition in place: nothing to put off.
        self._defers = any(not t.unit.policy.reduce_each_backward and t.unit.wire.size > 1 for t in self.traces)
        add = self._handles.append
        for host in hosts:
            add(host.module.register_forward_pre_hook(partial(self._pre_forward, host), prepend=True, with_kwargs=True))
            add(host.module.register_forward_hook(partial(self._post_forward, host)))
        for guest in self._guests(hosts) if self.frees else ():
            inner = guest.module
            add(
                inner.register_forward_pre_hook(partial(self._guest_pre_forward, guest), prepend=True, with_kwargs=True)
            )
            add(inner.register_forward_hook(partial(self._guest_post_forward, guest)))
        # The last to come first: the root may be a host, too, and its forward begins a new count.
        add(model.register_forward_pre_hook(self._root_pre_forward, prepend=True))
        add(model.register_forward_hook(self._root_post_forward))

    @staticmethod
    def _guests(hosts: list[Host]) -> Iterator[Host]:
        """Modules inside a host that hold parameters: someone may call them and go around the host's forward.

        Where hosts enclose others, the innermost is theirs.
        """
        known = {id(host.module) for host in hosts}
        for host in sorted(hosts, key=lambda host: sum(1 for _ in host.module.modules())):
            for inner in host.module.modules():
                if id(inner) not in known and inner._parameters:
                    known.add(id(inner))
                    yield Host(inner, host.trace)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def units(self) -> Iterator[Unit]:
        return (trace.unit for trace in self.traces)

    # Forward --------------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, args: Any) -> None:
        if self._in_backward:
            if _inside_backward():
                return  # the whole model is being recomputed
            self.reset()
        self.before_forward()
        self._pass += 1
        if self.frees:
            for trace in self.traces:
                trace.seen = trace.running = 0

    def _guest_pre_forward(self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not host.trace.running:
            host.acting = True
            self._pre_forward(host, module, args, kwargs)

    def _guest_post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        if host.acting:
            host.acting = False
            self._post_forward(host, module, args, output)

    def _pre_forward(self, host: Host, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace = host.trace
        trace.running += 1
        if self.frees:
            tail = self._tail
            if tail is not None and tail is not trace and not self._in_backward:
                self._tail = None
                tail.unit.release()
            self._need(trace.unit, self._backward if self._in_backward else self._forward)
        host.is_open = False
        if not torch.is_grad_enabled() or not (self.frees or trace.unit.trained):
            return
        if self._in_backward and (trace.in_backward or trace.pending):
            return  # a non-reentrant recomputation: the first forward's hooks stand
        host.given = _nodes((args, kwargs))
        node = _youngest(args, kwargs)
        if node is None:
            host.is_open = True
            trace.open.add(self._pass)
        else:
            trace.pending[self._pass] = trace.pending.get(self._pass, 0) + 1
            node.register_prehook(partial(self._post_backward, trace, self._pass))

    def _post_forward(self, host: Host, module: nn.Module, args: Any, output: Any) -> None:
        trace = host.trace
        trace.running = max(0, trace.running - 1)
        given, host.given = host.given, []
        if trace.in_backward:
            return
        if torch.is_grad_enabled() and (self.frees or host.is_open):
            hook = partial(self._pre_backward, host, host.is_open)
            for node in _nodes(output):
                if all(node is not other for other in given):  # what is handed on is no use of the unit
                    node.register_prehook(hook)
        if self.frees and not self._in_backward:
            trace.seen += 1
            if trace.seen >= trace.expected:
                self._tail = trace

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:
            return
        graph = torch.is_grad_enabled()
        if graph:
            for node in _nodes(output):
                node.register_prehook(self._root_pre_backward)
        if self.frees:
            self._forward.close()
            # The unit that ran last is the first that backward needs.
            keep, self._tail = (self._tail, self._tail) if graph else (None, None)
            for trace in self.traces:
                if trace.seen:
                    trace.expected = trace.seen
                if trace is not keep:
                    trace.unit.release()

    def _need(self, unit: Unit, order: Order) -> None:
        """`unit` now; and start on the one that came next, last time: at most two are gathered for use at any moment."""
        following = order.note(unit)
        unit.gather()
        if following is not None:
            following.gather()
        unit.wait()

    # Backward -------------------------------------------------------------------------------------------------------

    def _root_pre_backward(self, *_: Any) -> None:
        if self._in_backward and self._task != torch._C._current_graph_task_id():
            self.reset()  # the backward before this one raised
        self._begin_backward()

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._task = torch._C._current_graph_task_id()
        self._turn = 0
        for trace in self.traces:
            trace.ready = trace.reduced = trace.final = False
        Variable._execution_engine.queue_callback(self._end_backward)

    def _pre_backward(self, host: Host, is_open: bool, *_: Any) -> None:
        self._begin_backward()
        trace = host.trace
        if is_open:
            Variable._execution_engine.queue_callback(partial(self._close_open, trace))
        if host.is_embedding or not self.frees:
            return
        trace.in_backward = True
        trace.in_open = trace.in_open or is_open
        self._need(trace.unit, self._backward)

    def _post_backward(self, trace: Trace, pass_: int, *_: Any) -> None:
        self._begin_backward()
        trace.in_backward = trace.in_open
        left = trace.pending.pop(pass_, 0) - 1
        if left > 0:
            trace.pending[pass_] = left
            return
        if not trace.in_open:
            trace.unit.release()
        if pass_ not in trace.open:
            self._ready(trace)

    def _close_open(self, trace: Trace) -> None:
        """The end of the (possibly inner) backward that an open host ran in."""
        trace.in_backward = trace.in_open = False
        if self._in_backward and not trace.pending and trace.unit.has_grads():
            trace.unit.release()
            self._ready(trace)

    def _ready(self, trace: Trace) -> None:
        """All gradients of this unit's pass are there: they leave when it is their turn."""
        if not trace.unit.trained:
            return
        if not self.sync and self._defers:
            trace.unit.hold()
        elif trace.reduced or trace.unit.wire.size == 1:
            self._reduce(trace)  # of a further pass through the model
        else:
            trace.ready = True
            if self._came is not None:
                self._came.append(trace)
            while self._turn < len(self._turns) and self._turns[self._turn].ready:
                self._reduce(self._turns[self._turn])
                self._turn += 1

    def _reduce(self, trace: Trace) -> None:
        previous, self._reducing = self._reducing, trace
        if previous is not None:
            self._finish_reduce(previous)
        trace.unit.reduce()
        trace.reduced, trace.final = True, False

    def _finish_reduce(self, trace: Trace) -> None:
        trace.unit.finish_reduce()
        # With another pass of it to come, or one whose end only the end of backward shows, there may be more.
        if self.after_reduce is None or not self.sync or trace.final or trace.pending or trace.open:
            return
        trace.final = True
        self.after_reduce(trace.unit)

    def _reduce_rest(self) -> None:
        """Units that were not ready in this backward: unused ones send zeros, since another rank may have used them."""
        for trace in self._turns:
            if not trace.reduced or trace.unit.has_grads():
                self._reduce(trace)
        self._reducing = None
        for trace in self.traces:
            self._finish_reduce(trace)
        if self._came is not None:
            self._agree_on_turns(self._came)

    def _agree_on_turns(self, came: list[Trace]) -> None:
        """Once: rank 0's order, then units that only other ranks used, then those that no rank used."""
        self._came = None
        wire = self.traces[0].unit.wire
        if wire.size == 1:
            return
        place = {id(trace): index for index, trace in enumerate(self._turns)}
        everyone: list[list[int]] = wire.exchange([place[id(trace)] for trace in came])
        order = list(dict.fromkeys(index for theirs in everyone for index in theirs))
        order += [index for index in range(len(self._turns)) if index not in set(order)]
        self._turns = [self._turns[index] for index in order]

    def _end_backward(self) -> None:
        """Whatever the node hooks missed; then every owner's gradient is complete."""
        self._backward.close()
        self._tail = None
        for trace in self.traces:
            trace.in_backward = trace.in_open = False
            trace.open.clear()
            trace.unit.release()
        if self._defers and not self.sync:
            for trace in self.traces:
                trace.unit.hold()
        else:
            self._reduce_rest()
        self._in_backward = False
        self.unsynced = self._defers and (not self.sync)
        self.after_backward()

    def flush(self) -> None:
        """Reduce gradients that `no_sync` left on this rank. A collective where there are any."""
        if not self.unsynced:
            return
        self.unsynced = False
        for trace in self.traces:
            trace.reduced = trace.final = False
        self._reduce_rest()
        self.after_backward()

    def quiesce(self) -> None:
        """Before weights change: nothing gathered, nothing on the move. Recovers from a backward that raised."""
        if self._in_backward and not _inside_backward():
            self.reset()
        self._tail = None
        for unit in self.units:
            unit.release()
            unit.close()

    def reset(self) -> None:
        """Forget the pass under way, after an exception in it: local gradients, hooks' counts, transfers."""
        self._in_backward = False
        self._tail = None
        self._reducing = None
        self._forward, self._backward = Order(), Order()
        for trace in self.traces:
            trace.in_backward = trace.in_open = trace.reduced = False
            trace.running = 0
            trace.pending.clear()
            trace.open.clear()
            trace.unit.settle()
            trace.unit.drop_grads(shards=False)
            trace.unit.release()


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _youngest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The autograd node made last among those of the inputs; None, where no node made any."""
    youngest, age = None, -1
    for tensor in _tensors(args, kwargs.values()):
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is not None and (number := node._sequence_nr()) > age:
                youngest, age = node, number
    return youngest


def _nodes(values: Any) -> list[Any]:
    """The autograd nodes that made the tensors in `values`, and those that these are views of."""
    nodes: list[Any] = []
    for tensor in _tensors((values,)):
        if tensor.requires_grad:
            for node in (
                tensor.grad_fn,
                tensor._base.grad_fn if tensor._is_view() and tensor._base is not None else None,
            ):
                if node is not None and all(node is not known for known in nodes):
                    nodes.append(node)
    return nodes


def _tensors(*values: Iterable[Any]) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    found: list[Tensor] = []
    stack: list[Iterable[Any]] = [*values]
    while stack:
        for value in stack.pop():
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list)):
                stack.append(value)
            elif isinstance(value, (dict, OrderedDict)):
                stack.append(value.values())
            elif is_dataclass(value) and not isinstance(value, type):
                stack.append([getattr(value, f.name) for f in fields(value)])
    return found
