"""The norm of gradients over all ranks; clipping by it, or by value; float16 gradients that overflow on some rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...comm.wire import SoloWire
from ...core.precision import Precision
from ...errors import LayoutError
from ..values.flat_param import Flat
from ..values.state_shard import Shard, extents

ROW_NUMEL = 4096
"""Elements whose norm is taken in float32."""
NOT_FINITE = (
    "the norm of the gradients is not finite: the next step writes NaN into every weight. Run with debug=True (--zero-debug) "
    "to see in which unit, on which rank and in which step it began"
)
_WIDENED_NUMEL = 128 * ROW_NUMEL
"""Elements of a narrow type that are widened at a time; whole rows, whatever the engine's blocks are."""


# Clipping -----------------------------------------------------------------------------------------------------------


def clip_norm(
    flats: Sequence[Flat],
    known: Container[nn.Parameter],
    wire: SoloWire,
    max_norm: float,
    norm_type: float,
    parameters: Iterable[nn.Parameter] | None,
    *,
    hint: bool = False,
) -> Tensor:
    """See `Engine.clip_grad_norm_`. `known` are the model's parameters.

    Args:
        hint: say how to find what is not finite, where the norm is known here without waiting for a device.
    """
    pieces = _pieces(parameters, flats, known)
    device = flats[0].device if flats else torch.device("cpu")
    spans = [
        grads_to_read(flat) if pieces is None else [piece for shard in flat.shards for piece in pieces[shard]]
        for flat in flats
    ]
    if math.isinf(norm_type):
        local = power_sum([part for parts in spans for part in parts], norm_type, device)
    else:  # span by span: the last bit of the norm, and so of a clipped run, follows the order of these sums
        sums = [power_sum(parts, norm_type, device) for parts in spans if parts]
        local = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    if any(flat.span.shards > 1 for flat in flats):
        local = over_ranks(wire, local, norm_type)
    norm = root(local, norm_type)
    if not any(flat.master_dtype in (torch.float64, torch.complex128) for flat in flats):
        norm = norm.float()
    if max_norm == float("inf"):
        return norm
    coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if norm.device.type == "cpu":
        factor = float(coefficient)
        if factor == 1.0:
            return norm
        if hint and max_norm > 0 and not factor > 0.0:
            warnings.warn(NOT_FINITE, stacklevel=3)
    for flat in flats:
        for shard in flat.shards:
            if pieces is None:
                shard.scale(coefficient)
            else:
                for grad in pieces[shard]:
                    grad.mul_(coefficient.to(device=grad.device, dtype=grad.dtype))
    return norm


def clip_values(
    flats: Sequence[Flat],
    known: Container[nn.Parameter],
    clip_value: float,
    parameters: Iterable[nn.Parameter] | None,
) -> None:
    """See `Engine.clip_grad_value_`. `known` are the model's parameters."""
    pieces = _pieces(parameters, flats, known)
    for flat in flats:
        for shard, whole in flat.grads():
            for grad in pieces[shard] if pieces is not None else [whole]:
                grad.clamp_(-clip_value, clip_value)


def _pieces(
    parameters: Iterable[nn.Parameter] | None, flats: Sequence[Flat], known: Container[nn.Parameter]
) -> dict[Shard, list[Tensor]] | None:
    """Views of each shard's gradient that belong to `parameters`; None when those are all of them."""
    if parameters is None:
        return None
    wanted: set[Tensor] = {parameters} if isinstance(parameters, Tensor) else set(parameters)
    wholes: dict[Tensor, Tensor] = {w: flat.params[index] for flat in flats for index, w in (flat.wholes or {}).items()}
    wanted = {wholes.get(param, param) for param in wanted}
    masters: set[Tensor] = {shard.master for flat in flats for shard in flat.shards}
    if wanted >= masters or wanted >= {param for flat in flats for param in flat.params}:
        return None
    unknown = [p for p in wanted if p not in known and p not in masters]
    if unknown:
        raise LayoutError(
            f"{len(unknown)} of the parameters to clip (the first of shape {tuple(unknown[0].shape)}) are not of the "
            "sharded model; clip those with torch.nn.utils"
        )
    out: dict[Shard, list[Tensor]] = {shard: [] for flat in flats for shard in flat.shards}
    for flat in flats:
        chosen = {id(slot) for slot, p in zip(flat.span.slots, flat.params) if p in wanted}
        for shard, grad in flat.grads():
            if shard.master in wanted:
                out[shard] = [grad]
                continue
            for _, piece in extents(flat.span.overlaps(flat.rank), [shard]):
                if id(piece.source) in chosen:
                    out[shard].append(grad[piece.here])
    return out


# Norms --------------------------------------------------------------------------------------------------------------


def grads_to_read(flat: Flat) -> list[Tensor]:
    """This rank's gradient of the span, shard by shard. A narrow one on the host is not widened for it."""
    return [grad for shard in flat.shards if (grad := grad_to_read(shard)) is not None and grad.numel()]


def grad_to_read(shard: Shard) -> Tensor | None:
    return shard.grad if shard.coefficient is None else shard.whole_grad()


def power_sum(parts: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """What ranks add up (an infinite order: compare) for a norm of 1-D tensors: 0-dim float64 on `device`. It does not depend
    on where the elements are cut."""
    if not parts:
        return torch.full((), math.inf if order == -math.inf else 0.0, dtype=torch.float64, device=device)
    if order == 2.0:
        return square_sum(parts).to(device)
    if order == math.inf:
        return torch.stack([part.abs().max().double().to(device) for part in parts]).max()
    if order == -math.inf:
        return torch.stack([part.abs().min().double().to(device) for part in parts]).min()
    if order == 0:
        return torch.stack([part.count_nonzero().double().to(device) for part in parts]).sum()
    parts = [part.abs() if part.is_complex() else part for part in parts]
    norms = [torch.linalg.vector_norm(part, order, dtype=torch.float64).to(device) for part in parts]
    return torch.stack(norms).pow(order).sum()


def over_ranks(wire: SoloWire, local: Tensor, order: float) -> Tensor:
    """`power_sum` of all ranks' elements, of one norm or a vector of several; one collective. Every replica has them all."""
    wire = wire.shard_group or wire
    if not math.isinf(order):
        return wire.sum_scalar(local)
    sign = 1.0 if order > 0 else -1.0
    nan = local.isnan()  # a maximum over ranks may lose it
    both = torch.stack([torch.where(nan, -math.inf, local * sign), nan.double()])
    values, broken = wire.max_scalar(both).unbind()
    return torch.where(broken > 0, math.nan, values * sign)


def root(powers: Tensor, order: float) -> Tensor:
    if math.isinf(order) or order == 0:
        return powers
    return powers.sqrt() if order == 2.0 else powers.pow(1.0 / order)


def square_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of squares of 1-D float or complex tensors, one after another: 0-dim float64.

    torch's float32 norm on CPU loses digits with length (4e-3 at 5e7 elements). Norms of short rows, squared and summed in
    float64, are right to 1e-8 and as fast.
    """
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    sums: list[Tensor] = []
    on_device = [part for part in parts if part.device.type != "cpu" and part.dtype in narrow]
    if on_device:
        sums.append(tree_square_sum(on_device))
        parts = [part for part in parts if part.device.type == "cpu" or part.dtype not in narrow]
    rows: list[Tensor] = []
    rest: list[Tensor] = []  # the beginning of a row that the next part goes on with
    begun = 0  # elements of `rest`
    for part in parts:
        if part.device.type != "cpu" or part.dtype == torch.float64 or part.dtype.is_complex:
            if part.dtype.is_complex:
                part = torch.view_as_real(part)
            sums.append(torch.linalg.vector_norm(part, dtype=torch.float64).square())
            continue
        numel = part.numel()
        head = min(numel, ROW_NUMEL - begun) if begun else 0
        if begun + head == ROW_NUMEL:
            rows.append(_row_squares(torch.cat([*rest, part[:head].float()])))
            rest, begun = [], 0
        elif head:
            rest.append(part[:head].float())
            begun += head
        whole = head + (numel - head) // ROW_NUMEL * ROW_NUMEL
        for low in range(head, whole, _WIDENED_NUMEL):  # a narrow type is widened block by block
            rows.append(_row_squares(part[low : min(low + _WIDENED_NUMEL, whole)].float()))
        if whole < numel:
            rest.append(part[whole:].float())
            begun += numel - whole
    if rest:
        sums.append(torch.linalg.vector_norm(torch.cat(rest), dtype=torch.float64).square())
    if rows:
        sums.append(torch.cat(rows).sum())
    if not sums:  # nothing but parameters without elements
        return torch.zeros((), dtype=torch.float64)
    return sums[0] if len(sums) == 1 else torch.stack([value.cpu() for value in sums]).sum()


def tree_square_sum(parts: Sequence[Tensor]) -> Tensor:
    """As `square_sum`. Other devices sum in a tree, which loses nothing; asking them for float64 makes a copy in it first."""
    return torch.stack(torch._foreach_norm(list(parts), 2.0, torch.float32)).double().square().sum()


def _row_squares(flat: Tensor) -> Tensor:
    return torch.linalg.vector_norm(flat.view(-1, ROW_NUMEL), dim=1).double().square()


# Overflow -----------------------------------------------------------------------------------------------------------


def may_overflow(model: nn.Module, precision: Precision) -> bool:
    """Return whether the engine itself computes in float16, which is trained with a loss scaler."""
    return precision.autocast_dtype == torch.float16 or any(
        p.dtype == torch.float16 and p.requires_grad for p in model.parameters()
    )


def overflowed(flats: Sequence[Flat], optimizers: int, wire: SoloWire, device: torch.device) -> Tensor:
    """Return by optimizer whether a gradient is not finite on any rank: 1-D float32 of 0.0 and 1.0. A collective."""
    found = torch.zeros(optimizers, device=device)
    for flat in flats:
        if flat.span.is_updated:
            flag = found[flat.span.optimizer]
            for grad in grads_to_read(flat):
                flag.copy_(torch.maximum(flag, any_infinite([grad]).to(device)))
    return wire.max_scalar(found)


def any_infinite(tensors: Sequence[Tensor]) -> Tensor:
    """0-dim float32: 0.0 when every element is finite, else 1.0. Tensors of one device; one fused pass each, no host wait."""
    found = torch.zeros((), device=tensors[0].device)
    one = torch.ones_like(found)
    for tensor in tensors:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], found, one)
    return found
