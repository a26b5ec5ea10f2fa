"""Evaluations of the Trainer that plain data parallel passes: batch norms' buffers, and generation under bf16."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from harness import arguments, check, fresh, watch
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


def images(stage: int | None) -> list[list[float]]:
    fresh()
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=3)
    with tempfile.TemporaryDirectory() as folder:
        args = evaluating(TrainingArguments, folder, stage)
        model = ResNetForImageClassification(config)
        return evaluations(Trainer(model, args, train_dataset=Images(16), eval_dataset=Images(10)), "eval_loss")


def texts(stage: int | None) -> list[list[float]]:
    fresh()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=41, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = evaluating(
            Seq2SeqTrainingArguments, folder, stage, bf16=True, predict_with_generate=True, generation_max_length=6
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        model.generation_config.eos_token_id = list(range(12))  # rows end at different lengths on the two ranks
        trainer = Seq2SeqTrainer(
            model, args, train_dataset=Texts(16), eval_dataset=Texts(6),
            compute_metrics=lambda found: {"words": int(found.predictions.clip(0).sum())},
        )  # fmt: skip
        return evaluations(trainer, "eval_loss", "eval_words")


if __name__ == "__main__":
    watch()
    for stage in (None, 1, 3):
        check(f"images {stage}", lambda: images(stage))  # noqa: B023
        check(f"texts {stage}", lambda: texts(stage))  # noqa: B023
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
