"""The optimizers that are bound to one engine: wraps their methods and steps, and follows changes of their groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..core.held_signals import HeldSignals
from ..core.patching import Patches
from ..errors import StateError
from ..tiers.fingerprint import sample
from .binding import Binding
from .optimizer_dict import load_state_dict, state_dict
from .param_groups import rebind
from .parameter import raw_data
from .segments import Segment
from .step import StepWrapper

if TYPE_CHECKING:
    from .engine import Engine

_VERSION = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_MODES = ("train", "eval")
"""Methods of schedule-free optimizers that write the tensors in groups."""


class PinnedUnits(Protocol):
    """Full parameters that a context keeps gathered, and that user code may write."""

    def refuse_writes(self) -> None:
        """Raise `StateError` if user code wrote them, because it wrote the optimizer's tensors of them, too."""

    def renew(self) -> None:
        """Gather again, after the masters were written. A collective."""


class BoundOptimizers:
    """The optimizers of one engine, with their methods wrapped. `Binding` has the segments of one.

    Attributes:
        bindings: in the order in which they were bound. The list stays the same object.
    """

    def __init__(self, engine: Engine, bindings: list[Binding]) -> None:
        self._engine, self._context, self.bindings = engine, engine.context, bindings
        self._held = HeldSignals()
        self._patches = Patches()
        self._wrappers: dict[torch.optim.Optimizer, StepWrapper] = {}
        for binding in bindings:
            self._take(binding.optimizer)
        self._known: list[Tensor]
        self._was_part_called: bool
        self._versions: list[int]
        self.mark_versions()
        self._read: dict[Segment, int] = {}
        """Segments whose `data` was read since the last step, each with a sample of its values."""
        self._context.events.before_forward.append(lambda *_: self.follow_writes())
        self._context.events.before_part.append(self._follow_once)
        self._context.events.segment_data_read.append(self._data_read)

    def detach(self) -> None:
        """Give the optimizers their own methods back."""
        self._patches.restore()
        for wrapper in self._wrappers.values():
            wrapper.remove()
        self._wrappers.clear()

    def get(self, optimizer: torch.optim.Optimizer, what: str = "") -> Binding:
        """
        Raises:
            StateError: another optimizer was bound in its place.
        """
        for binding in self.bindings:
            if binding.optimizer is optimizer:
                return binding
        raise StateError(
            f"{type(optimizer).__name__}{'.' if what else ''}{what}: it is not an optimizer of the engine, or another "
            "optimizer was bound in its place. Use that one, or call engine.bind(optimizer)"
        )

    # Groups -----------------------------------------------------------------------------------------------------------

    def bind(self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Bind optimizers; see `Engine.bind`. A collective."""
        wanted = self._wanted(optimizers)
        if [each.optimizer for each in self.bindings] == wanted and all(each.is_current() for each in self.bindings):
            return
        self._context.refuse_unsharded("a change of optimizers or of their groups")
        self._engine.schedule.quiesce()
        self._engine.wait_for_host_steps()
        self.bindings[:] = rebind(wanted, self._context, self.bindings)
        for binding in self.bindings:
            if binding.optimizer not in self._wrappers:
                self._take(binding.optimizer)
        self.mark_versions()

    def follow_groups(self) -> None:
        """Bind again if user code has changed groups, in the same way on every rank. A collective if it has."""
        if not all(binding.is_current() for binding in self.bindings):
            self.bind([binding.optimizer for binding in self.bindings])

    def _wanted(
        self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        """Return the optimizers to bind. A single one is added, and replaces those that share a parameter with it."""
        if not isinstance(optimizers, torch.optim.Optimizer):
            return list(optimizers)
        bound = [binding.optimizer for binding in self.bindings]
        if any(each is optimizers for each in bound):
            return bound
        given = {id(param) for group in optimizers.param_groups for param in group["params"]}
        taken = [
            not given.isdisjoint(
                [id(param) for params in binding.originals for param in params]
                + [id(segment.tensor) for group in binding.segments for segment in group]
            )
            for binding in self.bindings
        ]
        if not any(taken):
            return [*bound, optimizers]
        first = taken.index(True)
        return [optimizers if at == first else each for at, each in enumerate(bound) if at == first or not taken[at]]

    # Methods ----------------------------------------------------------------------------------------------------------

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        self.get(optimizer).guard_state(self._engine.wait_for_host_steps)
        self._wrappers[optimizer] = StepWrapper(optimizer, self, self._held)
        methods: dict[str, Callable[..., Any]] = {
            "zero_grad": self._zero_grad,
            "state_dict": self._state_dict,
            "load_state_dict": self._load_state_dict,
        }
        for name, method in methods.items():
            self._patches.method(optimizer, name, partial(_without_stock, partial(method, optimizer)))
        for name in _MODES:
            if callable(getattr(optimizer, name, None)):
                self._patches.method(optimizer, name, partial(partial, self._write, optimizer))

    def _zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        self.get(optimizer, "zero_grad()")
        self._wrappers[optimizer].forget()
        self._engine.zero_grad(set_to_none, optimizer=optimizer)

    def _state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.get(optimizer, "state_dict()")
        self.follow_groups()
        self._engine.finish_step()
        return state_dict(self.get(optimizer), self._context.wire)

    @torch.inference_mode(False)  # the tensors that it allocates are trained later
    def _load_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self.get(optimizer, "load_state_dict()")
        self.follow_groups()
        self._engine.finish_step()
        load_state_dict(self.get(optimizer), self._context.wire, state)

    # Steps, for `StepWrapper` -----------------------------------------------------------------------------------------

    @property
    def runs_closure_first(self) -> bool:
        """Return whether a closure must run before the optimizer's arithmetic, which then sees no gradients."""
        return self._context.config.offloads

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Complete the gradients. May be called twice, around a closure."""
        engine = self._engine
        binding = self.get(optimizer, "step()")
        if engine.schedule.in_backward:
            engine.schedule.recover()
        if engine.schedule.in_backward:
            raise StateError(
                "optimizer.step() was called inside a backward, before the gradients of all ranks have arrived"
            )
        self._context.check()
        self._context.refuse_unsharded("optimizer.step()")
        self._context.wire.watch.phase = "optimizer.step()"
        binding.guard_state(engine.wait_for_host_steps)
        self.follow_groups()
        engine.schedule.flush(at_step=True)
        for event in engine.events.before_step:
            event(optimizer)
        engine.schedule.quiesce()

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hide offloaded segments: the last call before the optimizer's arithmetic."""
        stepper = self._engine.stepper
        if stepper is not None:
            binding = self.get(optimizer)
            stepper.prepare(binding)
            binding.hide_offloaded()

    def before_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy to the parameters what the step has written before it calls its closure."""
        self._pause(optimizer)
        self.follow_writes()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Start offloaded updates, and gather the values that the optimizer has written."""
        engine, binding = self._engine, self.get(optimizer)
        if engine.stepper is not None:
            binding.show_segments()
        binding.return_moved_tensors()
        if engine.stepper is not None:
            engine.stepper.begin(binding)
        engine.refresh(binding.spans)
        if not self._context.reshards:
            self._context.raise_failures("optimizer.step()")
        self._context.wire.watch.step += 1
        self._context.wire.watch.phase = "what follows the step"
        engine.schedule.end_step()
        self.mark_versions()
        self._read.clear()
        for event in engine.events.after_step:
            event(optimizer)

    def step_raised(self, optimizer: torch.optim.Optimizer, written: str | None) -> None:
        """Clean up after a step that ended before `after_step`.

        Args:
            written: the error, where values were written; None if the step may be repeated.
        """
        self._context.wire.watch.phase = "what follows a step that raised"
        if written is not None:
            self._context.fail_step(written)
        if any(each.optimizer is optimizer for each in self.bindings):
            self._pause(optimizer)

    def _pause(self, optimizer: torch.optim.Optimizer) -> None:
        """Put all segments and their gradients back into the groups, while the optimizer's arithmetic does not run."""
        binding = self.get(optimizer)
        self._context.hides_host_gradients = False
        if self._engine.stepper is not None:
            binding.show_segments()
            for segment in (each for group in binding.segments for each in group):
                segment.show_grad()
        for event in self._engine.events.step_paused:
            event(optimizer)

    # Writes outside of steps ------------------------------------------------------------------------------------------

    def _write(self, optimizer: torch.optim.Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method that writes the tensors in groups, maybe through `.data`."""
        self.get(optimizer, method.__name__)
        self._engine.quiesce()
        if self._engine.pinned is not None:
            # Must run before the write: where full parameters share the masters' memory, it would look like a write to both.
            self._engine.pinned.refuse_writes()
        result = method(*args, **kwargs)
        self._refresh()
        return result

    def follow_writes(self) -> None:
        """Copy user code's writes to tensors of the groups to the parameters. A collective if it wrote any."""
        if any(map(attrgetter("ignores_writes"), self._context.units)):
            return  # inside `GatheredParameters`, which shows values that are not in the masters yet
        tensors, versions = self._current()
        is_counted = versions != self._versions
        if is_counted:  # a split alone must not count: the segment may be unsplit on another rank
            is_counted = self._are_later(tensors, versions)
        is_uncounted = not is_counted and self._has_uncounted_writes()
        if is_uncounted and self._context.layout.shards > 1 and not self._context.reshards:
            raise StateError(
                "the optimizer's tensors were written through `.data` since the last step. No version counts such writes, so "
                "the ranks cannot agree to gather them. Write the tensors themselves under torch.no_grad(), or call "
                "engine.refresh() on every rank right afterwards"
            )
        if is_counted or is_uncounted or self._were_moved():
            if self._engine.pinned is not None:
                self._engine.pinned.refuse_writes()
            self._refresh()
        else:
            self._known, self._versions = tensors, versions

    def with_group_writes(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return parameters as `Engine.with_group_writes` does."""
        if self._current()[1] == self._versions and not self._were_moved():  # as nearly always
            return []
        written: set[nn.Parameter] = set()
        for binding in self.bindings:
            for segments, members in zip(binding.segments, binding.originals):
                tensors = [segment.tensor for segment in segments]
                if any(segment.was_moved for segment in segments) or self._are_later(tensors, _versions(tensors)):
                    written.update(members)
        return [param for param in params if param in written]

    def _are_later(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> bool:
        known = dict(zip(self._known, self._versions))
        return any(known.get(tensor, version) != version for tensor, version in zip(tensors, versions))

    def _refresh(self) -> None:
        pinned = self._engine.pinned
        for binding in self.bindings:
            binding.return_moved_tensors()
        self._engine.refresh()
        self._read.clear()
        if pinned is not None:
            pinned.renew()

    def _follow_once(self, *_: object) -> None:
        """Follow writes when user code first calls a part of the model by itself after a step."""
        if not self._was_part_called:
            self._was_part_called = True
            self.follow_writes()

    def mark_versions(self) -> None:
        """Record the versions of tensors in groups: later changes are writes by user code."""
        self._was_part_called = False
        self._known, self._versions = self._current()

    def _current(self) -> tuple[list[Tensor], list[int]]:
        """Return the tensors in groups and their versions. Includes those without elements: each rank must see a write."""
        groups = chain.from_iterable(binding.optimizer.param_groups for binding in self.bindings)
        tensors: list[Tensor] = [*chain.from_iterable(map(itemgetter("params"), groups))]
        return tensors, _versions(tensors)

    def _data_read(self, segment: Segment, values: Tensor) -> None:
        if segment not in self._read:
            self._read[segment] = sample(values.reshape(-1))

    def _has_uncounted_writes(self) -> bool:
        if not self._read:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                not segment.has_moved and sample(raw_data(segment.tensor).reshape(-1)) != before
                for segment, before in self._read.items()
            )

    def _were_moved(self) -> bool:
        groups = chain.from_iterable(binding.segments for binding in self.bindings)
        return any(map(attrgetter("was_moved"), chain.from_iterable(groups)))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_VERSION, tensors))


def _without_stock(method: Callable[..., Any], stock: object) -> Callable[..., Any]:
    return method
