"""Activations of a batch, and LoRA matrices on a model without values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..config import ZeroConfig
from ..core.precision import dtype_of
from ..tiers.tier import WRITTEN_INPUTS, padded
from .shapes import Architecture


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank: `rows` sequences of `sequence` tokens, which the ranks of a group share."""

    rows: int
    sequence: int
    checkpointing: bool = False
    """transformers' gradient checkpointing: keep the layers' inputs only, and recompute one layer at a time."""
    architecture: Architecture | None = None

    def tokens(self, config: ZeroConfig) -> int:
        """Return the tokens of one rank."""
        return self.rows * -(-self.sequence // config.sp_size)


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


def input_bytes(architecture: Architecture, tokens: int, size: int, is_mixed: bool) -> int:
    """Return bytes of one checkpointed layer's input."""
    return tokens * architecture.hidden * (4 if is_mixed else size)


def activation_bytes(batch: Batch, config: ZeroConfig, size: int, is_mixed: bool) -> tuple[int, int, int]:
    """Estimate bytes on the device, and return those of offloaded checkpoints on the host and on disk.

    All are 0 if the architecture is not known. Two inputs are on the device at once: one in use, one on its way.

    Args:
        size: bytes per element of the compute dtype.
        is_mixed: under autocast the residual stream stays float32.
    """
    architecture, tokens = batch.architecture, batch.tokens(config)
    if architecture is None:
        return 0, 0, 0
    layer = layer_bytes(architecture, size, 4 if is_mixed else size)
    is_chunked = config.chunked_loss is True or (
        config.chunked_loss == "auto" and tokens * architecture.vocab * 4 > LOSS_BYTES
    )
    head = tokens * logits_bytes(architecture, size)
    if is_chunked:
        # A chunk's log-softmax and the gradients of its two operations, in float32.
        head = min(head, chunk_tokens(architecture.vocab) * architecture.vocab * 3 * 4)
    if not batch.checkpointing:
        return tokens * architecture.layers * layer + head, 0, 0
    one, layers = input_bytes(architecture, tokens, size, is_mixed), architecture.layers
    # The backward starts with the logits and releases them before it recomputes the last layer.
    moment = max(tokens * layer, head)
    if config.offload_activations == "none":
        return moment + layers * one, 0, 0
    moment += min(2, layers) * one
    if config.offload_activations == "cpu":
        return moment, layers * one, 0
    return moment, min(layers, WRITTEN_INPUTS + 1) * one, layers * padded(one)


def attention_exchange(batch: Batch, config: ZeroConfig, size: int) -> tuple[int, float]:
    """Return how often attention exchanges tensors in one forward and its backward, and the bytes of one exchange.

    Each layer and pass has two: one of queries, keys and values, one of outputs.
    """
    architecture, sharers = batch.architecture, config.sp_size
    if architecture is None or sharers == 1:
        return 0, 0.0
    heads, pairs = architecture.heads, architecture.key_value_heads or architecture.heads
    repeats = next(n for n in range(1, heads + 1) if pairs * n % sharers == 0 or n * pairs >= heads)
    width = (heads + repeats * pairs) * architecture.hidden // heads
    passes = 3 if batch.checkpointing else 2  # forward, recomputation, backward
    return 2 * passes * architecture.layers, batch.tokens(config) * width * size * (sharers - 1) / sharers


def activation_traffic(batch: Batch, config: ZeroConfig, size: int, is_mixed: bool, is_cpu: bool) -> dict[str, int]:
    """Return the bytes that offloaded inputs move in one forward and its backward, by channel."""
    architecture = batch.architecture
    if architecture is None or config.offload_activations == "none":
        return {}
    one, layers = input_bytes(architecture, batch.tokens(config), size, is_mixed), architecture.layers
    if config.offload_activations == "cpu":
        return {"down": layers * one, "up": layers * one}
    late = max(0, layers - WRITTEN_INPUTS)
    arrives = layers - late if is_cpu else layers
    return {"down": layers * one, "up": arrives * one, "write": layers * one, "read": late * one}


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
