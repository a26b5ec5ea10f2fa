"""What a Trainer does differently when its model is sharded: its checkpoints, resuming from them, and the model card.

A stock `Trainer` whose `TrainingArguments` carry a `ZeroPlugin` needs nothing more. While it builds its Accelerator the
plugin finds it (`adopt_trainer`) and puts `ZeroTrainerMixin` in front of its class, as it does with the Accelerator
itself; `ZeroTrainer` and `zero_trainer_cls` do so explicitly. docs/DESIGN.md lists what of transformers is replaced, and when.

A checkpoint is one `Saving`: the stock code runs with the staged folder for its output folder and writes its own small
files there, all ranks put weights and optimizer state beside them, and the whole appears as `checkpoint-N` by one rename.
What the stock code does with a checkpoint it has written (push it, drop older ones) waits until then. The folder is one of
`from_pretrained`, readable at any stage and number of ranks by every Trainer that has the plugin, as are those of plain data
parallel. The other way only the weights go: plain data parallel stops at the `optimizer.pt` that it does not find.
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints

from ..checkpoint.cards import RunFacts
from ..checkpoint.files import Field
from ..checkpoint.folder import Occupancy
from ..checkpoint.load import Loading
from ..checkpoint.manifest import MANIFEST, check_sizes
from ..checkpoint.save import Saving
from ..checkpoint.series import CheckpointSeries, is_ours
from ..comm.agree import on_all_ranks
from ..comm.group_wire import home_device, open_wire
from ..comm.wire import SoloWire
from ..errors import CheckpointError, ConfigError
from ..runtime.checkpoints import load_state
from ..runtime.engine import Engine, engine_of
from ..runtime.passes.autocast import shown_in
from .arguments import TRAINING_ARGUMENTS, refuse
from .callback import MeasuredLogs, PreemptionCallback, calling_trainer, facts_of, write_card
from .checkpoints import (
    MAX_SHARD_SIZE,
    SavesBehind,
    bare_optimizer,
    hand_in,
    is_ours_everywhere,
    load_optimizer,
    load_weights,
    open_saving,
    put_as,
)
from .elastic import LATEST, KeepsBatches
from .push import check_kind, uploading
from .stock import TrainerBase, put_in_front, replaced

# Older releases of transformers (5.17 is one) do not let other ranks than the writing one into `_save`.
_WRITER_ONLY = "is_distributed_loading_by_transformers" not in Trainer._save.__code__.co_names


class ZeroTrainerMixin(SavesBehind, MeasuredLogs, KeepsBatches, TrainerBase):
    """What differs from the stock Trainer. Put in front: `class MyZeroTrainer(ZeroTrainerMixin, MyTrainer)`.

    Saving and loading are collectives: `save_model` must be called on every rank (as the stock Trainer's documentation
    asks for sharded models); called on one alone it waits for the others, and says after a minute which have not come.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    _zero_saving: Saving | None = None
    """The checkpoint that is being put together."""
    _zero_push = False
    """The stock code wants it pushed."""
    _zero_resuming = False
    """Inside `train(resume_from_checkpoint=...)`: weights come when there is an engine to take them."""
    _zero_resumed: str | os.PathLike[str] | None = None
    """The folder that training goes on from."""
    _zero_saved = False
    """Where the stock `save_model` calls `_save` on the writing rank only: this rank has taken part."""
    _zero_facts: RunFacts | None = None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not hasattr(self.accelerator, "zero_config"):  # set where its class is changed
            raise ConfigError(
                f"{type(self).__name__} needs a ZeroPlugin: use ZeroTrainingArguments, or "
                "TrainingArguments(parallelism_config=ZeroPlugin(stage=3)). If that is done, an Accelerator was built "
                "between the arguments and the Trainer, and accelerate keeps its settings: build it later or drop it"
            )
        _check_arguments(self.args)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # What is offloaded goes there unit by unit, when the model is sharded; the whole may not fit. The stock code comes here
        # from `__init__` and, with `model_init` or full evaluation in 16 bits, from `train`: always before `prepare`.
        if not self.accelerator.zero_config.offloads:
            super()._move_model_to_device(model, device)

    def _zero_engine(self) -> Engine | None:
        return engine_of(self.model)

    @property
    def _zero_output(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def _zero_series(self) -> CheckpointSeries:
        return CheckpointSeries(self._zero_output, f"{PREFIX_CHECKPOINT_DIR}-", TRAINER_STATE_NAME)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The stock Trainer evaluates the module itself, not the one that DDP wraps: buffers are each rank's own there."""
        with self._zero_full_eval():
            engine = self._zero_engine()
            with nullcontext() if engine is None else engine.buffers.apart():
                return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _zero_full_eval(self) -> Iterator[None]:
        """`bf16_full_eval` and `fp16_full_eval`, outside of `train` as in the stock code, which rounds the model for good.

        Here it is as it was afterwards, and is trained as if it had not been evaluated.
        """
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
        cast = shown_in(self.model, dtype) if engine is None else engine.shown_in(dtype)
        with cast, replaced([(args, "bf16_full_eval", False), (args, "fp16_full_eval", False)]):
            yield

    # -- training --

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the stock Trainer's. `resume_from_checkpoint=True` takes the newest checkpoint that is complete.

        Every byte of it is checked first; folders that are passed over are named in a warning. A checkpoint of any stage
        and number of ranks will do, and one of plain data parallel too.

        `"latest"` is for a job that is started again by itself (`torchrun --max-restarts`): the same, a new start where there
        is no checkpoint yet, and on another number of ranks a step takes the rows that it took before. Where the program's
        batch size and accumulation are those of the checkpoint, they are shared out anew: each rank takes its part of the
        rows, in micro-batches no larger than before. Each sample still comes once per epoch, under the same schedule.

        Raises:
            CheckpointError: on every rank: what to resume from is damaged, or all there is; another job is training into
                the same `output_dir`.
            ConfigError: on every rank: with "latest", a step's rows do not divide by the ranks there are now.
        """
        wire = open_wire(home_device(), self.accelerator.zero_config.stall_s)
        alone = wire.rank == 0 and self.args.save_strategy != SaveStrategy.NO and self.hp_search_backend is None
        taken: Occupancy | None = None
        try:
            with on_all_ranks(wire, f"training into {self._zero_output}"):
                if wire.rank == 0 and self.args.push_to_hub:
                    check_kind(self)  # here, not after hours of training
                taken = Occupancy(self._zero_output) if alone else None
            return self._zero_train(wire, resume_from_checkpoint, *args, **kwargs)
        finally:
            if taken is not None:
                taken.leave()

    def _zero_train(self, wire: SoloWire, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        self._zero_series.tidy(wire)
        elastic = resume_from_checkpoint == LATEST
        if resume_from_checkpoint is True or elastic:
            newest = self._zero_series.newest_whole(wire)
            # Without one, True stays: the stock code says that there is none.
            resume_from_checkpoint = str(newest) if newest is not None else None if elastic else True
        if isinstance(resume_from_checkpoint, (str, os.PathLike)):
            folder = Path(resume_from_checkpoint)
            ours = is_ours_everywhere(wire, folder)
            with on_all_ranks(wire, f"resuming from {folder}"):
                if ours:
                    check_sizes(folder)
            if folder.is_dir() and not ours and wire.rank == 0:
                warnings.warn(
                    f"{folder} has no {MANIFEST}: it is of plain data parallel, and nothing vouches for its bytes",
                    stacklevel=2,
                )
        self._zero_resumed = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
        self._zero_resuming = True
        try:
            with (
                PreemptionCallback.at_work(self.callback_handler.callbacks),
                self._zero_keeping_batches(wire, self._zero_resumed, elastic),
            ):
                out = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._zero_resuming = False
        self._zero_wait_for_save()
        return out

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing, where what is resumed had come to its last step; the stock code would take one step more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._zero_wait_for_save()
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        # The stock code now drops all checkpoints but the best, unseen: not if that is damaged.
        if limit == 1 and best is not None and self._zero_engine() is not None:
            wire = open_wire(home_device())
            reason = self._zero_series.why_broken(wire, Path(best))
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
        """While a checkpoint is put together: where it is."""
        # What the stock `_save_checkpoint` does with the answer: it adds checkpoint-N, looks there for the best one, and drops
        # older ones, of which this folder has none. Of the run's own they would be gone before this checkpoint is whole.
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
        try:
            with open_saving(engine, target, **self._zero_batch_facts()) as saving:
                if saving.folder.name != os.path.basename(target):
                    raise CheckpointError(
                        f"{target} is a link to {saving.target}: give the folder that name, or remove the link"
                    )
                self._zero_saving, self._zero_push = saving, False
                try:
                    # Its collectives are this class's own and fail on all ranks together; the rest it does alone.
                    with on_all_ranks(engine.wire, f"saving to {target}"):
                        parent._save_checkpoint(model, trial)
                finally:
                    self._zero_saving = None
                hand_in(saving, engine.wire)
                with on_all_ranks(engine.wire, f"saving to {target}"):
                    self._zero_name_best(saving, run_dir, target)
                then = copy.copy(self.state), self._zero_push
                self._zero_commit(saving, engine, partial(self._zero_after, engine, run_dir, target, *then))
        except BaseException:
            self.state.best_model_checkpoint = best
            raise
        return None

    def _zero_name_best(self, saving: Saving, run_dir: str, target: str) -> None:
        """The stock code looked for the best checkpoint beside the staged folder."""
        if self.state.best_global_step:
            best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best == target or os.path.exists(best):
                self.state.best_model_checkpoint = best
        path = saving.folder / TRAINER_STATE_NAME
        if self.args.should_save and path.exists():
            self.state.save_to_json(str(path))

    def _zero_after(self, engine: Engine, run_dir: str, target: str, then: TrainerState, push: bool) -> None:
        """The checkpoint is there: push it, drop older ones. `then` is the state in it, for the push."""
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
        """As the stock Trainer's, with the weights of all ranks. A collective: call it on every rank."""
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
        """Weights from all ranks, the rest as the stock code on rank 0 writes it. A collective.

        Raises:
            CheckpointError: on every rank; what was in the folder is still there.
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

    def _zero_put(
        self, saving: Saving, engine: Engine, stock: Callable[..., None], state: dict[str, Any] | None
    ) -> None:
        facts = self._zero_facts = facts_of(self, engine)
        with on_all_ranks(engine.wire, f"saving to {saving.target}"):
            if engine.rank == 0:
                facts.write(saving.folder)
                card = saving.target / "README.md"
                if card.exists() and hasattr(self.model, "create_or_update_model_card"):  # PEFT adds to it
                    shutil.copyfile(card, saving.folder / card.name)
                if state is not None:  # values that the caller has gathered
                    stock(str(saving.folder), state)
        if state is None:
            put_as(saving, engine, lambda: stock(str(saving.folder), None))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """State of the optimizer from all ranks, the scheduler's as the stock code writes it; no `optimizer.pt`."""
        engine, saving = self._zero_engine(), self._zero_saving
        if engine is None or saving is None or engine.optimizer is not bare_optimizer(self.optimizer):
            return super()._save_optimizer_and_scheduler(output_dir)
        saving.optimizer(engine.optimizer_state(bare_optimizer(self.optimizer)), max_shard_size=MAX_SHARD_SIZE)
        parent: Any = super()
        with on_all_ranks(engine.wire, f"saving to {saving.target}"):
            # The stock code writes both in one method: optimizer.pt gets an empty state, and goes again. With the true one it
            # would be a collective that only the writing rank calls.
            with replaced([(self.optimizer, "state_dict", dict)]):
                parent._save_optimizer_and_scheduler(output_dir)
            if self.args.should_save:
                Path(output_dir, OPTIMIZER_NAME).unlink(missing_ok=True)
        return None

    # -- loading --

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights of a checkpoint of ours. In `train` the model is not sharded yet: they come with the optimizer's state."""
        if not is_ours(resume_from_checkpoint):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        # In `train` the stock code loads weights before `accelerator.prepare`, and calls `_load_optimizer_and_scheduler` after
        # it whenever it resumes, whatever files there are: that is where ours are loaded, into slices. Read here, they would
        # be whole on every rank.
        if self._zero_resuming:
            return None
        if self._zero_engine() is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        engine = self._zero_engine()
        if engine is None:  # a stage that has no engine for evaluation
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._zero_wait_for_save()
        return load_weights(Loading(engine.wire, resume_from_checkpoint), engine)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        engine = self._zero_engine()
        if engine is None:
            if is_ours(checkpoint):
                super()._load_from_checkpoint(checkpoint)
            return super()._load_optimizer_and_scheduler(checkpoint)
        self._zero_wait_for_save()
        ours = is_ours_everywhere(engine.wire, checkpoint)
        bound = engine.optimizer is bare_optimizer(self.optimizer)
        loaded = False
        if ours:
            loading = Loading(engine.wire, checkpoint)
            load_weights(loading, engine)
            if bound and loading.has_optimizer():
                load_optimizer(loading, engine, bare_optimizer(self.optimizer))
                loaded = True
        single = Path(checkpoint, OPTIMIZER_NAME)
        if not ours and bound and single.is_file():
            # Into host memory, file-backed; the stock Trainer would put the whole state on every device.
            self.optimizer.load_state_dict(torch.load(single, map_location="cpu", weights_only=True, mmap=True))
            loaded = True
        if not bound:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if engine.rank == 0 and self._zero_resuming:
            what = "" if loaded else ", its weights only"
            print(f"hf_zero: resumed from {Path(checkpoint).name}{what} ({checkpoint})", file=sys.stderr, flush=True)
        if not loaded:
            if engine.rank == 0:
                warnings.warn(
                    f"{checkpoint} holds no optimizer state (saved with save_only_model?): training goes on with a fresh "
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
        if engine is None or best is None or not is_ours_everywhere(engine.wire, best):
            return super()._load_best_model()
        return load_weights(Loading(engine.wire, best), engine)

    # -- the Hub --

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock Trainer's, with hf_zero's model card. On every rank."""
        self._zero_wait_for_save()
        with on_all_ranks(open_wire(home_device()), "pushing to the Hub"):
            if self.is_world_process_zero():
                if self.hub_model_id is None:
                    self.init_hf_repo(token=kwargs.get("token"))
                check_kind(self, kwargs.get("token"), kwargs.get("revision"))
        with uploading():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._zero_saving is not None:
            self._zero_push = True  # when it is there
            return None
        if self.is_world_process_zero():
            # The stock code copies the checkpoint's weights over those that this would describe.
            (self._zero_output / MANIFEST).unlink(missing_ok=True)
        with uploading():
            return super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """hf_zero's card, of what is in `output_dir`: data, metrics, stage, memory, how to load. A subclass's own stays."""
        folder, facts = self._zero_output, self._zero_facts
        stock: Any = super().create_model_card
        if facts is None or stock.__func__ is not Trainer.create_model_card:
            stock(*args, **kwargs)
        elif self.is_world_process_zero():
            write_card(self, folder, inspect.signature(Trainer.create_model_card).bind(self, *args, **kwargs).arguments)


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """The Trainer for sharded models. A stock `Trainer` with a `ZeroPlugin` in its arguments becomes one by itself."""


def zero_trainer_cls(cls: type[Any]) -> type[Any]:
    """`zero_trainer_cls(SFTTrainer)`: the same Trainer, for sharded models."""
    return ZeroTrainer if cls is Trainer else put_in_front(ZeroTrainerMixin, cls)


def adopt_trainer() -> None:
    """Called where an Accelerator is built or shards a model: a Trainer that has it done learns to save and resume.

    accelerate hands the plugin its Accelerator but not who builds it. A Trainer does so in a method of transformers, so
    it is the `self` of a caller there. Without one (a plain accelerate loop) nothing happens.
    """
    owner = calling_trainer()
    if owner is not None:
        _check_arguments(owner.args)
        if not isinstance(owner, ZeroTrainerMixin):
            owner.__class__ = zero_trainer_cls(type(owner))


def _check_arguments(args: TrainingArguments) -> None:
    refuse(TRAINING_ARGUMENTS, args)
    if args.n_gpu > 1:
        # One process that sees several GPUs: the Trainer would wrap the model in nn.DataParallel.
        warnings.warn(
            f"one process sees {args.n_gpu} GPUs and will use the first; start one process per GPU with "
            "`accelerate launch` or `torchrun` to use them all",
            stacklevel=2,
        )
        args._n_gpu = 1
