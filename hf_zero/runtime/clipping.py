"""The norm of a step's gradients over all ranks; clipping by it, or by value."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..errors import LayoutError
from .flat_param import Flat
from .pieces import extents
from .state_shard import Shard

ROW_NUMEL = 4096
"""Elements whose norm is taken in float32."""
_WIDENED_NUMEL = 128 * ROW_NUMEL
"""Elements of a narrow type that are widened at a time; whole rows, whatever the engine's blocks are."""


def clip_norm(
    flats: Sequence[Flat],
    known: Container[nn.Parameter],
    wire: SoloWire,
    max_norm: float,
    norm_type: float,
    parameters: Iterable[nn.Parameter] | None,
) -> Tensor:
    """See `Engine.clip_grad_norm_`. `known` are the model's parameters."""
    pieces = _pieces(parameters, flats, known)
    norm = total_norm(flats, norm_type, wire, pieces)
    if max_norm == float("inf"):
        return norm
    coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if norm.device.type == "cpu" and float(coefficient) == 1.0:
        return norm
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
    wholes: dict[Tensor, Tensor] = {w: p for flat in flats for w, p in zip(flat.wholes, flat.params)}
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


def total_norm(
    flats: Iterable[Flat], norm_type: float, wire: SoloWire, pieces: dict[Shard, list[Tensor]] | None
) -> Tensor:
    """The norm of the gradients over all ranks: 0-dim float32 on the spans' device.

    `pieces` restricts it to views of each shard's gradient (a subset of the parameters). It does not depend on how slices are
    cut into shards of host memory.
    """
    tensors: list[list[Tensor]] = []  # by span
    shared = True
    device = torch.device("cpu")
    for flat in flats:
        device = flat.device
        shared = shared and flat.span.shards == 1
        found = [
            part
            for shard in flat.shards
            if (grad := shard.grad if pieces is None and shard.coefficient is None else shard.whole_grad()) is not None
            for part in (pieces[shard] if pieces is not None else [grad])
        ]
        if found:
            tensors.append(found)
    if math.isinf(norm_type):
        parts = [t.abs().max().double().to(device) for found in tensors for t in found if t.numel()]
        local = torch.stack(parts).max() if parts else torch.zeros((), dtype=torch.float64, device=device)
        return (local if shared else wire.max_scalar(local)).float()
    if norm_type == 2.0:
        parts = [square_sum(found).to(device) for found in tensors]
    else:
        parts = [
            torch.linalg.vector_norm(t, norm_type, dtype=torch.float64).pow(norm_type).to(device)
            for found in tensors
            for t in found
        ]
    local = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
    total = local if shared else wire.sum_scalar(local)
    return (total.sqrt() if norm_type == 2.0 else total.pow(1.0 / norm_type)).float()


def square_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of squares of 1-D float tensors, one after another: 0-dim float64.

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
    for part in parts:
        if part.device.type != "cpu" or part.dtype == torch.float64 or part.dtype.is_complex:
            sums.append(torch.linalg.vector_norm(part, dtype=torch.float64).square())
            continue
        begun = sum(map(Tensor.numel, rest))
        head = min(part.numel(), ROW_NUMEL - begun) if begun else 0
        if begun + head == ROW_NUMEL:
            rows.append(_row_squares(torch.cat([*rest, part[:head].float()])))
            rest = []
        elif head:
            rest.append(part[:head].float())
        whole = head + (part.numel() - head) // ROW_NUMEL * ROW_NUMEL
        for low in range(head, whole, _WIDENED_NUMEL):  # a narrow type is widened block by block
            rows.append(_row_squares(part[low : min(low + _WIDENED_NUMEL, whole)].float()))
        if whole < part.numel():
            rest.append(part[whole:].float())
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
