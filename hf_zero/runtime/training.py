"""One sharded model in training: in which order its parts work in a forward, a backward and a step, and the hooks for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.watch import AFTER_STEP, NO_GRAD
from ..errors import LayoutError, StallError, StateError
from ..plan.plan import keeps
from ..plan.record import Recorder, batch_of
from ..tiers.pool import is_out_of_memory
from . import instance_methods as overrides
from .bound_optimizers import BoundOptimizers
from .buffers import Buffers
from .build import Assembly, Groups
from .checks import Checks
from .gradient_ops import Gradients
from .group_flags import GroupFlags
from .offload import Offload
from .optimizers.optimizer import Binding
from .optimizers.transaction import AroundStep, Attempt, HeldSignals, Snapshot, followed_by, run_first, with_closure
from .own_methods import OwnMethods
from .passes.autocast import Autocast
from .passes.backward_order import Callbacks
from .passes.compiling import blocks_of
from .passes.schedule import Schedule
from .replicas import Options
from .saved_tensors import in_backward_of_any
from .spare_room import BatchWatch, SpareRoom
from .state_dict import ShardedHooks
from .unsharded import Unsharded
from .usage import free_device_bytes
from .values.carrying import carry_casts
from .values.flat_param import Flat
from .values.reads import AsTheyAre
from .values.sharded import Sharded
from .values.unit import Unit
from .values.writes import WriteWatch


class Training:
    """Of one sharded model, whose units are built.

    Args:
        patches: takes every hook and method that is put on the model or the optimizer, to be taken off again.

    Attributes:
        blocks: parts of the model that may be compiled by themselves.
        buffers: those that follow rank 0's.
        gradients: what parameters show as `.grad`.
        optimizers: those that are bound.
        recorder: what measures every step, see `Engine.record`.
        schedule: hooks, gathers, reduces.
        state_dict_hooks: what makes `model.state_dict()` whole.
        writes: what notices parameters that the program writes.
        autocast: around every entry into the model, where it computes in another type.
    """

    def __init__(
        self,
        sharded: Sharded,
        assembly: Assembly,
        offload: Offload,
        patches: overrides.Patches,
    ) -> None:
        self.sharded, self.model, self.config, self.policy = sharded, sharded.model, sharded.config, sharded.policy
        self.precision, self.units, self._wire = sharded.precision, sharded.units, sharded.wire
        self.offload = offload
        self._assembly, self._patches = assembly, patches
        self._trains_unbound: bool | None = False
        """A backward left gradients that no optimizer will see; None once that was said."""
        self._passes = 0  # backwards and steps
        self._held = HeldSignals()
        self._pre_hooks: dict[torch.optim.Optimizer, int] = {}
        self._attempts: dict[torch.optim.Optimizer, Attempt] = {}
        """The step under way; steps, where a closure makes another's."""
        self._stepped: set[torch.optim.Optimizer] = set()
        """In this step of the model: since the last backward, each once."""
        self._uncleared: set[int] = set()  # optimizers with gradients of a backward since their `zero_grad`
        self._lost: dict[int, str] = {}  # by optimizer, why this step's gradients are not all there
        self.recorder: Recorder | None = None
        self._unsharded: Unsharded | None = None
        self.buffers = Buffers(self.model, self._wire)  # sends rank 0's, on the device
        self.gradients = Gradients(sharded, offload, self.flush)
        self.state_dict_hooks = ShardedHooks(sharded, self.settle, lambda: self.writes.optimizer_wrote)
        for module in self.model.modules():
            if any(True for _ in module.parameters()):  # others may be in other models, too (XLM's activation, for one)
                patches.hooks(*self.state_dict_hooks.register(module))
        self._spare = SpareRoom(sharded) if keeps(self.config, self._wire.size) else None
        self.writes = WriteWatch(self.model, self.units, self.quiesce, self.state_dict_hooks.after_load, self._followed)
        self._hook_model()
        # Before a write: what is gathered shows the values that are about to change; it would be taken for new.
        self._own_methods = OwnMethods(self.units, self.schedule.end_looks, self._optimizer_wrote)
        self._group_flags = GroupFlags(sharded)
        self.optimizers = BoundOptimizers(
            sharded,
            assembly,
            offload,
            self.schedule,
            self.writes,
            self.gradients,
            self._group_flags,
            held=self._held,
            quiesce=self.quiesce,
            flush=self.flush,
            take_methods=self._take_methods,
        )
        self._checks: Checks | None = None
        if self.config.debug:
            self._checks = Checks(sharded, self.buffers, offload, assembly.hosts)
            patches.hooks(*self._checks.handles)

    def adopt(
        self, optimizers: Sequence[torch.optim.Optimizer], originals: Sequence[Groups], kinds: Sequence[type[Binding]]
    ) -> None:
        """After the hooks: bind the optimizers, and take over the model's methods. A collective."""
        self.optimizers.take(optimizers, originals, kinds)
        overrides.put_on(self._patches, self.model, self._assembly, self.zero_grad, self.quiesce)
        if self._wire.size > 1 and (not self.policy.keep_full or self.buffers.watched):
            overrides.generate_together(self._patches, self.model, self.buffers.apart, self.releases, self._generates)

    def _hook_model(self) -> None:
        """Everything that hears of the model's forward, from the outside in.

        torch runs pre-hooks that were prepended from the last to the first, other hooks in the order of their registration.
        """
        model, add = self.model, self._patches.hooks
        hosts = [host for _, modules in self._assembly.hosts() for host in modules]
        self.blocks = list(blocks_of(model, hosts))
        # 1. Around the call itself, so that all hooks, and what they start, run under autocast.
        self.autocast = Autocast(self.sharded, hosts) if self.precision.autocast_dtype is not None else None
        if self.autocast is not None:
            add(self.autocast)
        # 2. Gathers and releases.
        in_backward = self.config.step_in_backward
        self.schedule = Schedule(
            model,
            self._assembly.hosts(),
            self._wire,
            Callbacks(
                before_forward=self._before_forward,
                before_part=self._before_part,
                before_look=self._before_look,
                before_backward=self._before_backward,
                after_reduce=self._step_unit if in_backward else None,
                ask=self.buffers.ask,
                after_backward=self._after_backward,
                broke_off=self._backward_broke_off,
                options=Options(self.sharded, self.writes.edits),
                spare=self._spare,
            ),
        )
        # 3. Before the schedule's pre-hooks, though registered later: state may move while nothing is gathered.
        if self.config.is_auto or self._spare is not None:
            expect = partial(self._expect, BatchWatch(model))
            add(model.register_forward_pre_hook(expect, prepend=True, with_kwargs=True))
        # 4. After the schedule's: the forward has waited for its reads. Not after an exception: ranks do not share it.
        if self.offload.reads or self.buffers.watched:
            add(model.register_forward_hook(self._after_forward))
        # 5. Last: what any of these raised is explained.
        add(model.register_forward_hook(self._explain_out_of_memory, always_call=True))

    def _take_methods(self, optimizer: torch.optim.Optimizer) -> None:
        before = optimizer.register_step_pre_hook(self._before_step)
        self._patches.hooks(before)
        self._pre_hooks[optimizer] = before.id
        self._patches.hooks(optimizer.register_step_post_hook(self._after_step))
        self._patches.hooks(AroundStep(optimizer, partial(self._step, optimizer), partial(self._computed, optimizer)))
        self._own_methods.take(optimizer, self._patches)
        self._patches.method(optimizer, "zero_grad", partial(self._zero_grad_of, optimizer))
        self._patches.method(optimizer, "state_dict", partial(self.optimizers.state_dict, optimizer))
        self._patches.method(optimizer, "load_state_dict", partial(self.optimizers.load_state_dict, optimizer))

    def _step_unit(self, unit: Unit) -> None:
        """With `step_in_backward`, of the one optimizer there is."""
        self.offload.step_unit(unit, self.sharded.optimizers[0] if self.sharded.optimizers else None)

    # What hooks call --------------------------------------------------------------------------------------------------

    def _before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_inference_mode_enabled():
            # Units may be cut anew below: made in there, their tensors would have no versions, and no step could write them.
            with torch.inference_mode(False), torch.no_grad():
                self._before_forward(args, kwargs)
            return
        graph = torch.is_grad_enabled()
        self._wire.watch.phase = "forward" if graph else NO_GRAD
        if self._trains_unbound and graph:
            self._trains_unbound = None
            warnings.warn(
                f"this {type(self.model).__name__} was sharded without an optimizer, and gradients are there: no step will "
                "change it. Pass the optimizer to zero.shard (accelerator.prepare), or call engine.bind(optimizer)",
                stacklevel=2,
            )
        self.offload.refuse_while_away("forward")
        self.offload.check()
        # Groups, then flags, then writes: the first two may cut units anew, and these are the ones to be watched for writes.
        for binding in self.optimizers.bindings:
            if not binding.is_current():
                self.optimizers.bind(binding.optimizer)
                break  # that was all of them
        self._group_flags.follow()
        if self._assembly.look_at_flags():
            self.schedule.backward.notice_again()
            self.optimizers.unfreeze()
        self.writes.before_forward((self._passes, graph), values=graph and self.config.step_in_backward)
        self.buffers.before_forward(alone=self._may_run_alone)
        if self._checks is not None:
            self._checks.before_forward()
        if self.recorder is not None:
            self.recorder.forward(*batch_of(args, kwargs, getattr(self.model, "main_input_name", "input_ids")))

    def _before_part(self) -> None:
        if self._group_flags.follow():
            self.schedule.backward.notice_again()

    def _expect(self, batches: BatchWatch, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or in_backward_of_any() or (batch := batches.batch(args, kwargs)) is None:
            return
        if self.offload.monitor is not None:
            self.offload.refuse_while_away("forward")
            self.offload.monitor.expect(batch)
        if self._spare is not None:
            self._spare.expect(batch)

    def _after_forward(self, *_: Any) -> None:
        self.buffers.after_forward(self.schedule.backward.sync, alone=self._may_run_alone)
        # Not after a recomputation; something may have been read.
        if not in_backward_of_any() and not self.sharded.is_unsharded:
            self.offload.agree_on_disk()

    def _before_backward(self) -> None:
        self.sharded.refuse_unsharded("a backward")
        self._wire.watch.phase = "backward"
        self._group_flags.refuse_unheard()
        if self.config.step_in_backward or self.writes.looks:
            self.writes.before_backward()
        if self.schedule.backward.sends:
            self.gradients.hide()

    def _after_backward(self) -> None:
        if self.schedule.backward.sync and self.buffers.watched:
            self.buffers.agree(changed=self.schedule.backward.order.answered)
            if self.policy.keep_full:
                self.buffers.make_ready()
        if self.schedule.backward.sync:
            self.offload.land()
        if not self.optimizers.bindings and self._trains_unbound is False:
            self._trains_unbound = any(flat.is_reduced for flat in self.sharded.trained)
        self.offload.agree_on_disk(reduced=self.schedule.backward.sync)
        self.gradients.show()
        self.show_grads()
        if self._checks is not None:
            self._checks.after_backward(reduced=self.schedule.backward.sends)
        self._passes += 1
        self._group_flags.end_pass()
        for index in [*self._lost]:
            if index not in self._uncleared:  # nothing else was lost with a backward that raised before this one
                del self._lost[index]
        self._uncleared.update(range(max(1, len(self.optimizers.bindings))))
        self._stepped.clear()
        self._wire.watch.phase = "what follows the backward"

    def _backward_broke_off(self) -> None:
        """It left a part of its gradients, added to those of earlier backwards of this step: all of them go."""
        for unit in self.units:
            unit.drop_grads(shards=True)
        self.offload.backward_broke_off()
        if self._checks is not None:
            self._checks.reference.broke_off()
        for index in range(max(1, len(self.optimizers.bindings))):
            earlier = ", and those of earlier backwards of this step with them" if index in self._uncleared else ""
            self._lost[index] = f"a backward of this step raised: its gradients are gone{earlier}"

    def _refuse_lost(self, what: str, reason: str) -> None:
        """Raises:
        StateError: a step would be made of a part of its gradients; or one broke off half done, which comes first.
        """
        self.offload.check()
        raise StateError(f"{what}: {reason}. Call zero_grad() and make the step's forwards and backwards again")

    def _before_look(self) -> None:
        if self.writes.optimizer_wrote:
            self.writes.follow()

    def _optimizer_wrote(self) -> None:
        self.writes.optimizer_wrote = True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt, binding = self._attempts.get(optimizer), self.optimizers.bound(optimizer, "step()")
        if attempt is not None:
            attempt.is_complete = False
            attempt.put_hooks_back()  # a program that registers one from here on finds the optimizer's own
        self.sharded.refuse_unsharded("optimizer.step()")
        if in_backward_of_any():
            raise StateError(
                "optimizer.step() was called inside a backward (by a hook on a parameter?), before all ranks' gradients are "
                "there: call it when backward has ended, or offload the optimizer's state with step_in_backward=True"
            )
        self._wire.watch.phase = "optimizer.step()"
        self._own_methods.compare()
        self.offload.refuse_while_away("optimizer.step()")
        # Offloaded shards are updated from here on: the gradients must be there, and the optimizer gets the loss only.
        arguments = None
        if self.config.offloads:
            arguments = with_closure(args, kwargs, run_first)
        else:  # it may make backwards, and clip what they leave; then: plain gradients
            arguments = with_closure(args, kwargs, partial(followed_by, partial(self._hide_slices, binding)))
        if not binding.is_current():
            raise LayoutError(
                "the optimizer's parameter groups changed since the last forward; the new parameters have no gradients "
                "yet: run a forward and a backward before the step"
            )
        checks = None if attempt is not None and attempt.depth else self._checks
        if checks is not None:
            checks.before_step()
        self.schedule.backward.flush()
        self.schedule.quiesce()
        if binding.index in self._lost:
            self._refuse_lost("optimizer.step()", self._lost[binding.index])
        self.gradients.settle()
        self.writes.before_step(in_backward=self.config.step_in_backward)
        self._assembly.check()
        self.optimizers.part_spans()
        binding = self.optimizers.bound(optimizer, "step()")  # spans may have been cut anew
        self._hide_slices(binding)
        binding.keep_states(self.optimizers.settle_states)
        if checks is not None:
            has_closure = arguments is not None and not self.config.offloads
            checks.before_update(optimizer, binding.index, has_closure=has_closure)
        self.offload.prepare_step(optimizer, binding.index)
        if attempt is not None:
            attempt.depth += 1
            if attempt.before is None:
                attempt.before = Snapshot(optimizer)
        return arguments

    def _hide_slices(self, binding: Binding) -> None:
        self.gradients.hide_slices()
        binding.hide_slices()

    def _computed(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step has returned; its post-hooks are next."""
        attempt = self._attempts.get(optimizer)
        if attempt is not None and attempt.depth == 1:
            attempt.is_computed = True

    def _step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """`optimizer.step()`, as the program calls it: made as a whole or not at all, see `transaction`."""
        if optimizer in self._attempts:
            return step()
        # Ours takes gradients for the step: what a hook that was registered after it does to them would miss what is offloaded.
        # In a copy: torch iterates over the hooks, and only the last may remove itself, which now is ours.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        ordered = hooks.copy()
        ordered.move_to_end(self._pre_hooks[optimizer])
        with self._held:
            attempt = self._attempts[optimizer] = Attempt(
                partial(setattr, optimizer, "_optimizer_step_pre_hooks", hooks)
            )
            try:
                optimizer._optimizer_step_pre_hooks = ordered
                return step()
            except BaseException as error:
                self._step_broke_off(optimizer, attempt, error)
                raise
            finally:
                attempt.put_hooks_back()
                del self._attempts[optimizer]

    def _step_broke_off(self, optimizer: torch.optim.Optimizer, attempt: Attempt, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        if attempt.is_committing:
            if not isinstance(error, StallError):  # after which nothing is used any more
                self.offload.fail(reason)
        elif attempt.is_computed:  # a post-hook of the program's, before ours: the other ranks are making this step
            self._after_step(optimizer)
        elif attempt.is_complete:
            if attempt.depth:  # a class's step that goes on after its base's
                self.offload.fail(reason)
        elif attempt.before is not None:
            written = attempt.before.undo()
            if written:
                self.offload.fail(f"{reason}; {written} had been written")
        self.offload.show_grads()
        self.gradients.show_slices()
        self.show_grads()
        self._wire.watch.phase = "what follows a step that raised"

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        attempt, binding = self._attempts.get(optimizer), self.optimizers.bound(optimizer, "step()")
        if attempt is not None:
            attempt.depth -= 1
            attempt.is_computed, attempt.is_committing = False, True
        binding.stepped()
        self.offload.begin_step(optimizer, binding.index)
        self._wire.watch.step += 1  # what ranks compare: of all optimizers
        self.offload.end_step(binding.index)
        self._assembly.regather()
        self.writes.optimizer_wrote = False
        self._own_methods.stepped()
        self.schedule.backward.stepped()
        self._passes += 1
        if attempt is not None:
            attempt.before, attempt.is_committing, attempt.is_complete = None, False, True
        if optimizer in self._stepped:
            self._stepped.clear()
        if not self._stepped and self.recorder is not None:
            self.recorder.step()
        self._stepped.add(optimizer)
        if self.offload.monitor is not None:
            self.offload.monitor.look()
        if self._checks is not None and (attempt is None or attempt.depth == 0):
            self._checks.after_step(optimizer)
        self.gradients.show_slices()
        self._wire.watch.phase = AFTER_STEP

    def _explain_out_of_memory(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and is_out_of_memory(error):
            error.add_note(
                f"hf_zero: {self.sharded.advice()}. The model's state is whole: the next forward starts afresh"
            )

    # Between passes ---------------------------------------------------------------------------------------------------

    def _zero_grad_of(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Of one of several: its gradients, and those that no optimizer has."""
        binding = self.optimizers.bound(optimizer, "zero_grad()")
        self.zero_grad(set_to_none, index=binding.index if len(self.optimizers.bindings) > 1 else None)

    def zero_grad(self, set_to_none: bool = True, *, index: int | None = None) -> None:
        """See `Engine.zero_grad`; of the optimizer with this number, or (None) of all."""
        self.schedule.backward.recover()
        self.offload.zero_grad(index, set_to_none=set_to_none)
        if index is None:
            self._uncleared.clear()
            self._lost.clear()
        else:
            self._uncleared.discard(index)
            self._lost.pop(index, None)
        if not set_to_none:
            for unit in self.units:
                unit.finish_step()  # it reads the gradients
            trained = self.sharded.trained
            self.gradients.zero([f for f in trained if index in (None, f.span.optimizer) or not f.span.is_updated])
        else:
            with AsTheyAre():
                for unit in self.units:
                    unit.drop_grads(True, index)
        self.schedule.backward.unsynced = self.schedule.backward.unsynced and bool(self._uncleared)
        if not set_to_none:
            return
        if self._checks is not None and not self._uncleared:
            self._checks.sightings.drop_used()
        self.show_grads()

    def show_grads(self) -> None:
        """What the optimizers' parameters have as gradients is what the spans have."""
        for binding in self.optimizers.bindings:
            binding.show_grads()

    def give_grad(self, flat: Flat, index: int, write: Callable[[], None]) -> None:
        """A parameter gets a gradient that no backward made; `write` fills this rank's elements. Without communication."""
        if not in_backward_of_any():
            self.gradients.settle()
        self.gradients.give(flat, [index])
        write()
        self.gradients.wrote()
        self.gradients.show()
        self.show_grads()

    def quiesce(self) -> None:
        """Before the masters are read or written from outside: nothing gathered, nothing on the move."""
        self.schedule.quiesce()
        self.settle()

    def settle(self, flats: Sequence[Flat] | None = None) -> None:
        """Masters are those of one step, and have what was written to parameters since. Without communication.

        Args:
            flats: spans that matter; None: all.

        Raises:
            StateError, TierError: see `finish_step`; what was written cannot be carried over.
        """
        self.offload.finish_step()
        for flat in self.sharded.flats if flats is None else flats:
            if flat.casts:
                carry_casts(flat)
        if self._unsharded is not None:
            self._unsharded.carry(flats)
        self.writes.settle(flats)

    def _followed(self, flats: Sequence[Flat]) -> None:
        if self._unsharded is not None:
            self._unsharded.refill(flats)

    def flush(self, flats: Sequence[Flat] | None = None) -> None:
        """Reduce the gradients that `no_sync` left on this rank. A collective where there are any.

        Args:
            flats: whose gradients are to be what the parameters' `.grad` say; None: all.
        """
        self.schedule.backward.flush()
        if self._lost:
            self._refuse_lost("gradients", next(iter(self._lost.values())))
        self.offload.finish_step()
        if not in_backward_of_any():
            self.gradients.settle(flats)

    @contextmanager
    def unsharded(self, *, in_compute_dtype: bool = False) -> Iterator[None]:
        """As `zero.unsharded`, of this model. A collective at its beginning and its end."""
        if self._unsharded is not None:  # the outer one decides
            yield
            return
        self.offload.refuse_while_away("zero.unsharded")
        if in_backward_of_any():
            raise StateError("zero.unsharded cannot begin in a backward")
        self.quiesce()
        self.writes.follow()
        free_bytes = free_device_bytes(self.sharded, self.offload, self._wire.ranks_here())
        whole = Unsharded(self.sharded)
        whole.begin(in_compute_dtype=in_compute_dtype, free_bytes=free_bytes)
        self.buffers.make_ready()
        self._unsharded, self.sharded.is_unsharded = whole, True
        self.sharded.shows_masters = not in_compute_dtype and all(
            flat.shown_dtype is None for flat in self.sharded.flats
        )
        completed = False
        try:
            yield
            self.writes.follow()
            completed = True
        finally:
            try:
                whole.end(self.settle, compare=completed)
            finally:
                self._unsharded, self.sharded.is_unsharded = None, False
                self.sharded.shows_masters = False

    @property
    def _may_run_alone(self) -> bool:
        """Whether a forward now needs no other rank: user code may run it on one rank, for an evaluation."""
        return self.sharded.is_unsharded or (self.policy.keep_full and not torch.is_grad_enabled())

    def releases(self) -> bool:
        return not self.policy.keep_full and not self.sharded.is_unsharded

    def _generates(self) -> None:
        with self._wire.watch.doing("generate()"):
            self._wire.exchange(None)
