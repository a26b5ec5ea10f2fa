"""Sizes of models, as plain data: by the name of a model or a number of parameters. Loads no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Config(NamedTuple):
    """Arguments of `AutoConfig.for_model(kind, **settings)`."""

    kind: str
    """transformers' `model_type`."""
    architecture: str
    """The model class."""
    settings: dict[str, Any]
    source: str = ""
    """The publication of the sizes."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a transformer that activations depend on."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    key_value_heads: int | None = None
    """None: equal to `heads`."""
    is_gated: bool = False
    """True if the MLP multiplies two projections (SwiGLU)."""

    @staticmethod
    def of(config: Any, names: Iterable[str] = ()) -> Architecture | None:
        """Read the sizes from a transformers config and the parameter names; None if a size is missing."""
        config = getattr(config, "text_config", None) or config

        def find(*keys: str) -> int | None:
            values = (getattr(config, key, None) for key in keys)
            return next((value for value in values if isinstance(value, int) and value > 0), None)

        hidden, layers = find("hidden_size", "n_embd", "d_model"), find("num_hidden_layers", "n_layer", "num_layers")
        heads, vocab = find("num_attention_heads", "n_head", "num_heads"), find("vocab_size")
        if hidden is None or layers is None or heads is None or vocab is None:
            return None
        wide = find("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
        is_gated = any("gate_proj" in name or "gate_up_proj" in name for name in names)
        return Architecture(hidden, layers, heads, wide, vocab, find("num_key_value_heads"), is_gated)


def _gpt(layers: int, hidden: int, heads: int, source: str = "", vocab: int = 50257, positions: int = 1024) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return Config("gpt2", "GPT2LMHeadModel", {"vocab_size": vocab, **sizes}, source)


def _llama(
    layers: int, hidden: int, heads: int, wide: int, vocab: int, source: str, kv: int | None = None, tied: bool = False
) -> Config:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or heads,
        "intermediate_size": wide,
    }
    return Config("llama", "LlamaForCausalLM", {**sizes, "tie_word_embeddings": tied}, source)


_GPT2 = "Radford et al. 2019, table 2"
# Brown et al. 2020, table 2.1. A width that the table's heads do not divide (1.3B, 13B) is rounded.
_GPT3 = "arXiv 2005.14165, table 2.1"
_LLAMA = "arXiv 2302.13971, table 2"
_LLAMA3 = "arXiv 2407.21783, table 3"
_CONFIG = "its config.json"
_GPT3_MODELS = {
    f"gpt3-{name}": _gpt(layers, hidden, heads, _GPT3, positions=2048)
    for name, layers, hidden, heads in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 16), ("1.3b", 24, 2048, 16),
        ("2.7b", 32, 2560, 32), ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96),
    )
}  # fmt: skip
PUBLISHED = {
    "gpt2": _gpt(12, 768, 12, _GPT2),
    "gpt2-medium": _gpt(24, 1024, 16, _GPT2),
    "gpt2-large": _gpt(36, 1280, 20, _GPT2),
    "gpt2-xl": _gpt(48, 1600, 25, _GPT2),
    "pythia-70m": _gpt(6, 512, 8, "arXiv 2304.01373, table 1", vocab=50304, positions=2048),
    "megatron-1t": _gpt(128, 25600, 160, "arXiv 2104.04473, table 1", vocab=51200, positions=2048),
    "tinyllama-1.1b": _llama(22, 2048, 32, 5632, 32000, "arXiv 2401.02385, table 1", kv=4),
    "llama-7b": _llama(32, 4096, 32, 11008, 32000, _LLAMA),
    "llama-13b": _llama(40, 5120, 40, 13824, 32000, _LLAMA),
    "llama-30b": _llama(60, 6656, 52, 17920, 32000, _LLAMA),
    "llama-65b": _llama(80, 8192, 64, 22016, 32000, _LLAMA),
    "llama-2-70b": _llama(80, 8192, 64, 28672, 32000, "arXiv 2307.09288, section 2.2", kv=8),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, 128256, _CONFIG, kv=8, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192, 128256, _CONFIG, kv=8, tied=True),
    "llama-3-8b": _llama(32, 4096, 32, 14336, 128256, _LLAMA3, kv=8),
    "llama-3-70b": _llama(80, 8192, 64, 28672, 128256, _LLAMA3, kv=8),
    "llama-3-405b": _llama(126, 16384, 128, 53248, 128256, _LLAMA3, kv=8),
    "mistral-7b": _llama(32, 4096, 32, 14336, 32000, "arXiv 2310.06825, table 1", kv=8),
}
"""Configurations of published models by lower-case name."""
_SAME = {
    "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b",
    **{f"llama-3.1-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}, "llama-3.3-70b": "llama-3-70b",
    "tinyllama": "tinyllama-1.1b", "bert-base-uncased": "bert-110m", "t5-base": "t5-220m", "whisper-base": "whisper-74m",
}  # fmt: skip
"""Models of equal sizes under another name."""


# The tiny ones have no dropout: with it, so few steps show mostly noise, and runs would differ between world sizes.
_GPT2_TINY = {
    "vocab_size": 4096, "n_positions": 256, "n_embd": 192, "n_layer": 4, "n_head": 6, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_BERT_TINY = {
    "vocab_size": 4096, "max_position_embeddings": 256, "hidden_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 6, "intermediate_size": 768, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
_LLAMA_TINY = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_MOE_TINY = {**_LLAMA_TINY, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_T5_TINY = {
    "vocab_size": 4096, "d_model": 96, "d_kv": 24, "d_ff": 192, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip
_T5_220M = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
_SPEECH_TINY = {
    "vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 100,
    "max_target_positions": 32, "begin_suppress_tokens": None, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER_74M = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
}  # fmt: skip

CONFIGS = {
    "gpt2-tiny": Config("gpt2", "GPT2LMHeadModel", _GPT2_TINY),
    "gpt2-124m": Config("gpt2", "GPT2LMHeadModel", {}),
    "bert-tiny": Config("bert", "BertForMaskedLM", _BERT_TINY),
    "bert-110m": Config("bert", "BertForMaskedLM", {}),
    "llama-tiny": Config("llama", "LlamaForCausalLM", _LLAMA_TINY),
    "qwen3-tiny": Config("qwen3", "Qwen3ForCausalLM", {**_LLAMA_TINY, "head_dim": 32, "tie_word_embeddings": True}),
    "moe-tiny": Config("mixtral", "MixtralForCausalLM", _MOE_TINY),
    "t5-tiny": Config("t5", "T5ForConditionalGeneration", _T5_TINY),
    "t5-220m": Config("t5", "T5ForConditionalGeneration", _T5_220M),
    "speech-tiny": Config("whisper", "WhisperForConditionalGeneration", _SPEECH_TINY),
    "whisper-74m": Config("whisper", "WhisperForConditionalGeneration", _WHISPER_74M),
    **_GPT3_MODELS,
}
"""Configurations of the example scripts' models, which start from random weights, by lower-case name."""


def built_in(name: str) -> Config | None:
    """Return the model that a name such as `llama3-8b` or `meta-llama/Meta-Llama-3-8B-Instruct` means; None: not known."""
    return _BY_LETTERS.get(_letters(name))


_AROUND = re.compile(r"^(meta)?|(instruct|chat|base|hf|it|bnb4bit|v[\d.]+|intermediate[\w.]*)*$")


def _letters(name: str) -> str:
    """Return letters, digits and points of a model's name, without its owner, and without `meta-` and `-instruct`."""
    return _AROUND.sub("", re.sub(r"[^a-z0-9.]", "", name.lower().rsplit("/", 1)[-1]))


_EVERY = {**CONFIGS, **PUBLISHED}
_BY_LETTERS = {_letters(name): _EVERY[same] for name, same in ({name: name for name in _EVERY} | _SAME).items()}
NAMES = sorted({*_EVERY, *_SAME})
"""All names of models whose sizes are known."""
_LADDER = (
    "gpt2-tiny", "pythia-70m", "gpt2", "gpt2-medium", "gpt2-large", "tinyllama-1.1b", "llama-3.2-3b", "llama-7b", "llama-13b",
    "llama-30b", "llama-2-70b", "gpt3-175b", "llama-3-405b", "megatron-1t",
)  # fmt: skip


def of_size(parameters: int) -> tuple[str, Config]:
    """Return the name of the nearest published decoder, and its sizes with the number of blocks that comes nearest."""

    def distance(name: str) -> float:
        outside, block = _numel(_EVERY[name])
        return abs(math.log((outside + _layers(_EVERY[name]) * block) / parameters))

    name = min(_LADDER, key=distance)
    nearest = _EVERY[name]
    outside, block = _numel(nearest)
    layers = max(1, round((parameters - outside) / block))
    key = "n_layer" if nearest.kind == "gpt2" else "num_hidden_layers"
    return name, nearest._replace(settings={**nearest.settings, key: layers})


def _layers(config: Config) -> int:
    return int(config.settings["n_layer" if config.kind == "gpt2" else "num_hidden_layers"])


def _numel(config: Config) -> tuple[int, int]:
    """Return the parameters outside the blocks, and those of one block."""
    sizes = config.settings
    if config.kind == "gpt2":
        hidden = sizes["n_embd"]
        return (sizes["vocab_size"] + sizes["n_positions"] + 2) * hidden, (12 * hidden + 13) * hidden
    hidden, tables = sizes["hidden_size"], 1 if sizes["tie_word_embeddings"] else 2
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    block = hidden * (2 * hidden + 2 * kv + 3 * sizes["intermediate_size"] + 2)
    return (tables * sizes["vocab_size"] + 1) * hidden, block
