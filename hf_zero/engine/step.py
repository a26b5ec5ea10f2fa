"""Makes one call of `optimizer.step` atomic: it completes, has no effect, or the model is refused afterwards.

The engine's work runs directly around the optimizer's arithmetic: after all pre-hooks of user code, before all post-hooks.

* An exception before the optimizer has written (a pre-hook, a closure, a check): the step may be repeated.
* An exception after it has written: values of two steps are mixed. Everything but a load is refused from then on.
* A signal waits until the step is complete.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.held_signals import HeldSignals
from ..errors import StallError
from ..tiers.fingerprint import sample

if TYPE_CHECKING:
    from .bound_optimizers import BoundOptimizers

Closure = Callable[[], Any]


class StepWrapper:
    """Replaces `optimizer.step` on the instance and adds hooks, until `remove`.

    Args:
        bound: does the engine's part of a step.
        held: signals that wait for the end of the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bound: BoundOptimizers, held: HeldSignals) -> None:
        self._optimizer, self._bound, self._held = optimizer, bound, held
        self._handles = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        self._hooks: tuple[Any, Any] | None = None  # the optimizer's hooks, while a step uses reordered copies
        self._is_inside = False  # inside `_step`, which cleans up after an exception
        self._reset()
        self._had = optimizer.__dict__.get("step")
        inner = optimizer.step

        @wraps(inner)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(inner, *args, **kwargs)

        # A bound method: torch's schedulers wrap `step.__func__`.
        self._step_method = optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _reset(self) -> None:
        self._depth = -1  # nesting depth of hooked steps; -1: no step runs
        self._snapshot: Snapshot | None = None
        self._has_written = self._is_complete = False

    def forget(self) -> None:
        """Forget a step that raised outside the instance's method: gradients are cleared."""
        if not self._is_inside:
            self._reset()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._depth = 0  # a scheduler that has wrapped the method still calls it: it must then step plainly
        own = self._optimizer.__dict__
        if own.get("step") is self._step_method:
            del own["step"]
            if self._had is not None:
                own["step"] = self._had

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth >= 0:  # the class's step calls the instance's
            return inner(*args, **kwargs)
        with self._held:
            self._depth, self._is_inside = 0, True
            try:
                self._order_hooks()
                return inner(*args, **kwargs)
            except BaseException as error:
                self._raised(error)
                raise
            finally:
                self._restore_hooks()
                self._is_inside = False
                self._reset()

    def _order_hooks(self) -> None:
        optimizer: Any = self._optimizer
        self._hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        # Copies: torch iterates over them, and a hook may remove itself or add others.
        pre, post = self._hooks[0].copy(), self._hooks[1].copy()
        pre.move_to_end(self._handles[0].id)
        post.move_to_end(self._handles[1].id, last=False)
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post

    def _restore_hooks(self) -> None:
        if self._hooks is not None:
            optimizer: Any = self._optimizer
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = self._hooks
            self._hooks = None

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth = max(self._depth, 0) + 1  # user code may call the class's step directly
        if self._depth > 1:  # the class's step calls its base's
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        changed = None
        if closure is not None:
            instead = self._run_now(closure) if self._bound.runs_closure_first else self._around(closure)
            is_keyword = "closure" in kwargs
            changed = (args, {**kwargs, "closure": instead}) if is_keyword else ((args[0], instead, *args[2:]), kwargs)
        self._begin()
        return changed

    def _begin(self) -> None:
        self._bound.before_step(self._optimizer)
        self._bound.prepare_step(self._optimizer)
        self._snapshot = Snapshot(self._optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore_hooks()
            self._has_written = True
            self._bound.after_step(optimizer)
            self._is_complete = True
            self.forget()

    @staticmethod
    def _run_now(closure: Closure) -> Closure:
        with torch.enable_grad():
            loss = closure()
        return lambda: loss

    def _around(self, closure: Closure) -> Closure:
        def run() -> Any:
            # Compare now: the closure's backward may split segments, after which a snapshot is not comparable.
            self._has_written = self._has_written or (self._snapshot is not None and not self._snapshot.restore())
            self._snapshot = None
            self._bound.before_closure(self._optimizer)
            result = closure()
            self._begin()
            return result

        return run

    def _raised(self, error: BaseException) -> None:
        # A post-hook of user code raised, or no transfer can end any more.
        if self._is_complete or isinstance(error, StallError):
            return
        written = self._has_written or (self._snapshot is not None and not self._snapshot.restore())
        self._bound.step_raised(self._optimizer, f"{type(error).__name__}: {error}" if written else None)


class Snapshot:
    """Records what a step may change, without values: versions of tensors, options of groups, entries of state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._params: list[nn.Parameter] = [param for group in self._groups for param in group["params"]]
        self._versions = self._current()
        self._state = [(key, dict(each)) for key, each in dict.items(optimizer.state) if isinstance(each, dict)]
        self._state_versions = self._current_states()

    def _current(self) -> list[tuple[int, int, int | None]]:
        # Custom optimizers may write through `.data`, which no version counts. On a device a sample would synchronize.
        samples = not type(self._optimizer).__module__.startswith("torch.optim")
        return [
            (
                param._version,
                param.data_ptr(),
                sample(param.detach().reshape(-1))
                if samples and param.device.type == "cpu" and param.numel()
                else None,
            )
            for param in self._params
        ]

    def _current_states(self) -> list[int]:
        return [
            value._version
            for _, entries in self._state
            for value in entries.values()
            if value.__class__ is Tensor or isinstance(value, Tensor)
        ]

    def restore(self) -> bool:
        """Return whether no values were written; if so, restore options of groups and entries of state."""
        optimizer = self._optimizer
        if self._current() != self._versions:
            return False
        if self._current_states() != self._state_versions:
            return False
        del optimizer.param_groups[len(self._groups) :]
        for group, options in zip(optimizer.param_groups, self._groups):
            group.clear()
            group.update(options)
        known = dict(self._state)
        for key in [*optimizer.state]:
            if key not in known:
                del optimizer.state[key]
        for key, entries in known.items():
            optimizer.state[key].clear()
            optimizer.state[key].update(entries)
        return True
