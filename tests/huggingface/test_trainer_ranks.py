"""The stock Trainer on two ranks: one argument more than plain data parallel."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalPrediction

import hf_zero as zero
from tests.huggingface.trainer_runs import (
    STEPS,
    assert_curve,
    bf16,
    curve,
    equals_data_parallel,
    folders_in,
    one_argument,
    resume,
    resume_into_a_sharded_model,
    saved,
    trainer,
    whole_run,
)
from tests.kit.jobs.harness import (
    RANK,
    Tokens,
    assert_refused,
    barrier,
    bert,
    distance,
    gpt2,
)


def evaluates_a_checkpoint() -> None:
    """Weights of a checkpoint without training: into a model that is sharded for it, and into one that was before."""
    folder = "stage3/checkpoint-8"
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
    """Not a transformers model. Between forwards its ranks have other means; each evaluates with its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            out = {"loss": out["loss"], "logits": logits}
        return out


def plain_module() -> None:
    """A model that transformers knows nothing about saves and resumes too."""
    out: dict[str, Any] = {}
    for name, stage in (("plain_ddp", None), ("plain", 3)):
        run, said = trainer(name, stage, model=Plain()), io.StringIO()
        with contextlib.redirect_stdout(said):
            run.train()
        out[name] = curve(run)
        barrier()
    tells_the_tokens_of_all_ranks(run, said.getvalue())
    assert_curve(out["plain"], out["plain_ddp"])
    assert distance(saved(Path("plain", "checkpoint-8")), saved(Path("plain_ddp", "checkpoint-8"))) < 1e-5
    again = trainer("plain_again", 3, model=Plain())
    again.train(resume_from_checkpoint="plain/checkpoint-4")
    assert distance(saved(Path("plain_again", "checkpoint-8")), saved(Path("plain", "checkpoint-8"))) == 0.0


def tells_the_tokens_of_all_ranks(run: Trainer, said: str) -> None:
    """In the last log and in the closing lines: medians of this rank's steps, times the number of ranks."""
    path = Path(run.args.output_dir, f"zero_steps{f'.rank{RANK}' if RANK else ''}.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step" and each["step"] > 1 and not each["evaluations"]]
    rate = 2 * median(each["tokens"] for each in steps) / median(each["seconds"] for each in steps)
    rates = [entry["zero/tokens_per_s"] for entry in run.state.log_history if "zero/tokens_per_s" in entry]
    assert rates[-1] == pytest.approx(rate)
    assert (f" {rate:,.0f} tokens/s" in " ".join(said.split())) == (RANK == 0)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def classification() -> None:
    """BERT with a metric, and the best checkpoint by it."""
    out: dict[str, Any] = {}
    for name, stage in (("bert_ddp", None), ("bert", 3)):
        given = {"data": (Tokens(classes=3), Tokens(rows=8, classes=3, seed=8)), "metrics": accuracy}
        best = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
        run = trainer(name, stage, model=bert(), **given, **best)
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
    assert distance(saved(Path("bert")), saved(Path("bert_ddp"))) < 1e-5


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
    assert distance(saved(Path(f"eval{stage}")), expected) == 0.0


def save_fails() -> None:
    run = trainer("fails", 3, save_strategy="no", max_steps=1, optim="adafactor")
    run.train()
    Path("no_folder").write_text("not a folder")
    barrier()
    assert_refused(lambda: run.save_model("no_folder/model"), "no_folder", kind="CheckpointError")


def merges_an_adapter() -> None:
    """PEFT adds an adapter to the whole float32 weight, and takes it out again, though a block computes in bfloat16."""
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = get_peft_model(gpt2(), config)
    trainer("merges", 3, model=model, bf16=True, max_steps=1, eval_strategy="no", save_strategy="no").train()
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    weight, first, second = layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight
    before, delta = zero.full_parameter(weight), 4 * (zero.full_parameter(second) @ zero.full_parameter(first)).T
    assert delta.abs().max() > 0.1
    model.merge_adapter()
    torch.testing.assert_close(zero.full_parameter(weight), before + delta, rtol=0, atol=1e-6)
    model.unmerge_adapter()
    torch.testing.assert_close(zero.full_parameter(weight), before, rtol=0, atol=1e-6)


class Signal(TrainerCallback):
    """SIGTERM to rank 1, between two micro-batches of step 3."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def ends_by_a_signal(stage: int) -> None:
    """`enable_jit_checkpoint=True`: one rank alone is told to end; both save the same step, and training goes on."""
    before, folder, settings = signal.getsignal(signal.SIGTERM), Path(f"cut{stage}"), {"enable_jit_checkpoint": True}
    whole = trainer(f"uncut{stage}", stage, save_strategy="no", **settings)
    whole.train()
    cut = trainer(folder.name, stage, save_steps=100, callbacks=[Signal()], **settings)
    cut.train()
    assert cut.state.global_step == 3, cut.state.global_step
    assert signal.getsignal(signal.SIGTERM) is before
    barrier()
    assert folders_in(folder) == {"checkpoint-3"}
    zero.verify(folder / "checkpoint-3")
    again = trainer(folder.name, stage, save_strategy="no", **settings)
    again.train(resume_from_checkpoint=True)
    for run in (whole, again):
        assert run.state.global_step == STEPS
        run.save_model(f"{run.args.output_dir}/final")
    assert distance(saved(Path(f"uncut{stage}", "final")), saved(folder / "final")) == 0.0


WORK: dict[str, Callable[[], None]] = {
    **{f"stage {stage}": partial(one_argument, stage) for stage in range(4)},
    "resume 3": partial(resume, "resume3", 3, "stage3", 3, 0.0),
    "resume 1 from 3": partial(resume, "resume13", 1, "stage3", 3, 1e-5),
    "zero from ddp": partial(resume, "zero_from_ddp", 3, "ddp", None, 1e-5),
    "trainer class": partial(equals_data_parallel, "subclass", 2, kind=zero.ZeroTrainer),
    "resume into a sharded model": resume_into_a_sharded_model,
    "evaluate a checkpoint": evaluates_a_checkpoint,
    "bf16": bf16,
    "twice": trains_twice,
    "plain module": plain_module,
    "classification": classification,
    **{f"evaluate only {stage}": partial(evaluates_only, stage) for stage in (1, 3)},
    "save fails": save_fails,
    "merge": merges_an_adapter,
    "adafactor": partial(equals_data_parallel, "adafactor", 3, "ddp_adafactor", 2e-4, optim="adafactor"),
    **{f"signal {stage}": partial(ends_by_a_signal, stage) for stage in (2, 3)},
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])


class Start(TrainerCallback):
    """What training starts from."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}
        self.optimizer = kwargs["optimizer"].state_dict()


def stage_3() -> tuple[Path, list[float]]:
    return Path("stage3", "checkpoint-4").resolve(), whole_run("stage3", 3)["curve"]["loss"]


@pytest.mark.gloo
def test_resume_on_one_rank(on_two: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written by two ranks; this process resumes alone, at another stage, with the same rows in a step."""
    (folder, losses), start = on_two(stage_3), Start()
    shutil.copytree(folder, tmp_path / folder.name)
    run = trainer(str(tmp_path), 1, seed=4, max_steps=6, save_strategy="no", callbacks=[start])
    run.train(resume_from_checkpoint="latest")
    assert "1 rank(s) share the 8 rows of a step: 2 per rank, 4 times per step" in capsys.readouterr().err
    assert curve(run)["loss"] == pytest.approx(losses[:6], rel=1e-5)
    start.weights.pop("lm_head.weight")
    assert distance(start.weights, load_file(folder / "model.safetensors")) == 0.0
    engine = zero.engine_of(run.model)
    names = [name for group in engine.optimizer_state(engine.optimizer).groups for name in group["params"]]
    for state in ("exp_avg", "exp_avg_sq"):
        mine = {names[number]: entries[state] for number, entries in start.optimizer["state"].items()}
        assert distance(mine, load_file(folder / "optimizer" / f"{state}.safetensors")) == 0.0
