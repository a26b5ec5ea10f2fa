"""ZeroCallback: measurements in logs, the start screen and the closing lines; facts saved with weights; the model card."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from ..checkpoint.cards import CARD, RunFacts, card_for, is_machine_written, metrics_at, read_card, sealed
from ..checkpoint.files import is_number
from ..compat.preemption import Preemption, on_preemption
from ..config import size_text
from ..diagnostics.usage import measure
from ..errors import ConfigError
from ..params.engine import Engine, engine_of
from ..plan.costs import TIERS
from ..plan.machine import free_memory
from ..plan.report import end, start
from ..plan.solve import TIERS_OF_LIMIT
from ..tiers.tier import Tier
from .arguments import ONE_RANK
from .patches import show

PREFIX = "zero/"
"""Prefix of the engine's measurements in a log."""


_FIRST_IN_LINE = {
    "loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "learning_rate": "lr {:.2e}",
    f"{PREFIX}tokens_per_s": "tokens/s {:,.0f}",
    f"{PREFIX}device_gib": "memory {}",
    "epoch": "epoch {:.2f}",
}


def log_line(logs: Mapping[str, Any], state: TrainerState) -> str:
    """Return one line for a log: step, loss, gradient norm, learning rate, tokens/s, memory, epoch, other numbers."""
    parts = [f"step {state.global_step:,}/{state.max_steps:,}"]
    for name, text in _FIRST_IN_LINE.items():
        value = logs.get(name)
        if name.endswith("_gib") and value is not None:
            parts.append(text.format(size_text(value * 2**30)))
        elif is_number(value):
            parts.append(text.format(value))
    for name, value in logs.items():
        if not name.startswith(PREFIX) and not (name in _FIRST_IN_LINE and is_number(value)):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(parts)


def _print_log(callback: TrainerCallback, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
    """Replace `on_log` of callbacks that print logs: print one compact line. Subclasses get a log without measurements."""
    if type(callback) not in (ProgressCallback, PrinterCallback):
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith(PREFIX)}
        type(callback).on_log(callback, args, state, control, logs=shown, **kwargs)
    elif state.is_world_process_zero and logs:
        show(log_line(logs, state))


class ZeroCallback(TrainerCallback):
    """Measure every step: in the logs, in a file, and in a few lines on the screen.

    A Trainer whose arguments have a `ZeroPlugin` adds one by itself; pass your own to change its settings. Every training log
    gets `zero/device_gib`, `zero/host_gib`, `zero/disk_gib` (peaks since the previous log), `zero/step_s`, `zero/wait_s`,
    `zero/tokens_per_s` (all ranks) and everything else in `Recorder.logs`. Reporters (TensorBoard, W&B, …) get them as well,
    because this callback runs before all others. The main process prints one line per log: step, loss, gradient norm,
    learning rate, tokens/s, memory.

    Args:
        report: print one screen before training and a few lines after it, on the main process.
        record: append every step to `zero_steps.jsonl` in `output_dir` (other ranks: `zero_steps.rank1.jsonl`, …) for
            `hf-zero report OUTPUT_DIR`. With `push_to_hub` the files are in `output_dir/_zero`, which is not pushed.
        verbose: also print the engine's whole report, before and after training.

    Raises:
        ConfigError: training starts with a model that is not sharded.

    Example:
        >>> Trainer(model, args, callbacks=[zero.ZeroCallback(report=False)])
    """

    def __init__(self, report: bool = True, record: bool = True, verbose: bool = False) -> None:
        self.report = report
        self.record = record
        self.verbose = verbose
        self._shown = False
        """The start screen was printed: auto_find_batch_size restarts training."""
        self._saved_at: int | None = None
        """The step of the last save of this training."""
        self._first_step = 0
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = _engine_in(kwargs)
        if engine is None:
            raise ConfigError(
                "ZeroCallback found a model that is not sharded: pass ZeroTrainingArguments, or "
                "TrainingArguments(parallelism_config=ZeroPlugin(stage=3)), and build no other Accelerator between the "
                "arguments and the Trainer (accelerate would keep that one's settings)"
            )
        trainer = calling_trainer()
        if trainer is not None:
            self._move_to_front(trainer)
        self._first_step, self._began, self._saved_at = state.global_step, time.perf_counter(), None
        folder = Path(str(args.output_dir), "_zero" if args.push_to_hub else "")
        about = {"max_steps": state.max_steps, "batch_per_rank": rows_of(args, state)}
        engine.record(folder if self.record else None, first_step=state.global_step, about=about)
        if self.report and state.is_world_process_zero and not self._shown:
            self._shown = True
            show(self._start_text(engine, args, state, trainer))
            if self.verbose:
                show(str(engine.report()))

    def _start_text(self, engine: Engine, args: TrainingArguments, state: TrainerState, trainer: Any) -> str:
        sharers = "rank" if engine.config.sp_size == 1 else f"group of {engine.config.sp_size} ranks"
        batch = f"{rows_of(args, state)} rows per {sharers}"
        if args.gradient_accumulation_steps > 1:
            batch += f", {args.gradient_accumulation_steps} times per step"
        about = {"precision": str(engine.precision), "training": f"{state.max_steps:,} steps of {batch}"}
        if state.global_step:
            folder = getattr(trainer, "_zero_resumed", None)
            about["resumed"] = f"after step {state.global_step:,}" + (f", from {folder}" if folder else "")
        if engine.wire.size == 1 and not engine.config.offloads:
            about["ranks"] = ONE_RANK
        return start(engine.report(), type(engine.model).__name__, _limits(engine), about)

    def _move_to_front(self, trainer: Trainer) -> None:
        """Run before all other callbacks, so that they find measurements in logs, and shorten printed logs."""
        handler = trainer.callback_handler
        for callback in handler.callbacks:
            if isinstance(callback, (ProgressCallback, PrinterCallback)):
                callback.__dict__["on_log"] = partial(_print_log, callback)
        # A new list, because the handler is iterating over the old one.
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = _engine_in(kwargs)
        if engine is not None and engine.recorder is not None:
            engine.recorder.steps = state.global_step  # the Trainer also counts steps that a loss scaler skipped

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the measurements since the previous training log to this log, which all later callbacks get."""
        engine, logs = _engine_in(kwargs), kwargs["logs"]
        if engine is None or engine.recorder is None:
            return
        if "loss" in logs:
            measured = {f"{PREFIX}{name}": value for name, value in engine.recorder.logs().items()}
            _, tokens = engine.recorder.throughput()
            if measured and tokens:
                measured[f"{PREFIX}tokens_per_s"] = tokens * engine.wire.size
            logs.update(measured)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(measured)
        if state.is_world_process_zero:
            numbers = {name: float(value) for name, value in logs.items() if is_number(value)}
            engine.recorder.log({name: value for name, value in numbers.items() if not name.startswith(PREFIX)})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_at = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shown = False
        engine = _engine_in(kwargs)
        if engine is None:
            return
        report, recorder = engine.report(), engine.recorder
        path = None if recorder is None else recorder.path
        samples, tokens = (0.0, 0.0) if recorder is None else recorder.throughput()
        throughput = samples * report.world_size, tokens * report.world_size
        if recorder is not None:
            recorder.close()
        if not self.report or not state.is_world_process_zero:
            return
        saved = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        steps, seconds = state.global_step - self._first_step, time.perf_counter() - self._began
        folder = None if path is None else path.parent
        there = saved if self._saved_at == state.global_step and saved.is_dir() else None
        show(end(report, steps, seconds, throughput, folder, there))
        if self.verbose:
            show(report.comparison())


def rows_of(args: TrainingArguments, state: TrainerState) -> int:
    """Return the rows of a micro-batch; `auto_find_batch_size` may have chosen fewer than the arguments ask for."""
    return (state.train_batch_size if args.auto_find_batch_size else None) or args.per_device_train_batch_size


class PreemptionCallback(TrainerCallback):
    """`enable_jit_checkpoint=True`: SIGTERM or SIGUSR1 on any rank ends training with a checkpoint of the running step.

    Replaces transformers' callback, in which each rank decides alone when to save: ranks in different steps would
    deadlock.
    """

    def __init__(self) -> None:
        self._ends: Preemption | None = None

    @classmethod
    @contextmanager
    def installed(cls, callbacks: list[TrainerCallback]) -> Iterator[None]:
        """Replace transformers' callback in `callbacks` by this one, and restore signal handlers after training.

        Handlers are restored after an exception as well, which the stock code reports to no callback.
        """
        for at, callback in enumerate(callbacks):
            if isinstance(callback, JITCheckpointCallback):
                if callback.jit_manager is not None:
                    signal.signal(signal.SIGTERM, callback.jit_manager._original_sigterm_handler or signal.SIG_DFL)
                callbacks[at] = cls()
        try:
            yield
        finally:
            for callback in callbacks:
                if isinstance(callback, cls):
                    callback._close()

    def _close(self) -> None:
        if self._ends is not None:
            self._ends.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = _engine_in(kwargs)
        self._ends = None if engine is None else on_preemption(engine)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends is not None and self._ends():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the sender of the signal does not wait long

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ends is not None and self._ends():
            control.should_save = control.should_evaluate = False  # it is saved already


def _limits(engine: Engine) -> dict[str, tuple[int, str]]:
    """Return this rank's limit for each tier: a configured budget, else free memory plus the engine's own."""
    context = engine.context
    held = sum(sum(kinds.values()) for tier, kinds in measure(engine).items() if tier != Tier.DISK.value)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun and accelerate launch
    machine = free_memory(context.device, ranks=ranks, offload_dir=context.config.offload_dir, held_bytes=held)
    free = zip(TIERS, (machine.device_memory, machine.host_memory, machine.disk_free))
    found = {tier.value: (size, "free") for tier, size in free if size}
    budgets = context.plan.inputs.budgets.items()
    return found | {tier.value: (limit, "budget") for name, limit in budgets for tier in TIERS_OF_LIMIT[name]}


def _engine_in(event: dict[str, Any]) -> Engine | None:
    """Return the engine of the event's model."""
    model = event.get("model")
    return None if model is None else engine_of(model)


def calling_trainer() -> Trainer | None:
    """Return the Trainer that calls this, if any: `self` of the innermost frame in `transformers.trainer`.

    accelerate passes the plugin its Accelerator, and no library passes either of them the Trainer.
    """
    frame: FrameType | None = sys._getframe(1)
    # Read the locals of that frame only: up to Python 3.12 reading them keeps them alive with the frame.
    while frame is not None and frame.f_globals.get("__name__") != Trainer.__module__:
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    return owner if isinstance(owner, Trainer) else None


# Run facts and the model card -----------------------------------------------------------------------------------------


_HYPERPARAMETERS = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "seed",
)


def facts_of(trainer: Trainer, engine: Engine) -> RunFacts:
    """Return the facts about a run that its checkpoints record."""
    args = trainer.args
    base = getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    unused = "num_train_epochs" if args.max_steps > 0 else "max_steps"
    chosen = {
        name: getattr(args, name)
        for name in _HYPERPARAMETERS
        if name != unused and isinstance(getattr(args, name, None), (int, float))
    } | {"per_device_train_batch_size": rows_of(args, trainer.state)}
    return RunFacts(
        base_model=base if base and not Path(base).exists() else None,
        precision=str(engine.precision),
        stage=engine.config.stage,
        world_size=engine.world_size,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        hyperparameters={
            **chosen,
            "optim": str(getattr(args.optim, "value", args.optim)),
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        },
    )


def write_card(trainer: Trainer, folder: Path, asked: Mapping[str, Any]) -> None:
    """Write the model card of `folder`, unless a user wrote one.

    Args:
        asked: the arguments of `create_model_card`.
    """
    path = folder / CARD
    if path.is_file() and not is_machine_written(read_card(path)):
        return
    given: dict[str, Any] = {
        "language": asked.get("language"),
        "license": asked.get("license"),
        "base_model": asked.get("finetuned_from"),
        "task": next(iter(_listed(asked.get("tasks"))), None),
        "datasets": _listed(asked.get("dataset_tags")) or _listed(asked.get("dataset")),
        "metrics": metrics_at(trainer.state.log_history, trainer.state.global_step),
    }
    title = trainer.hub_model_id or asked.get("model_name")
    card = card_for(folder, model_id=title, **{name: value for name, value in given.items() if value})
    data: Any = card.data
    data.tags = list(dict.fromkeys([*(data.tags or []), *_listed(asked.get("tags"))]))
    path.write_text(sealed(card), encoding="utf-8")


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
