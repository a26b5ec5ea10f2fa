"""The stock Trainer on two ranks: one argument more than plain data parallel; what it saves, loads and logs.

Each check asserts by itself; `test_trainer.py` has the list of their names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    OUT,
    Tokens,
    barrier,
    bert,
    check,
    distance,
    fresh,
    gpt2,
    raised,
    watch,
)
from torch import Tensor, nn
from trainer_runs import (
    STEPS,
    arguments,
    assert_curve,
    assert_error,
    bf16,
    curve,
    equals_data_parallel,
    one_argument,
    resume,
    resume_into_a_sharded_model,
    saved,
    trainer,
    whole_run,
)
from trainer_saves import (
    behind,
    born,
    crash,
    damaged,
    damaged_best,
    fails_behind,
    nothing_left,
    plain_from_ours,
    rotation,
    save_only_model,
    two_nodes,
)
from transformers import (
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import EvalPrediction

import hf_zero as zero


def evaluates_a_checkpoint() -> None:
    """Weights of a checkpoint without training: into a model that is sharded for it, and into one that was before."""
    folder = str(OUT / "stage3" / "checkpoint-8")
    expected = trainer("eval_8", None, model=gpt2().from_pretrained(folder)).evaluate()["eval_loss"]
    run = trainer("eval_8", 3, seed=99)
    run._load_from_checkpoint(folder)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def trains_twice() -> None:
    out = {}
    for name, stage in (("twice_ddp", None), ("twice", 3)):
        run = trainer(name, stage, save_strategy="no")
        run.train()
        run.args.max_steps = STEPS
        run.train()
        out[name] = curve(run)
    assert_curve(out["twice"], out["twice_ddp"])


class Plain(nn.Module):
    """Not a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            out = {"loss": out["loss"], "logits": logits}
        return out


def plain_module() -> None:
    """A model that transformers knows nothing about saves and resumes too."""
    out: dict[str, Any] = {}
    for name, stage in (("plain_ddp", None), ("plain", 3)):
        run = trainer(name, stage, model=Plain())
        run.train()
        out[name] = curve(run)
        barrier()
    assert_curve(out["plain"], out["plain_ddp"])
    assert distance(saved(OUT / "plain" / "checkpoint-8"), saved(OUT / "plain_ddp" / "checkpoint-8")) < 1e-5
    again = trainer("plain_again", 3, model=Plain())
    again.train(resume_from_checkpoint=str(OUT / "plain" / "checkpoint-4"))
    assert distance(saved(OUT / "plain_again" / "checkpoint-8"), saved(OUT / "plain" / "checkpoint-8")) == 0.0


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def classification() -> None:
    """BERT with a metric, the best checkpoint by it, and `ZeroTrainingArguments`."""
    out: dict[str, Any] = {}
    for name, stage in (("bert_ddp", None), ("bert", 3)):
        fresh()
        changes: dict[str, Any] = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
        kind = TrainingArguments if stage is None else zero.ZeroTrainingArguments
        if stage is not None:
            changes["zero_stage"] = stage
        run = Trainer(
            model=bert(),
            args=arguments(name, kind, **changes),
            train_dataset=Tokens(classes=3),
            eval_dataset=Tokens(rows=8, classes=3, seed=8),
            compute_metrics=accuracy,
        )
        run.train()
        found = run.predict(Tokens(rows=7, classes=3, seed=9))
        run.save_model()
        barrier()
        out[name] = {
            "curve": curve(run),
            "accuracy": [entry["eval_accuracy"] for entry in run.state.log_history if "eval_accuracy" in entry],
            "rows": len(found.predictions),
            "best": Path(run.state.best_model_checkpoint or "").name,
        }
    mine, reference = out["bert"], out["bert_ddp"]
    assert_curve(mine.pop("curve"), reference.pop("curve"))
    assert mine == reference
    assert distance(saved(OUT / "bert"), saved(OUT / "bert_ddp")) < 1e-5


def evaluates_only(stage: int) -> None:
    """No training at all: the same loss, and the weights saved are those that came in."""
    plain = trainer("eval_ddp", None).evaluate()["eval_loss"]
    run = trainer(f"eval{stage}", stage)
    loss = run.evaluate()["eval_loss"]
    engine = zero.engine_of(run.model)
    sent = {} if engine is None else {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}
    run.save_model()
    assert engine is None or sent == {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}, (
        "nothing is gathered to save"
    )
    assert (engine is not None) is (stage == 3), "sharding saves memory in evaluation only where parameters are sharded"
    assert loss == pytest.approx(plain, rel=1e-6)
    expected = {k: v for k, v in gpt2().state_dict().items() if k != "lm_head.weight"}
    assert distance(saved(OUT / f"eval{stage}"), expected) == 0.0


def save_fails() -> None:
    run = trainer("fails", 3, save_strategy="no", max_steps=1)
    run.train()
    (OUT / "a_file").write_text("not a folder")
    barrier()
    assert_error(raised(lambda: run.save_model(str(OUT / "a_file" / "model"))), "CheckpointError", "a_file")


def refused(error: str, text: str, *, trains: bool = False, stage: int | None = 3, **changes: Any) -> None:
    """A wrong combination, on two ranks: when the Trainer is built, or when it trains."""

    def work() -> None:
        run = trainer("refuse", stage, **changes)
        if trains:
            run.train()

    assert_error(raised(work), error, text)


def main() -> None:
    ddp = check("ddp", lambda: whole_run("ddp", None))
    whole = {stage: check(f"stage {stage}", partial(one_argument, stage, ddp)) for stage in range(4)}
    check("resume 3", lambda: resume("resume3", "stage3", 3, whole[3], 0.0))
    check("resume 1 from 3", lambda: resume("resume13", "stage3", 1, whole[3], 1e-5))
    check("zero from ddp", lambda: resume("zero_from_ddp", "ddp", 3, ddp, 1e-5))
    check("plain from ours", plain_from_ours)
    check("trainer class", lambda: equals_data_parallel("subclass", 2, ddp, kind=zero.ZeroTrainer))
    check("resume into a sharded model", resume_into_a_sharded_model)
    check("rotation", rotation)
    check("damaged best", damaged_best)
    check("two nodes", two_nodes)
    check("born", partial(born, "stage3"))
    check("damaged", partial(damaged, "stage3"))
    check("nothing left", partial(nothing_left, "stage3"))
    for async_save in (False, True):
        check(f"crash {async_save}", partial(crash, async_save))
    check("behind", behind)
    check("fails behind", fails_behind)
    check("evaluate a checkpoint", evaluates_a_checkpoint)
    check("save_only_model", save_only_model)
    check("bf16", bf16)
    check("twice", trains_twice)
    check("plain module", plain_module)
    check("classification", classification)
    for stage in (1, 3):
        check(f"evaluate only {stage}", partial(evaluates_only, stage))
    check("save fails", save_fails)
    check("no plugin", lambda: refused("ConfigError", "needs a ZeroPlugin", stage=None, kind=zero.ZeroTrainer))
    quiet: dict[str, Any] = {"trains": True, "save_strategy": "no"}
    lone = partial(refused, stage=None, callbacks=[zero.ZeroCallback()], **quiet)
    check("callback without plugin", lambda: lone("ConfigError", "model that is not sharded"))
    adafactor = check("ddp adafactor", lambda: whole_run("ddp_adafactor", None, optim="adafactor"))
    check("adafactor", lambda: equals_data_parallel("adafactor", 3, adafactor, 2e-4, optim="adafactor"))


if __name__ == "__main__":
    watch()
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
