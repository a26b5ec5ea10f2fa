"""Writes values that user code wrote to parameters back to the master weights.

Elements that differ from the gathered values replace the master's. All others keep the master's extra digits. Every rank
writes back its own slice without communication, so user code must make the same edit on every rank.

A codec may round more coarsely than an edit. An element that changes by less than half the distance between two codes changes
its master by the same difference; one that changes more replaces it.
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
    """Replace one parameter's values: this rank's elements in the master, and all elements in `full` if it has memory.

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
    """Write back to the master what user code wrote in place to these parameters, which must be readable.

    Args:
        shown: the values in `local` before, if they were not the master's in the compute dtype.
    """
    indices = [index for index in indices if not _restore(span, index)]
    if span.master_is_local:
        return
    shown = shown_by_codec(span) if shown is None else shown
    for index in indices:
        write_back(span, index, span.view(index).reshape(-1), shown)


def _restore(span: Span, index: int) -> bool:
    """Point a parameter at `full` again if an operation (`p.set_(values)`) replaced its memory, and keep the new values.

    Returns:
        Whether its memory was replaced.
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
    """Return the values that a gather leaves in `local`, if a codec rounds them; else None."""
    if span.codec is None:
        return None
    span.unit.wait_for_step()
    return span.codec.rounded(fetch(span.master).to(span.device, span.compute_dtype))


def write_back(span: Span, index: int, values: Tensor, shown: Tensor | None = None) -> None:
    """Write this rank's elements of one parameter's 1-D `values` to the master. Equal ones keep the master's extra digits.

    Args:
        shown: the values in `local` before, if they were not the master's in the compute dtype.
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
    """Return `result`, except that elements which changed by less than a rounding change the master by the difference."""
    if span.codec is None:
        return result
    stop, first = start + new.numel(), start // BLOCK_NUMEL * BLOCK_NUMEL
    last = -(-stop // BLOCK_NUMEL) * BLOCK_NUMEL
    distance = span.codec.step(shown[first:last])[start - first : stop - first].to(master.device, master.dtype)
    before = shown[start:stop].to(master.device, master.dtype)
    change = new.to(master.dtype) - before
    # One value that is not finite makes its whole block NaN: these elements must not count as written.
    is_same = (change.abs() < distance / 2) | (new.isnan() & before.isnan())
    moved = torch.where(is_same, torch.where(change.isnan(), master, master + change), result)
    return torch.where(new == master.to(new.dtype), master, moved)
