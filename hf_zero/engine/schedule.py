"""Schedules gathers, releases and reduces of units: hooks on the modules that use them, and on autograd nodes.

* Forward: a unit is gathered before a module that uses it and released when the next use begins. From the second forward on,
  the next unit is gathered one ahead.
* Backward: a prehook on the nodes that made a module's output enters its use (`tape`): the unit is gathered, the unit of
  the next use is gathered one ahead, and units of uses that the backward has passed are released and reduced.
* End of a backward: an engine callback releases and reduces the remaining units, then the ranks agree on which parameters
  have a gradient, and optimizers get their gradients.

Hooks are on nodes, not on tensors or in autograd functions: user code may write a module's input or output in place.
Python work of this file grows with units, not with parameters, except for class changes at gathers and releases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable, profiler

from ..core.units import is_plain_embedding
from ..errors import StallError, StateError
from .bucket import have_local
from .context import Context
from .graph import GONE, backward_id, calls_of, is_lookup, next_sequence_number, nodes_of, tensors_in, weak_hook
from .reduce_queue import ReduceQueue
from .tape import HIGHEST, Calls, Tape, Token, Use, Walk
from .unit import State, Unit, have_gradients


class Schedule:
    """Runs the units of one model.

    Args:
        after_sync: called when a backward's reduced gradients are complete, the same on every rank.

    Attributes:
        sync: False inside `no_sync`.
        defers: inside `no_sync`, gradients add up on this rank at every stage.
        holds_gradients: a backward inside `no_sync` left unreduced gradients on this rank.
        deferred_last: the last backward inside `no_sync` had `defers`.
    """

    def __init__(self, context: Context, after_sync: Callable[[], None]) -> None:
        self.context, self.units, self.events = context, context.units, context.events
        self.reshards, self._wire, self._after_sync = context.reshards, context.wire, after_sync
        self.tape = Tape()
        self.sync = True
        self.defers = self.deferred_last = False
        self._lost: str | None = None  # the reason, if gradients of this step were lost
        self._is_first = True  # of the backwards since the last step: if it raises, no other gradients are lost
        self.in_backward, self._task = False, -1
        self.holds_gradients = False
        self._has_run = False  # a backward ran since gradients were cleared
        self._cleared: set[object] = set()  # optimizers whose gradients were cleared since the last backward
        self._may_have_missed = True  # there may be gradients that no hook saw, of graphs since the last flush
        self._create_graph = False  # the backward builds a graph of itself
        self._sends = True  # the backward reduces gradients
        # Forward
        self._running: list[int] = [0] * len(self.units)
        self._awaited: list[int] = [0] * len(self.units)  # bits of hosts that have not run: until then the unit stays
        self._depth = 0  # of calls of the root
        self._builds_graph = False  # this forward, or a part of it
        self._order: list[Unit] = []  # of uses in this forward
        self._last_order: list[Unit] = []
        self._last: Unit | None = None  # the unit used last: the first that a backward needs
        # Backward
        self.reduce_queue = ReduceQueue()
        self._walk = Walk()
        self._kept: set[Unit] = set()  # gathered until the backward ends
        self._kept_to_step: set[Unit] = set()
        self._handles: list[Any] = []
        self._hook()

    def _hook(self) -> None:
        model, add = self.context.model, self._handles.append
        for unit in self.units:
            for number, host in enumerate(unit.hosts):
                calls: Calls = []
                before = partial(self._pre_forward, unit, calls, 1 << number, is_plain_embedding(host))
                after = partial(self._post_forward, unit, calls)
                add(host.register_forward_pre_hook(before, prepend=True))
                add(host.register_forward_hook(after, always_call=True, with_kwargs=True))
        # torch runs prepended hooks in reverse order: the root's runs first, also where the root hosts a unit.
        add(model.register_forward_pre_hook(self._pre_root, prepend=True, with_kwargs=True))
        add(model.register_forward_hook(self._post_root, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _pre_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if backward_id() >= 0:
            return
        self.recover()
        self._depth += 1
        if self._depth > 1 and calls_of([module]) > 1:  # else Ctrl-C ended the last forward
            return
        self._depth = 1
        self.context.check()
        for event in self.events.before_forward:
            event(args, kwargs)
        self._begin_forward()
        self._running = [0] * len(self.units)
        self._awaited = [(1 << len(unit.hosts)) - 1 for unit in self.units]
        if not self.context.is_unsharded:  # inside `zero.unsharded` one rank alone may run a forward
            self._last_order, self._order = self._order, []

    def _begin_forward(self) -> None:
        self._builds_graph = torch.is_grad_enabled()
        self._may_have_missed = self._may_have_missed or self._builds_graph
        self._wire.watch.phase = "forward" if self._builds_graph else "a forward without gradients"

    def _post_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if backward_id() >= 0 or self._depth == 0:
            return
        self._depth -= 1
        if self._depth or (output is None and isinstance(sys.exc_info()[1], StallError)):  # a stall: no transfer ends
            return
        if torch.is_grad_enabled():
            if self._last is None and self._order and self._order[-1].index not in self.context.kept:
                self._last = self._order[-1]  # still gathered, because one of its hosts was not called
            hook = weak_hook(self, Schedule.begin)
            for node in nodes_of(tensors_in(output), 0):
                node.register_prehook(hook)
        elif self._last is not None and not self.tape.uses:  # else another rank's forward may have a graph
            self._last.release()
            self._last = None
        self._release_prefetched(keeps=self._keeps_units)
        for event in self.events.after_forward:
            event(output)
        if self.reshards and not self.context.is_unsharded:  # inside, ranks run forwards independently
            self.context.raise_failures("forward")

    @property
    def _keeps_units(self) -> bool:
        """Return whether units of `Context.kept` stay for a backward, also of a graph that only other ranks build."""
        return self._builds_graph or bool(self.tape.uses)

    def _release_prefetched(self, *, keeps: bool = False) -> None:
        for unit in self.units if self.reshards else ():
            if unit.state is State.SHARDED or unit is self._last or self._running[unit.index] or unit in self._kept:
                continue
            if not (keeps and unit.index in self.context.kept):
                unit.release()

    def _pre_forward(self, unit: Unit, calls: Calls, host: int, is_lookup: bool, *_: Any) -> None:
        self._awaited[unit.index] &= ~host
        self.begin_use(unit, calls, is_lookup=is_lookup)

    def begin_use(self, unit: Unit, calls: Calls, *, is_lookup: bool = False) -> None:
        """Begin a use of the unit's parameters: the forward of a host, or one operation.

        Args:
            calls: to be passed to `end_use`.
            is_lookup: an embedding, whose backward does not read them.
        """
        in_backward = backward_id() >= 0
        if self._depth == 0 and not in_backward:  # user code calls a part of the model by itself
            self.recover()
            self.context.check()
            for event in self.events.before_part:
                event(unit)
            self._begin_forward()
        tail = self._last
        if tail is not None and tail is not unit and not in_backward:
            self._last = None
            if not self._running[tail.index]:
                tail.release()
        self._running[unit.index] += 1
        if unit.state is not State.GATHERED:
            unit.gather()
            if self.reshards and not in_backward:
                self._prefetch(unit)
            unit.wait()
        elif self.reshards:
            unit.allow_reads()
            if not in_backward:
                self._prefetch(unit)
        if not in_backward and self._depth and not self.context.is_unsharded:
            self._order.append(unit)
        use = None
        # At stage 3 ranks agree on each use, so the tape also has uses that this rank alone runs without a graph.
        has_graph = torch.is_grad_enabled() or (self.reshards and self._builds_graph and not in_backward)
        if has_graph and (self.reshards or unit.trained):
            # Off the tape: recomputations inside a backward, and calls inside `unsharded`, which ranks make independently.
            is_off_tape = in_backward or (self.reshards and self.context.is_unsharded)
            use = Use(unit, -1, is_lookup=is_lookup) if is_off_tape else self.tape.open(unit, is_lookup=is_lookup)
        if self.reshards:
            for event in self.events.use_begun:
                event(unit)
        named = unit.named("forward") if profiler._is_profiler_enabled else None
        calls.append((use, next_sequence_number(), in_backward, named))

    def _prefetch(self, unit: Unit) -> None:
        """Gather the unit that followed this one in the last forward, as long as both forwards have the same order."""
        at = len(self._order)
        if self._depth and at + 1 < len(self._last_order) and self._last_order[at] is unit:
            self._last_order[at + 1].gather()

    def _post_forward(self, unit: Unit, calls: Calls, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.end_use(unit, calls, output, (args, kwargs))

    def end_use(self, unit: Unit, calls: Calls, output: Any, inputs: Any = ()) -> None:
        """End a use that returned `output`. A backward that reaches it, or results written to `inputs`, needs the unit."""
        if not calls:
            return
        use, first, in_backward, named = calls.pop()
        if named is not None:
            named.__exit__(None, None, None)
        if self._running[unit.index]:
            self._running[unit.index] -= 1
        found = tensors_in(output) if self.reshards or use is not None else []
        if self.reshards:
            for event in self.events.use_ended:
                event(unit, found)
        if use is not None:
            token = Token(use) if use.opened < 0 else self.tape.close(use)
            nodes = nodes_of(found + tensors_in(inputs) if self.reshards else found, first)
            if use.is_lookup and not all(is_lookup(node) for node in nodes):
                use.reads = True
            hook = weak_hook(self, Schedule.enter, token, gone=GONE)
            for node in nodes:
                node.register_prehook(hook)
            if not found and output is not None and self.reshards:
                self._kept.add(unit)  # no tensor found in its output: release at the end of the backward
        if not self.reshards or self._running[unit.index]:
            return
        unit.intercept_reads()  # from here on every read is a use of its own
        if unit in self._kept:
            return
        if not in_backward:
            # Must not depend on this call's grad mode: user code may run a part without a graph on one rank.
            is_used_again = self._depth > 0 and self._awaited[unit.index]
            if not (is_used_again or (unit.index in self.context.kept and self._keeps_units)):
                inner, self._last = self._last, unit
                if inner is not None and inner is not unit and not self._running[inner.index]:
                    inner.release()  # the last unit used inside this call
        elif not self._walk.is_in(unit.index):
            unit.release()

    def keep(self, unit: Unit, *, to_step: bool) -> None:
        """Keep a unit gathered, as it is now, to the end of the next backward, or to the next step."""
        self._kept.add(unit)
        if to_step:
            self._kept_to_step.add(unit)

    def release(self, unit: Unit) -> None:
        """Release a unit that was kept to the end of the next backward, unless it is in use."""
        if unit not in self._kept_to_step and not self._running[unit.index]:
            self._kept.discard(unit)
            unit.release()

    # Backward ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward, in its first hook."""
        if self.in_backward:
            return
        self.context.refuse_unsharded("a backward")
        self._is_first = not (self._has_run and (self._lost or self.holds_gradients or have_gradients(self.units)))
        if self._is_first:  # no earlier gradients were lost: a backward that raised may be repeated
            self._lost = None
        self.in_backward = self._has_run = True  # before anything that may raise: `recover` checks it
        self._cleared.clear()
        self._wire.watch.phase = "backward"
        self._task = backward_id()
        self._create_graph = torch.is_grad_enabled()
        for event in self.events.before_backward:
            event()
        self._list_uses()
        # Last: torch drops the callbacks of a backward that raises, and `recover` then cleans up.
        Variable._execution_engine.queue_callback(weak_hook(self, Schedule.end))

    def _list_uses(self) -> None:
        """Agree on what this backward may reach."""
        each = self.context.policy.reduce_each_backward and not self.defers
        sends = self._sends = self.sync or each or self._wire.size == 1
        if self.reshards or sends:
            mark = (self.context.requires_grad_digest << 1 | sends) & HIGHEST
            refuse = partial(self.context.raise_mismatch, sends=sends)
            start = self.tape.start_agreement
            self.reduce_queue.begin(start(self._wire, self.units, each_use=self.reshards, mark=mark, refuse=refuse))
            if self.reshards:
                self.reduce_queue.agree()  # it lists the uses
        else:
            self.reduce_queue.begin()
            self.tape.list_reachable()
        self._walk = Walk(self.tape.uses)

    def enter(self, token: Token) -> None:
        """Enter a use: the backward has reached its output."""
        use = token.use
        if not self.in_backward:
            self.begin()
        if backward_id() != self._task:
            self._enter_nested(use)
            return
        # A use from before the last step, or one that the walk passed before the backward reached it.
        if not use.is_listed or (use.is_entered and use.is_done and self.reshards):
            if use.reads:
                self._ensure_gathered(self.units[use.index], kept=True)
            return
        if use.is_entered:
            return
        for each in self._walk.up_to(use):
            self._enter_use(each)

    def _enter_use(self, use: Use) -> None:
        for earlier in self._walk.enter(use):  # entered first, so that an earlier use does not release the unit
            self._finish_use(earlier)
        if not self.reshards:
            return
        if use.reads:
            self._ensure_gathered(self.units[use.index])
        # Also where this rank skips the use: gathers and reduces of all ranks are in one order.
        following = self._walk.next
        if following is not None and following.reads:
            self.units[following.index].gather()

    def _ensure_gathered(self, unit: Unit, *, kept: bool = False) -> None:
        if unit.state is not State.GATHERED:
            unit.gather()
            unit.wait()
        if kept:
            self._kept.add(unit)

    def reach(self, unit: Unit) -> bool:
        """Gather a unit whose saved memory a backward reads. Returns False if the backward has entered a use of it already."""
        if self._walk.is_in(unit.index) and unit.state is State.GATHERED:
            return False
        if backward_id() >= 0:
            self.begin()
            for use in self._walk.ahead:
                if use.index == unit.index and use.reads:
                    self.enter(Token(use))  # in the order of the tape, as on ranks that reach its output
                    return True
        self._ensure_gathered(unit, kept=True)
        return True

    def _finish_use(self, use: Use) -> None:
        """Finish a use: all its nodes have run, and the gradients of its parameters are complete."""
        self._walk.finish(use)
        unit = self.units[use.index]
        if self._sends and not self._walk.left[use.index]:
            self.reduce_queue.advance(self._walk.left)
        stays = self._create_graph or unit in self._kept or self._running[unit.index]
        if self.reshards and not stays and not self._walk.needs(unit.index):
            unit.release()

    def _enter_nested(self, use: Use) -> None:
        """Enter a recomputed use in a backward inside the backward (reentrant checkpointing)."""
        if use.reads:
            self._ensure_gathered(self.units[use.index])
        if not use.is_entered:
            use.is_entered = True
            self._walk.entered.append(use)
            Variable._execution_engine.queue_callback(weak_hook(self, Schedule.end_nested, use))

    def end_nested(self, use: Use) -> None:
        walk, unit = self._walk, self.units[use.index]
        if use in walk.entered:
            walk.entered.remove(use)
            if self.reshards and not walk.left.get(unit.index):
                if self._sends:
                    self.reduce_queue.start(unit)
                if not walk.is_in(unit.index) and unit not in self._kept:
                    unit.release()

    def end(self) -> None:
        """End a backward: pass the remaining uses, reduce, and agree on gradients."""
        if not self.in_backward or backward_id() != self._task:
            return
        self._finish_walk()
        if self._create_graph and self.reshards:
            for unit in self.units:
                if unit.state is State.GATHERED:  # the new graph has views of it
                    self.keep(unit, to_step=True)
        self._kept.intersection_update(self._kept_to_step)
        self._release_prefetched()
        self._finish()

    def _finish_walk(self) -> None:
        """Pass the uses that this rank has not reached: other ranks did, and gathers and reduces need every rank."""
        self._last = None
        for use in self._walk.up_to():
            self._enter_use(use)
        for use in sorted(self._walk.entered, key=attrgetter("opened"), reverse=True):
            if use.is_listed:
                self._finish_use(use)
        self._walk.entered.clear()

    def _finish(self) -> None:
        if not self.sync:
            self.deferred_last = self.defers
        if self._sends:
            self.reduce_queue.finish()
            self.holds_gradients = False
            self._after_sync()
        else:
            self.holds_gradients = True
            for unit in self.units:
                if unit.trained and unit.has_local_grads:
                    unit.hold()
        for event in self.events.after_backward:
            event()
        self._wire.watch.phase = "what follows the backward"
        self.in_backward = False  # must be last: after an exception before this the backward has failed

    # Between passes ---------------------------------------------------------------------------------------------------

    def flush(self, *, at_step: bool = False) -> None:
        """Reduce gradients that `no_sync` or a backward without hooks left on this rank. A collective where there are any.

        Args:
            at_step: check all parameters. Else they are checked once after a forward, so that many reads cost one check.

        Raises:
            StateError: a backward of this step raised, after others.
        """
        self.recover()
        if self._lost is not None:
            raise StateError(f"{self._lost}. Call zero_grad() and repeat the step")
        if not self.holds_gradients:
            if not at_step and not self._may_have_missed:
                return
            # A backward that reached no hook, such as that of a loss inside the first block, may have left gradients.
            self._may_have_missed = False
            if not have_local([span.bucket for unit in self.units for span in unit.trained]):
                return
        sync, self.sync = self.sync, True
        try:
            for event in self.events.before_backward:
                event()
            self.in_backward, self._has_run, self._is_first = True, True, False
            self._list_uses()  # other ranks may be in a backward whose hooks this rank has missed
            self._finish_walk()
            self._release_prefetched()
            self._finish()
        finally:
            self.sync = sync

    def forget_gradients(self, cleared: Iterable[object], bound: Iterable[object]) -> None:
        """Forget backwards that raised, once the gradients of all `bound` optimizers are cleared."""
        self.recover()
        self._cleared.update(cleared)
        if self._cleared.issuperset(bound):
            self._lost, self._has_run = None, False

    def end_step(self) -> None:
        """Forget the passes of a step: the optimizer has used the gradients."""
        self.tape.clear()
        self._create_graph = False

    def quiesce(self) -> None:
        """Release units where the stage does, and wait for everything under way."""
        self.recover()
        self._last = None
        self._kept.clear()
        self._kept_to_step.clear()
        for unit in self.units:
            if self.reshards:
                unit.release()
            elif unit.state is State.GATHERING:
                unit.wait()

    def recover(self) -> None:
        """Clean up after a backward that raised. Does nothing inside a backward, or after one that ended."""
        if backward_id() >= 0:
            return
        if self.in_backward:
            others = "" if self._is_first else ", and those of earlier backwards of the step with them"
            self._lost = f"a backward of this step raised: its gradients are gone{others}"
            self._has_run = not self._is_first
            if self.context.has_updated:
                self.context.fail_step("a backward raised after step_in_backward had updated some units")
            self.reduce_queue.drop()
            self._walk = Walk()
            self.tape.clear()
            self._kept.clear()
            self._kept_to_step.clear()
            self._last = None
            for unit in self.units:
                unit.drop_gradients()
                if self.reshards:
                    unit.release()
            self.in_backward = False
