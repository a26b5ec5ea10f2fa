"""Ranks that run different parts of a model in one step, through the stock Trainer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from comparing import Build, compare, llama
from harness import RANK, Tokens
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS = 5
IMAGE = 63  # the token that stands for a patch
PATCHES = 4


class InOrder(Trainer):
    """Row 2·s + r is rank r's in step s."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: Sequence[dict[str, Tensor]]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row per rank and step, so that keys may differ between rows."""
    (row,) = rows
    return {key: value[None] for key, value in row.items()}


def in_order(model: nn.Module, rows: Sequence[dict[str, Tensor]], common: dict[str, Any], *callbacks: Any) -> Trainer:
    args = TrainingArguments(
        **{
            **common,
            "per_device_train_batch_size": 1,
            "max_steps": len(rows) // 2,
            "remove_unused_columns": False,
            "ddp_find_unused_parameters": True,
            "average_tokens_across_devices": False,
        }
    )
    return InOrder(model=model, args=args, train_dataset=Rows(rows), data_collator=stacked, callbacks=[*callbacks])


# ---- images on some ranks --------------------------------------------------------------------------------------------


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=PATCHES)
    model = LlavaForConditionalGeneration(config)
    tower = model.model.vision_tower
    for name, param in tower.named_parameters():
        # What no feature depends on (the last layer, the norm behind it) and keys' biases, whose gradient is rounding.
        if "layers.2." in name or "post_layernorm" in name or "k_proj.bias" in name:
            param.requires_grad_(False)
    return model


def illustrated(pattern: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """For each step, whether the rows of rank 0 and of rank 1 have an image."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for has_image in (image for step in pattern for image in step):
        ids = torch.randint(2, IMAGE, (10,), generator=draw)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if has_image:
            ids[1 : 1 + PATCHES] = IMAGE
            row["pixel_values"] = torch.randn(3, 8, 8, generator=draw)
        row["labels"] = ids.masked_fill(ids == IMAGE, -100)
        rows.append(row)
    return rows


def pictures(*pattern: tuple[int, int]) -> Build:
    return lambda common: in_order(llava(), illustrated(pattern), common)


# ---- layers that a rank skips ----------------------------------------------------------------------------------------


class Skips(TrainerCallback):
    """Seeds each rank before each step so that its encoder drops just these layers."""

    def __init__(self, pattern: Sequence[tuple[set[int], set[int]]], layers: int) -> None:
        self.seeds = [seed_that_skips(frozenset(step[RANK]), layers) for step in pattern]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(self.seeds[state.global_step])


@functools.cache
def seed_that_skips(skipped: frozenset[int], layers: int) -> int:
    seed = 0
    while True:
        torch.manual_seed(seed)
        if {layer for layer in range(layers) if float(torch.rand([])) < 0.5} == skipped:
            return seed
        seed += 1


def bart(layers: int) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        max_position_embeddings=32,
        d_model=32,
        encoder_layers=layers,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        dropout=0.0,
        encoder_layerdrop=0.5,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        decoder_start_token_id=1,
    )
    model = BartForConditionalGeneration(config)
    for name, param in model.named_parameters():
        if "k_proj.bias" in name:  # its gradient is rounding
            param.requires_grad_(False)
    return model


def skipping(*pattern: tuple[set[int], set[int]]) -> Build:
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in Tokens(rows=2 * len(pattern)).rows]
    return lambda common: in_order(bart(3), rows, common, Skips(pattern, 3))


# ---- forwards before one backward ------------------------------------------------------------------------------------


class SeveralForwards(InOrder):
    """Rank r adds up the losses of r + 1 forwards."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        losses = [model(**{key: value + turn for key, value in inputs.items()}).loss for turn in range(RANK + 1)]
        return torch.stack(losses).mean()


def several(common: dict[str, Any]) -> Trainer:
    # Data parallel broadcasts buffers in every forward, and would wait for ranks that have fewer.
    args = TrainingArguments(**{**common, "average_tokens_across_devices": False, "ddp_broadcast_buffers": False})
    rows = [{key: value.clamp(max=60) for key, value in row.items()} for row in Tokens().rows]
    return SeveralForwards(model=llama(), args=args, train_dataset=Rows(rows))


CASES: dict[str, Build] = {
    "images on one rank": pictures((1, 0), (0, 1), (1, 1), (1, 0), (0, 1)),
    "images on all ranks or none": pictures((1, 1), (0, 0), (1, 1), (0, 0), (1, 1)),
    "images anywhere": pictures((0, 0), (1, 0), (0, 0), (0, 1), (1, 1), (0, 0)),
    "layers on one rank": skipping(({0}, {1, 2}), (set(), {2}), ({1, 2}, {0}), ({2}, set())),
    "layers on no rank": skipping((set(), {1, 2}), ({0, 1}, {1, 2}), ({0, 1, 2}, {0, 1}), ({1}, set())),
    # The last layer's unit holds the encoder's first norm, too, which every pass uses.
    "half a unit on no rank": skipping((set(), {0}), ({2}, {2}), ({0, 2}, {2}), (set(), {1})),
    "half a unit on all ranks or none": skipping(({2}, {2}), (set(), set()), ({0, 2}, {0, 2}), ({1}, {1})),
    "layers on all ranks or none": skipping((set(), set()), ({0, 1}, {0, 1}), ({1}, {1}), (set(), set())),
    "forwards": several,
}
TOGETHER = {"images on all ranks or none", "layers on all ranks or none", "half a unit on all ranks or none"}
"""At stage 3, where a forward is a collective, the others only when asked for by name."""


if __name__ == "__main__":
    compare(CASES, apart_at_3=CASES.keys() - TOGETHER)
