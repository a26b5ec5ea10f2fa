"""The stock Trainer on two ranks: one argument more than plain data parallel; what it saves, loads and logs."""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    OUT,
    RANK,
    Tokens,
    barrier,
    bert,
    check,
    distance,
    files_under,
    fresh,
    gpt2,
    raised,
    watch,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import EvalPrediction

import hf_zero as zero

STEPS = 8


def arguments(folder: str, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(OUT / folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        "optim": "adamw_torch",
    }
    return kind(**{**settings, **changes})


def trainer(
    folder: str,
    stage: int | None,
    seed: int = 0,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    **changes: Any,
) -> Trainer:
    """`stage=None` is plain data parallel. The one argument is `parallelism_config`."""
    fresh()
    callbacks = changes.pop("callbacks", None)
    if stage is not None:
        async_save = changes.pop("async_save", False)
        changes["parallelism_config"] = zero.ZeroPlugin(stage=stage, async_save=async_save)
    args = arguments(folder, **changes)
    return kind(
        model=gpt2(seed) if model is None else model,
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(rows=8, seed=8),
        callbacks=callbacks,
    )


def curve(run: Trainer) -> dict[str, list[float]]:
    return {
        name: [entry[name] for entry in run.state.log_history if name in entry]
        for name in ("loss", "grad_norm", "eval_loss", "learning_rate")
    }


def saved(folder: Path) -> dict[str, Tensor]:
    barrier()
    return load_file(folder / "model.safetensors")


def whole_run(name: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    """Evaluate, train with evaluations and saves, load the best, evaluate, predict, save."""
    if stage is None:
        # In accelerate 1.15 a Trainer that evaluates before it trains is never wrapped in DDP: its ranks drift apart.
        before = trainer(name, stage, **changes).evaluate()["eval_loss"]
    run = trainer(name, stage, load_best_model_at_end=True, save_total_limit=2, **changes)
    if stage is not None:
        before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    predictions = run.predict(Tokens(rows=8, seed=9)).predictions
    run.save_model()
    barrier()
    folder = OUT / name
    return {
        "before": before,
        "curve": curve(run),
        "after": after,
        "predictions": float(np.abs(predictions.astype(np.float64)).mean()),
        "files": files_under(folder, but=("training_args.bin",)),
        "best": Path(run.state.best_model_checkpoint or "").name,
        "class": type(run).__name__,
        "dtype": json.loads((folder / "config.json").read_text())["dtype"],
    }


def optimizer_at(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """`optimizer/` of ours, or `optimizer.pt` of plain data parallel, whose numbers count `names`."""
    if (folder / "optimizer").is_dir():
        files = sorted((folder / "optimizer").glob("*.safetensors"))
        return {f"{file.stem} {key}": value for file in files for key, value in load_file(file).items()}
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return {
        f"{key} {names[number]}": value
        for number, entries in state.items()
        for key, value in entries.items()
        if key != "step"
    }


def compare_saved(name: str, reference: str) -> dict[str, float]:
    out = {}
    for step in (4, 8):
        one, two = OUT / name / f"checkpoint-{step}", OUT / reference / f"checkpoint-{step}"
        out[f"weights {step}"] = distance(saved(one), saved(two))
        groups = json.loads((one / "optimizer" / "optimizer.json").read_text())["groups"]
        names = [param for group in groups for param in group["params"]]
        out[f"optimizer {step}"] = distance(optimizer_at(one, names), optimizer_at(two, names))
        zero.verify(one)
    out["final"] = distance(saved(OUT / name), saved(OUT / reference))
    zero.verify(OUT / name)
    model = AutoModelForCausalLM.from_pretrained(OUT / name)
    files = saved(OUT / name)
    out["reloaded"] = distance({key: model.state_dict()[key] for key in files}, files)
    return out


def resume(name: str, source: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    """From the middle checkpoint of `source`, with a model that starts elsewhere: the second half must be the same."""
    run = trainer(name, stage, seed=99, **changes)
    run.train(resume_from_checkpoint=str(OUT / source / "checkpoint-4"))
    barrier()
    return {
        "curve": curve(run),
        "weights": distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8")),
        "files": files_under(OUT / name / "checkpoint-8"),
    }


def resume_into_a_sharded_model() -> float:
    """The same Trainer trains, then starts again from its middle checkpoint."""
    run = trainer("again", 3)
    run.train()
    barrier()
    first = saved(OUT / "again" / "checkpoint-8")
    run.train(resume_from_checkpoint=str(OUT / "again" / "checkpoint-4"))
    return distance(saved(OUT / "again" / "checkpoint-8"), first)


def rotation() -> list[str]:
    """`save_total_limit`: the best and the last stay, what is not complete goes first."""
    folder = OUT / "rotation"
    if RANK == 0:
        (folder / "checkpoint-99").mkdir(parents=True)
        (folder / "checkpoint-99" / "config.json").write_text("{}")
        (folder / ".checkpoint-98.zero_saving").mkdir()  # of a job that was killed
    barrier()
    run = trainer("rotation", 3, save_steps=2, eval_steps=2, save_total_limit=2, load_best_model_at_end=True)
    run.train()
    barrier()
    best = Path(run.state.best_model_checkpoint or "").name
    names = sorted(path.name for path in folder.iterdir())
    return [str(best in names), *names]


class Broken(Trainer):
    """Its rank 1 cannot write, from the second checkpoint on."""

    def _save_rng_state(self, output_dir: str) -> None:
        if RANK == 1 and self.state.global_step > 4:
            raise OSError("no space left")
        super()._save_rng_state(output_dir)


def crash(async_save: bool) -> dict[str, Any]:
    name = f"crash{int(async_save)}"
    run = trainer(name, 2, kind=Broken, async_save=async_save)
    said = raised(run.train)
    barrier()
    fine = zero.verify(OUT / name / "checkpoint-4").facts["world_size"]
    return {"said": said, "left": sorted(path.name for path in (OUT / name).iterdir()), "fine": fine}


class SmallDisk(TrainerCallback):
    """From the seventh step on the kernel lets no file of rank 1 grow beyond 20 KB: its weights do not fit."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if RANK == 1 and state.global_step == 7:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def fails_behind() -> dict[str, Any]:
    """The failure happens in the writing thread, while training goes on; the end of training reports it."""
    run = trainer("fails_behind", 3, async_save=True, callbacks=[SmallDisk()])
    try:
        said = raised(run.train)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    barrier()
    return {"said": said, "left": sorted(path.name for path in (OUT / "fails_behind").iterdir())}


def damage(name: str, source: str) -> list[str]:
    """A copy of a run whose newest checkpoint has one bit flipped; the best one is in it too."""
    if RANK == 0:
        shutil.copytree(OUT / source, OUT / name)
        victim = OUT / name / "checkpoint-8" / "optimizer" / "exp_avg.safetensors"
        data = bytearray(victim.read_bytes())
        data[-5] ^= 4
        victim.write_bytes(data)
    barrier()
    run = trainer(name, 3, seed=99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(resume_from_checkpoint=True)
    barrier()
    zero.verify(OUT / name / "checkpoint-8")
    same = distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8"))
    warned = [str(item.message) for item in caught if "Passed over" in str(item.message)]
    return [str(same), *warned]


class Damages(TrainerCallback):
    """The best checkpoint goes bad when the last is there."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 0 and state.global_step == 8:
            victim = Path(state.best_model_checkpoint) / "model.safetensors"
            data = bytearray(victim.read_bytes())
            data[-5] ^= 4
            victim.write_bytes(data)


def damaged_best() -> list[str]:
    """At the end the stock Trainer drops all checkpoints but the best."""
    options = {"save_total_limit": 1, "metric_for_best_model": "eval_loss"}
    run = trainer("damaged_best", 3, save_steps=4, eval_steps=4, callbacks=[Damages()], **options)
    run.train()
    barrier()
    return [Path(run.state.best_model_checkpoint).name, *sorted(p.name for p in (OUT / "damaged_best").iterdir())]


def nothing_left(source: str) -> str:
    """Every checkpoint is damaged: no fresh start behind the user's back."""
    folder = OUT / "nothing_left"
    if RANK == 0:
        shutil.copytree(OUT / source, folder)
        for path in folder.glob("checkpoint-*/zero_manifest.json"):
            path.unlink()
    barrier()
    run = trainer("nothing_left", 3)
    return raised(lambda: run.train(resume_from_checkpoint=True))


def behind() -> dict[str, Any]:
    """Written behind training: the same files as when training waits."""
    settings: dict[str, Any] = {"save_steps": 2, "save_total_limit": 3, "load_best_model_at_end": True, "eval_steps": 2}
    runs = {}
    for name, async_save in (("waits", False), ("behind", True)):
        run = trainer(name, 3, async_save=async_save, **settings)
        run.train()
        barrier()
        runs[name] = curve(run)
    differ = {"training_args.bin", "trainer_state.json", "zero_manifest.json"}  # paths, seconds, digests of these
    names = [files_under(OUT / name) for name in ("waits", "behind")]
    unequal = [
        name
        for name in names[0]
        if Path(name).name not in differ and (OUT / "waits" / name).read_bytes() != (OUT / "behind" / name).read_bytes()
    ]
    states = [json.loads((OUT / "behind" / n).read_text()) for n in names[1] if n.endswith("trainer_state.json")]
    return {
        "names": names[0] == names[1],
        "unequal": unequal,
        "count": len(states),
        "curves": runs["waits"] == runs["behind"],
        "best": all(str(OUT / "behind" / "checkpoint-") in (state["best_model_checkpoint"] or "") for state in states),
    }


def two_nodes() -> dict[str, Any]:
    """Rank 1 has a disk of its own where rank 0 saves: a file system mounted over the folder, for this thread alone."""
    folder = OUT / "node"
    if RANK == 0:
        folder.mkdir()
    barrier()
    apart = True
    if RANK == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private = 0x00020000, 0x4000 | 0x40000
        apart = (
            libc.unshare(new_mounts) == 0
            and libc.mount(b"none", b"/", None, private, None) == 0
            and libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=16m") == 0
        )
    if not agreed(apart):
        return {"apart": False}
    trainer("node", 3).train()
    barrier()
    out: dict[str, Any] = {
        "apart": True,
        "files": files_under(folder),
        "left": [path.name for path in folder.iterdir()],
    }
    if RANK == 0:
        zero.verify(folder / "checkpoint-8")
    run = trainer("node", 3)
    out["resume"] = raised(lambda: run.train(resume_from_checkpoint=str(folder / "checkpoint-4")))
    return out


def agreed(answer: bool) -> bool:
    answers: list[Any] = [None, None]
    torch.distributed.all_gather_object(answers, answer)
    return all(answers)


def born(source: str) -> dict[str, Any]:
    """A model that never was whole on a rank: trained, saved, and resumed into another such model."""
    with zero.Init():
        model = gpt2()
    run = trainer("born", 3, model=model, load_best_model_at_end=True)
    run.train()
    barrier()
    out: dict[str, Any] = {
        "weights": distance(saved(OUT / "born" / "checkpoint-8"), saved(OUT / source / "checkpoint-8"))
    }
    with zero.Init():
        model = gpt2(seed=99)
    again = trainer("born_again", 3, model=model)
    again.train(resume_from_checkpoint=str(OUT / "born" / "checkpoint-4"))
    out["resumed"] = distance(saved(OUT / "born_again" / "checkpoint-8"), saved(OUT / source / "checkpoint-8"))
    with zero.Init():
        model = gpt2(seed=98)
    again = trainer("born_from_ddp", 3, model=model)
    again.train(resume_from_checkpoint=str(OUT / "ddp" / "checkpoint-4"))
    out["from ddp"] = distance(saved(OUT / "born_from_ddp" / "checkpoint-8"), saved(OUT / "ddp" / "checkpoint-8"))
    return out


def generating_evaluation() -> dict[str, Any]:
    """Seq2SeqTrainer passes synced_gpus=False of its own accord; rows end at different lengths on the two ranks."""
    out = {}
    for name, stage in (("seq2seq_ddp", None), ("seq2seq", 3)):
        fresh()
        changes: dict[str, Any] = {} if stage is None else {"parallelism_config": zero.ZeroPlugin(stage=stage)}
        args = arguments(
            name, Seq2SeqTrainingArguments, predict_with_generate=True, max_steps=2, eval_steps=2, **changes
        )
        args.save_strategy = "no"
        run = Seq2SeqTrainer(model=gpt2(), args=args, train_dataset=Tokens(), eval_dataset=Tokens(rows=8, seed=8))
        run.model.config.pad_token_id = run.model.generation_config.pad_token_id = 0
        run.model.generation_config.eos_token_id = list(range(40))
        run.train()
        found = run.predict(Tokens(rows=8, seed=9), max_new_tokens=6)
        out[name] = np.asarray(found.predictions).tolist()
    return {"equal": out["seq2seq"] == out["seq2seq_ddp"], "rows": len(out["seq2seq"])}


def plain_from_ours() -> str:
    """Plain data parallel is told that there is no state that it could read."""
    return raised(lambda: trainer("plain_resumes", None).train(str(OUT / "stage3" / "checkpoint-4")))


def save_only_model() -> list[str]:
    trainer("only_model", 3, save_only_model=True).train()
    barrier()
    return files_under(OUT / "only_model" / "checkpoint-8")


def evaluates_a_checkpoint() -> list[float]:
    """Weights of a checkpoint without training: into a model that is sharded for it, and into one that was before."""
    folder = str(OUT / "stage3" / "checkpoint-8")
    expected = trainer("eval_8", None, model=gpt2().from_pretrained(folder)).evaluate()["eval_loss"]
    run = trainer("eval_8", 3, seed=99)
    run._load_from_checkpoint(folder)
    return [expected, run.evaluate()["eval_loss"]]


def trains_twice() -> dict[str, Any]:
    out = {}
    for name, stage in (("twice_ddp", None), ("twice", 3)):
        run = trainer(name, stage, save_strategy="no")
        run.train()
        run.args.max_steps = STEPS
        run.train()
        out[name] = curve(run)
    return out


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


def plain_module() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, stage in (("plain_ddp", None), ("plain", 3)):
        run = trainer(name, stage, model=Plain())
        run.train()
        out[name] = curve(run)
        barrier()
    out["weights"] = distance(saved(OUT / "plain" / "checkpoint-8"), saved(OUT / "plain_ddp" / "checkpoint-8"))
    again = trainer("plain_again", 3, model=Plain())
    again.train(resume_from_checkpoint=str(OUT / "plain" / "checkpoint-4"))
    out["resumed"] = distance(saved(OUT / "plain_again" / "checkpoint-8"), saved(OUT / "plain" / "checkpoint-8"))
    return out


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def classification() -> dict[str, Any]:
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
    out["weights"] = distance(saved(OUT / "bert"), saved(OUT / "bert_ddp"))
    return out


def generates() -> dict[str, Any]:
    """Rank-dependent lengths: a rank that is done early still takes part."""
    run = trainer("generate", 3, save_strategy="no", max_steps=1)
    run.train()
    model = run.model
    model.eval()
    prompt = Tokens()[RANK]["input_ids"][None, :4]
    sharded = model.generate(prompt, max_new_tokens=3 + 5 * RANK, do_sample=False, pad_token_id=0)
    state = model.state_dict()
    if RANK == 0:
        torch.save(dict(state), OUT / "generate.pt")
    barrier()
    twin = gpt2()
    twin.load_state_dict(torch.load(OUT / "generate.pt", weights_only=True))
    twin.eval()
    whole = twin.generate(prompt, max_new_tokens=3 + 5 * RANK, do_sample=False, pad_token_id=0)
    return {"equal": bool(torch.equal(sharded, whole)), "tokens": sharded.shape[1]}


def evaluates_only(stage: int) -> dict[str, Any]:
    """No training at all: the same loss, and the weights saved are those that came in."""
    plain = trainer("eval_ddp", None).evaluate()["eval_loss"]
    run = trainer(f"eval{stage}", stage)
    loss = run.evaluate()["eval_loss"]
    engine = zero.engine_of(run.model)
    sent = {} if engine is None else {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}
    run.save_model()
    quiet = engine is None or sent == {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}
    barrier()
    same = distance(
        saved(OUT / f"eval{stage}"), {k: v for k, v in gpt2().state_dict().items() if k != "lm_head.weight"}
    )
    return {"loss": loss, "plain": plain, "weights": same, "engine": engine is not None, "quiet": quiet}


def save_fails() -> str:
    run = trainer("fails", 3, save_strategy="no", max_steps=1)
    run.train()
    (OUT / "a_file").write_text("not a folder")
    barrier()
    return raised(lambda: run.save_model(str(OUT / "a_file" / "model")))


def refusals() -> dict[str, str]:
    """Wrong combinations, on two ranks."""
    out = {
        "bf16_full_eval": raised(lambda: trainer("refuse", 3, bf16_full_eval=True)),
        "no plugin": raised(lambda: trainer("refuse", None, kind=zero.ZeroTrainer)),
        "callback without plugin": raised(
            lambda: trainer("refuse", None, callbacks=[zero.ZeroCallback()], save_strategy="no").train()
        ),
        "adafactor": raised(lambda: trainer("refuse", 3, optim="adafactor", save_strategy="no").train()),
    }
    return out


def main() -> None:
    watch()
    check("ddp", lambda: whole_run("ddp", None))
    for stage in range(4):
        check(f"stage {stage}", lambda: whole_run(f"stage{stage}", stage))  # noqa: B023
        check(f"stage {stage} saved", lambda: compare_saved(f"stage{stage}", "ddp"))  # noqa: B023
    check("resume ddp", lambda: resume("resume_ddp", "ddp", None))
    check("resume 3", lambda: resume("resume3", "stage3", 3))
    check("resume 1 from 3", lambda: resume("resume13", "stage3", 1))
    check("zero from ddp", lambda: resume("zero_from_ddp", "ddp", 3))
    check("plain from ours", plain_from_ours)
    check("trainer class", lambda: whole_run("subclass", 2, kind=zero.ZeroTrainer))
    check("resume into a sharded model", resume_into_a_sharded_model)
    check("rotation", rotation)
    check("damaged best", damaged_best)
    check("two nodes", two_nodes)
    check("born", lambda: born("stage3"))
    check("generating evaluation", generating_evaluation)
    check("damaged", lambda: damage("damaged", "stage3"))
    check("nothing left", lambda: nothing_left("stage3"))
    for async_save in (False, True):
        check(f"crash {async_save}", lambda: crash(async_save))  # noqa: B023
    check("behind", behind)
    check("fails behind", fails_behind)
    check("evaluate a checkpoint", evaluates_a_checkpoint)
    check("save_only_model", save_only_model)
    check("ddp bf16", lambda: whole_run("ddp_bf16", None, bf16=True))
    check("bf16", lambda: whole_run("bf16", 3, bf16=True))
    check("bf16 saved", lambda: compare_saved("bf16", "ddp_bf16"))
    check("twice", trains_twice)
    check("plain module", plain_module)
    check("classification", classification)
    check("generate", generates)
    for stage in (1, 3):
        check(f"evaluate only {stage}", lambda: evaluates_only(stage))  # noqa: B023
    check("save fails", save_fails)
    check("refusals", refusals)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
