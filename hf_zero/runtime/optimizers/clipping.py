"""The norm of gradients over all ranks; clipping by it, or by value; float16 gradients that overflow on some rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterable, Sequence

import torch
from torch import Tensor, nn

from ...comm.agree import on_all_ranks, read
from ...comm.wire import SoloWire
from ...core.precision import Precision
from ...errors import LayoutError, TierError
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
    norm = root(_sum_over_ranks(flats, pieces, wire, norm_type, device), norm_type)
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
            elif pieces[shard] and (whole := shard.whole_grad()) is not None:
                for piece in pieces[shard]:
                    whole[piece].mul_(coefficient.to(device=whole.device, dtype=whole.dtype))
    return norm


def _sum_over_ranks(
    flats: Sequence[Flat], pieces: Pieces | None, wire: SoloWire, order: float, device: torch.device
) -> Tensor:
    """`power_sum` of all gradients, or of these pieces of them, over all ranks.

    Raises:
        TierError: on every rank, where one cannot read a gradient from disk.
    """
    failure: TierError | None = None
    sums = []
    try:
        # Span by span: the last bit of the norm, and so of a clipped run, follows the order of these sums.
        for flat in flats:
            found = _power_sum_of(flat, order, device) if pieces is None else _of_pieces(flat, pieces, order, device)
            if found is not None:
                sums.append(found)
    except TierError as error:
        failure = error
    if math.isinf(order):
        local = _extreme(sums, order) if sums else power_sum([], order, device)
    else:
        local = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    may_fail = any(flat.storage.uses_disk for flat in flats)
    if may_fail and wire.size > 1:  # in the same collective: whether every rank has a sum
        failed = torch.full_like(local, 0.0 if failure is None else 1.0)
        if any(flat.span.shards > 1 for flat in flats):
            both = over_ranks(wire, torch.stack([local, failed if order >= 0 else -failed]), order)
            local, failed = both.unbind()
        else:
            failed = wire.max_scalar(failed)
        if bool(failed != 0):
            with on_all_ranks(wire, "reading gradients from disk", kind=TierError):
                if failure is not None:
                    raise failure
    elif failure is not None:
        raise failure
    elif any(flat.span.shards > 1 for flat in flats):
        local = over_ranks(wire, local, order)
    return local


def _of_pieces(flat: Flat, pieces: Pieces, order: float, device: torch.device) -> Tensor | None:
    """`power_sum` of pieces of a span's gradient."""
    parts = []
    for shard in flat.shards:
        whole = shard.whole_grad() if pieces[shard] else None
        if whole is not None:
            parts += [whole[piece] for piece in pieces[shard]]
    return power_sum(parts, order, device) if parts else None


def _extreme(sums: Sequence[Tensor], order: float) -> Tensor:
    return torch.stack(list(sums)).max() if order > 0 else torch.stack(list(sums)).min()


def clip_values(
    flats: Sequence[Flat],
    known: Container[nn.Parameter],
    wire: SoloWire,
    clip_value: float,
    parameters: Iterable[nn.Parameter] | None,
) -> None:
    """See `Engine.clip_grad_value_`. `known` are the model's parameters."""
    pieces = _pieces(parameters, flats, known)

    def clip() -> None:
        for flat in flats:
            for shard, whole in flat.grads():
                for piece in pieces[shard] if pieces is not None else [slice(None)]:
                    whole[piece].clamp_(-clip_value, clip_value)

    read(wire, clip, may_fail=any(flat.storage.uses_disk for flat in flats))


Pieces = dict[Shard, list[slice]]
"""Elements of shards."""


def _pieces(
    parameters: Iterable[nn.Parameter] | None, flats: Sequence[Flat], known: Container[nn.Parameter]
) -> Pieces | None:
    """Of each shard that has a gradient, what belongs to `parameters`; None when those are all of them."""
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
    out: Pieces = {shard: [] for flat in flats for shard in flat.shards}
    for flat in flats:
        chosen = {id(slot) for slot, p in zip(flat.span.slots, flat.params) if p in wanted}
        for shard in flat.shards:
            if not shard.has_grad:
                continue
            if shard.master in wanted:
                out[shard] = [slice(0, shard.numel)]
                continue
            for _, piece in extents(flat.span.overlaps(flat.rank), [shard]):
                if id(piece.source) in chosen:
                    out[shard].append(piece.here)
    return out


# Norms --------------------------------------------------------------------------------------------------------------


def power_sum_of(flat: Flat, order: float, device: torch.device) -> Tensor:
    """`power_sum` of this rank's gradient of the span. A narrow one on the host is not widened for it.

    Raises:
        TierError: it cannot be read from disk.
    """
    found = _power_sum_of(flat, order, device)
    return power_sum([], order, device) if found is None else found


def _power_sum_of(flat: Flat, order: float, device: torch.device) -> Tensor | None:
    """None where there is no gradient."""
    shards = [shard for shard in flat.shards if shard.numel]
    if len(shards) == 1:
        found = shards[0].number(("norm", order), lambda grad: power_sum([grad], order, grad.device))
        return None if found is None else found.to(device)
    parts = [grad for shard in shards if (grad := shard.grad_to_read()) is not None]
    return power_sum(parts, order, device) if parts else None


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
        return torch.zeros((), dtype=torch.float64, device="cpu")
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
    """Return by optimizer whether a gradient is not finite on any rank: 1-D float32 of 0.0 and 1.0. A collective.

    Raises:
        TierError: on every rank, where one cannot read a gradient from disk.
    """

    def local() -> Tensor:
        found = torch.zeros(optimizers, device=device)
        for flat in flats:
            if not flat.span.is_updated:
                continue
            flag = found[flat.span.optimizer]
            for shard in flat.shards:
                if shard.numel and (here := shard.number("infinite", _is_infinite)) is not None:
                    flag.copy_(torch.maximum(flag, here.to(device)))
        return found

    return wire.max_scalar(read(wire, local, may_fail=any(flat.storage.uses_disk for flat in flats)))


def _is_infinite(grad: Tensor) -> Tensor:
    return any_infinite([grad])


def any_infinite(tensors: Sequence[Tensor]) -> Tensor:
    """0-dim float32: 0.0 when every element is finite, else 1.0. Tensors of one device; one fused pass each, no host wait."""
    found = torch.zeros((), device=tensors[0].device)
    one = torch.ones_like(found)
    for tensor in tensors:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], found, one)
    return found
