"""The Trainer and its arguments on one rank."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero
from hf_zero.huggingface.elastic import Batches, split_rows
from tests.kit.jobs.harness import Tokens, arguments, distance, gpt2


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
    with pytest.raises(zero.ConfigError, match="sets parallelism_config itself, found ZeroPlugin.stage=3"):
        zero.ZeroTrainingArguments(**settings, parallelism_config=zero.ZeroPlugin(stage=3))
    same = zero.ZeroTrainingArguments(**settings, zero_stage=3, parallelism_config=zero.ZeroPlugin(stage=3))
    copied = copy.deepcopy(pickle.loads(pickle.dumps(same)))
    assert dataclasses.replace(copied, zero_stage=1).parallelism_config.stage == 1


def small(folder: Path, kind: Any = zero.ZeroTrainingArguments, **changes: Any) -> Any:
    return arguments(folder, None, kind, **{"max_steps": 2, **changes})


class Fails(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the program's own")


def test_signals_are_given_back_where_training_fails(tmp_path: Path) -> None:
    """Else the next SIGTERM after it would be noted, for a step that does not come, and not end the process."""
    watched = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in watched]
    args = small(tmp_path, zero_stage=2, enable_jit_checkpoint=True, save_strategy="no")
    trainer = Trainer(gpt2(), args, train_dataset=Tokens(16), callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="the program's own"):
        trainer.train()
    assert [signal.getsignal(number) for number in watched] == before


class Ends(TrainerCallback):
    """A signal in the last step of an epoch, and what is then saved."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved: list[int] = []
        os.kill(os.getpid(), signal.SIGUSR1)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


def test_a_signal_at_the_end_of_an_epoch_saves_once(tmp_path: Path) -> None:
    settings = {"zero_stage": 2, "enable_jit_checkpoint": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    ends = Ends()
    args = small(tmp_path, gradient_accumulation_steps=2, max_steps=4, **settings)
    trainer = Trainer(gpt2(), args, train_dataset=Tokens(4), eval_dataset=Tokens(4), callbacks=[ends])
    trainer.train()
    assert ends.saved == [1]
    assert not any("eval_loss" in entry for entry in trainer.state.log_history)


def test_arguments_forget_an_older_accelerator(tmp_path: Path) -> None:
    """TrainingArguments resets accelerate's state, so that the plugin it makes is the one in force."""
    Accelerator(cpu=True)
    args = small(tmp_path, zero_stage=3)
    trainer = Trainer(gpt2(), args)
    assert isinstance(trainer.accelerator, zero.ZeroAccelerator)


def test_an_accelerator_between_arguments_and_trainer_is_found(tmp_path: Path) -> None:
    args = small(tmp_path, zero_stage=3, save_strategy="no")
    Accelerator(cpu=True)
    with pytest.raises(zero.ConfigError, match="an Accelerator was built between"):
        zero.ZeroTrainer(gpt2(), args)
    with pytest.raises(zero.ConfigError, match="build no other Accelerator between"):
        Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback()]).train()


def test_a_trainer_without_a_plugin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero.ConfigError, match="needs a ZeroPlugin"):
        zero.ZeroTrainer(gpt2(), small(tmp_path, TrainingArguments))
    args = small(tmp_path, TrainingArguments)
    with pytest.raises(zero.ConfigError, match="model that is not sharded"):
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
    args = small(tmp_path, zero_stage=1)
    trainer = OwnTrainer(gpt2(), args)
    assert isinstance(trainer, OwnTrainer)
    assert type(trainer).__name__ == "ZeroOwnTrainer"
    plain = OwnTrainer(gpt2(), small(tmp_path, TrainingArguments))
    assert type(plain) is OwnTrainer


class GivenTrainer(Trainer):
    """Uses an Accelerator that was built elsewhere."""

    given: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        self.accelerator = self.given
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False


def test_an_accelerator_from_elsewhere(tmp_path: Path) -> None:
    args = small(tmp_path, TrainingArguments, save_strategy="no")
    GivenTrainer.given = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=3))
    trainer = GivenTrainer(gpt2(), args, train_dataset=Tokens())
    assert type(trainer) is GivenTrainer
    trainer.train()
    assert type(trainer).__name__ == "ZeroGivenTrainer", "it learnt to save when its model was sharded"


def test_a_checkpoint_without_optimizer_state_is_warned_of(tmp_path: Path) -> None:
    settings = {"save_only_model": True, "zero_stage": 2, "save_steps": 1}
    Trainer(gpt2(), small(tmp_path, **settings), train_dataset=Tokens()).train()
    trainer = Trainer(gpt2(), small(tmp_path, **settings), train_dataset=Tokens())
    with pytest.warns(UserWarning, match="holds no optimizer state"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class OwnLoads(Trainer):
    """Reads more from a checkpoint than the stock Trainer, as TRL's GRPO does."""

    read: tuple[str, ...] = ()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model=model)
        self.read += ("weights",)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.read += () if checkpoint is None else ("optimizer",)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.read += ("best",)


class OwnFiles(OwnLoads):
    """Saves in files of its own and reads them, with fewer arguments, as Sentence Transformers' trainers do."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        torch.save(self.model.state_dict(), Path(str(output_dir), "own.bin"))

    def _load_from_checkpoint(self, folder: str) -> None:  # type: ignore[override]
        self.model.load_state_dict(torch.load(Path(folder, "own.bin")))
        self.read += ("own",)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


@pytest.mark.parametrize(
    ("kind", "weights", "best"), [(OwnLoads, "weights", "best"), (OwnFiles, "own", "own")], ids=["more", "own files"]
)
def test_methods_of_a_subclass_that_load_are_called(
    kind: type[OwnLoads], weights: str, best: str, tmp_path: Path
) -> None:
    steps = {
        "zero_stage": 3,
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
    }
    first, again = (
        kind(gpt2(seed), small(tmp_path, **steps), train_dataset=Tokens(), eval_dataset=Tokens(rows=4))
        for seed in (0, 5)
    )
    first.train()
    after = {name: value.clone() for name, value in first.model.state_dict().items()}
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert (first.read, again.read) == ((best,), (weights, "optimizer", best))
    assert distance(dict(again.model.state_dict()), after) == 0.0


def test_a_finished_run_that_is_resumed_takes_no_step(tmp_path: Path) -> None:
    """In the middle of an epoch, where the stock Trainer takes one: a job that starts again by itself would drift."""
    for resume in (None, True):
        trainer = Trainer(gpt2(), small(tmp_path, zero_stage=2, save_steps=2), train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 2
    assert trainer.state.epoch is not None
    assert trainer.state.epoch % 1
    stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    now = trainer.model.state_dict()
    assert distance({name: now[name] for name in stored}, stored) == 0.0


@pytest.mark.parametrize("schedules", [("linear", "constant"), ("constant", "cosine")])
def test_resume_under_another_schedule(schedules: tuple[str, str], tmp_path: Path) -> None:
    for name, resume in zip(schedules, (None, True)):
        settings = {"zero_stage": 2, "save_steps": 1, "lr_scheduler_type": name, "max_steps": 2 if resume else 1}
        trainer = Trainer(gpt2(), small(tmp_path, **settings), train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 2
    (rate,) = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rate == (5e-5 if schedules[1] == "constant" else 0.0)


def test_resume_without_checkpoints_is_the_stock_error(tmp_path: Path) -> None:
    trainer = Trainer(gpt2(), small(tmp_path, zero_stage=3), train_dataset=Tokens())
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)


class Pickles(Trainer):
    """Saves in a way of its own."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        torch.save({"value": self.model.state_dict()[NORM]}, Path(str(output_dir)) / "own.bin")


class PicklesMore(Trainer):
    """Pickles something of its own besides."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save({"value": self.model.state_dict()[NORM]}, Path(str(output_dir)) / "own.bin")


class Doubling(GPT2LMHeadModel):
    """Saves twice its weights: code of one's own that computes with values."""

    def save_pretrained(self, folder: Any, state_dict: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        state = self.state_dict() if state_dict is None else state_dict
        super().save_pretrained(folder, state_dict={key: 2 * value for key, value in state.items()}, **kwargs)


NORM = "transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("kind", "model", "file", "key", "factor"),
    [
        (Pickles, GPT2LMHeadModel, "own.bin", "value", 1),
        (PicklesMore, GPT2LMHeadModel, "own.bin", "value", 1),
        (PicklesMore, GPT2LMHeadModel, "model.safetensors", NORM, 1),
        (Trainer, Doubling, "model.safetensors", NORM, 2),
    ],
)
def test_code_that_saves_in_its_own_way_gets_values(
    kind: type[Trainer], model: Any, file: str, key: str, factor: int, tmp_path: Path
) -> None:
    args = small(tmp_path, zero_stage=3, save_strategy="no")
    trainer = kind(model(gpt2().config), args, train_dataset=Tokens())
    trainer.train()
    trainer.save_model(str(tmp_path / "own"))
    zero.verify(tmp_path / "own")
    path = tmp_path / "own" / file
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert torch.equal(found[key], factor * zero.full_parameter(trainer.model.get_parameter(NORM)))


class CardTrainer(Trainer):
    """A card of its own, as TRL's trainers have."""

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None) -> None:  # type: ignore[override]
        (Path(str(self.args.output_dir)) / "README.md").write_text(f"{model_name} {dataset_name}")


def test_a_trainers_own_card_stays(tmp_path: Path) -> None:
    args = small(tmp_path, zero_stage=3, save_strategy="no")
    trainer: Any = CardTrainer(gpt2(), args, train_dataset=Tokens())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="mine", dataset_name="rows")
    assert (tmp_path / "README.md").read_text() == "mine rows"


def test_model_card(tmp_path: Path) -> None:
    args = small(tmp_path, zero_stage=3, save_strategy="no")
    trainer = Trainer(gpt2(), args, train_dataset=Tokens())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(tags="tiny", dataset="user/rows", license="mit")
    text = (tmp_path / "README.md").read_text()
    for part in ("- tiny", "- user/rows", "license: mit", "zero-stage-3", "learning_rate"):
        assert part in text
    assert "num_train_epochs" not in text, "max_steps is what counts"
    zero.verify(tmp_path)


@pytest.mark.parametrize(
    ("rows", "ranks", "most", "expected"),
    [
        (6, 1, 3, (3, 2)),
        (6, 3, 3, (2, 1)),
        (6, 2, 3, (3, 1)),
        (32, 1, 5, (4, 8)),
        (7, 1, 3, (1, 7)),
        (12, 6, 8, (2, 1)),
    ],
)
def test_rows_are_shared_out_in_batches_that_fit(rows: int, ranks: int, most: int, expected: tuple[int, int]) -> None:
    assert split_rows(rows, ranks, most) == expected
    assert ranks * expected[0] * expected[1] == rows


def test_rows_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match=r"takes 32 rows, which 7 ranks cannot share evenly.*\(1, 2, 4, 8\)"):
        split_rows(32, 7, 4)
    with pytest.raises(zero.ConfigError, match="takes 4 rows, which 8 ranks"):
        split_rows(4, 8, 4)


@pytest.mark.parametrize("found", [None, 3, {}, {"asked_rows": True}, {"asked_rows": "3"}, {"asked_rows": -1}])
def test_what_a_manifest_says_is_not_believed_unseen(found: Any) -> None:
    good = {"asked_rows": 3, "asked_accumulation": 1, "rows_per_step": 6, "steps_per_epoch": 0}
    assert Batches.of_fact(good) == Batches(3, 1, 6)
    assert Batches.of_fact(found if not isinstance(found, dict) or not found else {**good, **found}) is None
