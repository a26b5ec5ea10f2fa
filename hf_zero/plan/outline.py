"""Modules without values, built from file headers, a shape or a number of parameters: all that a plan needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.safetensors import read_header
from ..core.precision import dtype_of
from ..errors import ConfigError
from ..tiers.tier import WRITTEN_INPUTS, padded
from .configs import Config


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
class Batch:
    """One micro-batch of one rank: `rows` sequences of `sequence` tokens, which `sp_size` ranks share.

    Raises:
        ConfigError: a size below 1.
    """

    rows: int
    sequence: int
    checkpointing: bool = False
    """transformers' gradient checkpointing: keep the layers' inputs only, and recompute one layer at a time."""
    offload: str = "none"
    """Where the kept inputs are stored: none (on the device), cpu or disk."""
    architecture: Architecture | None = None
    sp_size: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.sequence < 1:
            raise ConfigError(f"a batch needs at least one row and one token, found {self.rows} x {self.sequence}")

    @property
    def tokens(self) -> int:
        return self.rows * -(-self.sequence // self.sp_size)


# Activations ----------------------------------------------------------------------------------------------------------


def layer_bytes(architecture: Architecture, size: int, residual_size: int) -> int:
    """Return bytes per layer and token: `size` bytes per element in matrix products, `residual_size` in the residual stream.

    After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section
    4.1: 34 bytes per token, layer and hidden element in 16 bits, less the attention scores (5 a s / h), which torch's
    scaled_dot_product_attention does not keep. Here with the MLP's true width, grouped keys and values, gated MLPs, and types.

    Attention keeps its input, queries, keys, values and output; the MLP its input, and 2 (gated: 4) arrays of its width; the
    two norms their inputs; the two dropouts a byte per element.
    """
    hidden, heads = architecture.hidden, architecture.heads
    kv = 2 * hidden * (architecture.key_value_heads or heads) // heads
    wide = (4 if architecture.is_gated else 2) * architecture.intermediate
    return size * (4 * hidden + kv + wide) + residual_size * 2 * hidden + 2 * hidden


def logits_bytes(architecture: Architecture, size: int) -> int:
    """Return bytes per token of the logits, their float32 copy, their log-softmax, and the gradient."""
    return architecture.vocab * (size + 3 * 4)


def input_bytes(batch: Batch, size: int, is_mixed: bool) -> int:
    """Return bytes of one checkpointed layer's input; 0 if the architecture is not known."""
    return 0 if batch.architecture is None else batch.tokens * batch.architecture.hidden * (4 if is_mixed else size)


def activation_bytes(batch: Batch, size: int, is_mixed: bool) -> tuple[int, int, int]:
    """Estimate bytes on the device, and return those of offloaded checkpoints on the host and on disk.

    All are 0 if the architecture is not known. Two inputs are on the device at once: one in use, one on its way.

    Args:
        size: bytes per element of the compute dtype.
        is_mixed: under autocast the residual stream stays float32.
    """
    architecture = batch.architecture
    if architecture is None:
        return 0, 0, 0
    layer = layer_bytes(architecture, size, 4 if is_mixed else size)
    head = logits_bytes(architecture, size)
    if not batch.checkpointing:
        return batch.tokens * (architecture.layers * layer + head), 0, 0
    one, layers = input_bytes(batch, size, is_mixed), architecture.layers
    # The backward starts with the logits and releases them before it recomputes the last layer.
    moment = batch.tokens * max(layer, head)
    if batch.offload == "none":
        return moment + layers * one, 0, 0
    moment += min(2, layers) * one
    if batch.offload == "cpu":
        return moment, layers * one, 0
    return moment, min(layers, WRITTEN_INPUTS + 1) * one, layers * padded(one)


def activation_work(batch: Batch, size: int, is_mixed: bool, is_cpu: bool) -> dict[str, int]:
    """Return the bytes that one forward and its backward move, by road: offloaded inputs, and what attention exchanges."""
    architecture, one = batch.architecture, input_bytes(batch, size, is_mixed)
    if architecture is None:
        return {}
    layers, work = architecture.layers, {}
    if batch.offload != "none":
        late = max(0, layers - WRITTEN_INPUTS) if batch.offload == "disk" else 0
        work = {"down": layers * one, "up": (layers - late if is_cpu else layers) * one}
        work |= {"write": layers * one, "read": late * one} if batch.offload == "disk" else {}
    if batch.sp_size > 1:
        heads, pairs = architecture.heads, architecture.key_value_heads or architecture.heads
        repeats = next(n for n in range(1, heads + 1) if pairs * n % batch.sp_size == 0 or n * pairs >= heads)
        width = 2 * (heads + repeats * pairs) * architecture.hidden // heads  # queries and outputs, keys and values
        passes = 3 if batch.checkpointing else 2
        work["sequence"] = passes * layers * batch.tokens * width * size * (batch.sp_size - 1) // batch.sp_size
    return work


# Shapes ---------------------------------------------------------------------------------------------------------------


_GPT2 = "Radford et al. 2019, table 2"
_BERT = "arXiv 1810.04805, section 3"
_PYTHIA = "arXiv 2304.01373, table 1"
_TINYLLAMA = "arXiv 2401.02385, table 1"
_LLAMA = "arXiv 2302.13971, table 2"
_LLAMA2 = "arXiv 2307.09288, section 2.2"
_LLAMA3 = "arXiv 2407.21783, table 3"
_MEGATRON = "arXiv 2104.04473, table 1"
_SCRIPTS = "scripts/common/models.py"


@dataclass(frozen=True, slots=True)
class Shape(Architecture):
    """The sizes of a transformer. `kind` decides which tensors a block has: gpt (GPT-2), llama or bert."""

    name: str = field(kw_only=True)
    kind: str = field(kw_only=True)
    source: str = field(kw_only=True)
    positions: int = 0
    """Positions of a learned embedding; 0: none."""
    is_tied: bool = True
    """The embedding is also the head."""
    extra: int = 0
    """Elements added to the tensors of this kind of model, so that the number of parameters is exact."""

    @property
    def numel(self) -> int:
        without, one = (
            sum(math.prod(shape) for _, shape in tensors(replace(self, layers=layers))) for layers in (0, 1)
        )
        return without + self.layers * (one - without)

    @property
    def config(self) -> Config:
        """Return the configuration of transformers' model of these sizes."""
        if self.kind == "gpt":
            sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads, "n_positions": self.positions}
            return Config("gpt2", "GPT2LMHeadModel", {"vocab_size": self.vocab, **sizes})
        sizes = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
        }
        if self.kind == "bert":
            return Config("bert", "BertForMaskedLM", {**sizes, "max_position_embeddings": self.positions})
        more = {"num_key_value_heads": self.key_value_heads or self.heads, "tie_word_embeddings": self.is_tied}
        return Config("llama", "LlamaForCausalLM", {**sizes, **more})

    @property
    def architecture(self) -> Architecture:
        """Return True if all sizes are equal; names do not count."""
        return Architecture(*(getattr(self, item.name) for item in fields(Architecture)))


def _gpt(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    source: str,
    vocab: int = 50257,
    positions: int = 1024,
    kind: str = "gpt",
) -> Shape:
    return Shape(hidden, layers, heads, 4 * hidden, vocab, name=name, kind=kind, source=source, positions=positions)


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
    return Shape(hidden, layers, heads, wide, vocab, kv, True, name=name, kind="llama", source=source, is_tied=tied)


_bert = partial(_gpt, kind="bert")


PUBLISHED = (
    _gpt("gpt2-tiny", 4, 192, 6, _SCRIPTS, vocab=4096, positions=256),
    _gpt("gpt2-124m", 12, 768, 12, _GPT2),
    _gpt("gpt2", 12, 768, 12, _GPT2),
    _gpt("gpt2-medium", 24, 1024, 16, _GPT2),
    _gpt("gpt2-large", 36, 1280, 20, _GPT2),
    _gpt("gpt2-xl", 48, 1600, 25, _GPT2),
    _gpt("gpt3-175b", 96, 12288, 96, "arXiv 2005.14165, table 2.1", positions=2048),
    _bert("bert-tiny", 4, 192, 6, _SCRIPTS, vocab=4096, positions=256),
    _bert("bert-110m", 12, 768, 12, _BERT, vocab=30522, positions=512),
    _bert("bert-base-uncased", 12, 768, 12, _BERT, vocab=30522, positions=512),
    _llama("tinyllama-1.1b", 22, 2048, 32, 5632, 32000, _TINYLLAMA, kv=4),
    _llama("llama-7b", 32, 4096, 32, 11008, 32000, _LLAMA),
    _llama("llama-13b", 40, 5120, 40, 13824, 32000, _LLAMA),
    _llama("llama-30b", 60, 6656, 52, 17920, 32000, _LLAMA),
    _llama("llama-65b", 80, 8192, 64, 22016, 32000, _LLAMA),
    _llama("llama-2-70b", 80, 8192, 64, 28672, 32000, _LLAMA2, kv=8),
    _llama("llama-3-8b", 32, 4096, 32, 14336, 128256, _LLAMA3, kv=8),
    _llama("llama-3-70b", 80, 8192, 64, 28672, 128256, _LLAMA3, kv=8),
    _llama("llama-3-405b", 126, 16384, 128, 53248, 128256, _LLAMA3, kv=8),
)
BUILT_IN = {shape.name: shape for shape in PUBLISHED}
_LADDER = (
    # A number of parameters becomes the nearest of these, with width and MLP changed until the number is exact.
    _gpt("Pythia 70M", 6, 512, 8, _PYTHIA, vocab=50304, positions=2048),
    _llama("Llama 3.2 3B", 28, 3072, 24, 8192, 128256, "its config.json", kv=8, tied=True),
    _gpt("Megatron 1T", 128, 25600, 160, _MEGATRON, vocab=51200, positions=2048),
    *(replace(BUILT_IN[name], name=label) for name, label in (
        ("gpt2", "GPT-2 small"), ("gpt2-medium", "GPT-2 medium"), ("gpt2-large", "GPT-2 large"),
        ("tinyllama-1.1b", "TinyLlama 1.1B"), ("llama-7b", "LLaMA 7B"), ("llama-13b", "LLaMA 13B"),
        ("llama-30b", "LLaMA 33B"), ("llama-2-70b", "Llama 2 70B"), ("gpt3-175b", "GPT-3"), ("llama-3-405b", "Llama 3 405B"),
    )),
)  # fmt: skip
_STEPS = (128, 64, 16)
"""Widths are multiples of the first of these that keeps the MLP about as wide as published."""


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the parameters, tied ones once."""
    hidden, wide = shape.hidden, shape.intermediate
    kv = hidden * (shape.key_value_heads or shape.heads) // shape.heads
    yield "embeddings.word_embeddings.weight", (shape.vocab, hidden)
    if shape.positions:
        yield "embeddings.position_embeddings.weight", (shape.positions, hidden)
    if shape.kind == "bert":
        yield "embeddings.token_type_embeddings.weight", (2, hidden)
        yield from _layer("embeddings.norm", (hidden,), True)
    is_biased = shape.kind != "llama"
    for layer in range(shape.layers):
        at = f"layers.{layer}"
        yield from _layer(f"{at}.attention_norm", (hidden,), is_biased)
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield from _layer(f"{at}.attention.{name}", (out, hidden), is_biased)
        yield from _layer(f"{at}.mlp_norm", (hidden,), is_biased)
        for name in ("gate", "up") if shape.kind == "llama" else ("up",):
            yield from _layer(f"{at}.mlp.{name}", (wide, hidden), is_biased)
        yield from _layer(f"{at}.mlp.down", (hidden, wide), is_biased)
    if shape.kind == "bert":  # the head of masked language modelling
        yield from _layer("head.dense", (hidden, hidden), True)
        yield from _layer("head.norm", (hidden,), True)
        yield "head.bias", (shape.vocab,)
    else:
        yield from _layer("norm", (hidden,), is_biased)
    if shape.extra:
        yield "norm.extra", (shape.extra,)
    if not shape.is_tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def _layer(name: str, shape: tuple[int, ...], is_biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if is_biased:
        yield f"{name}.bias", shape[:1]


def of_size(parameters: int) -> Shape | None:
    """Return a transformer of exactly `parameters` parameters, with depth and ratios of the nearest published one.

    None if they are too few for a vocabulary and blocks.
    """
    nearest = min(_LADDER, key=lambda shape: abs(math.log(shape.numel / parameters)))
    group = nearest.heads // (nearest.key_value_heads or nearest.heads)
    scaled = nearest.hidden * math.sqrt(parameters / nearest.numel)
    for step in _STEPS:
        found = []
        for width in range(step, round(1.5 * scaled) + step, step):
            heads = max(1, round(width * nearest.heads / nearest.hidden / group)) * group
            shape = replace(nearest, hidden=width, heads=heads, key_value_heads=heads // group)
            found.append(replace(shape, intermediate=_wide(shape, parameters)))
        if not found:
            continue
        best = min(found, key=lambda shape: abs(math.log((shape.intermediate + 1) / shape.hidden / _ratio(nearest))))
        if best.intermediate >= 0.5 * _ratio(nearest) * best.hidden:
            return replace(best, extra=parameters - best.numel)
    return None


def _ratio(shape: Shape) -> float:
    return shape.intermediate / shape.hidden


def _wide(shape: Shape, parameters: int) -> int:
    """Return the widest MLP with at most `parameters` parameters."""
    none, one = (replace(shape, intermediate=wide).numel for wide in (0, 1))
    return max(0, (parameters - none) // (one - none))


# Models without values ------------------------------------------------------------------------------------------------


_EMBEDDING = re.compile(r"emb|wte|wpe")
_FLOATS = ("float32", "float64", "bfloat16", "float16")
_HEAD = "lm_head.weight"
_MOST_DEEP = 50
"""Deepest nesting of modules. Code recurses over them, and names in a file may have any number of dots."""


def from_number(parameters: int) -> nn.Module:
    """Return a model of one matrix: too few parameters for blocks."""
    return from_tensors({"parameters.weight": ("float32", (parameters, 1))})


def from_shape(shape: Shape) -> nn.Module:
    """Return float32 modules without values for a shape."""
    return from_tensors({name: ("float32", sizes) for name, sizes in tensors(shape)}, shape.is_tied)


def from_files(path: Path) -> nn.Module:
    """Return modules without values from the headers of one safetensors file, or of all in a folder.

    Raises:
        ConfigError: no safetensors file.
        CheckpointError: a damaged header.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}: expected a .safetensors file, or a folder with some or with a config.json")
    shapes = {key: entry for file in files for key, entry in read_header(file).tensors.items()}
    if not shapes:
        raise ConfigError(f"{path}: its files hold no tensors")
    return from_tensors({name: (entry.dtype, entry.shape) for name, entry in shapes.items()})


def from_tensors(shapes: Mapping[str, tuple[str, tuple[int, ...]]], is_tied: bool | None = None) -> nn.Module:
    """Return modules on the meta device with parameters of these names, dtypes and shapes.

    Order of a pass: embeddings, largest first; blocks; the others, largest last. Integer dtypes are frozen. `is_tied`: the
    largest embedding is also the head; None: tied if no other matrix follows the blocks.
    """
    params: dict[str, nn.Parameter] = {}
    for name, (dtype, shape) in shapes.items():
        empty = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        params[name] = nn.Parameter(empty, requires_grad=dtype in _FLOATS)
    order = {name: (_place(name), _place(name) * param.numel(), _natural(name)) for name, param in params.items()}
    params = {name: params[name] for name in sorted(params, key=lambda name: order[name])}
    if is_tied is None:
        is_tied = not any(_place(name) > 0 and param.dim() > 1 for name, param in params.items())
    first = next(iter(params))
    if is_tied and _place(first) < 0:
        params[_HEAD] = params[first]
    return _module("", {tuple(name.split(".", _MOST_DEEP)): param for name, param in params.items()})


def _place(name: str) -> int:
    """Return -1 for an embedding before the blocks, 0 for a parameter of a block (`h.0.…`), 1 behind the blocks."""
    if any(part.isdecimal() for part in name.split(".")[:-1]):
        return 0
    return -1 if _EMBEDDING.search(name) else 1


def _module(name: str, params: Mapping[tuple[str, ...], nn.Parameter]) -> nn.Module:
    """Return a module with these parameters. Matrices other than embeddings count as cast by autocast."""
    own: dict[str, nn.Parameter | None] = {path[0]: param for path, param in params.items() if len(path) == 1}
    inner: dict[str, dict[tuple[str, ...], nn.Parameter]] = {}
    for path, param in params.items():
        if len(path) > 1:
            inner.setdefault(path[0], {})[path[1:]] = param
    weight = own.get("weight")
    kind: type[nn.Module] = nn.Module
    if inner and not own and all(child.isdecimal() for child in inner):
        kind = nn.ModuleList
    elif weight is not None and weight.dim() > 1:
        kind = nn.Embedding if _EMBEDDING.search(name) else nn.Linear
    elif "in_proj_weight" in own:
        kind = nn.MultiheadAttention
    made = kind.__new__(kind)
    nn.Module.__init__(made)  # without its own parameters
    if kind is nn.Embedding:
        made.__dict__["max_norm"] = None
    made._parameters = own
    made._modules = {child: _module(f"{name}.{child}", its) for child, its in inner.items()}
    return made


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: `h.10` after `h.9`."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]
