"""Runs of the stock Trainer, plain and sharded, and how two are compared."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Trainer,
)

import hf_zero as zero
from tests.kit.jobs.harness import (
    SAVED,
    Tokens,
    arguments,
    barrier,
    distance,
    files_under,
    fresh,
    gpt2,
)

STEPS = 8
SETTINGS: dict[str, Any] = {
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
    "seed": 3,
    "optim": "adamw_torch",
}
PLUGIN = {"async_save", "offload_params", "offload_dir"}
FOLDER = [
    *SAVED,
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
    "zero_manifest.json",
    "zero_run.json",
]
OURS = {"zero_manifest.json", "zero_run.json", "zero_steps.jsonl", "zero_steps.rank1.jsonl"}


def trainer(
    folder: str,
    stage: int | None,
    seed: int = 0,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    data: tuple[Any, Any] | None = None,
    metrics: Any = None,
    **changes: Any,
) -> Trainer:
    """`stage=None` is plain data parallel. The one argument is `parallelism_config`."""
    fresh()
    callbacks = changes.pop("callbacks", None)
    settings = {name: changes.pop(name) for name in PLUGIN & changes.keys()}
    if stage is not None:
        changes["parallelism_config"] = zero.ZeroPlugin(stage=stage, **settings)
    args = arguments(folder, None, **{**SETTINGS, **changes})
    rows, held_out = data or (Tokens(), Tokens(rows=8, seed=8))
    model = gpt2(seed) if model is None else model
    return kind(model, args, train_dataset=rows, eval_dataset=held_out, callbacks=callbacks, compute_metrics=metrics)


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


@functools.cache
def whole_run(name: str, stage: int | None, **changes: Any) -> dict[str, Any]:
    """Evaluate, train with evaluations and saves, load the best, evaluate, predict, save. Once for equal arguments."""
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
    folder = Path(name)
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


def equals_data_parallel(
    name: str, stage: int, source: str = "ddp", rel: float = 2e-6, kind: Any = Trainer, **changes: Any
) -> Any:
    """Curves, evaluations, predictions, the best checkpoint."""
    mine, reference = whole_run(name, stage, kind=kind, **changes), whole_run(source, None, **changes)
    assert_curve(mine["curve"], reference["curve"], rel)
    assert len(mine["curve"]["eval_loss"]) == 3
    for part in ("before", "after", "predictions"):
        assert mine[part] == pytest.approx(reference[part], rel=rel), part
    assert mine["best"] == reference["best"] == "checkpoint-4"
    assert mine["dtype"] == reference["dtype"] == "float32"
    assert mine["class"] == "ZeroTrainer"
    return mine


def one_argument(stage: int) -> None:
    """Evaluate, train, evaluate, save, load the best, predict; the very files of data parallel."""
    mine, reference = equals_data_parallel(f"stage{stage}", stage), whole_run("ddp", None)
    stock = [name for name in mine["files"] if "optimizer" not in name and Path(name).name not in OURS]
    assert stock == [name for name in reference["files"] if "optimizer" not in name]
    assert [name for name in mine["files"] if name.startswith("checkpoint-8/")] == [f"checkpoint-8/{n}" for n in FOLDER]
    same_files(f"stage{stage}", "ddp")


def same_files(name: str, reference: str) -> None:
    """Values in checkpoints and at the end; all of them whole, and `from_pretrained` takes them."""
    for step in (4, 8):
        one, two = Path(name, f"checkpoint-{step}"), Path(reference, f"checkpoint-{step}")
        assert distance(saved(one), saved(two)) < 1e-5
        groups = json.loads((one / "optimizer" / "optimizer.json").read_text())["groups"]
        names = [param for group in groups for param in group["params"]]
        assert distance(optimizer_at(one, names), optimizer_at(two, names)) < 1e-5
        zero.verify(one)
    assert distance(saved(Path(name)), saved(Path(reference))) < 1e-5
    zero.verify(Path(name))
    model = AutoModelForCausalLM.from_pretrained(Path(name))
    files = saved(Path(name))
    assert distance({key: model.state_dict()[key] for key in files}, files) == 0.0


def bf16() -> None:
    equals_data_parallel("bf16", 3, "ddp_bf16", rel=1e-3, bf16=True)
    # Data parallel adds micro-batches up before ranks, stage 3 ranks before micro-batches: the last bit of a float32 sum may
    # round a weight to the next bf16 number. What the keys' biases have as gradients is such rounding alone (a softmax does
    # not see them), which Adam makes steps of its full size: hence a mean, where a step is 3e-3.
    one, two = (saved(Path(name, "checkpoint-4")) for name in ("bf16", "ddp_bf16"))
    assert one.keys() == two.keys()
    numel = sum(values.numel() for values in one.values())
    assert sum(float((one[name] - two[name]).abs().sum()) for name in one) / numel < 1e-4
    zero.verify(Path("bf16", "checkpoint-4"))


def resume(name: str, stage: int, source: str, of: int | None, tolerance: float) -> None:
    """From the middle checkpoint of `source`, with a model that starts elsewhere: the second half must be the same."""
    whole = whole_run(source, of)
    run = trainer(name, stage, seed=99)
    run.train(resume_from_checkpoint=f"{source}/checkpoint-4")
    assert distance(saved(Path(name, "checkpoint-8")), saved(Path(source, "checkpoint-8"))) <= tolerance
    mine = curve(run)
    for part in ("loss", "grad_norm", "learning_rate"):
        assert mine[part] == pytest.approx(whole["curve"][part], rel=2e-6), part


def resume_into_a_sharded_model() -> None:
    """The same Trainer trains, then starts again from its middle checkpoint."""
    run = trainer("again", 3)
    run.train()
    barrier()
    first = saved(Path("again", "checkpoint-8"))
    run.train(resume_from_checkpoint="again/checkpoint-4")
    assert distance(saved(Path("again", "checkpoint-8")), first) == 0.0
