"""Small models whose attention is divided, and what one process with whole sequences computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import VOCAB, bert, generator, gpt2, llama

LENGTH = 22
"""Tokens per row: no multiple of 4, so that the last part is filled up."""


def qwen() -> nn.Module:
    """Biases in attention, norms of heads, more query heads per key-value head than ranks, a tied head."""
    import transformers

    options = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))


def mixtral(**changes: Any) -> nn.Module:
    """A mixture of experts with a sliding window shorter than the sequence."""
    import transformers

    options = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "vocab_size": VOCAB, "max_position_embeddings": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 5, "use_cache": False,
    }  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**options, **changes}))


def roberta() -> nn.Module:
    """Positions that start at 2."""
    import transformers

    options = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCAB,
        "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen": qwen,
    "gpt2": lambda: gpt2(n_head=4, n_positions=LENGTH),
    "bert": lambda: bert(num_attention_heads=4, max_position_embeddings=LENGTH),
    "mixtral": mixtral,
    "roberta": roberta,
}


def batch(group: int, step: int = 0, rows: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """A group's batch. The first row begins with a prompt, which has no labels; of group 1, every row."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator(group, step))
    labels = ids.clone()
    labels[: rows if group else 1, : length // 2 + 1] = -100
    return {"input_ids": ids, "labels": labels}


def tokens(labels: Tensor, shifts: bool) -> Tensor:
    return (labels[:, 1:] if shifts else labels).ne(-100).sum()


def whole(model: nn.Module, batches: list[dict[str, Any]], shifts: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over all tokens of `batches`, and its gradients, by one process."""
    counts = [tokens(each["labels"], shifts) for each in batches]
    total = sum(counts)
    value = torch.zeros(())
    for each, count in zip(batches, counts):
        if count:
            loss = model(**each).loss * count / total
            loss.backward()
            value += loss.detach()
    return value, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
