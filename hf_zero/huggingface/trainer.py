"""`ZeroTrainerMixin`: checkpoints, resuming and the model card of a Trainer with a sharded model.

A stock `Trainer` whose `TrainingArguments` have a `ZeroPlugin` needs no change: while it builds its Accelerator,
`adopt_trainer` puts the mixin in front of its class. `ZeroTrainer` and `zero_trainer_cls` do so explicitly.
docs/DESIGN.md lists what of transformers is replaced and overridden.

One `CheckpointWriter` saves a checkpoint. The stock code writes small files into its folder, every rank writes weights and
optimizer state there, and one rename makes `checkpoint-N` appear. Pushes and the rotation of older checkpoints run
afterwards. `from_pretrained` reads the folder. A Trainer with the plugin resumes from it at any stage and number of ranks,
and from checkpoints of plain data parallel. Plain data parallel can read only the weights: it needs an `optimizer.pt`.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ..checkpoint.cards import adding_to_card
from ..checkpoint.files import Field
from ..checkpoint.load import CheckpointReader
from ..checkpoint.manifest import MANIFEST, check_segments, check_sizes
from ..checkpoint.objects import load_state
from ..checkpoint.save import OPTIMIZER_FOLDER, CheckpointWriter, is_hf_zero_checkpoint
from ..checkpoint.series import CheckpointSeries
from ..checkpoint.weights import format_of
from ..comm.agreement import on_all_ranks
from ..comm.group_wire import open_wire
from ..comm.process_group import home_device
from ..comm.wire import Wire
from ..compat.evaluation import cast
from ..core.patching import patched
from ..engine.saving import open_saving, put_weights
from ..errors import CheckpointError, ConfigError
from ..params.deferred import deferred_of
from ..params.engine import Engine, engine_of
from .arguments import TRAINING_ARGUMENTS, refuse
from .callback import PreemptionCallback, ZeroCallback, calling_trainer, facts_of
from .checkpoints import MAX_SHARD_SIZE, agree_is_checkpoint, bare_optimizer, load_optimizer, save_gathered, send_files
from .elastic import LATEST, ElasticBatchMixin
from .patches import TrainerBase, show, with_mixin
from .push import PushMixin, check_kind
from .sequences import SequenceParallelMixin
from .weights import has_custom_save, without_weights

# Before 5.23, `Trainer.save_model` calls `_save` on the writing rank only.
_WRITER_ONLY = Version(transformers.__version__) < Version("5.23")


class ZeroTrainerMixin(ElasticBatchMixin, SequenceParallelMixin, PushMixin, TrainerBase):
    """Override what a sharded model needs: `class MyZeroTrainer(ZeroTrainerMixin, MyTrainer)`.

    Saving and loading are collectives: call `save_model` on every rank, as the stock Trainer's documentation asks for
    sharded models. Called on one rank, it waits for the others and raises an error that names them.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    _zero_resuming = False
    """Inside `train`: weights are loaded once the engine exists."""
    _zero_has_weights = False
    """A subclass with its own files has already loaded the weights."""
    _zero_resumed: str | os.PathLike[str] | None = None
    """The folder that training resumes from."""
    _zero_saved = False
    """This rank has already saved; the stock `save_model` may call `_save` on the writing rank again."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not hasattr(self.accelerator, "zero_config"):  # the plugin sets it
            raise ConfigError(
                f"{type(self).__name__} needs a ZeroPlugin: use ZeroTrainingArguments, or "
                "TrainingArguments(parallelism_config=ZeroPlugin(stage=3)). If that is done, an Accelerator was built "
                "between the arguments and the Trainer, and accelerate keeps its settings: build it later or drop it"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # With offload, `prepare` moves the model unit by unit, because all of it may not fit. The stock code calls this from
        # `__init__` and, with `model_init` or full evaluation in 16 bits, from `train`: always before `prepare`.
        if not self.accelerator.zero_config.offloads:
            super()._move_model_to_device(model, device)

    def _zero_engine(self) -> Engine | None:
        return engine_of(self.model)

    def _zero_wait_for_save(self) -> None:
        engine = self._zero_engine()
        if engine is not None:
            engine.wait_for_save()

    @property
    def _zero_series(self) -> CheckpointSeries:
        return CheckpointSeries(self._zero_output, f"{PREFIX_CHECKPOINT_DIR}-", TRAINER_STATE_NAME)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with each rank's own buffers, as the stock Trainer does: it evaluates the module inside DDP."""
        with self._zero_full_eval():
            engine = self._zero_engine()
            with nullcontext() if engine is None else engine.own_buffers():
                return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _zero_full_eval(self) -> Iterator[None]:
        """Apply `bf16_full_eval` and `fp16_full_eval` outside of `train`; restore the parameters, which stock code does not."""
        args = self.args
        dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16 if args.bf16_full_eval else None
        if dtype is None or self.is_in_train:
            yield
            return
        if not self.accelerator._models:  # as the stock loop does
            if self._zero_engine() is None:
                self._move_model_to_device(self.model, args.device)
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        engine = self._zero_engine()
        shown = cast(self.model, dtype) if engine is None else engine.shown_in(dtype)
        with shown, patched([(args, "bf16_full_eval", False), (args, "fp16_full_eval", False)]):
            yield

    # -- training --

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer does. `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Its digests are checked first; a warning names folders that are skipped. The checkpoint may be of any stage and
        number of ranks, or of plain data parallel.

        `"latest"` is for a job that restarts by itself (`torchrun --max-restarts`): it starts fresh without a checkpoint, and
        keeps the rows of a step on another number of ranks. If batch size and accumulation are those of the checkpoint, each
        rank takes its part of the rows, in micro-batches no larger than before. Each sample still comes once per epoch, under
        the same schedule.

        Raises:
            CheckpointError: on every rank: every checkpoint, or the given one, is damaged.
            ConfigError: on every rank: with "latest", the number of ranks does not divide a step's rows.
        """
        wire = open_wire(home_device(), self.accelerator.zero_config.stall_s)
        with on_all_ranks(wire, f"training into {self._zero_output}"):
            if wire.rank == 0 and self.args.push_to_hub:
                check_kind(self)  # here, not after hours of training
        return self._zero_train(wire, resume_from_checkpoint, *args, **kwargs)

    def _zero_train(self, wire: Wire, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        elastic = resume_from_checkpoint == LATEST
        if resume_from_checkpoint is True or elastic:
            newest = self._zero_series.newest_complete(wire)
            # Without one, True stays: the stock code raises an error.
            resume_from_checkpoint = str(newest) if newest is not None else None if elastic else True
            if newest is None and elastic and wire.rank == 0:
                show(f"hf_zero: no checkpoint in {self._zero_output}: training starts from the beginning", sys.stderr)
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            folder = Path(resume_from_checkpoint)
            ours = agree_is_checkpoint(wire, folder)
            with on_all_ranks(wire, f"resuming from {folder}"):
                if ours:
                    listed = check_sizes(folder).files
                    # The stock code reads this file first; all others are checked when they are loaded.
                    for name in {TRAINER_STATE_NAME} & listed.keys():
                        check_segments(folder / name, listed[name].segments)
            if folder.is_dir() and not ours and wire.rank == 0:
                warnings.warn(
                    f"{folder} has no {MANIFEST}: it is of plain data parallel, and its bytes cannot be verified",
                    stacklevel=2,
                )
        if not any(isinstance(callback, ZeroCallback) for callback in self.callback_handler.callbacks):
            self.add_callback(ZeroCallback())
        self._zero_resumed = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
        self._zero_resuming = True
        try:
            with (
                PreemptionCallback.installed(self.callback_handler.callbacks),
                self._zero_keeping_batches(wire, self._zero_resumed, elastic),
            ):
                out = super().train(resume_from_checkpoint, *args, **kwargs)
        except KeyboardInterrupt:
            if wire.rank == 0:
                show(self._zero_resume_hint(), sys.stderr)
            raise
        finally:
            self._zero_resuming = False
        self._zero_wait_for_save()
        return out

    def _zero_resume_hint(self) -> str:
        newest = max(self._zero_series.folders(), default=None, key=lambda folder: int(folder.name.rpartition("-")[2]))
        if newest is None:
            return f"hf_zero: interrupted; no checkpoint in {self._zero_output}"
        return (
            f"hf_zero: interrupted; the newest checkpoint is {newest}. Continue with "
            f'trainer.train(resume_from_checkpoint="{LATEST}")'
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Skip training if the checkpoint is at the last step; the stock code would take one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._zero_wait_for_save()
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        # The stock code now removes all checkpoints but the best. Keep them if the best is damaged.
        if limit == 1 and best is not None and self._zero_engine() is not None:
            wire = open_wire(home_device())
            reason = self._zero_series.find_damage(wire, Path(best))
            if reason is not None:
                self.args.save_total_limit = None
                if wire.rank == 0:
                    warnings.warn(f"the best checkpoint is damaged, so no other is removed: {reason}", stacklevel=2)
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    # -- saving --

    def _get_output_dir(self, trial: Any) -> str:
        """Return the staged folder while a checkpoint is saved."""
        # The stock `_save_checkpoint` adds checkpoint-N to it, searches it for the best one, and removes older ones. The staged
        # folder has none; in the run's folder, older ones would be removed before this checkpoint is complete.
        if self._zero_saving is not None:
            return str(self._zero_saving.folder.parent)
        return super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        engine = self._zero_engine()
        if engine is None:
            return super()._save_checkpoint(model, trial)
        self._zero_wait_for_save()
        run_dir, best = self._get_output_dir(trial), self.state.best_model_checkpoint
        target = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        parent: Any = super()
        self.store_flos()  # a collective of the stock method, which a subclass may not reach on every rank
        try:
            with open_saving(engine, target, **self._zero_batch_facts()) as saving:
                if saving.folder.name != os.path.basename(target):
                    raise CheckpointError(
                        f"{target} is a link to {saving.target}: give the folder that name, or remove the link"
                    )
                self._zero_saving, self._zero_push = saving, False
                try:
                    # Its other collectives are methods of this class, which fail on all ranks together.
                    stored = [(self, "store_flos", lambda: None)]
                    with on_all_ranks(engine.wire, f"saving to {target}"), patched(stored):
                        parent._save_checkpoint(model, trial)
                finally:
                    self._zero_saving = None
                send_files(saving, engine.wire)
                with on_all_ranks(engine.wire, f"saving to {target}"):
                    self._zero_name_best(saving, run_dir, target)
                state = copy.copy(self.state)
                on_complete = partial(self._zero_after, engine, run_dir, target, state, self._zero_push)
                engine.saves.commit(saving, in_background=engine.config.async_save, on_complete=on_complete)
        except BaseException:
            self.state.best_model_checkpoint = best
            raise
        return None

    def _zero_name_best(self, saving: CheckpointWriter, run_dir: str, target: str) -> None:
        """Set the path of the best checkpoint, which the stock code searched in the staged folder."""
        if self.state.best_global_step:
            best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == target or os.path.exists(best):
                self.state.best_model_checkpoint = best
        path = saving.folder / TRAINER_STATE_NAME
        if self.args.should_save and path.exists():
            self.state.save_to_json(str(path))

    def _zero_after(self, engine: Engine, run_dir: str, target: str, then: TrainerState, push: bool) -> None:
        """Push the complete checkpoint and remove older ones. `then` is the state in it, for the push."""
        with on_all_ranks(engine.wire, f"after saving {target}"):
            if not self.args.should_save or not os.path.exists(os.path.join(target, MANIFEST)):
                return
            if push:
                now, self.state = self.state, then
                try:
                    self._push_from_checkpoint(target)
                finally:
                    self.state = now
            folders = [Path(path) for path in sort_checkpoints(run_dir, use_mtime=True)]
            keep = [Path(path) for path in (target, self.state.best_model_checkpoint) if path]
            self._zero_series.rotate(folders, self.args.save_total_limit, keep)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the stock Trainer does, with the weights of all ranks. A collective: call it on every rank."""
        if self._zero_engine() is None and any(deferred_of(param) is not None for param in self.model.parameters()):
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if not _WRITER_ONLY or self.args.should_save or self._zero_engine() is None:
            return super().save_model(output_dir, _internal_call)
        self._zero_saved = False
        self._save(output_dir)
        self._zero_saved = True
        try:
            return super().save_model(output_dir, _internal_call)
        finally:
            self._zero_saved = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights of all ranks, and the stock code's other files on rank 0. A collective.

        Raises:
            CheckpointError: on every rank; the folder keeps its content.
        """
        engine = self._zero_engine()
        if engine is None:
            return super()._save(output_dir, state_dict)
        if self._zero_saved:
            self._zero_saved = False
            return None
        folder = Path(output_dir) if output_dir is not None else self._zero_output
        parent: Any = super()
        if self._zero_saving is not None and folder == self._zero_saving.folder:
            return self._zero_put(self._zero_saving, engine, parent._save, state_dict)
        self._zero_wait_for_save()
        with open_saving(engine, folder) as saving:
            self._zero_put(saving, engine, parent._save, state_dict)
            saving.commit()
        return None

    def _zero_put(self, saving: CheckpointWriter, engine: Engine, stock: Any, state: dict[str, Any] | None) -> None:
        facts = self._zero_facts = facts_of(self, engine)
        is_stock = stock.__func__ is Trainer._save and not has_custom_save(self.model)
        with on_all_ranks(engine.wire, f"saving to {saving.target}"):
            if engine.rank == 0:
                facts.write(saving.folder)
                if state is not None:  # the caller has gathered values
                    self._zero_save_here(saving, stock, state)
                elif is_stock:
                    with patched(without_weights(self.model, engine.outline())):
                        self._zero_save_here(saving, stock, {})
                    (saving.folder / "model.safetensors").unlink(missing_ok=True)  # the empty file of a plain module
        if state is None and is_stock:
            put_weights(saving, engine, MAX_SHARD_SIZE, form=format_of(self.model))
        elif state is None:  # custom saving code needs full values
            save_gathered(saving, engine, partial(self._zero_save_here, saving, stock, None))

    def _zero_save_here(self, saving: CheckpointWriter, stock: Any, state: dict[str, Any] | None) -> None:
        with adding_to_card(saving.folder, saving.target):
            stock(str(saving.folder), state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state of all ranks, and the scheduler as the stock code does; no `optimizer.pt`."""
        engine, saving = self._zero_engine(), self._zero_saving
        if engine is None or saving is None or engine.optimizer is not bare_optimizer(self.optimizer):
            return super()._save_optimizer_and_scheduler(output_dir)
        saving.optimizer(engine.optimizer_state(bare_optimizer(self.optimizer)), max_shard_size=MAX_SHARD_SIZE)
        parent: Any = super()
        with on_all_ranks(engine.wire, f"saving to {saving.target}"):
            # The stock method writes both files. optimizer.pt gets an empty state and is removed: the optimizer's
            # state_dict() is a collective, and only the writing rank calls it.
            with patched([(self.optimizer, "state_dict", dict)]):
                parent._save_optimizer_and_scheduler(output_dir)
            if self.args.should_save:
                Path(output_dir, OPTIMIZER_NAME).unlink(missing_ok=True)
        return None

    # -- loading --

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *model: Any, **named: Any) -> None:
        """Load weights of a checkpoint with a manifest. In `train`, they are loaded later with the optimizer's state."""
        if not is_hf_zero_checkpoint(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, *model, **named)
        # In `train` the stock code loads weights before `accelerator.prepare`, and always calls `_load_optimizer_and_scheduler`
        # after it: weights are loaded there, into slices. Here, every rank would load all of them.
        if self._zero_resuming:
            put_off = list[str]()
            given = resume_from_checkpoint, *model
            self._zero_replace("_load_from_checkpoint", lambda it, *_, **__: put_off.append(it), *given, **named)
            self._zero_has_weights = not put_off  # a subclass has loaded files of its own
            return None
        if self._zero_engine() is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        engine = self._zero_engine()
        if engine is None:  # this stage evaluates without an engine
            return super()._load_from_checkpoint(resume_from_checkpoint, *model, **named)
        load = partial(engine.load, resume_from_checkpoint, load_optimizer=False)
        return self._zero_replace(
            "_load_from_checkpoint", lambda *_, **__: load(), resume_from_checkpoint, *model, **named
        )

    def _zero_replace(self, name: str, ours: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a subclass's own method with `ours` in place of the stock one; without an own method, call `ours`.

        Passes only the caller's arguments: Sentence Transformers' methods take fewer than the stock ones.
        """
        own = getattr(super(), name)
        if own.__func__ is getattr(Trainer, name):
            return ours(*args, **named)
        with patched([(Trainer, name, lambda _, *given, **more: ours(*given, **more))]):
            return own(*args, **named)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        engine = self._zero_engine()
        if engine is None:
            if is_hf_zero_checkpoint(checkpoint):
                super()._load_from_checkpoint(checkpoint)
            return super()._load_optimizer_and_scheduler(checkpoint)
        load = partial(self._zero_load, engine, Trainer._load_optimizer_and_scheduler)
        return self._zero_replace("_load_optimizer_and_scheduler", load, checkpoint)

    def _zero_load(self, engine: Engine, stock: Callable[..., Any], checkpoint: str) -> None:
        self._zero_wait_for_save()
        ours = agree_is_checkpoint(engine.wire, checkpoint)
        bound = engine.optimizer is bare_optimizer(self.optimizer)
        single = Path(checkpoint, OPTIMIZER_NAME)
        loaded = bound and (Path(checkpoint, OPTIMIZER_FOLDER) if ours else single).exists()
        if ours and not self._zero_has_weights:
            engine.load(checkpoint, load_optimizer=loaded)
        elif ours and loaded:
            load_optimizer(
                CheckpointReader(engine.wire, checkpoint), engine, bare_optimizer(self.optimizer), OPTIMIZER_FOLDER
            )
        elif loaded:
            # Memory-mapped; the stock Trainer would copy the full state to every device.
            self.optimizer.load_state_dict(torch.load(single, map_location="cpu", weights_only=True, mmap=True))
        if not bound:
            stock(self, checkpoint)
            return None
        if engine.rank == 0 and self._zero_resuming:
            what = "" if loaded else ", its weights only"
            show(f"hf_zero: resumed from {Path(checkpoint).name}{what} ({checkpoint})", sys.stderr)
        if not loaded:
            if engine.rank == 0:
                warnings.warn(
                    f"{checkpoint} holds no optimizer state (saved with save_only_model?): training continues with a fresh "
                    "optimizer and schedule",
                    stacklevel=2,
                )
            return None
        scheduler = Path(checkpoint, SCHEDULER_NAME)
        with on_all_ranks(engine.wire, f"loading {scheduler}"):
            if scheduler.is_file():
                schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # in accelerate's wrapper
                load_state(schedule, Field(scheduler, torch.load(scheduler, weights_only=True)))
        return None

    def _load_best_model(self) -> None:
        self._zero_wait_for_save()
        engine, best = self._zero_engine(), self.state.best_model_checkpoint
        if engine is None or best is None or not agree_is_checkpoint(engine.wire, best):
            return super()._load_best_model()
        return self._zero_replace("_load_best_model", partial(engine.load, best, load_optimizer=False))


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """The Trainer for sharded models; a stock `Trainer` with a `ZeroPlugin` in its arguments becomes one."""


def zero_trainer_cls(cls: type[Any]) -> type[Any]:
    """Return the Trainer class `cls` for sharded models: `zero_trainer_cls(SFTTrainer)`."""
    return ZeroTrainer if cls is Trainer else with_mixin(ZeroTrainerMixin, cls)


def adopt_trainer() -> bool:
    """Put `ZeroTrainerMixin` in front of the class of the Trainer that builds or uses an Accelerator with the plugin.

    accelerate passes the plugin its Accelerator, but not the Trainer, so `calling_trainer` finds it. Returns whether
    there is one.
    """
    owner = calling_trainer()
    if owner is None:
        return False
    refuse(TRAINING_ARGUMENTS, owner.args)
    if owner.args.n_gpu > 1:
        # One process that sees several GPUs: the Trainer would wrap the model in nn.DataParallel.
        warnings.warn(
            f"one process sees {owner.args.n_gpu} GPUs and will use the first; start one process per GPU with "
            "`accelerate launch` or `torchrun` to use them all",
            stacklevel=2,
        )
        owner.args._n_gpu = 1
    if not isinstance(owner, ZeroTrainerMixin):
        owner.__class__ = zero_trainer_cls(type(owner))
    return True
