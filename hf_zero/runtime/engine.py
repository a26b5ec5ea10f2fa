"""`Engine`: what users call of a sharded model. Its parts do the work, put together by `shard.shard`; no algorithm here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.save import Saving
from ..checkpoint.weights import Stateful
from ..comm.wire import Traffic
from ..core.layout import Layout
from ..errors import ConfigError, StateError, ZeroError
from ..plan.plan import Plan
from ..plan.record import Recorder
from ..plan.report import Report
from . import instance_methods as overrides
from .build import Assembly
from .checkpoints import Saves, load, save
from .offload import STATES
from .optimizers.clipping import clip_norm, clip_values
from .optimizers.state_pieces import OptimizerPieces
from .passes import weighing
from .passes.autocast import shown_in
from .passes.compiling import Block, Compile
from .preemption import Preemption
from .renamed import EngineNames, ModelNames
from .training import Training
from .usage import Usage, report

_ENGINE = "_hf_zero_engine"  # where a sharded module keeps its engine: a plain cycle, freed with the module


class Engine(EngineNames):
    """One sharded model. Made by `shard.shard`; see there.

    Attributes:
        sharded: all there is of it, as data.
        training: what happens in its passes and steps.
        model: the module itself, same type, parameters now views of flat spans.
        optimizer: the optimizer bound to it, the first of several, or None.
        saves: those that are written behind training.
        traffic: collectives and bytes sent by this rank, by kind (`gather`, `reduce`, `scalar`, `other`;
            with replicas also `across`).
    """

    def __init__(self, training: Training, assembly: Assembly, patches: overrides.Patches) -> None:
        self.sharded, self.training, self._assembly, self._patches = training.sharded, training, assembly, patches
        self.model, self.config, self.precision = training.model, training.config, self.sharded.precision
        self.units, self.offload = self.sharded.units, training.offload
        self.buffers, self.schedule = training.buffers, training.schedule
        self.wire = self.sharded.wire
        self.saves = Saves(self.wire)
        patches.method(self.model, "compile", self.compile)
        if not hasattr(self.model, "no_sync"):
            patches.method(self.model, "no_sync", partial(overrides.no_sync, self.sharded, self.no_sync))
        patches.hooks(ModelNames(self.model))
        self.model.__dict__[_ENGINE] = self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "an Engine cannot be copied or pickled: it holds what this process shares with the other ranks. Copy the model "
            "instead (copy.deepcopy(model) on every rank gives a plain one), save with engine.save(folder) or "
            "model.state_dict()"
        )

    # What the user calls --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def world_size(self) -> int:
        return self.wire.size

    @property
    def traffic(self) -> Traffic:
        return self.wire.traffic

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.sharded.optimizers[0] if self.sharded.optimizers else None

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return tuple(self.sharded.optimizers)

    @property
    def recorder(self) -> Recorder | None:
        return self.training.recorder

    @property
    def plan(self) -> Plan:
        return self.sharded.plan

    @property
    def layout(self) -> Layout:
        return self.sharded.layout

    def bind(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Attach an optimizer built over `model.parameters()`, before or after sharding. A collective.

        The object and its `param_groups` dicts stay; `group["params"]` becomes this rank's flat spans. Binding the same
        optimizer again is a no-op unless groups were added to it.

        Args:
            optimizer: one joins those that are bound; of these it takes the place of any that has one of its parameters. A
                list: these from now on, and no others.

        Raises:
            UnsupportedOptimizerError, LayoutError, RankMismatchError: see `shard`.
        """
        self.training.optimizers.bind(optimizer)

    @contextmanager
    def no_sync(self, *, defer: bool = False) -> Iterator[None]:
        """Backwards inside are not the last of a step. The same on every rank.

        Stages 0 and 1: gradients add up on this rank and travel once, with the first backward outside (or at the step).
        Stages 2 and 3: they still go to their owners each time, which is what keeps them sharded.

        Args:
            defer: also at stages 2 and 3 they add up on this rank and travel once, as under DDP: of k micro-batches, 1/k of
                the bytes that are reduced, for a whole local gradient in device memory (4 bytes per trained parameter).
        """
        backward = self.schedule.backward
        before = backward.sync, backward.defers
        backward.sync, backward.defers = False, backward.defers or defer
        try:
            yield
        finally:
            backward.sync, backward.defers = before

    def total_weight(self, weight: float | Tensor) -> float:
        """The sum of all ranks' `weight`, for `weigh`; one scalar all-reduce. A collective: ranks without samples give 0.

        Raises:
            ConfigError: on every rank: a weight on some rank that is no number of at least 0; all weights are 0.
        """
        with self.wire.watch.doing("total_weight()"):
            return weighing.over_ranks(self.wire, weight)

    def weigh(self, loss: Tensor, weight: float | Tensor, total: float | None = None) -> Tensor:
        """`loss` scaled such that a step's gradient is the weighted mean over the samples of all ranks, as in one process.

        Every rank runs as many forwards and backwards; one without samples runs any batch with weight 0.

        Args:
            loss: the (weighted) mean over this rank's samples, 0-dim.
            weight: what these samples weigh together: their number, their tokens, the sum of their weights, times this
                rank's own factor if it has one.
            total: `total_weight` of what this rank has in the whole step, where a step has several backwards. None: the
                step's only backward; a collective then.

        Raises:
            ConfigError: see `total_weight`; a loss that is not one number; a weight above `total`.
        """
        problem = weighing.is_loss(loss)
        if total is None:
            with self.wire.watch.doing("weigh()"):
                total = weighing.over_ranks(self.wire, weight, problem)
        elif problem is not None:
            raise ConfigError(problem)
        return weighing.scaled(loss, weight, total, self.world_size)

    def unsharded(self, *, in_compute_dtype: bool = False) -> AbstractContextManager[None]:
        """As `zero.unsharded`, of this model. A collective at its beginning and its end."""
        return self.training.unsharded(in_compute_dtype=in_compute_dtype)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Clip by the norm over all ranks, as `torch.nn.utils.clip_grad_norm_` on the whole model; a collective.

        Returns:
            The norm before clipping, 0-dim float32, the same on every rank. `max_norm=inf` only measures (NaN with
            `step_in_backward`, where gradients are not kept).
        """
        if self.config.step_in_backward and max_norm == float("inf"):
            return torch.tensor(float("nan"), device="cpu")  # the gradients are gone
        self.offload.refuse_clipping("clip_grad_norm_")
        with self.wire.watch.doing("clip_grad_norm_()"):
            self.training.flush()
            self.training.gradients.wrote()
            return clip_norm(
                self.sharded.trained,
                self.sharded.names,
                self.wire,
                max_norm,
                float(norm_type),
                parameters,
                # A loss scaler tries scales that overflow, and leaves these steps out.
                hint=not self.sharded.storage.wide and not self.config.debug and self.rank == 0,
            )

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Clamp every gradient element to ±`clip_value`."""
        self.offload.refuse_clipping("clip_grad_value_")
        self.training.flush()
        self.training.gradients.wrote()
        clip_values(self.sharded.trained, self.sharded.names, self.wire, clip_value, parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, local and reduced. Also what `model.zero_grad` and `optimizer.zero_grad` do.

        Args:
            set_to_none: False: reduced gradients stay, as zeros.
        """
        self.training.zero_grad(set_to_none)

    def report(self) -> Report:
        """What lives where, in bytes per rank: predicted, and measured now; with `record`, also peaks, traffic and waits."""
        return report(self, self.recorder)

    def record(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        first_step: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> Recorder:
        """Measure every step from now on: `report()` shows peaks, traffic and waits then. Ended by `Recorder.close`.

        Args:
            folder: where every step is appended to `zero_steps.jsonl` (other ranks: `zero_steps.rank1.jsonl`, …), for
                `hf-zero report`. None: no file.
            first_step: steps before this one, for a run that goes on.
            about: what else is known of the run, as plain values for JSON: `hf-zero report` shows `model` and `max_steps`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        if self.recorder is not None:
            self.recorder.close()
        said = {"model": type(self.model).__name__, **(about or {})}
        made = self.training.recorder = Recorder(Usage(self), folder, first_step, said, self._recorder_closed)
        return made

    def _recorder_closed(self, recorder: Recorder) -> None:
        if self.recorder is recorder:
            self.training.recorder = None

    def group_options(self) -> list[dict[str, Any]]:
        """The groups of the optimizers, one after another: their options, and under `params` the parameters' names."""
        return [dict(group) for optimizer in self.optimizers for group in self.optimizer_state(optimizer).groups]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerPieces:
        """What a checkpoint writes and fills of a bound optimizer. A collective where its groups were changed.

        Raises:
            StateError: it is not bound.
            LayoutError: its groups were changed while there are gradients.
        """
        return self.training.optimizers.pieces_of(optimizer)

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
            CheckpointError: on every rank, with the rank, the file and the reason. `folder` is unchanged, unless the message
                says that it holds files of both saves: loads then reject it.
        """
        self.quiesce()
        self.wait_for_save()
        save(
            self.training,
            folder,
            max_shard_size=max_shard_size,
            save_optimizer=save_optimizer,
            objects=objects,
            finish=self.saves.write_behind if async_save else Saving.commit,
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
        self.sharded.refuse_unsharded("Engine.load")
        self.schedule.quiesce()
        for unit in self.units:
            with contextlib.suppress(ZeroError):  # a step that broke: everything is written anew
                unit.finish_step()
        with contextlib.suppress(ZeroError):  # what the folder does not have stays as it was written
            self.training.writes.settle()
        self.wait_for_save()
        load(
            self.training,
            folder,
            load_optimizer=load_optimizer,
            objects=objects,
            verify=verify,
            strict=strict,
        )

    def wait_for_save(self) -> None:
        """Return when the save that `async_save` left behind is complete. A collective only in that all ranks raise.

        Raises:
            CheckpointError: it failed, here or on another rank.
        """
        self.saves.wait()

    def compile(self, *, using: Compile | None = None, **options: Any) -> None:
        """`torch.compile` block by block; also what `model.compile(...)` does. Gathers and releases stay outside of the graphs.

        A block that cannot be compiled runs as it is, which is said once on stderr. Without communication.

        Args:
            using: compiles a function, instead of `torch.compile` with these options.
        """
        blocks = [module for module in self.training.blocks if not isinstance(module.__dict__.get("forward"), Block)]
        failed: list[str] = []
        for module in blocks:
            self._patches.method(module, "forward", Block(module, using or partial(torch.compile, **options), failed))
        if self.rank == 0:
            count = len(self.training.blocks)
            found = f"{count} blocks, each by itself" if count else "nothing: it has no blocks"
            print(f"hf_zero: torch.compile: {found}", file=sys.stderr)

    @property
    def is_compiled(self) -> bool:
        return any(isinstance(module.__dict__.get("forward"), Block) for module in self.training.blocks)

    def outline(self) -> dict[str, Any]:
        """`model.state_dict()` without values or communication: parameters as meta tensors, buffers as CPU copies."""
        return self.training.state_dict_hooks.outline()

    def offload_states(self, include: Iterable[str] = STATES) -> None:
        """Move what rests on the device to host memory, until `reload_states`: for who shares the GPU with something else.

        A collective only in that all ranks do it. Nothing can be computed meanwhile; saving and reading values works.

        Args:
            include: of `parameters`, `gradients`, `optimizer` (masters and state, with their gradients).

        Raises:
            ConfigError: another name.
            StateError: states are away already.
        """
        self.sharded.refuse_unsharded("offload_states")
        with self.wire.watch.doing("Engine.offload_states"):
            self.training.flush()
            self.quiesce()
            self.offload.leave(include)
            self.training.show_grads()

    def reload_states(self) -> None:
        """Undo `offload_states`: all is where it was, the same to the bit. A collective where the stage keeps parameters.

        Raises:
            StateError: nothing is away.
        """
        with self.wire.watch.doing("Engine.reload_states"):
            self.offload.come_back()
            self.training.gradients.show_slices()
            self.training.show_grads()

    def exchange(self, value: Any) -> list[Any]:
        """Small Python values of all ranks, in rank order; a collective."""
        return self.wire.exchange(value)

    def shown_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Inside, the model is as after `model.to(dtype)`, for forwards without a graph; masters and training are as before.

        Where whole parameters stay, that takes a second copy of them in this type, else one of a unit at a time. On every rank.
        """
        return shown_in(self.model, dtype, self.units, self.quiesce)

    def quiesce(self) -> None:
        """Before masters are read or written from outside: nothing is gathered, nothing on the move. A collective."""
        self.training.quiesce()

    def finish_step(self) -> None:
        """Updates of offloaded shards that go on behind `optimizer.step()` are done afterwards.

        Raises:
            StateError, TierError: one of them broke off.
        """
        self.offload.finish_step()

    def refresh(self) -> None:
        """After the masters were written: whole parameters follow, where the stage keeps them. A collective."""
        self.training.state_dict_hooks.after_load()

    def reset(self) -> None:
        """Forget what an exception left half done: local gradients, transfers. Happens by itself at the next forward."""
        self.schedule.backward.reset()

    def detach(self) -> None:
        """Undo: full plain parameters on every rank, no hooks. A collective, between steps: gradients are forgotten. The
        optimizer has those parameters then, in the same groups, and its state in plain form.
        """
        if self.model.__dict__.get(_ENGINE) is not self:
            return
        self.sharded.refuse_unsharded("Engine.detach")
        with self.wire.watch.doing("Engine.detach"):
            self.quiesce()
            if (preemption := self.schedule.backward.order.preemption) is not None:
                preemption.close()
            bindings = self.training.optimizers.bindings
            states = [binding.plain_state() for binding in bindings]
            if self.recorder is not None:
                self.recorder.close()
            self.zero_grad()
            self._assembly.dissolve()
        self.offload.close()
        self.schedule.detach()
        self._patches.take_off()
        self.model.__dict__.pop(_ENGINE, None)
        for binding, state in zip(bindings, states):
            binding.unbind(state)
        self.training.optimizers.bindings, self.sharded.optimizers = [], []


def on_preemption(
    model: nn.Module | Engine, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Preemption:
    """From now on these signals ask the run to end after a whole step, on every rank, whichever of them receives one.

        ends = zero.on_preemption(model)
        for batch in loader:
            ...
            optimizer.step()
            if ends():            # the same answer on every rank, of the last backward that reduces; no collective
                engine.save("ckpt")
                break

    Between a signal and its answer lie one step at most, and what the program does between steps. A second signal does what it
    would have done before. Call it on every rank that is to hear signals, in the main thread; `close()` gives them back.

    Args:
        model: a sharded model, or its engine.

    Raises:
        ConfigError: the model is not sharded, or this is not the main thread.
    """
    engine = model if isinstance(model, Engine) else engine_of(model)
    if engine is None:
        raise ConfigError(f"on_preemption: this {type(model).__name__} is not sharded; call zero.shard first")
    order = engine.schedule.backward.order
    if order.preemption is not None:
        order.preemption.close()
    order.preemption = made = Preemption(signals)
    return made


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a sharded model, also through wrappers that hold it as a submodule; None for any other module."""
    for module in model.modules():
        engine: Engine | None = module.__dict__.get(_ENGINE)
        if engine is not None:
            return engine
    return None
