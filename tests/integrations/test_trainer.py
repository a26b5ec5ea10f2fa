"""The stock Trainer on two real ranks with one argument more, against plain data parallel; and its arguments alone."""

from __future__ import annotations

import dataclasses
import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero

from .jobs.harness import Tokens, distance, gpt2, optimizer_distance
from .launch import Results, launch

STAGES = (0, 1, 2, 3)
FOLDER = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
]
PIECES = [
    "zero_optimizer/optimizer.json",
    "zero_optimizer/rank-00000-of-00002.safetensors",
    "zero_optimizer/rank-00001-of-00002.safetensors",
]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_arguments_have_the_fields_of_the_config() -> None:
    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name: field for field in dataclasses.fields(zero.ZeroTrainingArguments) if field.name not in stock}
    expected = {f"zero_{field.name}": field.default for field in dataclasses.fields(zero.ZeroConfig)}
    assert {name: field.default for name, field in own.items()} == expected
    assert all(field.metadata["help"] for field in own.values())


@pytest.mark.parametrize("flag", ["--zero_stage", "--zero-stage"])
def test_arguments_from_the_command_line(flag: str, tmp_path: Path) -> None:
    parser = HfArgumentParser(zero.ZeroTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--use_cpu", flag, "3", "--zero-reduce-dtype", "bfloat16"]
    (args,) = parser.parse_args_into_dataclasses(line)
    assert args.parallelism_config.config == zero.ZeroConfig(stage=3, reduce_dtype="bfloat16")
    again = pickle.loads(pickle.dumps(args))
    assert again.parallelism_config.config == args.parallelism_config.config
    assert json.loads(args.to_json_string())["parallelism_config"]["stage"] == 3
    replaced = dataclasses.replace(args, zero_stage=1)
    assert replaced.parallelism_config.config.stage == 1


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True}
    with pytest.raises(zero.ConfigError, match="stage must be 0, 1, 2 or 3"):
        zero.ZeroTrainingArguments(**settings, zero_stage=7)
    with pytest.raises(zero.ConfigError, match="remove --deepspeed"):
        zero.ZeroTrainingArguments(**settings, deepspeed={"zero_optimization": {"stage": 3}})
    with pytest.raises(zero.ConfigError, match="remove --fsdp"):
        zero.ZeroTrainingArguments(**settings, fsdp="full_shard")
    with pytest.raises(zero.ConfigError, match="sets parallelism_config itself"):
        zero.ZeroTrainingArguments(**settings, parallelism_config=ParallelismConfig())


def test_arguments_forget_an_older_accelerator(tmp_path: Path) -> None:
    """TrainingArguments resets accelerate's state, so that the plugin it makes is the one in force."""
    Accelerator(cpu=True)
    args = zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero_stage=3, report_to=[])
    trainer = Trainer(gpt2(), args)
    assert isinstance(trainer.accelerator, zero.ZeroAccelerator)


def test_an_accelerator_between_arguments_and_trainer_is_found(tmp_path: Path) -> None:
    args = zero.ZeroTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, zero_stage=3, report_to=[], max_steps=1, save_strategy="no"
    )
    Accelerator(cpu=True)
    with pytest.raises(zero.ConfigError, match="an Accelerator was built between"):
        zero.ZeroTrainer(gpt2(), args)
    with pytest.raises(zero.ConfigError, match="build no other Accelerator between"):
        Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback()]).train()


class OwnTrainer(Trainer):
    """A user's subclass."""


def test_trainer_classes(tmp_path: Path) -> None:
    made = zero.zero_trainer_cls(OwnTrainer)
    assert made is zero.zero_trainer_cls(OwnTrainer)
    assert issubclass(made, OwnTrainer)
    assert made.__name__ == "ZeroOwnTrainer"
    assert zero.zero_trainer_cls(Trainer) is zero.ZeroTrainer
    assert zero.zero_trainer_cls(zero.ZeroTrainer) is zero.ZeroTrainer
    args = zero.ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True, zero_stage=1, report_to=[])
    trainer = OwnTrainer(gpt2(), args)
    assert isinstance(trainer, OwnTrainer)
    assert type(trainer).__name__ == "ZeroOwnTrainer"
    plain = OwnTrainer(gpt2(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]))
    assert type(plain) is OwnTrainer


class GivenTrainer(Trainer):
    """Uses an Accelerator that was built elsewhere."""

    given: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        self.accelerator = self.given
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": []}
    return {"output_dir": str(folder), "disable_tqdm": True, **settings, **changes}


def test_an_accelerator_from_elsewhere(tmp_path: Path) -> None:
    args = TrainingArguments(**small(tmp_path, save_strategy="no"))
    GivenTrainer.given = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    trainer = GivenTrainer(gpt2(), args, train_dataset=Tokens())
    assert type(trainer) is GivenTrainer
    trainer.train()
    assert type(trainer).__name__ == "ZeroGivenTrainer", "it learnt to save when its model was sharded"


def test_callback_reports_once_before_and_once_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = zero.ZeroTrainingArguments(**small(tmp_path, save_strategy="no", zero_stage=3))
    Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback()]).train()
    text = capsys.readouterr().out
    assert text.count("MiB per rank") == 1
    assert text.count("2 step(s). On this rank now:") == 1


def test_a_checkpoint_without_optimizer_state_is_warned_of(tmp_path: Path) -> None:
    settings = small(tmp_path, save_only_model=True, zero_stage=2, save_steps=1)
    Trainer(gpt2(), zero.ZeroTrainingArguments(**settings), train_dataset=Tokens()).train()
    trainer = Trainer(gpt2(), zero.ZeroTrainingArguments(**settings), train_dataset=Tokens())
    with pytest.warns(UserWarning, match="holds no optimizer state"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("with_callback_last", [False, True])
def test_what_was_saved_last_is_resumed(tmp_path: Path, with_callback_last: bool) -> None:
    """The same checkpoint folder, written with and without ZeroCallback."""
    for number, last in enumerate((not with_callback_last, with_callback_last)):
        settings = small(tmp_path, zero_stage=2, save_steps=2, learning_rate=10.0 ** -(2 + number))
        callbacks = [zero.ZeroCallback(report=False)] if last else []
        trainer = Trainer(gpt2(), zero.ZeroTrainingArguments(**settings), train_dataset=Tokens(), callbacks=callbacks)
        trainer.train()
    look = Look()
    settings = small(tmp_path, zero_stage=3, max_steps=3, save_strategy="no")
    resumed = Trainer(gpt2(4), zero.ZeroTrainingArguments(**settings), train_dataset=Tokens(), callbacks=[look])
    expected = trainer.optimizer.state_dict()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance({"m": look.optimizer["state"][0]["exp_avg"]}, {"m": expected["state"][0]["exp_avg"]}) == 0.0


# ---- two ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    out = tmp_path_factory.mktemp("trainer")
    return launch("trainer_job", out, timeout=200), out


@pytest.fixture
def found(job: tuple[Results, Path]) -> Results:
    return job[0]


def assert_curve(mine: dict[str, list[float]], reference: dict[str, list[float]], rel: float) -> None:
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert mine[name] == pytest.approx(reference[name], rel=rel), name


def assert_run(mine: dict[str, Any], reference: dict[str, Any], rel: float) -> None:
    assert_curve(mine["curve"], reference["curve"], rel)
    for name in ("before", "after", "predictions"):
        assert mine[name] == pytest.approx(reference[name], rel=rel), name
    assert mine["best"] == reference["best"] == "checkpoint-4"
    assert mine["dtype"] == reference["dtype"] == "float32"


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_one_argument_is_enough(found: Results, stage: int) -> None:
    """Evaluate, train, evaluate, save, load the best, predict; the very files of data parallel."""
    mine, reference = found(f"stage {stage}"), found("ddp")
    assert_run(mine, reference, 2e-6)
    assert mine["files"] == reference["files"]
    assert [name for name in mine["files"] if name.startswith("checkpoint-8/")] == [f"checkpoint-8/{n}" for n in FOLDER]
    assert len(mine["curve"]["eval_loss"]) == 3
    assert mine["class"] == "ZeroTrainer"
    saved = found(f"stage {stage} saved")
    assert saved.pop("reloaded") == 0.0
    assert max(saved.values()) < 1e-5
    assert {"optimizer 4", "optimizer 8"} <= set(saved)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("check", "reference", "tolerance"),
    [
        ("resume 3", "stage 3", 0.0),
        ("resume 1 from 3", "stage 3", 1e-5),
        ("zero from ddp", "ddp", 1e-5),
        ("ddp from zero", "stage 3", 1e-5),
        ("resume callback", "callback", 0.0),
        ("resume without callback", "callback", 1e-5),
    ],
)
def test_resume_equals_uninterrupted(found: Results, check: str, reference: str, tolerance: float) -> None:
    resumed, whole = found(check), found(reference)
    assert resumed["weights"] <= tolerance
    for name in ("loss", "grad_norm", "learning_rate"):
        assert resumed["curve"][name] == pytest.approx(whole["curve"][name], rel=2e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("check", ["callback", "trainer class"])
def test_callback_and_trainer_class_save_pieces(found: Results, check: str) -> None:
    mine = found(check)
    assert_run(mine, found("ddp"), 2e-6)
    inside = [name.removeprefix("checkpoint-8/") for name in mine["files"] if name.startswith("checkpoint-8/")]
    assert inside == sorted([*FOLDER, *PIECES])


@pytest.mark.gloo
def test_callback_saves_the_same_model(found: Results) -> None:
    assert set(found("callback saved").values()) == {0.0}


@pytest.mark.gloo
def test_a_lost_optimizer_folder_is_named(found: Results) -> None:
    said = found("placeholder")
    assert said["size"] == "True", "optimizer.pt is small where the pieces lie beside it"
    assert said["zero"].startswith("CheckpointError")
    assert "broken/checkpoint-4/zero_optimizer" in said["zero"]
    assert said["plain"], "plain data parallel cannot take it for a fresh start"


@pytest.mark.gloo
@pytest.mark.parametrize("check", ["only_model", "only_model_callback"])
def test_save_only_model(found: Results, check: str) -> None:
    files = found("save_only_model")[check]
    assert "model.safetensors" in files
    assert not [name for name in files if "optimizer" in name]


@pytest.mark.gloo
def test_resume_into_a_sharded_model(found: Results) -> None:
    assert found("resume into a sharded model") == 0.0


@pytest.mark.gloo
def test_rotation_keeps_the_best_and_the_last(found: Results) -> None:
    assert found("rotation") == ["True", "True", "2"]


@pytest.mark.gloo
def test_bf16(found: Results) -> None:
    assert_run(found("bf16"), found("ddp bf16"), 1e-3)
    saved = found("bf16 saved")
    assert saved["weights 4"] < 1e-5
    assert saved["optimizer 4"] < 1e-6
    assert saved["reloaded"] == 0.0


@pytest.mark.gloo
def test_train_twice(found: Results) -> None:
    runs = found("twice")
    assert_curve(runs["twice"], runs["twice_ddp"], 2e-6)


@pytest.mark.gloo
def test_a_plain_module(found: Results) -> None:
    """A model that transformers knows nothing about saves and resumes too."""
    runs = found("plain module")
    assert_curve(runs["plain"], runs["plain_ddp"], 2e-6)
    assert runs["weights"] < 1e-5
    assert runs["resumed"] == 0.0


@pytest.mark.gloo
def test_bert_classification_with_a_metric(found: Results) -> None:
    runs = found("classification")
    mine, reference = runs["bert"], runs["bert_ddp"]
    assert_curve(mine["curve"], reference["curve"], 2e-6)
    for name in ("accuracy", "rows", "best"):
        assert mine[name] == reference[name]
    assert runs["weights"] < 1e-5


@pytest.mark.gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_generate_with_other_lengths_on_each_rank(found: Results, rank: int) -> None:
    seen = found("generate", rank=rank)
    assert seen == {"equal": True, "tokens": 4 + 3 + 5 * rank}


@pytest.mark.gloo
def test_seq2seq_trainer_generates(found: Results) -> None:
    assert found("generating evaluation") == {"equal": True, "rows": 8}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluate_without_training(found: Results, stage: int) -> None:
    seen = found(f"evaluate only {stage}")
    assert seen["loss"] == pytest.approx(seen["plain"], rel=1e-6)
    assert seen["weights"] == 0.0
    assert seen["engine"] is (stage == 3), "sharding saves memory in evaluation only where parameters are sharded"


@pytest.mark.gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_raises_on_every_rank(found: Results, rank: int) -> None:
    message = found("save fails", rank=rank)
    assert message.startswith("CheckpointError: writing the model to ")
    assert "rank 0: NotADirectoryError" in message


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("check", "start", "text"),
    [
        ("bf16_full_eval", "ConfigError", "use bf16=True"),
        ("no plugin", "ConfigError", "needs a ZeroPlugin"),
        ("callback without plugin", "ConfigError", "model that is not sharded"),
        ("adafactor", "UnsupportedOptimizerError", "Adafactor"),
    ],
)
def test_wrong_combinations_are_refused(found: Results, check: str, start: str, text: str) -> None:
    message = found("refusals")[check]
    assert message.startswith(start)
    assert text in message


@pytest.mark.gloo
def test_push_to_the_hub(tmp_path: Path) -> None:
    """Every save and the end, to a Hub on the loopback interface: rank 0 sends what all ranks gathered."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pushed = launch("hub_job", tmp_path, str(port))("push")
    assert pushed["commits"] == ["Training in progress, step 2", "Training in progress, step 4", "the end"]
    assert {"README.md", "config.json", "model.safetensors"} <= set(pushed["files"])
    assert pushed["weights"] == 0.0


class Look(TrainerCallback):
    """What training starts from."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.optimizer: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights = dict(kwargs["model"].state_dict())
        self.optimizer = kwargs["optimizer"].state_dict()


@pytest.mark.gloo
@pytest.mark.parametrize("source", ["stage3", "callback"])
def test_resume_on_one_rank(job: tuple[Results, Path], source: str, tmp_path: Path) -> None:
    """Written by two ranks; this process resumes alone, at another stage."""
    from safetensors.torch import load_file

    found, out = job
    found("callback")
    folder = out / source / "checkpoint-4"
    args = TrainingArguments(
        output_dir=str(tmp_path),
        parallelism_config=zero.ZeroPlugin(stage=1),
        max_steps=6,
        per_device_train_batch_size=2,
        save_strategy="no",
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        optim="adamw_torch",
    )
    look = Look()
    Trainer(gpt2(seed=4), args, train_dataset=Tokens(), callbacks=[look]).train(resume_from_checkpoint=str(folder))
    look.weights.pop("lm_head.weight")
    assert distance(look.weights, load_file(folder / "model.safetensors")) == 0.0
    expected = torch.load(out / "stage3" / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert optimizer_distance(look.optimizer, expected) == 0.0
