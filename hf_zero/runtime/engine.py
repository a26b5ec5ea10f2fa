"""`shard(model, optimizer, config) -> Engine`: puts layout, units, schedule and optimizer together; no algorithm here."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.objects import Stateful
from ..checkpoint.save import Saving
from ..comm import agree
from ..comm.wire import SoloWire, Traffic
from ..config import ZeroConfig
from ..core.layout import Layout, ParamSpec
from ..core.precision import Precision, dtype_of, gathered_as
from ..errors import ConfigError, LayoutError, ZeroError
from ..plan.machine import Machine, device_bytes_in_use
from ..plan.plan import Drafter, Plan, advice
from ..plan.record import Recorder
from ..plan.report import Report
from ..tiers.fingerprint import fingerprint
from ..tiers.pool import is_out_of_memory
from ..tiers.tier import Tier
from . import copies
from . import instance_methods as overrides
from .autocast import Autocast
from .buffers import Buffers
from .build import Assembly, device_of
from .checkpoints import Behind, load, save
from .clipping import clip_norm, clip_values
from .deferred_hooks import unguard
from .flat_param import Flat
from .gradient_ops import Gradients
from .monitor import Monitor
from .offload import STATES, Offload
from .optimizer import Binding, originals_of, state_tensors, take_state, with_closure_followed, with_closure_run
from .overflow import Overflow
from .ownership import refuse_owned
from .schedule import Schedule
from .sharded import Sharded
from .state_dict import FullState
from .state_shard import Fields
from .supported_optimizers import needs_wholes
from .transports import Roads
from .unit import Unit
from .usage import Usage, report
from .whole_matrices import WholeBinding
from .write_watch import Edits

_ENGINE = "_hf_zero_engine"  # where a sharded module keeps its engine: a plain cycle, freed with the module


class Engine:
    """One sharded model. Made by `shard`; see there.

    Attributes:
        sharded: all there is of it, as data.
        model: the module itself, same type, parameters now views of flat spans.
        optimizer: the optimizer bound to it, or None.
        layout: where each element lives.
        traffic: collectives and bytes sent by this rank, by kind (`gather`, `reduce`, `scalar`, `other`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: ZeroConfig,
        mixed_precision: str | None,
        machine: Machine | None = None,
        device: torch.device | None = None,
        roads: Roads | None = None,
    ) -> None:
        self.model = model
        self._machine = machine or Machine()
        self.config = config
        self.precision = Precision.of(mixed_precision, config.reduce_dtype, config.full_precision)
        roads = roads or Roads()
        self._wire = roads.wire(device or next((p.device for p in model.parameters()), torch.device("cpu")))
        self._binding: Binding | None = None
        self._mixed_precision = mixed_precision
        self._trains_unbound: bool | None = False
        """A backward left gradients that no optimizer will see; None once that was said."""
        self.recorder: Recorder | None = None
        """What measures every step, see `record`."""
        self._side: SoloWire | None = None
        self.pending_save: Behind | None = None
        """The save that is being written behind training."""
        self.save_slab: Tensor | None = None
        """Host memory of asynchronous saves, kept for the next one."""
        self._handles: list[Any] = []
        with agree.on_errors(self._wire, "zero.shard"):  # refused on every rank, before anything has changed
            _refuse_nested(model)
            config.check_world_size(self.world_size)
            self.policy = config.policy_for(self.world_size)
            drafter = Drafter(model, self.precision)  # first: it refuses models that have nothing to shard
            self.device = device_of(model, device)
            self.sharded = Sharded(model, config, self.policy, self.precision, self._wire, self.device)
            self._assembly = Assembly(self.sharded, drafter)
            refuse_owned(self._assembly.names)
            self._overflow = Overflow(model, self.precision, self._wire, self.device)
            originals = originals_of(optimizer, self._assembly.first_names, None) if optimizer is not None else []
            kind = Binding if optimizer is None else self._kind_of_binding(optimizer)
            specs = self._assembly.specs(originals)
        names = self._assembly.names
        agree.same_structure(self._wire, config, mixed_precision, specs, originals, names)
        agree.same_values(self._wire, self._assembly.local_values(), fingerprint)
        self._wire.take_tags()
        self.units = self.sharded.units
        self.offload = Offload(config, self._wire, self.device, self.units, roads)
        self.sharded.storage = self.offload.storage
        self.offload.storage.wide = self._overflow.possible
        with agree.on_errors(self._wire, "zero.shard"):
            self.sharded.plan = self._new_plan(specs, optimizer)
            self.offload.settle(self.plan.placements, self.plan.memory.at_rest(Tier.DISK))
            fields = self.offload.fields(optimizer)
            if config.step_in_backward and self._overflow.possible:
                raise ConfigError(
                    "step_in_backward does not go with fp16: whether a gradient overflowed is known after backward only. Use "
                    "bf16, or turn it off"
                )
        self._assembly.build(specs, self.plan.placements, fields)
        unguard(model)
        overrides.move_buffers(model, lambda buffer: buffer.to(self.device))
        self.buffers = Buffers(model, self._wire)
        if self.buffers.watched:
            self._handles.append(model.register_forward_hook(self._after_any_forward))
        if self.precision.autocast_dtype is not None:
            hosts = [host for _, modules in self._assembly.hosts() for host in modules]
            self._handles.append(Autocast(self.precision, self.device).around(model, hosts, self._cast_params()))
        self._gradients = Gradients(self.sharded, self.offload, self._overflow, self.flush)
        self._passes = 0  # backwards and steps
        self._schedule = self._new_schedule()
        if self.offload.reads:
            self._handles.append(model.register_forward_hook(self._after_forward))
        self._full_state = FullState(model, self.units, self._wire, self.settle)
        self._edits = Edits(model, self.units)
        if optimizer is not None:
            self._bind(optimizer, originals, kind)
        overrides.put_on(model, self.units, self.zero_grad)
        copies.put_on(model, self._assembly, self._wire, self.quiesce)
        model.__dict__[_ENGINE] = self
        self._watch()
        if config.is_auto:  # comes before the schedule's own: state may move while nothing is gathered
            self._handles.append(model.register_forward_pre_hook(self._expect, prepend=True, with_kwargs=True))
        self.offload.explain_with(self.advice)
        self._handles.append(model.register_forward_hook(self._explain_out_of_memory, always_call=True))
        if self.rank == 0:
            ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
            print(f"hf_zero: stage {config.stage} on {ranks}; {self.precision}", file=sys.stderr)
            if self.precision.autocast_dtype is not None:
                cast = gathered_as([*self._cast_params().values()], len(names), self.precision.autocast_dtype)
                print(f"hf_zero: gathered {cast}; ZeroConfig.full_precision names others", file=sys.stderr)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copies.refuse_copy("an Engine")

    # What the user calls --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def world_size(self) -> int:
        return self._wire.size

    @property
    def traffic(self) -> Traffic:
        return self._wire.traffic

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.sharded.optimizer

    @property
    def plan(self) -> Plan:
        return self.sharded.plan

    @property
    def _trained(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.trained]

    @property
    def layout(self) -> Layout:
        return self.sharded.layout

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach an optimizer built over `model.parameters()`, before or after sharding. A collective.

        The object and its `param_groups` dicts stay; `group["params"]` becomes this rank's flat spans. Binding the same
        optimizer again is a no-op unless groups were added to it.

        Raises:
            UnsupportedOptimizerError, LayoutError, RankMismatchError: see `shard`.
        """
        previous = self._binding
        if previous is not None and previous.optimizer is optimizer and previous.is_current():
            return
        with agree.on_errors(self._wire, "Engine.bind"):
            kind = self._kind_of_binding(optimizer)
            if previous is not None and previous.optimizer is optimizer and type(previous) is not kind:
                raise LayoutError(
                    f"a group that was added to {type(optimizer).__name__} makes it need whole matrices where it did not, or "
                    "the other way round: build the optimizer anew with all its groups, and bind that"
                )
            originals = originals_of(optimizer, self._assembly.first_names, previous)
            fields = self.offload.fields(optimizer)
            specs = self._assembly.specs(originals)
        agree.same_structure(self._wire, self.config, self._mixed_precision, specs, originals, self._assembly.names)
        self.quiesce()
        if previous is not None and previous.optimizer is not optimizer:
            previous.forget()
            previous = None
        if self._assembly.cuts_otherwise(specs):
            if any(flat.grads() for flat in self._trained):
                raise LayoutError("an optimizer's groups may change only between steps: call zero_grad() first")
            self._recut(specs, optimizer, previous, fields)
        self._bind(optimizer, originals, kind)
        self._watch()

    def _recut(
        self,
        specs: list[list[ParamSpec]],
        optimizer: torch.optim.Optimizer,
        binding: Binding | None,
        fields: Sequence[Fields],
    ) -> None:
        # New spans are filled from the masters: what was written to parameters, frozen ones too, must be there before.
        self._edits.settle()
        former = self._schedule
        seen = former.state()
        former.detach(whole=False)
        self._full_state.detach()
        self.sharded.plan = self._new_plan(specs, optimizer)
        self._assembly.recut(specs, binding, self.plan.placements, fields)
        copies.protect(self.sharded)
        self._schedule = self._new_schedule()
        self._schedule.take_over(seen)
        former.heir = self._schedule
        self._full_state = FullState(self.model, self.units, self._wire, self.settle)
        self._edits = Edits(self.model, self.units)

    def _part_spans(self) -> None:
        """Before a step: parameters without a gradient leave the spans of those that have one, and are left alone."""
        binding = self._binding
        if binding is None or not binding.one_gradient or self.config.step_in_backward:
            return
        specs = self._assembly.parted(binding.originals)
        if specs is not None:
            self._recut(specs, binding.optimizer, binding, self.offload.fields(binding.optimizer))
            self._bind(binding.optimizer, binding.originals, type(binding))
            self._gradients.show()
            self._watch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of a step.

        Stages 0 and 1: gradients add up on this rank and travel once, with the first backward outside (or at the step).
        Stages 2 and 3: they still go to their owners each time, which is what keeps them sharded.
        """
        before, self._schedule.sync = self._schedule.sync, False
        try:
            yield
        finally:
            self._schedule.sync = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip by the norm over all ranks, as `torch.nn.utils.clip_grad_norm_` on the whole model; a collective.

        Returns:
            The norm before clipping, 0-dim float32, the same on every rank. `max_norm=inf` only measures (NaN with
            `step_in_backward`, where gradients are not kept).
        """
        if self.config.step_in_backward and max_norm == float("inf"):
            return torch.tensor(float("nan"))  # the gradients are gone
        self.offload.refuse_clipping("clip_grad_norm_")
        self.flush()
        self._gradients.wrote()
        return clip_norm(self._trained, self._assembly.names, self._wire, max_norm, float(norm_type), parameters)

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Clamp every gradient element to ±`clip_value`."""
        self.offload.refuse_clipping("clip_grad_value_")
        self.flush()
        self._gradients.wrote()
        clip_values(self._trained, self._assembly.names, clip_value, parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, local and reduced. Also what `model.zero_grad` and `optimizer.zero_grad` do.

        Args:
            set_to_none: False: reduced gradients stay, as zeros.
        """
        if not set_to_none:
            self._gradients.zero()
            self._schedule.unsynced = False
            return
        for unit in self.units:
            unit.drop_grads(shards=True)
        self._schedule.unsynced = False
        if self._binding is not None:
            self._binding.show_grads()

    def report(self) -> Report:
        """What lives where, in bytes per rank: predicted, and measured now; with `record`, also peaks, traffic and waits."""
        return report(self, self.recorder)

    def record(self, folder: str | os.PathLike[str] | None = None, *, first_step: int = 0) -> Recorder:
        """Measure every step from now on: `report()` shows peaks, traffic and waits then. Ended by `Recorder.close`.

        Args:
            folder: where every step is appended to `zero_steps.jsonl` (other ranks: `zero_steps.rank1.jsonl`, …), for
                `hf-zero report`. None: no file.
            first_step: steps before this one, for a run that goes on.

        Raises:
            ConfigError: the folder cannot be written.
        """
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = Recorder(Usage(self), folder, first_step, self._recorder_closed)
        return self.recorder

    def _recorder_closed(self, recorder: Recorder) -> None:
        if self.recorder is recorder:
            self.recorder = None

    def group_options(self) -> list[dict[str, Any]]:
        """The optimizer's groups: their options, and under `params` the parameters' names."""
        if self._binding is None:
            return []
        return self._binding.group_options(self._assembly.first_names)

    # Files ----------------------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "50GB",
        save_optimizer: bool = True,
        objects: Mapping[str, Stateful] | None = None,
        async_save: bool = False,
    ) -> None:
        """Write a checkpoint that is an ordinary model folder; all ranks at once, nothing gathered. A collective.

        It appears as a whole or not at all: an older one in `folder` stays until then. Readable by `load` at any world size
        and stage, and by `from_pretrained` / `safetensors.torch.load_file`.

        Args:
            max_shard_size: of one weight file, as in `save_pretrained`.
            objects: name -> scheduler, loss scaler, data loader, …: whatever has `state_dict()`; of rank 0, as JSON.
            async_save: return when everything is copied to host memory (the bytes that this rank writes; the memory stays
                for the next such save) and write behind. At most one at a time: the next `save` or `load`, `wait_for_save`
                or the exit of the process waits, and raises there on every rank if it failed on any.

        Raises:
            CheckpointError: on every rank, naming the rank, the file and the reason; `folder` is then as it was (or, where the
                message says that the new files are complete, as it will be once it is loaded from).
        """
        self.quiesce()
        self.wait_for_save()
        save(
            self.sharded,
            folder,
            max_shard_size=max_shard_size,
            outline=self.outline,
            options=self.group_options() if save_optimizer else None,
            objects=objects,
            finish=self.save_behind if async_save else Saving.commit,
        )

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        load_optimizer: bool | None = None,
        objects: Mapping[str, Stateful] | None = None,
        verify: bool = True,
        strict: bool = True,
    ) -> None:
        """Read a checkpoint of any world size and stage, or a plain `from_pretrained` folder (weights only). A collective.

        Args:
            load_optimizer: None: if the checkpoint and this engine have one.
            objects: name -> what to `load_state_dict`, as given to `save`. Random states are restored where the world size
                is that of the save.
            verify: compare every byte with its digest as it is read. Coverage is checked in any case.
            strict: every parameter and persistent buffer is there, nothing else is, and shapes are equal.

        Raises:
            CheckpointError: on every rank, naming the file and what is wrong. The model may hold part of it then: load
                another one before going on.
        """
        self._schedule.quiesce()
        for unit in self.units:
            with contextlib.suppress(ZeroError):  # a step that broke: everything is written anew
                unit.finish_step()
        with contextlib.suppress(ZeroError):  # what the folder does not have stays as it was written
            self._edits.settle()
        self.wait_for_save()
        load(
            self.sharded,
            folder,
            load_optimizer=load_optimizer,
            objects=objects,
            verify=verify,
            strict=strict,
            options=self.group_options,
            refresh=self.refresh,
            recover=self.offload.recover,
        )

    def save_behind(self, saving: Saving) -> None:
        """Commit a save that has all its parts, behind training. A collective."""
        self.wait_for_save()  # it still reads the slab, and talks over the side wire
        behind = Behind(saving, self.side_wire(), self.save_slab)
        self.pending_save, self.save_slab = behind, behind.slab

    def wait_for_save(self) -> None:
        """Return when the save that `async_save` left behind is complete. A collective only in that all ranks raise.

        Raises:
            CheckpointError: it failed, here or on another rank.
        """
        pending, self.pending_save = self.pending_save, None
        if pending is not None:
            pending.wait()

    def outline(self) -> dict[str, Any]:
        """`model.state_dict()` without values or communication: parameters as meta tensors, buffers as CPU copies."""
        return self._full_state.outline()

    def offload_states(self, include: Iterable[str] = STATES) -> None:
        """Move what rests on the device to host memory, until `reload_states`: for who shares the GPU with something else.

        A collective only in that all ranks do it. Nothing can be computed meanwhile; saving and reading values works.

        Args:
            include: of `parameters`, `gradients`, `optimizer` (masters and state, with their gradients).

        Raises:
            ConfigError: another name; an optimizer that has parameters of true shape.
            StateError: states are away already.
        """
        if isinstance(self._binding, WholeBinding):
            raise ConfigError(
                f"offload_states: {type(self.optimizer).__name__} steps over whole parameters, whose state does not move: use "
                "an element-wise optimizer"
            )
        self.flush()
        self.quiesce()
        self.offload.leave(include, self.optimizer)

    def reload_states(self) -> None:
        """Undo `offload_states`: all is where it was, the same to the bit. A collective where the stage keeps parameters.

        Raises:
            StateError: nothing is away.
        """
        self.offload.come_back(self.optimizer)
        self._gradients.show_slices()

    @property
    def schedule(self) -> Schedule:
        """When units move. Another object after units were cut anew."""
        return self._schedule

    @property
    def wire(self) -> SoloWire:
        return self._wire

    def side_wire(self) -> SoloWire:
        """For a thread that communicates while training goes on; made once, a collective then."""
        if self._side is None:
            self._side = self._wire.side()
        return self._side

    def exchange(self, value: Any) -> list[Any]:
        """Small Python values of all ranks, in rank order; a collective."""
        return self._wire.exchange(value)

    def quiesce(self) -> None:
        """Before the masters are read or written from outside: nothing gathered, nothing on the move."""
        self._schedule.quiesce()
        self.settle()

    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Masters are those of one step, and have what was written to parameters since. Without communication.

        Args:
            flats: spans that matter; None: all.

        Raises:
            StateError, TierError: see `finish_step`; what was written cannot be carried over.
        """
        self.finish_step()
        self._edits.settle(flats)

    def finish_step(self) -> None:
        """Updates of offloaded shards that go on behind `optimizer.step()` are done afterwards.

        Raises:
            StateError, TierError: one broke off.
        """
        self.offload.finish_step()

    def refresh(self) -> None:
        """After the masters were written: whole parameters follow, where the stage keeps them. A collective."""
        self._full_state.settle()

    def place_of(self, param: nn.Parameter) -> tuple[Unit, Flat, int]:
        """Where a parameter of this model is: its unit, its span, and which of the span's it is."""
        return self.sharded.places[param]

    def flush(self, flats: Sequence[Flat] | None = None) -> None:
        """Reduce the gradients that `no_sync` left on this rank. A collective where there are any.

        Args:
            flats: whose gradients are to be what the parameters' `.grad` say; None: all.
        """
        self._schedule.flush()
        self.finish_step()
        if not _inside_backward():
            self._gradients.settle(flats)

    def gradients_written(self) -> None:
        """On every rank: norms that are known are not those of the gradients any more."""
        self._gradients.wrote()

    def reset(self) -> None:
        """Forget what an exception left half done: local gradients, transfers. Happens by itself at the next forward."""
        self._schedule.reset()

    def detach(self) -> None:
        """Undo: full plain parameters on every rank, no hooks. A collective, between steps: gradients are forgotten.

        The optimizer has those parameters then, in the same groups, and its state in plain form: it goes on as if it had
        never been bound.
        """
        if self.model.__dict__.get(_ENGINE) is not self:
            return
        self.quiesce()
        binding = self._binding
        state = None if binding is None else binding.plain_state()
        if self.recorder is not None:
            self.recorder.close()
        self._assembly.dissolve()
        self.offload.close()
        self._schedule.detach(whole=True)
        self._full_state.detach()
        for handle in self._handles:
            handle.remove()
        overrides.take_off(self.model)
        copies.take_off(self.model)
        self.model.__dict__.pop(_ENGINE, None)
        if binding is not None and state is not None:
            overrides.take_off_optimizer(binding.optimizer)
            binding.unbind(state)
            self._binding = self.sharded.optimizer = None

    # Building -------------------------------------------------------------------------------------------------------

    @property
    def _cuts(self) -> bool:
        """Whether a parameter may be cut in two."""
        return self.policy.shard and self.world_size > 1

    def _kind_of_binding(self, optimizer: torch.optim.Optimizer) -> type[Binding]:
        offloaded = self.config.offload_optimizer != "none"
        wholes = needs_wholes(optimizer, self._assembly.names, cut=self._cuts, offloaded=offloaded)
        return WholeBinding if wholes else Binding

    def _new_plan(self, specs: list[list[ParamSpec]], optimizer: torch.optim.Optimizer | None) -> Plan:
        machine = Machine()
        if self.config.is_auto:
            machine = self._assembly.machine_now(self._machine, self.offload.ranks_here, self.config.offload_dir)
        return self._assembly.plan(specs, machine, state_tensors(optimizer))

    def _cast_params(self) -> dict[nn.Parameter, str]:
        """What is gathered in the compute dtype, by name."""
        names = self._assembly.first_names
        return {
            param: names[param]
            for unit in self.units
            for flat in unit.flats
            if flat.compute_dtype != dtype_of(flat.span.spec.dtype)
            for param in flat.params
        }

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
        self.offload.reserve(optimizer)
        self._binding = kind(optimizer, self.units, self._wire, originals)
        self.sharded.optimizer = optimizer
        if state is not None:
            self._binding.load_state_dict(state)
        if fresh:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            overrides.after_own_methods(optimizer, self._optimizer_wrote)
            overrides.override(optimizer, "zero_grad", self.zero_grad)
            overrides.override(optimizer, "state_dict", self._optimizer_state_dict)
            overrides.override(optimizer, "load_state_dict", self._optimizer_load_state_dict)

    def _new_schedule(self) -> Schedule:
        schedule = Schedule(self.model, self._assembly.hosts(), self._wire)
        schedule.before_forward = self._before_forward
        if self.buffers.watched:
            schedule.order.ask = self.buffers.changed
        schedule.before_backward = self._before_backward
        schedule.after_backward = self._after_backward
        if self.config.step_in_backward:
            schedule.order.after_reduce = self._step_unit
        return schedule

    # What hooks call ------------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        if self._trains_unbound and torch.is_grad_enabled():
            self._trains_unbound = None
            warnings.warn(
                f"this {type(self.model).__name__} was sharded without an optimizer, and gradients are there: no step will "
                "change it. Pass the optimizer to zero.shard (accelerator.prepare), or call engine.bind(optimizer)",
                stacklevel=2,
            )
        self.offload.refuse_while_away("forward")
        self.offload.check()
        if self._binding is not None and not self._binding.is_current():
            self.bind(self._binding.optimizer)
        self._follow_edits()
        self._overflow.look()
        self.buffers.before_forward()
        if self.recorder is not None:
            self.recorder.forward()

    def _follow_edits(self) -> None:
        graph = torch.is_grad_enabled()
        flats = self._edits.before_forward((self._passes, graph), values=graph and self.config.step_in_backward)
        if not flats:
            return
        if self.policy.keep_full:
            self._edits.settle()
            self.refresh()
        else:
            self.quiesce()
            for flat in flats:
                flat.refresh()

    def _expect(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.offload.monitor is not None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.offload.refuse_while_away("forward")
            self.offload.monitor.expect(args, kwargs)

    def _after_forward(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.offload.agree_on_reads()

    def _after_any_forward(self, *_: Any) -> None:
        self.buffers.after_forward(self._schedule.sync)

    def _before_backward(self) -> None:
        if self._schedule.sync or self.policy.reduce_each_backward:
            self._gradients.hide()

    def _after_backward(self) -> None:
        if self._schedule.sync and self.buffers.watched:
            self.buffers.agree(changed=self._schedule.order.answered)
        self.offload.agree_on_reads()
        if self._schedule.sync:
            self.offload.land()
        if self._binding is None and self._trains_unbound is False:
            self._trains_unbound = any(flat.grads() for flat in self._trained)
        storage = self.offload.storage if self.config.offloads else None
        self._overflow.show(self.units, storage, reduced=self._schedule.sync and self.layout.shards > 1)
        if self._binding is not None:
            self._binding.show_grads()
        self._gradients.show()
        self._passes += 1

    def _optimizer_wrote(self) -> None:
        self._edits.optimizer_wrote = True

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.offload.refuse_while_away("optimizer.step()")
        # Offloaded shards are updated from here on: the gradients must be there, and the optimizer gets the loss only.
        arguments = None
        if self.config.offloads:
            arguments = with_closure_run(args, kwargs)
        elif (
            self.layout.shards > 1
        ):  # it may make backwards, and clip what they leave; the optimizer goes on with plain gradients
            arguments = with_closure_followed(args, kwargs, self._gradients.hide_slices)
        if self._binding is not None and not self._binding.is_current():
            raise LayoutError(
                "the optimizer's parameter groups changed since the last forward; the new parameters have no gradients "
                "yet: run a forward and a backward before the step"
            )
        self._schedule.flush()
        self._schedule.quiesce()
        self._gradients.settle()
        self._edits.before_step(in_backward=self.config.step_in_backward)
        self._assembly.check()
        self._part_spans()
        self._gradients.hide_slices()
        if self._binding is not None:
            self._binding.show_grads()
            self.offload.prepare_step()
        return arguments

    def _step_unit(self, unit: Unit) -> None:
        self.offload.step_unit(unit, self.sharded.optimizer)

    def _after_step(self, *_: Any) -> None:
        if self._binding is not None:
            self._binding.stepped()
            self.offload.begin_step(self._binding.optimizer)
        self.offload.end_step()
        self._assembly.regather()
        self._edits.optimizer_wrote = False
        self._schedule.stepped()
        self._passes += 1
        if self.recorder is not None:
            self.recorder.step()
        if self.offload.monitor is not None:
            self.offload.monitor.look()
        self._gradients.show_slices()

    def advice(self) -> str:
        """What of the settings would have made this model fit on the device as it is now. Without communication."""
        held = device_bytes_in_use(self.device) or self.plan.memory.at_rest(Tier.DEVICE)
        return advice(self.plan, held, self.precision, state_tensors(self.optimizer))

    def _explain_out_of_memory(self, *_: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and is_out_of_memory(error) and hasattr(error, "add_note"):
            error.add_note(f"hf_zero: {self.advice()}. The model's state is whole: the next forward starts afresh")

    def _optimizer_state_dict(self) -> dict[str, Any]:
        if self._binding is None:
            raise ConfigError("no optimizer is bound")
        self.quiesce()
        return self._binding.state_dict()

    def _optimizer_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._binding is None:
            raise ConfigError("no optimizer is bound")
        self.quiesce()
        self._binding.load_state_dict(state_dict)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | None = None,
    *,
    mixed_precision: str | None = "no",
    machine: Machine | None = None,
    device: torch.device | None = None,
    roads: Roads | None = None,
) -> Engine:
    """Shard `model` and `optimizer` in place over the default process group (or on this rank alone, without one).

    The training loop stays as it was: `model(x).loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. Gradients
    are averaged over ranks. A collective: every rank calls it with the same model, optimizer and config; rank 0's
    parameter values are sent around when ranks differ.

    Args:
        model: on its final device (see `device`), in its final type.
        optimizer: any element-wise `torch.optim.Optimizer` over this model's parameters, with or without state; one over
            whole matrices (Adafactor, Muon) where nothing is cut: stage 0 or one rank, with its state in memory. None to
            evaluate only, or to `Engine.bind` one later.
        mixed_precision: `no`, `bf16` or `fp16`; the model's forward then runs under autocast.
        device: where to compute, for a model that is still in host memory: it comes unit by unit, and what is offloaded never
            does. None: where the model is.
        machine: measured speeds, for `auto`; `hf-zero probe` makes one. Without, typical ones order the choices.
        roads: what bytes move with, in place of the process group's own wire and the device's own link, and what else an engine
            has from outside.

    Raises:
        ConfigError: settings; a model that is sharded already.
        LayoutError: a model on several devices or on the meta device, an optimizer over other parameters.
        UnsupportedOptimizerError: an optimizer that needs whole tensors.
        RankMismatchError: ranks that differ in structure; names the first difference, on every rank.
    """
    engine = Engine(model, optimizer, config or ZeroConfig(), mixed_precision, machine, device, roads)
    return engine


def _refuse_nested(model: nn.Module) -> None:
    if engine_of(model) is not None:
        raise ConfigError(f"this {type(model).__name__} is sharded already; call detach() on its engine first")


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a sharded model, also through wrappers that hold it as a submodule; None for any other module."""
    for module in model.modules():
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None
