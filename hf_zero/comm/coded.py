"""Gathers and reduces in a narrower format (`codec`), over any wire.

A reduce sends every rank its slice of the codes, all to all, and sums what is decoded in float32, in rank order: one rounding
per rank and element on the way, none in the sum. Who keeps a slice uses the decoded values of its own, as the others do.

Wang et al., "ZeRO++" (arXiv 2306.10209), section 3.3: the same exchange, where a ring would round at every hop.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..core.layout import Span
from ..core.precision import dtype_of
from .codec import CODECS, Codec
from .inflight import Inflight


class Swapping(Protocol):
    """What is used of a wire."""

    size: int

    def gather(self, full: Tensor, own: Tensor, tag: int) -> Inflight: ...
    def swap(self, sent: Tensor, landing: Tensor, tag: int) -> Inflight: ...


def fits(codec: Codec | None, numel: int, dtype: torch.dtype) -> bool:
    """Whether slices of so many elements are coded: where that makes them shorter. float64 and complex ones never are."""
    narrow = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return codec is not None and narrow and codec.nbytes(numel) < numel * dtype.itemsize


def gather_codec(span: Span) -> Codec | None:
    """In whose format a span's slices are gathered; None: as they are."""
    codec = CODECS.get(span.spec.gathered_in)
    if span.shards == 1 or span.cuts or not fits(codec, span.slice_numel, dtype_of(span.spec.compute_dtype)):
        return None
    return codec


def reduce(wire: Swapping, codec: Codec, source: Tensor, out: Tensor, tag: int) -> Inflight:
    """As `SoloWire.reduce`; `source` may be written again at once."""
    numel, nbytes = out.numel(), codec.nbytes(out.numel())
    sent = torch.empty(wire.size * nbytes, dtype=torch.uint8, device=source.device)
    for rank, part in enumerate(sent.split(nbytes)):
        codec.encode(source[rank * numel : (rank + 1) * numel], part, numel)
    landing = torch.empty_like(sent)
    move = wire.swap(sent, landing, tag)

    def finish() -> None:
        move.close()
        for rank, part in enumerate(landing.split(nbytes)):
            codec.decode(part, out, add=rank > 0)
        out.mul_(1.0 / wire.size)

    return Inflight((), (), finish)


def gather(wire: Swapping, codec: Codec, full: Tensor, own: Tensor, tag: int) -> Inflight:
    """As `SoloWire.gather`, but that this rank's place in `full` holds the decoded values, too; `own` may be in it."""
    numel, nbytes = own.numel(), codec.nbytes(own.numel())
    sent = torch.empty(nbytes, dtype=torch.uint8, device=own.device)
    codec.encode(own, sent, numel)
    landing = torch.empty(wire.size * nbytes, dtype=torch.uint8, device=own.device)
    move = wire.gather(landing, sent, tag)

    def finish() -> None:
        move.close()
        for rank, part in enumerate(landing.split(nbytes)):
            codec.decode(part, full[rank * numel : (rank + 1) * numel])

    return Inflight((), (), finish)
