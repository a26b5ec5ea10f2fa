"""The engine of one sharded model: the methods that user code calls, and the order in which its parts run in a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint.async_save import AsyncSaves
from ..checkpoint.objects import Stateful
from ..comm.agreement import read_on_all_ranks
from ..comm.wire import Traffic, Wire
from ..config import ZeroConfig
from ..core.precision import Precision
from ..errors import StateError, ZeroError
from ..tiers.tier import Tier
from .binding import Binding
from .bound_optimizers import BoundOptimizers, PinnedUnits
from .build import give_back
from .clipping import clip_norm, clip_value, parts_to_clip
from .context import Context
from .graph import backward_id
from .host_step import Stepper
from .observer import Observer
from .optimizer_dict import unbind
from .optimizer_state import full_states
from .parameter import put_grad
from .pieces import OptimizerPieces
from .precision import Autocast
from .presence import Presence
from .saving import load, outline, save
from .schedule import Schedule
from .span import Span
from .unit import Unit

Attached = TypeVar("Attached", bound=Observer)
_ENGINE = "_hf_zero_engine"
"""The attribute in which a sharded module keeps its engine."""


class Engine:
    """Runs forward, backward and step of one sharded model. `shard` creates it.

    Attributes:
        model: the user's model, whose parameters are sharded.
        context: settings, transports and units.
        schedule: when units are gathered, released and reduced.
        bindings: the optimizers.
    """

    def __init__(self, context: Context, bindings: list[Binding]) -> None:
        self.context, self.bindings = context, bindings
        self.model, self.units, self._wire, self.events = context.model, context.units, context.wire, context.events
        self.schedule = Schedule(context, self._after_sync)
        self.saves = AsyncSaves(self._wire)
        is_offloaded = any(span.tier is not Tier.DEVICE for unit in self.units for span in unit.spans)
        self.stepper = Stepper(context, bindings, self.schedule) if is_offloaded else None
        self._presence = Presence(context, self.schedule.reduce_queue, bindings)
        self._undo: list[Callable[[], object]] = [self.schedule.detach]
        if context.precision.autocast_dtype is not None:
            spans = [span for unit in self.units for span in unit.spans if span.compute_dtype != span.master_dtype]
            cast = {param for span in spans for param in span.params}
            hosts = [host for unit in self.units for host in unit.hosts]
            self._undo.append(Autocast(self.model, context.precision, context.device, hosts, cast).remove)
        self.pinned: PinnedUnits | None = None
        """The full parameters that a context such as `zero.unsharded` keeps gathered, while it is open."""
        self._bound = BoundOptimizers(self, bindings)
        self._undo.append(self._bound.detach)
        for observer in context.events.observers:
            observer.attach(self)
            self._undo.append(observer.detach)
        self.model.__dict__[_ENGINE] = self
        self._undo.append(lambda: self.model.__dict__.pop(_ENGINE, None))

    @property
    def config(self) -> ZeroConfig:
        return self.context.config

    @property
    def precision(self) -> Precision:
        return self.context.precision

    @property
    def wire(self) -> Wire:
        """Return the transport between ranks."""
        return self._wire

    @property
    def traffic(self) -> Traffic:
        """Return the bytes and messages that this rank has sent."""
        return self._wire.traffic

    def exchange(self, value: Any) -> list[Any]:
        """Return small Python values of all ranks, in rank order. A collective."""
        return self._wire.exchange(value)

    @property
    def rank(self) -> int:
        return self._wire.rank

    @property
    def world_size(self) -> int:
        return self._wire.size

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizers that update the model, in order."""
        return tuple(binding.optimizer for binding in self.bindings)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the first optimizer; None if there is none."""
        return self.bindings[0].optimizer if self.bindings else None

    @property
    def trained(self) -> list[Span]:
        return [span for unit in self.units for span in unit.trained]

    # Backward ---------------------------------------------------------------------------------------------------------

    def _after_sync(self) -> None:
        self._bound.follow_groups()
        self._presence.agree()

    def fit_segments(self, span: Span) -> None:
        """Show optimizers which parameters have a gradient, after `bucket.present` changed in the same way on every rank."""
        self._presence.fit(span)

    @contextmanager
    def no_sync(self, *, defer: bool = False) -> Iterator[None]:
        """Accumulate gradients on this rank: backwards inside do not communicate them at stages 0 and 1.

        Args:
            defer: nor at stages 2 and 3, where each rank then needs memory for full local gradients.

        Example:
            >>> with engine.no_sync():
            ...     model(first).loss.backward()
            >>> model(second).loss.backward()  # reduces the sum of both
        """
        schedule = self.schedule
        before = schedule.sync, schedule.defers
        schedule.sync, schedule.defers = False, schedule.defers or defer
        try:
            yield
        finally:
            schedule.sync, schedule.defers = before

    # Step -------------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # the tensors that it allocates are trained later
    def bind(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Bind an optimizer, or optimizers, over the model's parameters. A collective.

        Args:
            optimizer: a single one is added, and replaces bound ones that share a parameter with it. A list replaces all.
                Optimizers that were bound before keep their state.

        Raises:
            LayoutError: parameters that it cannot have.
            UnsupportedOptimizerError: it cannot step over a sharded model.
            RankMismatchError: other ranks bind other optimizers.
        """
        self._bound.bind(optimizer)

    @torch.no_grad()
    def refresh(self, spans: Sequence[Span] | None = None) -> None:
        """Gather again the full parameters that the stage keeps, after the masters of these spans were written. A collective.

        Args:
            spans: None: all spans. Copies of offloaded masters that gathers read are updated, too.

        Raises:
            TierError: a rank could not read or write.
        """
        if spans is None:
            spans = [span for unit in self.units for span in unit.spans]

            def publish() -> None:
                for span in spans:
                    span.publish()

            self.schedule.quiesce()
            self.wait_for_host_steps()
            if not self.context.reshards:
                for unit in self.units:
                    for event in self.events.masters_written:
                        event(unit)
            read_on_all_ranks(self._wire, publish, may_fail=self.context.storage.uses_disk)
            self._bound.mark_versions()
        by_unit: dict[Unit, list[Span]] = {}
        for span in spans:
            by_unit.setdefault(span.unit, []).append(span)
        units = sorted(by_unit, key=attrgetter("index"))
        for unit in units:
            unit.mark_old(by_unit[unit])
            if not self.context.reshards:
                unit.gather()
        if not self.context.reshards:
            for unit in units:
                unit.wait()

    def zero_grad(self, set_to_none: bool = True, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clear the gradients: those of one optimizer, or of all.

        Args:
            set_to_none: False: gradients that exist become zeros.
        """
        self.schedule.forget_gradients(self.optimizers if optimizer is None else [optimizer], self.optimizers)
        if not set_to_none:
            self.wait_for_host_steps()
        chosen = [each for each in self.bindings if optimizer is None or each.optimizer is optimizer]
        for binding in chosen if set_to_none else ():
            for group in binding.segments:
                for segment in group:
                    put_grad(segment.tensor, None)
        shared_spans = {} if optimizer is None else chosen[0].shared_spans
        for span in self.trained if optimizer is None else chosen[0].spans:
            if span in shared_spans:
                span.unit.wait_for_step()
                span.bucket.clear_some(shared_spans[span], set_to_none)
            elif set_to_none:
                span.bucket.clear()
            else:
                span.bucket.zero()
        for event in self.events.after_zero_grad:
            event()

    def follow_writes(self) -> None:
        """Copy user code's writes to tensors of optimizer groups to the parameters. A collective if it wrote any."""
        self._bound.follow_writes()

    def with_group_writes(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of `params` in whose group user code wrote a tensor since the last `follow_writes`."""
        return self._bound.with_group_writes(params)

    def wait_for_host_steps(self) -> None:
        """Wait until no other thread updates masters or reads gradients."""
        if self.stepper is not None:
            self.stepper.wait()

    # Clipping ---------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Clip the norm of all gradients to `max_norm`. A collective.

        Args:
            max_norm: `inf` only measures (NaN with `step_in_backward`, which keeps no gradients).
            norm_type: order of the norm; `inf` for the largest magnitude.
            parameters: of the model, these alone.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            LayoutError: a parameter is not of the sharded model.
        """
        if self.config.step_in_backward and max_norm == float("inf"):
            return torch.tensor(float("nan"), device="cpu")  # nothing is left to measure
        with self._wire.watch.operation("clip_grad_norm_()"):
            self.complete_gradients("clip_grad_norm_")
            parts = parts_to_clip(self.trained, self.context, parameters)
            return clip_norm(parts, self.context, float(max_norm), float(norm_type))

    def clip_grad_value_(self, clip_value_: float, parameters: Iterable[Tensor] | None = None) -> None:
        """Clamp every gradient element to `[-clip_value_, clip_value_]`, of all parameters or of some.

        Raises:
            LayoutError: a parameter is not of the sharded model.
        """
        self.complete_gradients("clip_grad_value_")
        clip_value(parts_to_clip(self.trained, self.context, parameters), self.context, clip_value_)

    def complete_gradients(self, what: str) -> None:
        """Reduce gradients that still wait on this rank, before gradients are used outside a step. A collective if any wait.

        Raises:
            StateError: inside a backward; with `step_in_backward`, which keeps no gradients.
        """
        if backward_id() >= 0:
            raise StateError(
                f"{what} inside a backward: other ranks' gradients have not arrived. Do it after the backward"
            )
        if self.config.step_in_backward:
            raise StateError(
                f"{what}: step_in_backward updates parameters before all gradients have arrived, and keeps none. Set it to "
                "False, or do not clip (max_grad_norm=0 in TrainingArguments)"
            )
        if self.context.states_offloaded:
            self.context.check()
        self.schedule.flush()
        self.wait_for_host_steps()
        for event in self.events.before_gradients:
            event()

    # Values from outside ----------------------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Finish the running step and release units, so that masters hold the values of one step and may be accessed.

        Raises:
            StateError: an optimizer's step was interrupted.
            TierError: a rank could not read or write.
        """
        self.schedule.quiesce()
        self.finish_step()
        for event in self.events.before_save:
            event()

    def prepare_load(self) -> None:
        """As `quiesce`, before a load overwrites all masters and states: an incomplete step is no error."""
        self.context.refuse_unsharded("load")
        if self.context.states_offloaded:
            self.context.check()
        self.schedule.quiesce()
        with suppress(Exception):  # a failed step may raise the optimizer's own errors: the load replaces it
            self.wait_for_host_steps()
        with suppress(ZeroError):  # carries user code's writes to parameters that the folder does not have
            for event in self.events.before_save:
                event()
        self.context.wire.watch.gathers = 0
        for event in self.events.before_load:
            event()

    def finish_step(self) -> None:
        """Wait as `wait_for_host_steps`, then raise on every rank a failure that any rank has recorded.

        Raises:
            StateError: a step was interrupted.
            TierError: a rank could not read or write.
        """
        self.wait_for_host_steps()
        self.context.raise_failures("an optimizer's step over offloaded state")
        self.context.check()

    def forget_failure(self) -> None:
        """Forget an incomplete step or load: all masters were loaded, and also states if those were mixed."""
        self.context.forget_failure()
        if self.stepper is not None:
            self.stepper.forget()

    def outline(self) -> dict[str, Any]:
        """Return `model.state_dict()` without values or communication: parameters as meta tensors, buffers as CPU copies."""
        return outline(self.context)

    # Optimizer state --------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerPieces:
        """Return the access that a checkpoint has to an optimizer's state, to write or to fill it. A collective.

        Raises:
            StateError: the engine does not have this optimizer.
        """
        self._bound.follow_groups()
        binding = self._bound.get(optimizer)
        groups = zip(optimizer.param_groups, binding.originals)
        names = self.context.names
        named = [{**group, "params": [names[param][0] for param in params]} for group, params in groups]
        return OptimizerPieces(binding, self._wire, named)

    # Files ------------------------------------------------------------------------------------------------------------

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "50GB",
        save_optimizer: bool = True,
        objects: Mapping[str, Stateful] | None = None,
        async_save: bool = False,
    ) -> None:
        """Write a checkpoint that is an ordinary model folder. All ranks write at once; nothing is gathered. A collective.

        A new folder appears as a whole. In a folder that has files they are replaced one by one, the manifest last: if the job
        dies in between, every load refuses that folder. `load` reads a checkpoint at any world size and stage, and so do
        `from_pretrained` and `safetensors.torch.load_file`.

        Args:
            max_shard_size: of one weight file, as in `save_pretrained`.
            objects: name -> scheduler, loss scaler, data loader, …: anything with `state_dict()`; of rank 0, as JSON.
            async_save: return when this rank's bytes are copied to host memory, and write them in the background. The next
                `save` or `load`, `wait_for_save` or the exit of the process waits, and raises if it failed on any rank.

        Raises:
            CheckpointError: on every rank; names the rank, the file and the reason, and reports if `folder` holds files of
                both saves. Otherwise `folder` is unchanged.
            StateError: an optimizer's step was interrupted.
        """
        with self._wire.watch.operation(f"saving to {folder}"):
            self.wait_for_save()
            save(
                self,
                folder,
                max_shard_size=max_shard_size,
                save_optimizer=save_optimizer,
                objects=objects,
                in_background=async_save,
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
            strict: the folder must have every parameter and persistent buffer, nothing else, in equal shapes.

        Raises:
            CheckpointError: on every rank; names the file and what is wrong. If part of it was loaded, every use of the model
                but another load raises `StateError`.
        """
        self.prepare_load()
        self.wait_for_save()
        load(self, folder, load_optimizer=load_optimizer, objects=objects, verify=verify, strict=strict)

    def wait_for_save(self) -> None:
        """Wait until the background save that `async_save` started is complete.

        Raises:
            CheckpointError: on every rank: it failed on one.
        """
        self.saves.wait()

    # End --------------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # the tensors that it allocates are trained later
    def detach(self) -> None:
        """Restore the plain model and optimizers, with full parameters and full optimizer state. A collective.

        Gradients are cleared.

        Raises:
            StateError: an optimizer's step was interrupted.
            TierError: on every rank: one could not read its values.
        """
        if self.model.__dict__.get(_ENGINE) is not self:
            return
        self.context.refuse_unsharded("Engine.detach")
        with self._wire.watch.operation("Engine.detach"):
            self.quiesce()
            states = [full_states(binding, self._wire, everywhere=True) for binding in self.bindings]
            self.zero_grad()
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            give_back(self.context)
        if self.stepper is not None:
            self.stepper.close()
        for binding, state in zip(self.bindings, states):
            unbind(binding, state)
        self.bindings = []
        self.context.storage.close()

    def on_detach(self, call: Callable[[], object]) -> None:
        """Call `call` when the engine is detached."""
        self._undo.append(call)

    def observer(self, kind: type[Attached]) -> Attached:
        """Return the observer of a class.

        Raises:
            StateError: none is attached.
        """
        for each in self.events.observers:
            if isinstance(each, kind):
                return each
        raise StateError(f"no {kind.__name__} observes this engine. Build the engine by zero.shard, which attaches one")


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, also through wrappers that hold it as a submodule; None for any other module."""
    for module in model.modules():
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None
