"""Computes norms of the gradients over all ranks, and clips by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm.agreement import read_on_all_ranks
from ..comm.wire import Wire
from ..errors import LayoutError
from .context import Context
from .parameter import place_of
from .span import Span

_ROW_NUMEL = 4096
"""Elements whose norm is taken in float32; sums of rows are float64."""
_PART_NUMEL = 1 << 20
"""Elements of a gradient on disk that are in memory at a time; whole rows."""

Parts = dict[Span, list[slice]]
"""By span, elements of this rank's slice, in order. The same spans on every rank."""


def parts_to_clip(spans: Sequence[Span], context: Context, params: Iterable[Tensor] | None) -> Parts:
    """Return the elements of these parameters, or of these tensors of optimizer groups; None: of all.

    Raises:
        LayoutError: a parameter is not of the sharded model.
    """
    every = {span: [slice(0, span.local_numel)] for span in spans}
    if params is None:
        return every
    wanted = {id(param): param for param in ([params] if isinstance(params, Tensor) else params)}
    trained = {id(param) for span in spans for param in span.params}
    segments = {id(segment.tensor): segment for span in spans for segment in span.segments}
    for key in (key for key in wanted if key not in trained and key not in segments):
        param, place = wanted[key], place_of(wanted[key])
        # A rank has a tensor without elements for a group of which it has none.
        if param.numel() and (place is None or place.unit.context is not context):
            raise LayoutError(
                f"a parameter to clip, of shape {tuple(param.shape)}, is not of the sharded model. Clip it in a call of "
                "its own, or all by torch.nn.utils.clip_grad_norm_, which takes parameters of several models"
            )
    if wanted.keys() >= trained:
        return every
    found: dict[Span, list[slice]] = {span: [] for span in spans}
    for key, param in wanted.items():
        segment, place = segments.get(key), place_of(param)
        if segment is not None:
            found[segment.span].append(segment.as_slice)
        elif place is not None and place.span in found and (part := place.span.part_of(place.index)) is not None:
            found[place.span].append(part.as_slice)
    for span, parts in found.items():
        is_whole = sum(part.stop - part.start for part in parts) == span.local_numel
        found[span] = every[span] if is_whole else sorted(parts, key=lambda part: part.start)
    return found


@torch.no_grad()
def clip_norm(parts: Parts, context: Context, max_norm: float, order: float) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; returns the norm before. A collective.

    Args:
        order: of the norm, `inf` too.
    """
    wire, may_fail = context.wire, context.storage.uses_disk

    def local() -> Tensor:
        having = [(span, chosen) for span, chosen in parts.items() if span.bucket.grad is not None]
        counting = ((span, part) for span, chosen in having for part in counted(span, chosen, order))
        return power_sum((each for span, part in counting for each in _values(span, [part])), order, context.device)

    norm = over_ranks(
        read_on_all_ranks(wire, local, may_fail=may_fail), order, wire, is_shared=context.layout.shards > 1
    )
    if not {span.master_dtype for span in parts} & {torch.float64, torch.complex128}:
        norm = norm.float()
    if max_norm == float("inf"):
        return norm
    scale = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if norm.device.type == "cpu" and float(scale) == 1.0:
        return norm

    def clip() -> None:
        for span, chosen in parts.items():
            if len(chosen) == 1 and chosen[0] == slice(0, span.local_numel):
                span.bucket.scale(scale)
                continue
            for part in chosen if span.bucket.grad is not None else ():
                values = span.bucket.read(part)
                span.bucket.write(part, values.mul_(scale.to(values.device, values.dtype)))

    read_on_all_ranks(wire, clip, may_fail=may_fail)
    return norm


def over_ranks(powers: Tensor, order: float, wire: Wire, *, is_shared: bool) -> Tensor:
    """Return norms in float64 from each rank's sums of powers (`power_sum`), any shape. One collective.

    Args:
        is_shared: the ranks have different elements.
    """
    among = wire.shard_group or wire  # every replica has all elements
    if math.isinf(order):
        most = powers
        if is_shared:
            broken = powers.isnan()  # a maximum over ranks may lose it
            most, any_broken = among.max_scalar(torch.stack([powers.masked_fill(broken, -math.inf), broken.double()]))
            most = most.masked_fill(any_broken > 0, math.nan)
        return most.abs()
    total = among.sum_scalar(powers) if is_shared else powers
    if order == 0:
        return total
    return total.sqrt() if order == 2.0 else total ** (1.0 / order)


def power_sum(parts: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the sum of `|x| ** order` of 1-D tensors, 0-dim float64 on `device`. Order 0 counts the nonzero elements.

    For `inf` it is the largest magnitude, for `-inf` the negated smallest, so that a maximum combines both over ranks.

    The result does not depend on where a gradient is divided, as long as all of its parts but the last are whole rows.
    """
    rows: list[Tensor] = []
    rest: list[Tensor] = []  # of less than a row
    for values in parts:
        numel = values.numel()
        whole = numel - numel % _ROW_NUMEL
        if whole:
            norms = torch.linalg.vector_norm(values[:whole].view(-1, _ROW_NUMEL), order, dim=1)
            rows.append(norms if norms.device == device else norms.to(device))
        if whole < numel:
            norms = torch.linalg.vector_norm(values[whole:].view(1, -1), order, dim=1)
            rest.append(norms if norms.device == device else norms.to(device))
    if not rows and not rest:
        return torch.full((), -math.inf if order == -math.inf else 0.0, dtype=torch.float64, device=device)
    # Whole rows must be in one sum: the last bit of a norm depends on the order of sums.
    norms = torch.cat([*rows, *rest]).double()
    if math.isinf(order):
        return norms.max() if order > 0 else (-norms).max()
    powers, numel = norms.pow(order) if order else norms, sum(map(len, rows))
    return powers[:numel].sum() + powers[numel:].sum()


def power_sums(parts: Sequence[Tensor], order: float) -> Tensor:
    """Return `power_sum` of each of these 1-D tensors, which are on one device: 1-D."""
    device = parts[0].device
    if order <= 0 or device.type == "cpu":  # torch's float32 norm on a CPU loses digits with length
        return torch.stack([power_sum([part], order, device) for part in parts])
    norms = torch.stack([part.sum() if not part.numel() else torch.linalg.vector_norm(part, order) for part in parts])
    return norms.double() if math.isinf(order) else norms.double().pow(order)


def counted(span: Span, chosen: Sequence[slice], order: float) -> Sequence[slice]:
    """Return the elements that count in a norm.

    Zeros of padding and of parameters without a gradient change no sum and no maximum, but in a norm of negative order they
    would be the smallest elements.
    """
    if order >= 0:
        return chosen
    present = [part.as_slice for index, part in span.parts() if span.bucket.present[index]]
    cuts = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a in chosen for b in present]
    return [cut for cut in cuts if cut.start < cut.stop]


def _values(span: Span, chosen: Iterable[slice]) -> Iterator[Tensor]:
    for part in chosen:
        step = _PART_NUMEL if span.bucket.is_on_disk else max(1, part.stop - part.start)
        for start in range(part.start, part.stop, step):
            yield span.bucket.read(slice(start, min(start + step, part.stop)))


def clip_value(parts: Parts, context: Context, limit: float) -> None:
    """Clamp gradients to `[-limit, limit]`. A collective where a rank uses a disk."""

    def clamp() -> None:
        for span, chosen in parts.items():
            for part in chosen if span.bucket.grad is not None else ():
                for start in range(part.start, part.stop, _PART_NUMEL):
                    piece = slice(start, min(start + _PART_NUMEL, part.stop))
                    span.bucket.write(piece, span.bucket.read(piece).clamp_(-limit, limit))

    read_on_all_ranks(context.wire, clamp, may_fail=context.storage.uses_disk)
