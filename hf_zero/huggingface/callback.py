"""What a run tells of itself: measurements in its logs, a report, facts beside its weights, and the model card."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from ..checkpoint.hub import RunFacts, card_for
from ..errors import ConfigError
from ..runtime.engine import Engine, engine_of, on_preemption
from ..runtime.preemption import Preemption

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object


class MeasuredLogs(_TrainerBase):
    """A Trainer whose logs have what is measured before any reporter is called, whatever the order of its callbacks."""

    model: Any

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the stock Trainer's."""
        add_measured(engine_of(self.model), logs)
        super().log(logs, *args, **kwargs)


def add_measured(engine: Engine | None, logs: dict[str, Any]) -> dict[str, float]:
    """Beside the loss of training, what the engine measured since the log before; `{}` where nobody records."""
    if engine is None or engine.recorder is None or "loss" not in logs:
        return {}
    measured = {f"zero/{name}": value for name, value in engine.recorder.logs().items()}
    logs.update(measured)
    return measured


class ZeroCallback(TrainerCallback):
    """Measures every step, beside what was predicted: in the logs, in a file, in a table at the end. Needed for nothing else.

    Every log of training gets, beside the loss, `zero/device_gib`, `zero/host_gib`, `zero/disk_gib` (highest since the log
    before), `zero/step_s`, `zero/wait_s` and what else `Recorder.logs` has. Reporters see these whatever their order.

    Args:
        report: print the engine's report before and after training.
        record: append every step to `zero_steps.jsonl` in `output_dir` (other ranks: `zero_steps.rank1.jsonl`, …), which
            `hf-zero report OUTPUT_DIR` shows. With `push_to_hub` they are in `output_dir/_zero`, which is not pushed.

    Raises:
        ConfigError: at the start of training, when the model turns out not to be sharded.
    """

    def __init__(self, report: bool = True, record: bool = True) -> None:
        self.report = report
        self.record = record
        self._shown = False
        self._first_step = 0
        self._sent: dict[str, int] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = _engine_in(kwargs)
        if engine is None:
            raise ConfigError(
                "ZeroCallback found a model that is not sharded: pass ZeroTrainingArguments, or "
                "TrainingArguments(parallelism_config=ZeroPlugin(stage=3)), and build no other Accelerator between the "
                "arguments and the Trainer (accelerate would keep that one's settings)"
            )
        self._come_first()
        self._first_step, self._sent = state.global_step, _sent(engine)
        folder = Path(str(args.output_dir), "_zero" if args.push_to_hub else "")
        engine.record(folder if self.record else None, first_step=state.global_step)
        if self.report and state.is_world_process_zero and not self._shown:
            self._shown = True  # the Trainer starts again after auto_find_batch_size
            print(engine.report(), flush=True)

    def _come_first(self) -> None:
        """Where `MeasuredLogs` is not at work (a model sharded by hand), reporters read what `on_log` adds."""
        trainer = calling_trainer()
        if trainer is not None and not isinstance(trainer, MeasuredLogs):
            handler = trainer.callback_handler
            # A new list: the handler is going through the one it has.
            handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = _engine_in(kwargs)
        if engine is not None and engine.recorder is not None:
            engine.recorder.steps = state.global_step  # a step that a loss scaler skipped is the Trainer's, not ours

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        measured = add_measured(_engine_in(kwargs), kwargs["logs"])
        if measured and state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(measured)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = _engine_in(kwargs)
        if engine is None:
            return
        report, steps = engine.report(), state.global_step - self._first_step
        path = None if engine.recorder is None else engine.recorder.path
        if engine.recorder is not None:
            engine.recorder.close()
        if not self.report or not state.is_world_process_zero:
            return
        sent = {kind: bytes_ - self._sent.get(kind, 0) for kind, bytes_ in _sent(engine).items()}
        print(
            f"ZeRO stage {report.stage}, {report.world_size} rank(s), {steps} step(s). On this rank now: "
            f"{_mib(sum(report.measured.values()))} of parameters, gradients and optimizer state (predicted "
            f"{_mib(report.predicted.total)}, plain data parallel {_mib(report.data_parallel.total)}). Sent: "
            + (", ".join(f"{_mib(bytes_)} by {kind}" for kind, bytes_ in sent.items() if bytes_) or "nothing")
            + (f"; {_mib(sum(sent.values()) / steps)} per step, evaluations and saves included." if steps else "."),
            flush=True,
        )
        print(report.comparison(), flush=True)
        if path is not None:
            print(f"hf-zero report {path.parent} shows every step", flush=True)


class PreemptionCallback(TrainerCallback):
    """`enable_jit_checkpoint=True`: SIGTERM or SIGUSR1 on any rank ends training with a checkpoint of the step under way.

    In the place of transformers' own callback, in which each rank decides by its own clock when it saves: ranks in different
    steps would wait for each other.
    """

    def __init__(self) -> None:
        self._ends: Preemption | None = None

    @classmethod
    def take_over(cls, callbacks: list[TrainerCallback]) -> None:
        """Where transformers' is among `callbacks`."""
        for at, callback in enumerate(callbacks):
            if isinstance(callback, JITCheckpointCallback):
                if callback.jit_manager is not None:
                    signal.signal(signal.SIGTERM, callback.jit_manager._original_sigterm_handler or signal.SIG_DFL)
                callbacks[at] = cls()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = _engine_in(kwargs)
        self._ends = None if engine is None else on_preemption(engine)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._ends is not None and self._ends():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # what sent the signal does not wait for long

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ends is not None and self._ends():
            control.should_save = control.should_evaluate = False  # it is saved already

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ends is not None:
            self._ends.close()


def _engine_in(event: dict[str, Any]) -> Engine | None:
    """Of the model that an event is about."""
    model = event.get("model")
    return None if model is None else engine_of(model)


def _sent(engine: Engine) -> dict[str, int]:
    return {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}


def _mib(bytes_: float) -> str:
    return f"{bytes_ / (1 << 20):,.1f} MiB"


def calling_trainer() -> Trainer | None:
    """The Trainer that this is called from, if any: the `self` of the innermost caller in transformers' own module."""
    frame: FrameType | None = sys._getframe(1)
    # Only frames of transformers are looked into: up to Python 3.12 a look at a frame's locals keeps them alive with it.
    while frame is not None and frame.f_globals.get("__name__") != Trainer.__module__:
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    return owner if isinstance(owner, Trainer) else None


# What is kept beside the weights ------------------------------------------------------------------------------------


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
    """A collective: memory is that of the highest rank."""
    report, args = engine.report(), trainer.args
    everyone: list[dict[str, int]] = engine.exchange(dict(report.measured))
    base = getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    unused = "num_train_epochs" if args.max_steps > 0 else "max_steps"
    chosen = {
        name: getattr(args, name)
        for name in _HYPERPARAMETERS
        if name != unused and isinstance(getattr(args, name, None), (int, float))
    }
    predicted = {name: getattr(report.predicted, name) for name in ("parameters", "gradients", "optimizer")}
    return RunFacts(
        base_model=base if base and not Path(base).exists() else None,
        precision=report.precision,
        stage=report.stage,
        world_size=report.world_size,
        predicted_bytes=predicted,
        measured_bytes={name: max(theirs[name] for theirs in everyone) for name in report.measured},
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        hyperparameters={
            **chosen,
            "optim": str(getattr(args.optim, "value", args.optim)),
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        },
    )


def write_card(trainer: Trainer, folder: Path, asked: Mapping[str, Any]) -> None:
    """hf_zero's card of what is in `folder`; `asked` are the arguments of `create_model_card`."""
    given: dict[str, Any] = {
        "language": asked.get("language"),
        "license": asked.get("license"),
        "base_model": asked.get("finetuned_from"),
        "task": next(iter(_listed(asked.get("tasks"))), None),
        "datasets": _listed(asked.get("dataset_tags")) or _listed(asked.get("dataset")),
        "metrics": _last_metrics(trainer.state.log_history, trainer.state.global_step),
    }
    title = trainer.hub_model_id or asked.get("model_name")
    card = card_for(folder, model_id=title, **{name: value for name, value in given.items() if value})
    data: Any = card.data
    data.tags = list(dict.fromkeys([*(data.tags or []), *_listed(asked.get("tags"))]))
    card.save(folder / "README.md")


def _last_metrics(log: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Those of the evaluation of these weights."""
    found = [entry for entry in log if entry.get("step") == step and "eval_loss" in entry]
    timing = ("runtime", "per_second", "time")
    return {
        name: float(value)
        for name, value in (found[-1] if found else {}).items()
        if name.startswith("eval_") and isinstance(value, (int, float)) and not name.endswith(timing)
    }


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
