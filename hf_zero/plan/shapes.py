"""Sizes of models, as plain data: by the name of a model or a number of parameters. Loads no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple


class Config(NamedTuple):
    """Arguments of `AutoConfig.for_model(kind, **settings)`."""

    kind: str
    """transformers' `model_type`."""
    architecture: str
    """The model class."""
    settings: dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class Shape(Architecture):
    """The sizes of a decoder: of Llama where the MLP is gated, of GPT-2 otherwise."""

    name: str = field(kw_only=True)
    source: str = field(kw_only=True)
    positions: int = 0
    """Positions of a learned embedding; 0: none."""
    is_tied: bool = True
    """The embedding is also the head."""
    extra: int = 0
    """Elements added to the last norm, so that the number of parameters is exact."""

    @property
    def numel(self) -> int:
        without, one = (
            sum(math.prod(shape) for _, shape in tensors(replace(self, layers=layers))) for layers in (0, 1)
        )
        return without + self.layers * (one - without)

    @property
    def config(self) -> Config:
        """Return the configuration of transformers' model of these sizes."""
        if not self.is_gated:
            sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads, "n_positions": self.positions}
            return Config("gpt2", "GPT2LMHeadModel", {"vocab_size": self.vocab, **sizes})
        sizes = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads or self.heads,
            "intermediate_size": self.intermediate,
        }
        return Config("llama", "LlamaForCausalLM", {**sizes, "tie_word_embeddings": self.is_tied})

    @property
    def architecture(self) -> Architecture:
        """Return the sizes alone: equal for models that differ in name."""
        return Architecture(*(getattr(self, item.name) for item in fields(Architecture)))


def _gpt(
    name: str, layers: int, hidden: int, heads: int, source: str, vocab: int = 50257, positions: int = 1024
) -> Shape:
    return Shape(hidden, layers, heads, 4 * hidden, vocab, name=name, source=source, positions=positions)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    wide: int,
    vocab: int,
    source: str,
    kv: int | None = None,
    tied: bool = False,
) -> Shape:
    return Shape(hidden, layers, heads, wide, vocab, kv, True, name=name, source=source, is_tied=tied)


_GPT2 = "Radford et al. 2019, table 2"
# Brown et al. 2020, table 2.1. A width that the table's heads do not divide (1.3B, 13B) is rounded.
_GPT3 = "arXiv 2005.14165, table 2.1"
_LLAMA = "arXiv 2302.13971, table 2"
_LLAMA3 = "arXiv 2407.21783, table 3"
_CONFIG = "its config.json"
_GPT3_SHAPES = tuple(
    _gpt(f"gpt3-{name}", layers, hidden, heads, _GPT3, positions=2048)
    for name, layers, hidden, heads in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 16), ("1.3b", 24, 2048, 16),
        ("2.7b", 32, 2560, 32), ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96),
    )
)  # fmt: skip
_PUBLISHED = (
    _gpt("gpt2", 12, 768, 12, _GPT2),
    _gpt("gpt2-medium", 24, 1024, 16, _GPT2),
    _gpt("gpt2-large", 36, 1280, 20, _GPT2),
    _gpt("gpt2-xl", 48, 1600, 25, _GPT2),
    *_GPT3_SHAPES,
    _llama("tinyllama-1.1b", 22, 2048, 32, 5632, 32000, "arXiv 2401.02385, table 1", kv=4),
    _llama("llama-7b", 32, 4096, 32, 11008, 32000, _LLAMA),
    _llama("llama-13b", 40, 5120, 40, 13824, 32000, _LLAMA),
    _llama("llama-30b", 60, 6656, 52, 17920, 32000, _LLAMA),
    _llama("llama-65b", 80, 8192, 64, 22016, 32000, _LLAMA),
    _llama("llama-2-70b", 80, 8192, 64, 28672, 32000, "arXiv 2307.09288, section 2.2", kv=8),
    _llama("llama-3.2-1b", 16, 2048, 32, 8192, 128256, _CONFIG, kv=8, tied=True),
    _llama("llama-3.2-3b", 28, 3072, 24, 8192, 128256, _CONFIG, kv=8, tied=True),
    _llama("llama-3-8b", 32, 4096, 32, 14336, 128256, _LLAMA3, kv=8),
    _llama("llama-3-70b", 80, 8192, 64, 28672, 128256, _LLAMA3, kv=8),
    _llama("llama-3-405b", 126, 16384, 128, 53248, 128256, _LLAMA3, kv=8),
    _llama("mistral-7b", 32, 4096, 32, 14336, 32000, "arXiv 2310.06825, table 1", kv=8),
)
BUILT_IN = {shape.name: shape for shape in _PUBLISHED}
"""Shapes by lower-case name."""
_SAME = {
    "gpt2-124m": "gpt2", "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b",
    **{f"llama-3.1-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}, "llama-3.3-70b": "llama-3-70b",
    "tinyllama": "tinyllama-1.1b", "bert-base-uncased": "bert-110m", "t5-base": "t5-220m", "whisper-base": "whisper-74m",
}  # fmt: skip
"""Models of equal sizes under another name."""
_LADDER = (
    # A number of parameters becomes the nearest of these, with width and MLP changed until the number is exact.
    _gpt("pythia-70m", 6, 512, 8, "arXiv 2304.01373, table 1", vocab=50304, positions=2048),
    _gpt("Megatron 1T", 128, 25600, 160, "arXiv 2104.04473, table 1", vocab=51200, positions=2048),
    *(BUILT_IN[name] for name in (
        "gpt2", "gpt2-medium", "gpt2-large", "tinyllama-1.1b", "llama-3.2-3b", "llama-7b", "llama-13b", "llama-30b",
        "llama-2-70b", "gpt3-175b", "llama-3-405b",
    )),
)  # fmt: skip


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
    **{shape.name: shape.config for shape in _GPT3_SHAPES},
}
"""Configurations of the example scripts' models, which start from random weights, by lower-case name."""


def built_in(name: str) -> Shape | Config | None:
    """Return the model that a name such as `llama3-8b` or `meta-llama/Meta-Llama-3-8B-Instruct` means; None: not known."""
    return _BY_LETTERS.get(_letters(name))


_AROUND = re.compile(r"^(meta)?|(instruct|chat|base|hf|it|bnb4bit|v[\d.]+|intermediate[\w.]*)*$")


def _letters(name: str) -> str:
    """Return letters, digits and points of a model's name, without its owner, and without `meta-` and `-instruct`."""
    return _AROUND.sub("", re.sub(r"[^a-z0-9.]", "", name.lower().rsplit("/", 1)[-1]))


_EVERY: dict[str, Shape | Config] = {**CONFIGS, **BUILT_IN}
_BY_LETTERS = {_letters(name): _EVERY[same] for name, same in ({name: name for name in _EVERY} | _SAME).items()}
NAMES = sorted({*_EVERY, *_SAME})
"""All names of models whose sizes are known."""


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the parameters, tied ones once."""
    hidden, wide = shape.hidden, shape.intermediate
    kv = hidden * (shape.key_value_heads or shape.heads) // shape.heads

    def layer(name: str, *sizes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", sizes
        if not shape.is_gated:
            yield f"{name}.bias", sizes[:1]

    yield "embeddings.word_embeddings.weight", (shape.vocab, hidden)
    if shape.positions:
        yield "embeddings.position_embeddings.weight", (shape.positions, hidden)
    for number in range(shape.layers):
        at = f"layers.{number}"
        yield from layer(f"{at}.attention_norm", hidden)
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield from layer(f"{at}.attention.{name}", out, hidden)
        yield from layer(f"{at}.mlp_norm", hidden)
        for name in ("gate", "up") if shape.is_gated else ("up",):
            yield from layer(f"{at}.mlp.{name}", wide, hidden)
        yield from layer(f"{at}.mlp.down", hidden, wide)
    yield from layer("norm", hidden)
    if shape.extra:
        yield "norm.extra", (shape.extra,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def of_size(parameters: int) -> Shape | None:
    """Return a decoder of exactly `parameters` parameters, with depth and ratios of the nearest published one.

    None if they are too few for a vocabulary and blocks.
    """
    nearest = min(_LADDER, key=lambda shape: abs(math.log(shape.numel / parameters)))
    group = nearest.heads // (nearest.key_value_heads or nearest.heads)
    scaled = nearest.hidden * math.sqrt(parameters / nearest.numel)
    step = 128 if scaled >= 1024 else 16
    found = []
    for width in range(step, round(1.5 * scaled) + step, step):
        heads = max(1, round(width * nearest.heads / nearest.hidden / group)) * group
        shape = replace(nearest, hidden=width, heads=heads, key_value_heads=heads // group)
        none, one = (replace(shape, intermediate=wide).numel for wide in (0, 1))
        if (wide := (parameters - none) // (one - none)) > 0:  # the widest MLP with at most as many parameters
            found.append(replace(shape, intermediate=wide))
    if not found:
        return None
    ratio = nearest.intermediate / nearest.hidden
    best = min(found, key=lambda shape: abs(math.log(shape.intermediate / shape.hidden / ratio)))
    return replace(best, extra=parameters - best.numel)
