"""Evaluations of the Trainer on two ranks equal plain data parallel's: batch norms' buffers, and generation under bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.kit.jobs.harness import arguments


class Images(Dataset[dict[str, Any]]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(row))
        return {"pixel_values": pixels * (1 + row % 3), "labels": row % 3}


class Texts(Images):
    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(4, 40, (6,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:5]}


def evaluating(kind: type[Any], folder: str, stage: int | None, **more: Any) -> Any:
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "learning_rate": 1e-2, "max_steps": 4}
    return arguments(folder, stage, kind, per_device_eval_batch_size=3, **often, **more)


def evaluations(trainer: Trainer, *names: str) -> list[list[float]]:
    trainer.train()
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "eval_loss" in entry]


@functools.cache
def images(stage: int | None) -> list[list[float]]:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=3)
    args = evaluating(TrainingArguments, f"images{stage}", stage)
    model = ResNetForImageClassification(config)
    return evaluations(Trainer(model, args, train_dataset=Images(16), eval_dataset=Images(10)), "eval_loss")


@functools.cache
def texts(stage: int | None) -> list[list[float]]:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=41, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )  # fmt: skip
    args = evaluating(
        Seq2SeqTrainingArguments, "texts", stage, bf16=True, predict_with_generate=True, generation_max_length=6
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.generation_config.eos_token_id = list(range(12))  # rows end at different lengths on the two ranks
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=Texts(16), eval_dataset=Texts(6),
        compute_metrics=lambda found: {"words": int(found.predictions.clip(0).sum())},
    )  # fmt: skip
    return evaluations(trainer, "eval_loss", "eval_words")


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("task", [pytest.param(images, marks=pytest.mark.wide), texts])
def test_evaluations_equal_data_parallel(on_two: Callable[..., Any], task: Callable[..., Any], stage: int) -> None:
    mine, reference = on_two(task, stage), on_two(task, None)
    assert len(mine) == 2
    for ours, theirs in zip(mine, reference, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
