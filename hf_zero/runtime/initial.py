"""A span's first values: its parameters', what they were born with, or left where the model's own files have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..comm.wire import SoloWire
from ..core.layout import Span
from ..core.precision import dtype_of
from ..tiers.array import DiskArray, FilePieces
from ..tiers.pool import Storage
from .deferred import birth_of, hand_over


def poured(span: Span, params: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """The whole span's, in the master dtype, on the device; what was born gives its own up."""
    whole = torch.zeros(span.numel, dtype=dtype_of(span.spec.master_dtype), device=device)
    for slot, param in zip(span.slots, params):
        birth = birth_of(param)
        if birth is None:
            whole[slot.offset : slot.stop].view(slot.spec.shape).copy_(param.detach())
        else:
            birth.pour(param, whole[slot.offset :])
            hand_over(param, None)
    whole[span.used_numel :].zero_()
    return whole


def left_in_files(span: Span, params: Sequence[nn.Parameter], wire: SoloWire, storage: Storage) -> DiskArray | None:
    """This rank's slice of a frozen span, where its values are at rest in the model's own files: no copy is made of them.

    A collective for parameters with an origin.
    """
    births = [birth for param in params if (birth := birth_of(param)) is not None and birth.origin is not None]
    if span.trainable or len(births) < len(params):
        return None
    if not all(wire.exchange(all(birth.at_rest for birth in births))):
        return None  # some rank was given its part, and may have written to it
    origins = {slot.spec.name: birth.origin for slot, birth in zip(span.slots, births)}
    parts = [
        (part.slice_start, origin[part.param_start : part.param_start + part.numel])
        for part in span.overlaps(wire.rank if span.shards > 1 else 0)
        if (origin := origins[part.slot.spec.name]) is not None
    ]
    for param in params:
        hand_over(param, None)
    dtype = dtype_of(span.spec.master_dtype)
    pieces = FilePieces(span.slice_numel, dtype, parts, storage.meter)
    return DiskArray(storage.disk, span.slice_numel, dtype, pieces)
