"""Values that user code writes to parameters, carried into the master weights.

Elements that differ from what was shown go into the master. All others keep the digits that the compute dtype does not have.
Every rank carries its own slice, so user code makes the same edit on every rank. Nothing is communicated.

A codec's rounding is coarser than many an edit. An element that changes by less than half the distance between two codes moves
its master by as much; one that changes more sets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.codec import BLOCK_NUMEL
from ..errors import StateError, ZeroError
from ..tiers.array import fetch
from .parameter import raw_data, set_raw_data

if TYPE_CHECKING:
    from .span import Span


@torch.no_grad()
def assign(span: Span, index: int, values: Tensor) -> None:
    """Replace one parameter's values: this rank's elements in the master, all of them in `full` where it has memory.

    Raises:
        StateError: `values` has another shape.
    """
    check_shape(span, index, values)
    if not span.master_is_local and not span.unit.ignores_writes:
        write_back(span, index, values.detach().reshape(-1), shown_by_codec(span))
    if span.is_readable:
        span.view(index).copy_(values)


@torch.no_grad()
def write_back_in_place(span: Span, indices: Iterable[int], shown: Tensor | None = None) -> None:
    """Carry what was written in place to these parameters, which are readable, into the master.

    Args:
        shown: what `local` showed before, where that was not the master in the compute dtype.
    """
    indices = [index for index in indices if not _restore(span, index)]
    if span.master_is_local:
        return
    shown = shown_by_codec(span) if shown is None else shown
    for index in indices:
        write_back(span, index, span.view(index).reshape(-1), shown)


def _restore(span: Span, index: int) -> bool:
    """Point a parameter at `full` that an operation gave other memory (`p.set_(values)`), and keep the values.

    Returns:
        Whether it had other memory.
    """
    param, view = span.params[index], span.view(index)
    with torch._C.DisableTorchFunctionSubclass():
        values = raw_data(param)
        if values.data_ptr() == view.data_ptr() and values.stride() == view.stride():
            return False
        set_raw_data(param, view)
    check_shape(span, index, values)
    span.assign(index, values)
    return True


def check_shape(span: Span, index: int, values: Tensor) -> None:
    """
    Raises:
        StateError: user code gives a parameter another shape.
    """
    shape = span.view(index).shape
    if values.shape != shape:
        raise StateError(
            f"{span.name_of(index)!r} was assigned values of shape {tuple(values.shape)}, and has shape {tuple(shape)}. A "
            "sharded parameter keeps its shape: detach() the engine first"
        )


def shown_by_codec(span: Span) -> Tensor | None:
    """Return the values that a gather leaves in `local`, where that is not the master in the compute dtype; else None."""
    if span.codec is None:
        return None
    span.unit.wait_for_step()
    return span.codec.rounded(fetch(span.master).to(span.device, span.compute_dtype))


def write_back(span: Span, index: int, values: Tensor, shown: Tensor | None = None) -> None:
    """Give the master this rank's elements of `values`, 1-D, one parameter's; those that are equal keep their digits.

    Args:
        shown: what `local` showed before, where that was not the master in the compute dtype.
    """
    part = span.part_of(index)
    if part is None:
        return
    try:
        span.unit.wait_for_step()
        master = fetch(span.master[part.start : part.stop])
        new = values[part.source_slice].to(master.device)
        result = with_digits(master, new)
        if shown is not None:
            result = _moved(span, shown, part.start, new, master, result)
        span.store(part.start, result)
    except ZeroError as error:  # the disk of this rank alone
        span.context.record_failure(error)


def with_digits(master: Tensor, new: Tensor) -> Tensor:
    """Return `new` in the master's dtype. Elements equal to the master's keep the digits that the dtype of `new` lacks.

    Zeros get the sign of `new`: ranks compare the bytes of what they show, of which each rank's master has a part.
    """
    if new.dtype == master.dtype:
        return new
    return torch.where(new == master.to(new.dtype), master.copysign(new), new.to(master.dtype))


def _moved(span: Span, shown: Tensor, start: int, new: Tensor, master: Tensor, result: Tensor) -> Tensor:
    """Return `result`, but move elements that were written by less than a rounding."""
    if span.codec is None:
        return result
    stop, first = start + new.numel(), start // BLOCK_NUMEL * BLOCK_NUMEL
    last = -(-stop // BLOCK_NUMEL) * BLOCK_NUMEL
    distance = span.codec.step(shown[first:last])[start - first : stop - first].to(master.device, master.dtype)
    before = shown[start:stop].to(master.device, master.dtype)
    change = new.to(master.dtype) - before
    # One value that is not finite makes all of its block NaN: such elements were not written.
    is_same = (change.abs() < distance / 2) | (new.isnan() & before.isnan())
    moved = torch.where(is_same, torch.where(change.isnan(), master, master + change), result)
    return torch.where(new == master.to(new.dtype), master, moved)
