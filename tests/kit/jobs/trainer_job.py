"""The stock Trainer on two ranks: one argument more than plain data parallel; what it saves, loads and logs.

Each check asserts by itself; `test_trainer.py` has the list of their names.
"""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import EvalPrediction

import hf_zero as zero

STEPS = 8
FOLDER = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer/exp_avg.safetensors",
    "optimizer/exp_avg_sq.safetensors",
    "optimizer/optimizer.json",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
    "zero_manifest.json",
    "zero_run.json",
]
OURS = {"zero_manifest.json", "zero_run.json", "zero_steps.jsonl", "zero_steps.rank1.jsonl"}


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


def folders_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def curve(run: Trainer) -> dict[str, list[float]]:
    return {
        name: [entry[name] for entry in run.state.log_history if name in entry]
        for name in ("loss", "grad_norm", "eval_loss", "learning_rate")
    }


def saved(folder: Path) -> dict[str, Tensor]:
    barrier()
    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


def assert_curve(mine: dict[str, list[float]], reference: dict[str, list[float]], rel: float = 2e-6) -> None:
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert mine[name] == pytest.approx(reference[name], rel=rel), (name, mine[name], reference[name])


def assert_error(message: str, kind: str, *parts: str) -> None:
    assert message.startswith(f"{kind}: "), message
    for part in parts:
        assert part in message, (part, message)


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


def equals_data_parallel(name: str, stage: int, reference: dict[str, Any], rel: float = 2e-6, **changes: Any) -> Any:
    """Curves, evaluations, predictions, the best checkpoint."""
    mine = whole_run(name, stage, **changes)
    assert_curve(mine["curve"], reference["curve"], rel)
    assert len(mine["curve"]["eval_loss"]) == 3
    for part in ("before", "after", "predictions"):
        assert mine[part] == pytest.approx(reference[part], rel=rel), part
    assert mine["best"] == reference["best"] == "checkpoint-4"
    assert mine["dtype"] == reference["dtype"] == "float32"
    assert mine["class"] == "ZeroTrainer"
    return mine


def one_argument(stage: int, reference: dict[str, Any]) -> Any:
    """Evaluate, train, evaluate, save, load the best, predict; the very files of data parallel."""
    mine = equals_data_parallel(f"stage{stage}", stage, reference)
    stock = [name for name in mine["files"] if "optimizer" not in name and Path(name).name not in OURS]
    assert stock == [name for name in reference["files"] if "optimizer" not in name]
    assert [name for name in mine["files"] if name.startswith("checkpoint-8/")] == [f"checkpoint-8/{n}" for n in FOLDER]
    same_files(f"stage{stage}", "ddp")
    return mine


def same_files(
    name: str, reference: str, steps: tuple[int, ...] = (4, 8), optimizer: float = 1e-5, at_the_end: bool = True
) -> None:
    """Values in checkpoints and at the end; all of them whole, and `from_pretrained` takes them."""
    for step in steps:
        one, two = OUT / name / f"checkpoint-{step}", OUT / reference / f"checkpoint-{step}"
        assert distance(saved(one), saved(two)) < 1e-5
        groups = json.loads((one / "optimizer" / "optimizer.json").read_text())["groups"]
        names = [param for group in groups for param in group["params"]]
        assert distance(optimizer_at(one, names), optimizer_at(two, names)) < optimizer
        zero.verify(one)
    assert not at_the_end or distance(saved(OUT / name), saved(OUT / reference)) < 1e-5
    zero.verify(OUT / name)
    model = AutoModelForCausalLM.from_pretrained(OUT / name)
    files = saved(OUT / name)
    assert distance({key: model.state_dict()[key] for key in files}, files) == 0.0


def bf16() -> None:
    reference = whole_run("ddp_bf16", None, bf16=True)
    equals_data_parallel("bf16", 3, reference, rel=1e-3, bf16=True)
    # Data parallel adds micro-batches up before ranks, stage 3 ranks before micro-batches: the last bit of a float32 sum may
    # round a weight to the next bf16 number. What the keys' biases have as gradients is such rounding alone (a softmax does
    # not see them), which Adam makes steps of its full size: hence a mean, where a step is 3e-3.
    one, two = (saved(OUT / name / "checkpoint-4") for name in ("bf16", "ddp_bf16"))
    assert one.keys() == two.keys()
    numel = sum(values.numel() for values in one.values())
    assert sum(float((one[name] - two[name]).abs().sum()) for name in one) / numel < 1e-4
    zero.verify(OUT / "bf16" / "checkpoint-4")


def resume(name: str, source: str, stage: int | None, whole: dict[str, Any], tolerance: float, **changes: Any) -> None:
    """From the middle checkpoint of `source`, with a model that starts elsewhere: the second half must be the same."""
    run = trainer(name, stage, seed=99, **changes)
    run.train(resume_from_checkpoint=str(OUT / source / "checkpoint-4"))
    assert distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) <= tolerance
    mine = curve(run)
    for part in ("loss", "grad_norm", "learning_rate"):
        assert mine[part] == pytest.approx(whole["curve"][part], rel=2e-6), part


def resume_into_a_sharded_model() -> None:
    """The same Trainer trains, then starts again from its middle checkpoint."""
    run = trainer("again", 3)
    run.train()
    barrier()
    first = saved(OUT / "again" / "checkpoint-8")
    run.train(resume_from_checkpoint=str(OUT / "again" / "checkpoint-4"))
    assert distance(saved(OUT / "again" / "checkpoint-8"), first) == 0.0


def rotation() -> None:
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
    names = folders_in(folder)
    assert len(names) == 2
    assert {"checkpoint-8", Path(run.state.best_model_checkpoint or "").name} <= names
    assert not {"checkpoint-99", ".checkpoint-98.zero_saving"} & names


class Broken(Trainer):
    """Its rank 1 cannot write, from the second checkpoint on."""

    def _save_rng_state(self, output_dir: str) -> None:
        if RANK == 1 and self.state.global_step > 4:
            raise OSError("no space left")
        super()._save_rng_state(output_dir)


def crash(async_save: bool) -> None:
    """A failed checkpoint leaves the one before."""
    name = f"crash{int(async_save)}"
    run = trainer(name, 2, kind=Broken, async_save=async_save)
    assert_error(raised(run.train), "CheckpointError", "failed on rank 1: OSError: no space left")
    barrier()
    assert zero.verify(OUT / name / "checkpoint-4").facts["world_size"] == 2
    assert folders_in(OUT / name) == {"checkpoint-4"}


class SmallDisk(TrainerCallback):
    """From the seventh step on the kernel lets no file of rank 1 grow beyond 20 KB: its weights do not fit."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if RANK == 1 and state.global_step == 7:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def fails_behind() -> None:
    """The failure happens in the writing thread, while training goes on; the end of training reports it."""
    run = trainer("fails_behind", 3, async_save=True, callbacks=[SmallDisk()])
    try:
        said = raised(run.train)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    barrier()
    assert_error(said, "CheckpointError", "checkpoint-8", "File too large")
    assert folders_in(OUT / "fails_behind") == {"checkpoint-4"}


def damaged(source: str) -> None:
    """A copy of a run whose newest checkpoint has one bit flipped: `resume_from_checkpoint=True` says so and goes on."""
    name = "damaged"
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
    assert distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) == 0.0
    warned = [str(item.message) for item in caught if "Passed over" in str(item.message)]
    assert len(warned) == (RANK == 0), "rank 0 speaks"
    for message in warned:
        assert "checkpoint-4. Passed over: checkpoint-8:" in message
        assert "exp_avg.safetensors is damaged" in message


class Damages(TrainerCallback):
    """The best checkpoint goes bad when the last is there."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 0 and state.global_step == 8:
            victim = Path(state.best_model_checkpoint) / "model.safetensors"
            data = bytearray(victim.read_bytes())
            data[-5] ^= 4
            victim.write_bytes(data)
        barrier()  # the other rank may be the one that checks these bytes


def damaged_best() -> None:
    """At the end the stock Trainer drops all checkpoints but the best."""
    options = {"save_total_limit": 1, "metric_for_best_model": "eval_loss"}
    run = trainer("damaged_best", 3, save_steps=4, eval_steps=4, callbacks=[Damages()], **options)
    run.train()
    barrier()
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-4"
    assert (OUT / "damaged_best" / "checkpoint-8").is_dir()


def nothing_left(source: str) -> None:
    """Every checkpoint is damaged: no fresh start behind the user's back."""
    folder = OUT / "nothing_left"
    if RANK == 0:
        shutil.copytree(OUT / source, folder)
        for path in folder.glob("checkpoint-*/zero_manifest.json"):
            path.unlink()
    barrier()
    run = trainer("nothing_left", 3)
    message = raised(lambda: run.train(resume_from_checkpoint=True))
    assert_error(message, "CheckpointError", "holds 2 checkpoint folders and none is complete: checkpoint-8: ")


def behind() -> None:
    """Written behind training: the same files as when training waits."""
    settings: dict[str, Any] = {"save_steps": 2, "save_total_limit": 3, "load_best_model_at_end": True, "eval_steps": 2}
    runs = {}
    for name, async_save in (("waits", False), ("behind", True)):
        run = trainer(name, 3, async_save=async_save, **settings)
        run.train()
        barrier()
        runs[name] = curve(run)
    differ = {"training_args.bin", "trainer_state.json", "zero_manifest.json"}  # paths, seconds, digests of these
    differ |= {"zero_steps.jsonl", "zero_steps.rank1.jsonl"}
    names = [files_under(OUT / name) for name in ("waits", "behind")]
    assert names[0]
    assert names[0] == names[1]
    for name in names[0]:
        if Path(name).name not in differ:
            assert (OUT / "waits" / name).read_bytes() == (OUT / "behind" / name).read_bytes(), name
    states = [json.loads((OUT / "behind" / n).read_text()) for n in names[1] if n.endswith("trainer_state.json")]
    assert len(states) == 3
    for state in states:
        assert str(OUT / "behind" / "checkpoint-") in (state["best_model_checkpoint"] or ""), "of the finished one"
    assert runs["waits"] == runs["behind"]


def two_nodes() -> bool:
    """False where this process may not mount a file system. Rank 0's node gets the whole checkpoint, the other nothing.

    Rank 1 has a disk of its own where rank 0 saves: a file system mounted over the folder, for this thread alone.
    """
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
        return False
    trainer("node", 3).train()
    barrier()
    if RANK == 0:
        files = [name for name in files_under(folder) if name.startswith("checkpoint-8/")]
        assert files == [f"checkpoint-8/{name}" for name in sorted([*FOLDER, "training_args.bin"])]
        zero.verify(folder / "checkpoint-8")
    else:
        assert not folders_in(folder)
    run = trainer("node", 3)
    message = raised(lambda: run.train(resume_from_checkpoint=str(folder / "checkpoint-4")))
    assert_error(message, "CheckpointError", "is missing on ranks [1]")  # to resume, both need to see it
    return True


def agreed(answer: bool) -> bool:
    answers: list[Any] = [None, None]
    torch.distributed.all_gather_object(answers, answer)
    return all(answers)


def born(source: str) -> None:
    """A model that never was whole on a rank: trained, saved, and resumed into another such model."""
    with zero.Init():
        model = gpt2()
    run = trainer("born", 3, model=model, load_best_model_at_end=True)
    run.train()
    barrier()
    assert distance(saved(OUT / "born" / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) == 0.0
    with zero.Init():
        model = gpt2(seed=99)
    again = trainer("born_again", 3, model=model)
    again.train(resume_from_checkpoint=str(OUT / "born" / "checkpoint-4"))
    assert distance(saved(OUT / "born_again" / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) == 0.0
    with zero.Init():
        model = gpt2(seed=98)
    again = trainer("born_from_ddp", 3, model=model)
    again.train(resume_from_checkpoint=str(OUT / "ddp" / "checkpoint-4"))
    assert distance(saved(OUT / "born_from_ddp" / "checkpoint-8"), saved(OUT / "ddp" / "checkpoint-8")) < 1e-5


def plain_from_ours() -> None:
    """Plain data parallel is told that there is no state that it could read."""
    message = raised(lambda: trainer("plain_resumes", None).train(str(OUT / "stage3" / "checkpoint-4")))
    assert "optimizer.pt" in message, message


def save_only_model() -> None:
    trainer("only_model", 3, save_only_model=True).train()
    barrier()
    files = files_under(OUT / "only_model" / "checkpoint-8")
    assert {"model.safetensors", "zero_manifest.json"} <= set(files)
    assert not [name for name in files if "optimizer" in name or "rng" in name]


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


# LoRA -----------------------------------------------------------------------------------------------------------------


def adapted(seed: int = 0) -> PeftModel:
    base = gpt2(0)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config)


def adapter_run(name: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    """Train, load the best, evaluate, save. What PEFT loads again is the adapter; the base stays as it was."""
    run = trainer(name, stage, model=adapted(), learning_rate=1e-2, load_best_model_at_end=True, **changes)
    run.train()
    out = {"curve": curve(run), "after": run.evaluate()["eval_loss"]}
    run.save_model()
    barrier()
    again = PeftModel.from_pretrained(gpt2(0), OUT / name)
    loaded = {key.replace(".default", ""): value for key, value in again.state_dict().items() if "lora" in key}
    assert distance(loaded, saved(OUT / name)) == 0.0
    key = "transformer.wte.weight"
    state = run.model.state_dict()
    assert RANK or torch.equal(state[f"base_model.model.{key}"], gpt2(0).state_dict()[key])
    out["config"] = (OUT / name / "adapter_config.json").read_text()
    out["files"] = [name for name in files_under(OUT / name / "checkpoint-8", OURS) if "optimizer" not in name]
    return out


def adapter_equals(
    name: str, stage: int, reference: dict[str, Any], source: str = "ddp", rel: float = 2e-6, **changes: Any
) -> None:
    """The adapter that plain data parallel trains and saves, and no more."""
    mine = adapter_run(name, stage, **changes)
    assert_curve(mine.pop("curve"), reference["curve"], rel)
    assert mine.pop("after") == pytest.approx(reference["after"], rel=rel)
    assert mine == {name: reference[name] for name in mine}
    for folder in ("checkpoint-4", "checkpoint-8", "."):
        assert distance(saved(OUT / name / folder), saved(OUT / source / folder)) < 1e-6


def adapter_resumes(name: str, source: str, stage: int, tolerance: float, **changes: Any) -> None:
    """Into an adapter that starts elsewhere. In "killed" the newest checkpoint was never finished."""
    checkpoint: str | bool = str(OUT / source / "checkpoint-4")
    if name == "killed":
        if RANK == 0:
            shutil.copytree(OUT / source, OUT / name)
            (OUT / name / "checkpoint-8" / "zero_manifest.json").unlink()
        checkpoint = True
        barrier()
    run = trainer(name, stage, model=adapted(99), learning_rate=1e-2, **changes)
    run.train(resume_from_checkpoint=checkpoint)
    assert distance(saved(OUT / name / "checkpoint-8"), saved(OUT / source / "checkpoint-8")) <= tolerance


def adapter_generates() -> None:
    """Through the adapter's wrapper and through the base model; ranks end at different lengths."""
    run = trainer("generate", 3, model=adapted(), save_strategy="no", max_steps=2)
    run.train()
    states: list[Any] = [{key: value.clone() for key, value in run.model.state_dict().items()}]
    torch.distributed.broadcast_object_list(states, 0)
    twin = adapted()
    twin.load_state_dict(states[0])
    prompt = Tokens()[RANK]["input_ids"][None, :4]
    settings: dict[str, Any] = {"max_new_tokens": 3 + 4 * RANK, "do_sample": False, "pad_token_id": 0}
    run.model.eval(), twin.eval()
    whole = twin.generate(input_ids=prompt, **settings)
    assert torch.equal(run.model.generate(input_ids=prompt, **settings), whole)
    assert torch.equal(run.model.get_base_model().generate(prompt, **settings), whole)


def adapters() -> None:
    ddp = check("ddp", lambda: adapter_run("ddp", None))
    for stage in range(4):
        check(f"stage {stage}", partial(adapter_equals, f"stage{stage}", stage, ddp))
    check("resume", lambda: adapter_resumes("resume3", "stage3", 3, 0.0))
    check("resume newest", lambda: adapter_resumes("killed", "stage3", 1, 1e-6))
    bf16 = check("bf16 ddp", lambda: adapter_run("bf16_ddp", None, bf16=True))
    for stage in (1, 3):  # the best is loaded into a sharded model, where PEFT would cast it
        check(f"bf16 {stage}", partial(adapter_equals, f"bf16_{stage}", stage, bf16, "bf16_ddp", 5e-3, bf16=True))
    check("bf16 resume", lambda: adapter_resumes("bf16_resume", "bf16_3", 3, 0.0, bf16=True))
    check("checkpointing", lambda: adapter_equals("checkpointing", 3, ddp, gradient_checkpointing=True))
    check("generate", adapter_generates)


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
    adapters() if sys.argv[2:] == ["adapters"] else main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
