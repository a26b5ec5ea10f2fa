"""Norms of the gradients over all ranks, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.wire import SoloWire
from .span import Span

_ROW_NUMEL = 4096
"""Elements whose norm is taken in float32; sums of rows are float64."""


@torch.no_grad()
def clip_norm(spans: Sequence[Span], wire: SoloWire, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. A collective.

    Args:
        norm_type: order of the norm, `inf` too.
    """
    device = spans[0].device if spans else torch.device("cpu")
    sums = [power_sum(grad, norm_type) for span in spans if (grad := span.bucket.grad) is not None]
    sums = [value.to(device) for value in sums]
    is_shared = any(span.layout.shards > 1 for span in spans)
    if math.isinf(norm_type):
        total = torch.stack(sums).max() if sums else torch.zeros((), dtype=torch.float64, device=device)
        norm = wire.max_scalar(total) if is_shared else total
    else:
        total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
        norm = (wire.sum_scalar(total) if is_shared else total) ** (1.0 / norm_type)
    if not any(span.master_dtype == torch.float64 for span in spans):
        norm = norm.float()
    if max_norm == float("inf"):
        return norm
    scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if norm.device.type == "cpu" and float(scale) == 1.0:
        return norm
    for span in spans:
        if span.bucket.grad is not None:
            span.bucket.grad.mul_(scale.to(span.bucket.grad.device))
    return norm


def power_sum(values: Tensor, order: float) -> Tensor:
    """The sum of `|x| ** order` in float64, or the largest magnitude."""
    if math.isinf(order):
        return values.abs().max().double() if values.numel() else values.new_zeros((), dtype=torch.float64)
    whole = values.numel() // _ROW_NUMEL * _ROW_NUMEL
    rows = [part for part in (values[:whole].view(-1, _ROW_NUMEL), values[whole:].view(1, -1)) if part.numel()]
    total = values.new_zeros((), dtype=torch.float64)
    for part in rows:
        total = total + torch.linalg.vector_norm(part, order, dim=1).double().pow(order).sum()
    return total


def clip_value(spans: Iterable[Span], limit: float) -> None:
    """Clamp every gradient to `[-limit, limit]`."""
    for span in spans:
        if span.bucket.grad is not None:
            span.bucket.grad.clamp_(-limit, limit)
