"""Divide a group's batch among its ranks, as arguments of a stock forward, and weight the losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError

IGNORED = -100
"""Label of tokens without a loss, the default of transformers and torch."""
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys that collators add for packed rows in flash attention, which can derive it from `position_ids`."""
_MARK = "_zero_part"


@dataclass(eq=False)
class Part:
    """The division of one batch among the ranks of a group. `attention` reads it in every layer, also in recomputations.

    Attributes:
        rows, length: of the whole batch, padded to a multiple of the group's ranks.
        tokens: the length before this padding.
        local: tokens per row on this rank.
        causal_mask: the padding mask of the whole rows for causal attention; None: no padding.
        full_mask: for bidirectional attention; it also masks the tokens that fill up the last part.
        position_ids: of the whole rows.
        packed: index of each token's sequence in packed rows; None: one sequence per row.
        count: number of this rank's tokens with a loss; None: the batch has no labels.
        total: divisor of the sum of all losses, in tokens.
        names: those of the arguments.
        needs_labels: the model must compute the loss, because the training loop does not know that tokens are divided.
    """

    rows: int
    length: int
    tokens: int
    local: int
    causal_mask: Tensor | None
    full_mask: Tensor | None
    position_ids: Tensor
    packed: Tensor | None
    count: Tensor | None = None
    total: Tensor | float | None = None
    needs_labels: bool = False
    names: frozenset[str] = frozenset()


def part_of(kwargs: Mapping[str, Any]) -> Part | None:
    """Return the part that these arguments of a forward belong to; None if they are not divided."""
    for value in kwargs.values():
        part = getattr(value, _MARK, None) if isinstance(value, Tensor) else None
        if part is not None:
            return part
    return None


def divide(
    batch: Mapping[str, Any],
    size: int,
    index: int,
    *,
    shifts: bool,
    default_positions: Any,
    packed_of: Any,
) -> tuple[dict[str, Any], Part]:
    """Return part `index` of `size` along the sequence, as arguments of a stock forward.

    Args:
        batch: `input_ids` or `inputs_embeds` (rows x tokens), and tensors of the same first two dimensions.
        shifts: the model's loss compares each token's logits with the next label.
        default_positions: takes the whole `input_ids` and mask, returns the model's own positions; None: 0, 1, 2, …
        packed_of: takes whole `position_ids`, returns the number of each token's sequence; None: one per row.

    Raises:
        ConfigError: a tensor of another shape, labels that are not one per token.
    """
    named = {name: value for name, value in batch.items() if name not in _FLATTENED or "position_ids" not in batch}
    main = next((named[name] for name in ("input_ids", "inputs_embeds") if isinstance(named.get(name), Tensor)), None)
    if main is None or main.dim() < 2:
        raise ConfigError(
            f"sequence parallelism needs input_ids or inputs_embeds of rows and tokens, found {sorted(named)}. Pass the whole "
            "batch as keywords, as the tokenizer and the collator return it"
        )
    rows, tokens = main.shape[:2]
    given = named.get("attention_mask")
    labels = named.get("shift_labels", named.get("labels"))
    positions = named.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2:
        positions = named["position_ids"] = positions.expand(rows, -1)
    _check_shapes(named, rows, tokens)
    packed = None
    if positions is None:
        positions = default_positions(named.get("input_ids"), given)
        if positions is None:
            positions = torch.arange(tokens, device=main.device).expand(rows, -1)
    elif given is None:  # like transformers: rows with a mask hold one sequence
        packed = packed_of(positions)
    if labels is not None and shifts and "shift_labels" not in named:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)

    length = -(-tokens // size) * size
    local = length // size
    filled = length - tokens
    whole = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim() >= 2}
    whole["position_ids"] = positions
    # Without a mask a model would look for packed rows in this part's positions; only the whole rows show them (`packed`).
    whole["attention_mask"] = torch.ones_like(positions) if given is None else given
    if labels is not None:
        whole["labels"] = labels
        if shifts:
            whole["shift_labels"] = labels
    whole = {name: _filled(value, filled, _PADDING.get(name, 0)) for name, value in whole.items()}
    mask = whole["attention_mask"]
    part = Part(
        rows,
        length,
        tokens,
        local,
        causal_mask=None if given is None else mask if not filled else _filled(given, filled, 1),
        full_mask=None if given is None and not filled else mask,
        position_ids=whole["position_ids"],
        packed=None if packed is None else _filled(packed, filled, -1),
    )
    out = {name: value for name, value in named.items() if name not in whole}
    for name, value in whole.items():
        out[name] = value[:, index * local : (index + 1) * local].contiguous()
        setattr(out[name], _MARK, part)
    part.names = frozenset(out)
    if labels is not None:
        part.count = (out["labels"] != IGNORED).sum()
    return out, part


def _check_shapes(batch: Mapping[str, Any], rows: int, tokens: int) -> None:
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and (value.dim() < 2 or value.shape[:2] != (rows, tokens)):
            hint = (
                "Sequence parallelism trains losses over tokens: leave sp_size out for one label per sample"
                if name == "labels"
                else "Leave it out of the batch, or leave sp_size out"
            )
            raise ConfigError(
                f"{name} has the shape {tuple(value.shape)}, and a sequence of {rows} x {tokens} tokens is divided among the "
                f"ranks of a group. {hint}"
            )
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise ConfigError(
            f"attention_mask must mark padding in rows x tokens under sequence parallelism, found {type(mask).__name__} of "
            f"{getattr(mask, 'ndim', 0)} dimensions. Pass a padding mask, or position_ids that start anew for packed sequences"
        )


def _filled(value: Tensor, count: int, with_: int) -> Tensor:
    """Return `value` with `count` more tokens at the end of each row."""
    if not count:
        return value
    return torch.cat([value, value.new_full((value.shape[0], count, *value.shape[2:]), with_)], 1)


def share_of(loss: Tensor, part: Part, total: Tensor | float, factor: float) -> Tensor:
    """Return `factor` / `total` times the sum of this rank's losses, from their mean.

    A part without labels has a NaN mean. Its share and gradient are zero.
    """
    if part.count is None:
        return loss
    weight = (part.count * factor / total).to(loss.dtype)
    return torch.where(part.count > 0, loss * weight, loss.new_zeros(()))
