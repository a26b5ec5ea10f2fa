"""What a schedule remembers of a model's units: where each is used, by which forward, and in which order."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from ...core.units import is_plain_embedding
from ..saved_tensors import Saved
from ..values.span_values import SpanValues
from ..values.unit import Unit


class Order:
    """The order in which units were needed in the last pass; only ever a hint."""

    def __init__(self) -> None:
        self._now: list[Unit] = []
        self._last: list[Unit] = []

    def note(self, unit: Unit) -> Unit | None:
        """Record that `unit` is needed now; answers which one was needed next, last time."""
        now, last = self._now, self._last
        if not now or now[-1] is not unit:
            now += (unit,)
        place = len(now)
        return last[place] if place < len(last) and last[place - 1] is unit else None

    def close(self) -> None:
        if self._now:
            self._last, self._now = self._now, []


class Host:
    """One module whose forward uses one unit's parameters. The root is a host without a unit of its own here.

    Attributes:
        inputs, given: during its forward: its inputs, and the nodes that made them.
        entry: during its forward: the youngest of them.
        use: during its forward with a graph: what this forward adds to.
        named: the ranges of its forwards under way in a profiler's trace.
        borrowed: during its forward: units of other hosts whose parameters were read; `lent` their uses.
        outer: these of the forwards around its forward, where the module calls itself.
    """

    def __init__(self, module: nn.Module, trace: Trace | None) -> None:
        self.module = module
        self.trace = trace
        self.given: list[Any] = []
        self.inputs: Any = None
        self.entry: Any = None
        self.use: Use | None = None
        self.borrowed: list[Trace] = []
        self.lent: list[Use] = []
        self.named: list[record_function] = []
        self.outer: list[tuple[Any, ...]] = []
        self.is_embedding = is_plain_embedding(module)

    def begin_inner(self) -> None:
        """Its forward is under way and has called the module again."""
        self.outer.append((self.given, self.inputs, self.entry, self.use, self.borrowed, self.lent))
        self.given, self.inputs, self.entry, self.use, self.borrowed, self.lent = [], None, None, None, [], []

    def end_inner(self) -> None:
        """The forward around the one that has just ended continues."""
        self.given, self.inputs, self.entry, self.use, self.borrowed, self.lent = self.outer.pop()


class Use:
    """One unit in one pass forward with a graph. The graph's hooks hold it: it lives as long as a backward may come.

    Attributes:
        trace: weakly, see `graph_hooks.Lead`.
        first: when it began.
        forwards: of its hosts, with a graph.
        events: hosts of it whose post-backward will come; `left` of them in the backward under way.
        is_open: it has a host whose post-backward will not come, its inputs need no gradient.
        done: a backward has been through it; with `retain_graph` there may be another.
    """

    def __init__(self, trace: Trace, first: int) -> None:
        self.trace = weakref.ref(trace)
        self.first = first
        self.forwards = self.events = self.left = 0
        self.is_open = self.done = False
        trace.uses.append(first)

    def finish(self) -> None:
        trace = self.trace()
        if not self.done and trace is not None:
            self.done = True
            trace.uses.remove(self.first)
            trace.kept.append(self.first)
            trace.pending -= bool(self.events)

    def __del__(self) -> None:
        if not self.done:
            self.finish()
        trace = self.trace()
        if trace is not None:
            trace.kept.remove(self.first)


class Trace:
    """What the schedule remembers of one unit.

    Attributes:
        uses: when those began that have a graph and wait for its backward; `kept`: those that have had one.
        pending: how many of `uses` will have a post-backward.
        begun: when its use in this pass began; a count that only grows. `first`, `latest`: when its first use since the last
            backward began, and its last one ended. A second backward over a kept graph reads them again.
        agreed_first, agreed_latest: in the backward under way, the latest first use and the latest end on any rank.
        noted: the last pass it ran in, maybe without a graph of its own (reentrant checkpointing); 0 after the next backward.
        place, step: in the agreed orders of reduces and gathers of the backward under way; -1: no rank has used it.
        held: not released. 1: until the next forward or step, 2: until the end of a backward.
        keeps: it is to stay gathered from a forward to its backward, on every rank; `is_kept`: it does.
        parts: it is to stay so by parts, cut among the ranks of each node; `is_parted`: it does, once it is released.
    """

    def __init__(self, unit: Unit, modules: list[nn.Module], at: int) -> None:
        self.unit = unit
        self.modules = modules  # its hosts
        self.at = at  # its index
        self.expected = len(modules)  # uses in a pass, as of the last one
        self.seen = 0  # in this pass so far
        self.running = 0  # hosts whose forward is under way
        self.uses: list[int] = []
        self.kept: list[int] = []
        self.first = self.begun = self.latest = self.pending = 0
        self.agreed_first = self.agreed_latest = 0
        self.use: weakref.ref[Use] | None = None  # of the pass under way
        self.noted = 0
        self.noticed = False  # its parameters have hooks of their own
        self.has_middle: bool | None = None  # whether hooks tell of the middle of its backward; None: not looked for
        self.opened = False  # modules inside its hosts act as hosts
        self.borrowed = False  # others than its hosts have read it
        self.stays = False  # from forward to the end of backward, since a backward came to it by a way that nobody sees
        self.strict = False  # backward has come to it, or may come, by other ways than its hosts' outputs
        self.held = 0
        self.unexplained = False  # a release found views that no saved tensor explains, while hooks were off
        self.is_hooked = False  # in its last use with a graph, saved tensors passed through `record`
        self._is_viewed = False  # user code was seen to keep views of it
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._usual: dict[tuple[int, ...], int] = {}
        unit.are_saved = self.are_saved
        self.keeps = self.is_kept = self.parts = self.is_parted = False
        self.weightless = all(is_plain_embedding(module) for module in modules)  # its backward needs no values
        # In the backward under way:
        self.place = self.step = -1
        self.joinable = False  # used in one pass: its one gather in backward has one place in the order of all ranks
        self.everywhere = True  # every rank has used it: none makes the others wait for its part
        self.in_backward = self.in_open = False
        self.came = False  # gathered in it, also for other ranks alone
        self.sent = False  # this rank's part in the gather that all ranks make of it has begun
        self.entered = False  # there for this rank's use
        self.unstepped = False  # reduced, and who steps in backward has not been told that all gradients are there
        self.local = False  # gradients wait on this rank, from a backward that did not send them

    def heir(self, unit: Unit) -> Trace:
        """What takes its place when the unit's spans are cut anew: it knows what was learnt, and none of the uses."""
        trace = Trace(unit, self.modules, self.at)
        trace.expected, trace.strict, trace.stays = self.expected, self.strict, self.stays
        trace.opened, trace.noticed = self.opened, self.noticed
        return trace

    def record(self, saved: Saved) -> None:
        """A graph has saved a tensor of this unit's memory."""
        self._saved.add(saved)

    def are_saved(self, flat: SpanValues, views: int) -> bool:
        """Whether all views of a span that outlive a release belong to graphs, which read them after the next gather.

        Autograd's views and those of user code look alike from outside. While hooks on saved tensors are on, autograd's are
        known one by one. What they were is then expected in passes without hooks; any other number keeps the memory, and has
        the hooks put on again.
        """
        passes = len(self.uses) + len(self.kept)
        if not passes:
            return False
        use = None if self.use is None else self.use()
        key = (flat.span.index, passes, *(() if use is None else (use.forwards, use.left)))
        usual = self._usual.get(key)
        if not self.is_hooked:
            if views in (usual, len(self.uses) * flat.usual_views) and not self._is_viewed:
                return True
            self.strict = self.unexplained = True
            return False
        saved = [each for each in self._saved if each.memory == flat.memory]
        times = Counter(id(each.tensor) for each in saved)
        # Beside `Saved`, the call has a reference.
        if len(times) != views or any(sys.getrefcount(each.tensor) > times[id(each.tensor)] + 1 for each in saved):
            self.strict = self._is_viewed = True
            return False
        expected = len({id(each.tensor) for each in saved if not each.is_parameter})
        if usual is not None and usual != expected:  # as of experts: each pass has to be looked at
            self.strict = True
        self._usual[key] = expected
        if len(self.uses) == 1 and passes < 3:
            flat.usual_views = expected
        return True

    @property
    def ran_twice(self) -> bool:
        """In the last pass, and a backward of it may come."""
        use = None if self.use is None else self.use()
        return use is not None and use.forwards > 1

    def release(self) -> None:
        """Unless it is held, or kept for its backward."""
        if not self.held and not self.is_kept:
            one = bool(self.uses) and not self.uses[1:] and not self.kept[1:]
            self.unit.release(parts=self.is_parted, as_usual=one and not (self.is_hooked or self._is_viewed))

    def leave(self) -> None:
        """Its backward is over: as `release`, and it is kept no more, nor its parts."""
        self.is_kept = False
        if self.is_parted:
            self.is_parted = False
            self.unit.drop_parts()
        if not self.held:
            self.unit.release()
