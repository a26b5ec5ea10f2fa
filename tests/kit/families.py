"""A small model of each further family of architectures, with random weights; others: tests/models.py."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tests.kit.common import VOCAB

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def mixtral(**changes: Any) -> nn.Module:
    options = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**options, **changes}))


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SMALL, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    )
    return transformers.Qwen3MoeForCausalLM(config)


def vit(**changes: Any) -> nn.Module:
    options = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**{**options, "image_size": 16, "patch_size": 8, **changes})
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetForImageClassification(config)
