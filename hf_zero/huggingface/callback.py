"""transformers: arguments, callback, and what a Trainer does differently when its model is sharded.

A stock `Trainer` whose `TrainingArguments` carry a `ZeroPlugin` needs nothing more. While it builds its Accelerator the
plugin finds it (`adopt_trainer`) and puts `ZeroTrainerMixin` in front of its class, as it does with the Accelerator
itself; `ZeroTrainer` and `zero_trainer_cls` are the same thing said out loud. Nothing of transformers is patched.

What such a Trainer does differently is in `trainer`: files. A checkpoint is a `from_pretrained` folder with the optimizer's
state beside it, readable at any stage and number of ranks by every Trainer that has the plugin, as are those of plain data
parallel. The other way only the weights go: plain data parallel stops at the `optimizer.pt` that it does not find.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import ZeroConfig, setting
from ..errors import ConfigError
from ..runtime.engine import Engine, engine_of
from .facts import add_measured
from .plugin import ZeroPlugin, put_in_front
from .trainer import ZeroTrainerMixin, check_arguments

# ---- arguments -------------------------------------------------------------------------------------------------------


@dataclass
class ZeroFlags:
    """Every field of `ZeroConfig` as `zero_<field>`, for `HfArgumentParser`: what may be text is typed as text."""

    zero_stage: int = setting("stage")
    zero_reduce_dtype: str | None = setting("reduce_dtype")
    zero_full_precision: str = setting("full_precision")
    zero_async_save: bool = setting("async_save")
    zero_offload_optimizer: str = setting("offload_optimizer")
    zero_offload_params: str = setting("offload_params")
    zero_offload_dir: str | None = setting("offload_dir")
    zero_device_memory: str | None = setting("device_memory")
    zero_host_memory: str | None = setting("host_memory")
    zero_step_in_backward: bool = setting("step_in_backward")
    zero_stall_s: float = setting("stall_s")

    def settings(self) -> dict[str, Any]:
        """By field of `ZeroConfig`, for `ZeroPlugin(**settings)`."""
        return {item.name: getattr(self, f"zero_{item.name}") for item in fields(ZeroConfig)}


@dataclass
class ZeroTrainingArguments(ZeroFlags, TrainingArguments):
    """`TrainingArguments` with every field of `ZeroConfig` as `zero_<field>`; for code and for `HfArgumentParser`.

    Raises:
        ConfigError: a bad value, or DeepSpeed, FSDP or another parallelism_config in the same arguments.
    """

    def __post_init__(self) -> None:
        for name in ("deepspeed", "fsdp"):
            if getattr(self, name, None):
                raise ConfigError(
                    f"--{name} and --zero_* both shard the model: remove --{name}, or use plain TrainingArguments"
                )
        given = self.parallelism_config
        if given is not None and not isinstance(given, ZeroPlugin):
            raise ConfigError(f"ZeroTrainingArguments sets parallelism_config itself, found {given!r}: remove it")
        super().__post_init__()
        # After super(): it resets accelerate's state, so that an Accelerator from before cannot shadow the plugin.
        self.parallelism_config = ZeroPlugin(**self.settings())


ZeroTrainingArguments.__module__ = "hf_zero"  # as ZeroPlugin: training_args.bin names the place that stays


# ---- the trainer -----------------------------------------------------------------------------------------------------


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
    owner = _calling_trainer()
    if owner is not None:
        check_arguments(owner.args)
        if not isinstance(owner, ZeroTrainerMixin):
            owner.__class__ = zero_trainer_cls(type(owner))


def _calling_trainer() -> Trainer | None:
    frame: FrameType | None = sys._getframe(1)
    # Only frames of transformers are looked into: up to Python 3.12 a look at a frame's locals keeps them alive with it.
    while frame is not None and frame.f_globals.get("__name__") != Trainer.__module__:
        frame = frame.f_back
    owner = None if frame is None else frame.f_locals.get("self")
    return owner if isinstance(owner, Trainer) else None


# ---- the callback ----------------------------------------------------------------------------------------------------


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
        """Where `ZeroTrainerMixin.log` is not at work (a model sharded by hand), reporters read what `on_log` adds."""
        trainer = _calling_trainer()
        if trainer is not None and not isinstance(trainer, ZeroTrainerMixin):
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


def _engine_in(event: dict[str, Any]) -> Engine | None:
    """Of the model that an event is about."""
    model = event.get("model")
    return None if model is None else engine_of(model)


def _sent(engine: Engine) -> dict[str, int]:
    return {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}


def _mib(bytes_: float) -> str:
    return f"{bytes_ / (1 << 20):,.1f} MiB"


__all__ = ["ZeroCallback", "ZeroTrainer", "ZeroTrainerMixin", "ZeroTrainingArguments", "zero_trainer_cls"]
