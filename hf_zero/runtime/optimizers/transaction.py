"""One call of `optimizer.step()`: made as a whole, or not at all, or refused afterwards.

What may stop a step, and what is done about it:

* a signal (Ctrl-C, a handler that raises) waits until the step is complete: `HeldSignals`. A step that is under way is
  carried to its end on every rank, so that ranks stay at the same one;
* an exception before the optimizer has written anything (a pre-hook, a closure, a check, memory for its first temporary):
  the step has not been; new entries and numbers that it left are undone: `Snapshot`. The gradients are there still;
* an exception after the optimizer's own arithmetic (a post-hook of the program's): the step is carried to its end first;
* an exception in the middle of the arithmetic, when parameters or states were written: nothing can be undone without a
  second copy of them. The engine refuses everything but a load from then on.

In a good step that costs a look at version counters and three signals, and no memory.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor

from ...tiers.array import OnDisk
from ...tiers.fingerprint import sample
from ..values.reads import AsTheyAre

Handler = Callable[[int, FrameType | None], Any]
HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
"""Whose handlers raise in practice: Ctrl-C, an orderly end, a time limit."""


class HeldSignals:
    """`with held:` signals for which the program has a handler in Python are answered after the block, in their order.

    A second one of a kind is answered at once: it ends a block that does not come to its end. In the main thread only, as
    handlers run in no other; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Handler] = {}
        self._came: list[int] = []
        self._pid = os.getpid()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        try:
            for number in HELD:
                handler: Any = signal.getsignal(number)
                if handler is not None and handler.__class__ is not signal.Handlers:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except ValueError:  # not the main thread
            self._handlers.clear()
        except BaseException:  # a handler raised, before its signal was held
            self._depth -= 1
            self._give_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or not self._handlers:
            return
        try:
            self._give_back()
        finally:
            came, self._came = self._came, []
            for number in came:
                signal.raise_signal(number)

    def _give_back(self) -> None:
        """A signal that comes meanwhile, of a kind that has been given back, raises; the others are given back all the same."""
        try:
            for number in [*self._handlers]:
                handler = self._handlers[number]
                now = signal.signal(number, handler)
                if now != self._note:  # the program has set another meanwhile
                    signal.signal(number, now)
                del self._handlers[number]
        finally:
            if self._handlers:
                self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._came or os.getpid() != self._pid:  # a forked child has no block that ends
            self._handlers[number](number, frame)
        else:
            self._came.append(number)


class Snapshot:
    """What an optimizer's own step may change, as it is before: without a copy of any values.

    Parameters and state tensors are known by their version counters; numbers and the groups' options by themselves. Custom
    optimizers may write through `.data`, which nothing counts: of their parameters a sample is taken, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups, state = optimizer.param_groups, optimizer.state
        self._groups = [dict(group) for group in groups]
        self._params = [param for group in groups for param in group["params"]]
        with AsTheyAre():
            self._versions = [param._version for param in self._params]
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim")
        self._samples = [] if self._is_torchs else self._sampled()
        self._known = list(state)
        self._is_readable = True
        rows = []
        try:  # without a call for each entry
            rows = [
                (param, key, entries[key]) for param, entries in zip(self._known, state.values()) for key in entries
            ]
        except TypeError:  # what a custom optimizer has there is its own affair
            self._is_readable = False
        self._tensor_versions = [row[2]._version for row in rows if row[2].__class__ is Tensor]
        # Tensors are not kept where a step may replace them: those would be freed at the end of the step only.
        self._rows = rows if self._is_torchs else [_weakly(row) for row in rows]

    def _sampled(self) -> list[int | None]:
        """None: nobody waits for a device to see its values, which may be written by then."""
        with AsTheyAre():  # of what is on disk and cannot be written, too
            return [
                None if not (param.device.type == "cpu" and param.is_contiguous()) else sample(_flat(param))
                for param in self._params
            ]

    def undo(self) -> str:
        """Put everything back where only numbers, options and new entries are in the way.

        Returns:
            What was written that cannot be put back, or may have been; empty: the step has not been.
        """
        optimizer, state = self._optimizer, self._optimizer.state
        edited = bool(self._samples) and self._sampled() != self._samples  # by ways that no version counts
        if edited or [param._version for param in self._params] != self._versions:
            return "parameters"
        before: dict[Any, dict[Any, Any]] = {param: {} for param in self._known}
        versions = iter(self._tensor_versions)
        for param, key, value in self._rows:
            former = value() if isinstance(value, weakref.ref) else value
            if former.__class__ is Tensor or former is not value:
                found = state[param].get(key) if param in state else None
                if found is None or found is not former or found._version != next(versions):
                    return "optimizer states"
            elif not (value is None or isinstance(value, (int, float, str, OnDisk))):
                return "optimizer states"
            before[param][key] = former
        if not self._is_readable:
            return "optimizer states"
        for param in [*state]:
            if param not in before:
                del state[param]
        for param, entries in before.items():
            state[param].clear()
            state[param].update(entries)
        del optimizer.param_groups[len(self._groups) :]
        for group, options in zip(optimizer.param_groups, self._groups):
            group.clear()
            group.update(options)
        return ""


def _flat(param: Tensor) -> Tensor:
    """Of a contiguous one. A single element may have any stride, which `reshape` would keep."""
    return param.detach().as_strided((param.numel(),), (1,))


def _weakly(row: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    param, key, value = row
    return param, key, weakref.ref(value) if value.__class__ is Tensor else value


class Attempt:
    """One call of `optimizer.step()` by the program.

    Args:
        put_hooks_back: the optimizer has its own step pre-hooks afterwards, where it had a copy.

    Attributes:
        depth: steps within it whose pre-hooks have run and post-hooks have not: a class's step may call its base's, which
            has the same hooks.
        before: since the outermost pre-hook has ended; None before that, and once the step is complete.
        is_computed: the outermost optimizer's own step has returned.
        is_committing: what follows it has begun.
        is_complete: it has ended.
    """

    def __init__(self, put_hooks_back: Callable[[], None]) -> None:
        self.put_hooks_back = put_hooks_back
        self.depth = 0
        self.before: Snapshot | None = None
        self.is_computed = self.is_committing = self.is_complete = False


class AroundStep:
    """While it is on, `optimizer.step(...)` is `run(the step with its arguments)`.

    On the instance, and on top of what others have put there; a scheduler may put its own on top of this one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, run: Callable[[Callable[[], Any]], Any], computed: Callable[[], None]
    ) -> None:
        self._optimizer, self._is_on = optimizer, True
        self._former = optimizer.__dict__.get("step")
        former: Callable[..., Any] = optimizer.step

        @wraps(former)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return run(partial(former, *args, **kwargs)) if self._is_on else former(*args, **kwargs)

        self._step = optimizer.__dict__["step"] = MethodType(step, optimizer)
        # torch calls this between a step and its post-hooks. Its own code object stays what runs: a profiler looks for it.
        profiled = optimizer._optimizer_step_code

        def code() -> None:
            profiled()
            if self._is_on:
                computed()

        self._code = optimizer.__dict__["_optimizer_step_code"] = code

    def remove(self) -> None:
        self._is_on = False
        own = self._optimizer.__dict__
        if own.get("step") is self._step:
            del own["step"]
            if self._former is not None:
                own["step"] = self._former
        if own.get("_optimizer_step_code") is self._code:
            del own["_optimizer_step_code"]


# Closures -------------------------------------------------------------------------------------------------------------


Closure = Callable[[], Any]


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], instead: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of `step` with what `instead` makes of its closure. None: it has no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": instead(closure)}
    return (args[0], instead(closure), *args[2:]), kwargs


def followed_by(call: Callable[[], None], closure: Closure) -> Closure:
    def followed() -> Any:
        try:
            return closure()
        finally:
            call()

    return followed


def run_first(closure: Closure) -> Closure:
    """It is run now; what stands for it only gives the loss."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
