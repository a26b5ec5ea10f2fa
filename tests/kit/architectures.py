"""Every architecture of transformers in small sizes: configurations shrink by the names of their fields."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

VOCAB = 97
KINDS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
         "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT")  # fmt: skip
_SIZES: dict[str, int] = {
    r"(token|_)(id|idx|index)$|^(pad|bos|eos)_token": VOCAB - 1,
    r"feat_extract_layers|conv_layers|max_window_layers": 99,
    r"num_codebooks$|num_codevector|num_(key_value|kv)_heads|n_head_kv|multi_query_group_num|experts_per_tok|top_?k$|moe_k$": 2,
    r"^vocab|vocab_size$": VOCAB,
    r"^d_head$|head_dim$|^d_kv$|kv_channels|head_size$|_rank$|sliding_window|attention_window|chunk_size|d?_state": 8,
    r"rotary_dim|heads?$|window_size|experts$": 4,
    r"(layers?|blocks)$|^depth$|num_hidden_groups|_groups$|num_frames": 2,
    r"n_group$|n(um)?_shared|topk_group|tubelet": 1,
    r"intermediate|ffn|^d_ff$|n_inner|dim_feedforward|mlp_dim": 48,
    r"hidden_size|^d_model$|^n_embd$|embed|bottleneck_size|_size_per_layer_input|dim$|_hidden$|image_size": 32,
    r"patch_size": 8,
    r"positions|position_embeddings|max_seq|^n_ctx$|context_length": 64,
}  # fmt: skip
"""The largest number of a field by its name; the first that fits."""
_LISTS = {"types?$": None, "hidden_sizes|dims$|channels": 16, "depths|num_layers": 1, "heads": 2, "conv_dim": 8}
"""The elements of a list by its name; None: one of each kind."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "default_language": "en_XX", "attention_types": [[["global", "local"], 1]], "is_decoder": True},
    {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_head_dim": 16, "layer_types": ["sliding_attention"] * 2},
    {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0, "hidden_size": 64, "num_heads": 8},
)  # fmt: skip
"""Changes that one or another model needs for its sizes to fit."""


def names() -> dict[str, str]:
    """The kind of every model's class."""
    found: dict[str, str] = {}
    for kind in reversed(KINDS):
        classes = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()
        found |= dict.fromkeys(
            (name for each in classes for name in ((each,) if isinstance(each, str) else each)), kind
        )
    return found


def _small(cls: Any, changes: dict[str, Any]) -> Any:
    fields = {name: value for name, value in vars(cls()).items() if not name.startswith("_")}
    given: dict[str, Any] = {}
    for name, old in fields.items():
        limit = next((size for pattern, size in _SIZES.items() if re.search(pattern, name)), None)
        is_list = isinstance(old, (list, tuple)) and bool(old) and all(type(each) in (int, str) for each in old)
        element = next((size for pattern, size in _LISTS.items() if is_list and re.search(pattern, name)), 0)
        if isinstance(old, transformers.PreTrainedConfig):
            given[name] = _small(type(old), changes)
        elif name in cls.attribute_map:
            continue
        elif name == "pad_token_id":
            given[name] = min(old or 1, VOCAB - 1)
        elif type(old) is int and limit is not None:
            given[name] = min(old, limit)
        elif isinstance(old, float) and "drop" in name:
            given[name] = 0.0
        elif element != 0:
            given[name] = ([*dict.fromkeys(old)] * 2)[:2] if element is None else [element] * len(old)
        elif isinstance(old, dict) and "mrope_section" in old:
            given[name] = {**old, "mrope_section": [2, 1, 1]}
    given |= {name: value for name, value in changes.items() if name in fields}
    return cls(**given)


def build(name: str, variant: int = 0) -> nn.Module:
    """A model without dropout, always of the same weights."""
    cls = getattr(transformers, name)
    config = _small(cls.config_class, VARIANTS[variant])
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        if sum(param.numel() for param in cls(config).parameters()) > 4_000_000:
            raise ValueError("a field without a known name makes it large")
    torch.manual_seed(3)
    model: nn.Module = cls(config).train()
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and (key == "p" or "drop" in key):
                setattr(module, key, 0.0)
    return model


def batch(name: str, model: Any, seed: int, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Inputs with labels, as the model's kind takes them."""
    generator = torch.Generator().manual_seed(seed)
    kind, config = names()[name], model.config
    text = config.get_text_config()
    special = {
        value
        for each in (config, text)
        for key, value in vars(each).items()
        if key.endswith("token_id") and type(value) is int
    }
    free = torch.tensor([token for token in range(3, VOCAB) if token not in special])
    given: dict[str, Tensor] = {}
    if kind == "IMAGE_CLASSIFICATION":
        given["pixel_values"] = torch.randn(rows, getattr(config, "num_channels", 3), 32, 32, generator=generator)
    else:
        given["input_ids"] = free[torch.randint(len(free), (rows, length), generator=generator)]
    if kind.endswith("CLASSIFICATION"):
        if config.is_encoder_decoder:
            given["input_ids"][:, -1] = text.eos_token_id
        shape = (rows, length) if kind.startswith("TOKEN") else (rows,)
        return given | {"labels": torch.randint(config.num_labels, shape, generator=generator)}
    given["labels"] = given["input_ids"].flip(1) if kind == "MASKED_LM" else given["input_ids"].clone()
    given["labels"][0, : length // 2] = -100
    return given
