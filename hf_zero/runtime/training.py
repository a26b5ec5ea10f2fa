"""One sharded model in training: what happens in a forward, a backward and a step, and which optimizer it is for.

The parts do the work (`schedule`, `gradient_ops`, `writes`, `offload`, `buffers`); here is their order, and the hooks that
bring it about. `Engine` puts a `Training` together and is what users call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm import agree
from ..comm.places import AFTER_STEP, NO_GRAD
from ..core.layout import ParamSpec
from ..errors import ConfigError, LayoutError, RankMismatchError, StallError, StateError
from ..plan.machine import Machine
from ..plan.record import Recorder, batch_of
from ..tiers.pool import is_out_of_memory
from . import instance_methods as overrides
from .autocast import Autocast
from .buffers import Buffers
from .build import Assembly
from .checks import Checks
from .clipping import Overflow
from .compiling import blocks_of
from .flat_param import Flat
from .gradient_ops import Gradients
from .moves import Monitor
from .offload import Offload
from .optimizer import Binding, take_state, with_closure_followed, with_closure_run
from .reads import AsTheyAre
from .replicas import Options
from .saved_tensors import in_backward_of_any
from .schedule import Callbacks, Schedule
from .sharded import Sharded
from .state_dict import ShardedHooks
from .transaction import AroundStep, Attempt, HeldSignals, Snapshot
from .unsharded import Unsharded
from .usage import free_device_bytes
from .writes import WriteWatch


class Training:
    """Of one sharded model, whose units are built.

    Args:
        mixed_precision: as the ranks compare it.
        machine: measured speeds, for spans that are cut anew.
        overflow: what finds gradients that are no numbers.
        patches: takes every hook and method that is put on the model or the optimizer, to be taken off again.

    Attributes:
        binding: how the optimizer is bound; None: there is none.
        blocks: parts of the model that may be compiled by themselves.
        buffers: those that follow rank 0's.
        gradients: what parameters show as `.grad`.
        recorder: what measures every step, see `Engine.record`.
        schedule: hooks, gathers, reduces.
        state_dict_hooks: what makes `model.state_dict()` whole.
        autocast: around every entry into the model, where it computes in another type.
    """

    def __init__(
        self,
        sharded: Sharded,
        assembly: Assembly,
        offload: Offload,
        overflow: Overflow,
        patches: overrides.Patches,
        machine: Machine,
        mixed_precision: str | None,
    ) -> None:
        self.sharded, self.model, self.config, self.policy = sharded, sharded.model, sharded.config, sharded.policy
        self.precision, self.units, self._wire = sharded.precision, sharded.units, sharded.wire
        self.offload = offload
        self._assembly, self._overflow, self._patches = assembly, overflow, patches
        self._machine, self._mixed_precision = machine, mixed_precision
        self.binding: Binding | None = None
        self._trains_unbound: bool | None = False
        """A backward left gradients that no optimizer will see; None once that was said."""
        self._passes = 0  # backwards and steps
        self._held = HeldSignals()
        self._attempt: Attempt | None = None  # the step under way
        self._has_gradients = False  # of a backward since `zero_grad`
        self._lost: str | None = None  # why this step's gradients are not all there
        self.recorder: Recorder | None = None
        self._unsharded: Unsharded | None = None
        self.buffers = Buffers(self.model, self._wire)  # sends rank 0's, on the device
        self.gradients = Gradients(sharded, offload, overflow, self.flush)
        self.state_dict_hooks = ShardedHooks(sharded, self.settle)
        for module in self.model.modules():
            if any(True for _ in module.parameters()):  # others may be in other models, too (XLM's activation, for one)
                patches.hooks(*self.state_dict_hooks.register(module))
        self.writes = WriteWatch(self.model, self.units, self.quiesce, self.refresh)
        self._hook_model()
        self._checks: Checks | None = None
        if self.config.debug:
            self._checks = Checks(sharded, self.buffers, offload, assembly.hosts)
            patches.hooks(*self._checks.handles)

    def adopt(
        self, optimizer: torch.optim.Optimizer | None, originals: list[list[nn.Parameter]], kind: type[Binding]
    ) -> None:
        """After the hooks: bind the optimizer, if there is one, and take over the model's methods. A collective."""
        if optimizer is not None:
            self._bind(optimizer, originals, kind)
        overrides.put_on(self._patches, self.model, self._assembly, self.zero_grad, self.quiesce)
        if self._wire.size > 1 and (not self.policy.keep_full or self.buffers.watched):
            overrides.generate_together(self._patches, self.model, self.buffers.apart, self.releases, self._generates)
        self._watch()

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
                before_backward=self._before_backward,
                after_reduce=(lambda unit: self.offload.step_unit(unit, self.sharded.optimizer))
                if in_backward
                else None,
                ask=self.buffers.changed,
                after_backward=self._after_backward,
                broke_off=self._backward_broke_off,
                options=Options(self.sharded),
            ),
        )
        # 3. Before the schedule's pre-hooks, though registered later: state may move while nothing is gathered.
        if self.config.is_auto:
            add(model.register_forward_pre_hook(self._expect, prepend=True, with_kwargs=True))
        # 4. After the schedule's: the forward has waited for its reads. Not after an exception: ranks do not share it.
        if self.offload.reads or self.buffers.watched:
            add(model.register_forward_hook(self._after_forward))
        # 5. Last: what any of these raised is explained.
        add(model.register_forward_hook(self._explain_out_of_memory, always_call=True))

    # The optimizer ----------------------------------------------------------------------------------------------------

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach an optimizer built over `model.parameters()`, before or after sharding. A collective.

        The object and its `param_groups` dicts stay; `group["params"]` becomes this rank's flat spans. Binding the same
        optimizer again is a no-op unless groups were added to it.

        Raises:
            UnsupportedOptimizerError, LayoutError, RankMismatchError: see `shard`.
        """
        previous = self.binding
        if previous is not None and previous.optimizer is optimizer and previous.is_current():
            return
        self.sharded.refuse_unsharded("Engine.bind")
        with self._assembly.tried():
            with agree.on_all_ranks(self._wire, "Engine.bind", kind=RankMismatchError):
                kind = self._assembly.kind_of_binding(optimizer)
                if previous is not None and previous.optimizer is optimizer and type(previous) is not kind:
                    raise LayoutError(
                        f"a group that was added to {type(optimizer).__name__} makes it need whole matrices where it did not, "
                        "or the other way round: build the optimizer anew with all its groups, and bind that"
                    )
                originals = self._assembly.originals(optimizer, previous)
                specs = self._assembly.specs(originals)
            agree.same_structure(self._wire, self.config, self._mixed_precision, specs, originals, self.sharded.names)
        self.quiesce()
        if previous is not None and previous.optimizer is not optimizer:
            previous.forget()
            previous = None
        if self._assembly.cuts_otherwise(specs):
            if any(flat.grads() for flat in self.sharded.trained):
                raise LayoutError("an optimizer's groups may change only between steps: call zero_grad() first")
            self._recut(specs, optimizer, previous)
        self._bind(optimizer, originals, kind)
        self._watch()

    def _recut(
        self,
        specs: list[list[ParamSpec]],
        optimizer: torch.optim.Optimizer | None,
        binding: Binding | None,
    ) -> None:
        # New spans are filled from the masters: what was written to parameters, frozen ones too, must be there before.
        self.writes.settle()
        self.sharded.plan = self._assembly.plan(specs, optimizer, self._machine, self.offload.ranks_here)
        self._assembly.recut(specs, binding, self.sharded.plan.placements)
        self.schedule.recut(self.units)
        self.writes.restart()

    def _part_spans(self) -> None:
        """Before a step: parameters without a gradient leave the spans of those that have one, and are left alone."""
        binding = self.binding
        if binding is None or not binding.one_gradient or self.config.step_in_backward:
            return
        specs = self._assembly.parted(binding.originals)
        if specs is not None:
            self._cut_anew(specs)

    def _unfreeze(self) -> None:
        """Parameters were frozen or unfrozen. Frozen ones keep their place and their state, and get no gradient; the first time
        that one is unfrozen, it gets a place for its gradient and state: a collective, so on every rank in the same step.
        """
        self.schedule.notice_again()
        if not self._assembly.has_unfrozen:
            return
        binding = self.binding
        originals = [] if binding is None else binding.originals
        specs = self._assembly.specs(originals)
        agree.same_structure(self._wire, self.config, self._mixed_precision, specs, originals, self.sharded.names)
        self.flush()
        self.quiesce()
        self._cut_anew(specs)

    def _cut_anew(self, specs: list[list[ParamSpec]]) -> None:
        """Between passes: the same optimizer over other spans. A collective."""
        binding = self.binding
        with self._held:  # there is no way back half way
            self._recut(specs, self.sharded.optimizer, binding)
            if binding is not None:
                self._bind(binding.optimizer, binding.originals, type(binding))
            self.gradients.show()
            self._watch()

    def make_room(self, marks: Mapping[str, str]) -> None:
        """Before optimizer state is loaded, on every rank with the same `marks`: see `Assembly.arranged`. A collective then."""
        binding = self.binding
        if binding is None or not binding.one_gradient or self.config.step_in_backward:
            return
        specs = self._assembly.arranged(binding.originals, marks)
        if specs is not None:
            self.quiesce()
            self._cut_anew(specs)

    def _watch(self) -> None:
        """Anew where units or optimizer are."""
        if self.config.is_auto:
            free = partial(self.offload.free_host_bytes, self.offload.ranks_here)
            self.offload.monitor = Monitor(self.sharded, free)

    def _bind(self, optimizer: torch.optim.Optimizer, originals: list[list[nn.Parameter]], kind: type[Binding]) -> None:
        fresh = self.sharded.optimizer is not optimizer
        state = take_state(optimizer, originals)
        agree.same_answer(
            self._wire, state is not None, "whether the optimizer has state (has made steps) when it is bound"
        )
        self.binding = kind(optimizer, self.units, self._wire, originals)
        self.writes.counts_references = True
        self.sharded.optimizer = optimizer
        if state is not None:
            self.binding.load_state_dict(state)
        if fresh:
            self._patches.hooks(optimizer.register_step_pre_hook(self._before_step))
            self._patches.hooks(optimizer.register_step_post_hook(self._after_step))
            self._patches.hooks(AroundStep(optimizer, self._step, self._computed))
            overrides.after_own_methods(optimizer, self._optimizer_wrote, self._patches)
            self._patches.method(optimizer, "zero_grad", self.zero_grad)
            self._patches.method(optimizer, "state_dict", self._optimizer_state_dict)
            self._patches.method(optimizer, "load_state_dict", self._optimizer_load_state_dict)

    def quiet_binding(self) -> Binding:
        if self.binding is None:
            raise ConfigError("no optimizer is bound")
        self.quiesce()
        return self.binding

    def _optimizer_state_dict(self) -> dict[str, Any]:
        return self.quiet_binding().state_dict()

    def _optimizer_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        binding = self.quiet_binding()
        if binding.one_gradient:
            what = "the optimizer's load_state_dict()"
            with agree.on_all_ranks(self._wire, what, kind=RankMismatchError) as report:
                report.mine = binding.marks(state_dict, self.sharded.names)
            self.make_room(report.everyone[0])
        self.quiet_binding().load_state_dict(state_dict)

    # What hooks call --------------------------------------------------------------------------------------------------

    def _before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
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
        if self.binding is not None and not self.binding.is_current():
            self.bind(self.binding.optimizer)
        if self._assembly.look_at_flags():
            self._unfreeze()
        self.writes.before_forward((self._passes, graph), values=graph and self.config.step_in_backward)
        self._overflow.look()
        self.buffers.before_forward()
        if self._checks is not None:
            self._checks.before_forward()
        if self.recorder is not None:
            self.recorder.forward(*batch_of(args, kwargs, getattr(self.model, "main_input_name", "input_ids")))

    def _expect(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.offload.monitor is not None and torch.is_grad_enabled() and not in_backward_of_any():
            self.offload.refuse_while_away("forward")
            self.offload.monitor.expect(args, kwargs)

    def _after_forward(self, *_: Any) -> None:
        self.buffers.after_forward(self.schedule.sync)
        # Not after a recomputation; something may have been read.
        if not in_backward_of_any() and not self.sharded.is_unsharded:
            self.offload.agree_on_reads()

    def _before_backward(self) -> None:
        self.sharded.refuse_unsharded("a backward")
        self._wire.watch.phase = "backward"
        if self.config.step_in_backward:
            self.writes.before_backward()
        if self.schedule.sync or self.policy.reduce_each_backward:
            self.gradients.hide()

    def _after_backward(self) -> None:
        if self.schedule.sync and self.buffers.watched:
            self.buffers.agree(changed=self.schedule.order.answered)
        self.offload.agree_on_reads()
        if self.schedule.sync:
            self.offload.land()
        if self.binding is None and self._trains_unbound is False:
            self._trains_unbound = any(flat.grads() for flat in self.sharded.trained)
        storage = self.offload.storage if self.config.offloads else None
        self._overflow.show(self.units, storage, reduced=self.schedule.sync and self.sharded.layout.shards > 1)
        self.gradients.show()
        if self.binding is not None:
            self.binding.show_grads()
        if self._checks is not None:
            self._checks.after_backward(reduced=self.schedule.sync or self.policy.reduce_each_backward)
        self._passes += 1
        if not self._has_gradients:  # nothing else was lost with a backward that raised before this one
            self._lost = None
        self._has_gradients = True
        self._wire.watch.phase = "what follows the backward"

    def _backward_broke_off(self) -> None:
        """It left a part of its gradients, added to those of earlier backwards of this step: all of them go."""
        for unit in self.units:
            unit.drop_grads(shards=True)
        self.offload.backward_broke_off()
        earlier = ", and those of earlier backwards of this step with them" if self._has_gradients else ""
        self._lost = f"a backward of this step raised: its gradients are gone{earlier}"

    def _refuse_lost(self, what: str) -> None:
        """Raises:
        StateError: a step would be made of a part of its gradients; or one broke off half done, which comes first.
        """
        self.offload.check()
        raise StateError(f"{what}: {self._lost}. Call zero_grad() and make the step's forwards and backwards again")

    def _optimizer_wrote(self) -> None:
        self.writes.optimizer_wrote = True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt = self._attempt
        if attempt is not None:
            attempt.is_complete = False
        self.sharded.refuse_unsharded("optimizer.step()")
        self._wire.watch.phase = "optimizer.step()"
        self.offload.refuse_while_away("optimizer.step()")
        # Offloaded shards are updated from here on: the gradients must be there, and the optimizer gets the loss only.
        arguments = None
        if self.config.offloads:
            arguments = with_closure_run(args, kwargs)
        elif self.sharded.layout.shards > 1:  # it may make backwards, and clip what they leave; then: plain gradients
            arguments = with_closure_followed(args, kwargs, self._hide_slices)
        if self.binding is not None and not self.binding.is_current():
            raise LayoutError(
                "the optimizer's parameter groups changed since the last forward; the new parameters have no gradients "
                "yet: run a forward and a backward before the step"
            )
        if self._checks is not None:
            self._checks.before_step()
        self.schedule.flush()
        self.schedule.quiesce()
        if self._lost is not None:
            self._refuse_lost("optimizer.step()")
        self.gradients.settle()
        self.writes.before_step(in_backward=self.config.step_in_backward)
        self._assembly.check()
        self._part_spans()
        self._hide_slices()
        if self.binding is not None:
            if self._checks is not None:
                self._checks.before_update(has_closure=arguments is not None and not self.config.offloads)
            self.offload.prepare_step()
        if attempt is not None:
            attempt.depth += 1
            if attempt.before is None:
                attempt.before = Snapshot(optimizer)
        return arguments

    def _hide_slices(self) -> None:
        self.gradients.hide_slices()
        if self.binding is not None:
            self.binding.hide_slices()

    def _computed(self) -> None:
        """The optimizer's own step has returned; its post-hooks are next."""
        attempt = self._attempt
        if attempt is not None and attempt.depth == 1:
            attempt.is_computed = True

    def _step(self, step: Callable[[], Any]) -> Any:
        """`optimizer.step()`, as the program calls it: made as a whole or not at all, see `transaction`."""
        if self._attempt is not None:
            return step()
        with self._held:
            attempt = self._attempt = Attempt()
            try:
                return step()
            except BaseException as error:
                self._step_broke_off(attempt, error)
                raise
            finally:
                self._attempt = None

    def _step_broke_off(self, attempt: Attempt, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        if attempt.is_committing:
            if not isinstance(error, StallError):  # after which nothing is used any more
                self.offload.fail(reason)
        elif attempt.is_computed:  # a post-hook of the program's, before ours: the other ranks are making this step
            self._after_step()
        elif attempt.is_complete:
            if attempt.depth:  # a class's step that goes on after its base's
                self.offload.fail(reason)
        elif attempt.before is not None:
            written = attempt.before.undo()
            if written:
                self.offload.fail(f"{reason}; {written} had been written")
        self.offload.show_grads()
        self.gradients.show_slices()
        if self.binding is not None:
            self.binding.show_grads()
        self._wire.watch.phase = "what follows a step that raised"

    def _after_step(self, *_: Any) -> None:
        attempt = self._attempt
        if attempt is not None:
            attempt.depth -= 1
            attempt.is_computed, attempt.is_committing = False, True
        if self.binding is not None:
            self.binding.stepped()
            self.offload.begin_step(self.binding.optimizer)
        self._wire.watch.step += 1
        self.offload.end_step()
        self._assembly.regather()
        self.writes.optimizer_wrote = False
        self.schedule.stepped()
        self._passes += 1
        if attempt is not None:
            attempt.before, attempt.is_committing, attempt.is_complete = None, False, True
        if self.recorder is not None:
            self.recorder.step()
        if self.offload.monitor is not None:
            self.offload.monitor.look()
        if self._checks is not None:
            self._checks.after_step()
        self.gradients.show_slices()
        self._wire.watch.phase = AFTER_STEP

    def _explain_out_of_memory(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and is_out_of_memory(error):
            error.add_note(
                f"hf_zero: {self.sharded.advice()}. The model's state is whole: the next forward starts afresh"
            )

    # Between passes ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, local and reduced. Also what `model.zero_grad` and `optimizer.zero_grad` do.

        Args:
            set_to_none: False: reduced gradients stay, as zeros.
        """
        self.schedule.recover()
        self._has_gradients, self._lost = False, None
        if not set_to_none:
            for unit in self.units:
                unit.finish_step()  # it reads the gradients
            self.gradients.zero()
            self.schedule.unsynced = False
            return
        with AsTheyAre():
            for unit in self.units:
                unit.drop_grads(shards=True)
        self.schedule.unsynced = False
        if self._checks is not None:
            self._checks.cleared()
        if self.binding is not None:
            self.binding.show_grads()

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
        self.finish_step()
        if self._unsharded is not None:
            self._unsharded.carry(flats)
        self.writes.settle(flats)

    def finish_step(self) -> None:
        """Updates of offloaded shards that go on behind `optimizer.step()` are done afterwards.

        Raises:
            StateError, TierError: one broke off.
        """
        self.offload.finish_step()

    def refresh(self) -> None:
        """After the masters were written: whole parameters follow, where the stage keeps them. A collective."""
        self.state_dict_hooks.after_load()

    def flush(self, flats: Sequence[Flat] | None = None) -> None:
        """Reduce the gradients that `no_sync` left on this rank. A collective where there are any.

        Args:
            flats: whose gradients are to be what the parameters' `.grad` say; None: all.
        """
        self.schedule.flush()
        if self._lost is not None:
            self._refuse_lost("gradients")
        self.finish_step()
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
        free_bytes = free_device_bytes(self.sharded, self.offload, self._wire.ranks_here())
        whole = Unsharded(self.sharded, in_compute_dtype=in_compute_dtype, free_bytes=free_bytes)
        whole.begin()
        self._unsharded, self.sharded.is_unsharded = whole, True
        completed = False
        try:
            yield
            completed = True
        finally:
            try:
                whole.end(self.settle, compare=completed)
            finally:
                self._unsharded, self.sharded.is_unsharded = None, False

    def releases(self) -> bool:
        return not self.policy.keep_full and not self.sharded.is_unsharded

    def _generates(self) -> None:
        with self._wire.watch.doing("generate()"):
            self._wire.exchange(None)
