"""Norms of the gradients over all ranks, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.agree import read
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

    def local() -> list[Tensor]:
        having = [span.bucket for span in spans if span.bucket.grad is not None]
        return [power_sum([part for _, part in bucket.parts()], norm_type).to(device) for bucket in having]

    sums = read(wire, local, may_fail=any(span.context.storage.uses_disk for span in spans))
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
        span.bucket.scale(scale)
    return norm


def power_sum(parts: Iterable[Tensor], order: float) -> Tensor:
    """The sum of `|x| ** order` in float64, or the largest magnitude, of the parts of one gradient.

    The result does not depend on where parts end, as long as all but the last are whole rows.
    """
    rows: list[Tensor] = []
    rest: list[Tensor] = []  # of less than a row
    for values in parts:
        if math.isinf(order):
            rows.append(values.abs().max().double().view(1) if values.numel() else _none(values))
            continue
        whole = values.numel() // _ROW_NUMEL * _ROW_NUMEL
        for part, into in ((values[:whole].view(-1, _ROW_NUMEL), rows), (values[whole:].view(1, -1), rest)):
            if part.numel():
                into.append(torch.linalg.vector_norm(part, order, dim=1).double().pow(order))
    if math.isinf(order):
        return torch.cat(rows).max()
    # Whole rows in one sum: the last bit of a norm follows the order of its sums.
    sums = [torch.cat(each).sum() for each in (rows, rest) if each]
    return (
        sums[0] + sums[1] if len(sums) > 1 else sums[0] if sums else torch.zeros((), dtype=torch.float64, device="cpu")
    )


def _none(values: Tensor) -> Tensor:
    return values.new_zeros(1, dtype=torch.float64)


def clip_value(spans: Sequence[Span], wire: SoloWire, limit: float) -> None:
    """Clamp every gradient to `[-limit, limit]`. A collective where a rank uses a disk."""

    def clamp() -> None:
        for span in spans:
            span.bucket.clamp(limit)

    read(wire, clamp, may_fail=any(span.context.storage.uses_disk for span in spans))
