"""Bytes that a forward leaves for backward: an estimate from the architecture, the batch and checkpointing.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.1:
34 bytes per token, layer and hidden element in 16 bits, less the attention scores (5 a s / h), which torch's
scaled_dot_product_attention does not keep. Here with the MLP's true width, grouped keys and values, gated MLPs, and types.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a transformer that activations depend on."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    key_value_heads: int | None = None
    """None: as many as heads."""
    is_gated: bool = False
    """Whether the MLP multiplies two projections (SwiGLU)."""

    @staticmethod
    def of(config: Any, names: Iterable[str] = ()) -> Architecture | None:
        """From a transformers config and the model's parameter names; None where a size is not to be found."""
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
    """What one rank puts through the model at a time: `rows` sequences of `sequence` tokens.

    Raises:
        ConfigError: a size below 1.
    """

    rows: int
    sequence: int
    checkpointing: bool = False
    """transformers' gradient checkpointing: only the layers' inputs stay, one layer is computed again at a time."""
    offloads_checkpoints: bool = False
    """Whether the kept inputs rest in host memory."""
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.sequence < 1:
            raise ConfigError(f"a batch needs at least one row and one token, found {self.rows} x {self.sequence}")

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def layer_bytes(architecture: Architecture, size: int, residual_size: int) -> int:
    """One layer and token, `size` bytes per element inside matrices' products, `residual_size` in the residual stream.

    Attention keeps its input, queries, keys, values and output; the MLP its input, and 2 (gated: 4) arrays of its width; the
    two norms their inputs; the two dropouts a byte per element.
    """
    hidden, heads = architecture.hidden, architecture.heads
    kv = 2 * hidden * (architecture.key_value_heads or heads) // heads
    wide = (4 if architecture.is_gated else 2) * architecture.intermediate
    return size * (4 * hidden + kv + wide) + residual_size * 2 * hidden + 2 * hidden


def logits_bytes(architecture: Architecture, size: int) -> int:
    """One token: the logits, a float32 copy of them, their logarithm of the softmax, and the gradient."""
    return architecture.vocab * (size + 3 * 4)


def activation_bytes(batch: Batch, size: int, is_mixed: bool) -> tuple[int, int]:
    """Estimated bytes on the device and, of offloaded checkpoints, on the host; (0, 0) where the architecture is not known.

    Args:
        size: bytes per element of the compute dtype.
        is_mixed: under autocast the residual stream stays float32.
    """
    architecture = batch.architecture
    if architecture is None:
        return 0, 0
    residual = 4 if is_mixed else size
    layer = layer_bytes(architecture, size, residual)
    head = logits_bytes(architecture, size)
    if not batch.checkpointing:
        return batch.tokens * (architecture.layers * layer + head), 0
    kept = batch.tokens * architecture.layers * architecture.hidden * residual
    # Backward starts with the logits; they are gone when the last layer is computed again.
    moment = batch.tokens * max(layer, head)
    return (moment, kept) if batch.offloads_checkpoints else (moment + kept, 0)
