"""Modules without values, built from file headers, a shape or a number of parameters: all that a plan needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.safetensors import read_header
from ..core.precision import dtype_of
from ..errors import ConfigError
from ..tiers.tier import WRITTEN_INPUTS, padded
from .shapes import Architecture, Shape, tensors


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
    chunked_loss: bool | str = False

    def __post_init__(self) -> None:
        if self.rows < 1 or self.sequence < 1:
            raise ConfigError(f"a batch needs at least one row and one token, found {self.rows} x {self.sequence}")

    @property
    def tokens(self) -> int:
        return self.rows * -(-self.sequence // self.sp_size)


LOSS_BYTES = 1 << 30
"""`chunked_loss="auto"` computes logits in chunks where they take more than this in float32."""
_CHUNK_BYTES = 1 << 28


def chunk_tokens(vocab: int) -> int:
    """Return the tokens of one chunk of the loss: 256 MiB of float32 logits."""
    return max(1, _CHUNK_BYTES // (4 * vocab))


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
    is_chunked = batch.chunked_loss is True or (
        batch.chunked_loss == "auto" and batch.tokens * architecture.vocab * 4 > LOSS_BYTES
    )
    at_once = min(batch.tokens, chunk_tokens(architecture.vocab)) if is_chunked else batch.tokens
    head = at_once * logits_bytes(architecture, size)
    if not batch.checkpointing:
        return batch.tokens * architecture.layers * layer + head, 0, 0
    one, layers = input_bytes(batch, size, is_mixed), architecture.layers
    # The backward starts with the logits and releases them before it recomputes the last layer.
    moment = max(batch.tokens * layer, head)
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


def add_adapters(model: nn.Module, rank: int, dtype: str, in_4bit: bool) -> None:
    """Freeze a model on the meta device in `dtype`, and add LoRA matrices of `rank` to every matrix of its blocks.

    Args:
        in_4bit: two elements of a matrix of the blocks share a byte.
    """
    for param in model.parameters():
        param.requires_grad_(False)
        param.data = param.data.to(dtype_of(dtype)) if param.is_floating_point() else param.data
    for name, module in [*model.named_modules()]:
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or not any(part.isdecimal() for part in name.split(".")):
            continue
        out, inner = weight.shape
        module.add_module("lora_A", nn.Linear(inner, rank, bias=False, device="meta"))
        module.add_module("lora_B", nn.Linear(rank, out, bias=False, device="meta"))
        if in_4bit:
            weight.data = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta")


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
