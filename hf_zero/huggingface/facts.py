"""What a Trainer's run knows of itself: in its logs, beside its weights and in their model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer

from ..checkpoint.hub import RunFacts, card_for
from ..runtime.engine import Engine

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


def add_measured(engine: Engine | None, logs: dict[str, Any]) -> dict[str, float]:
    """Beside the loss of training, what the engine measured since the log before; `{}` where nobody records."""
    if engine is None or engine.recorder is None or "loss" not in logs:
        return {}
    measured = {f"zero/{name}": value for name, value in engine.recorder.logs().items()}
    logs.update(measured)
    return measured


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
