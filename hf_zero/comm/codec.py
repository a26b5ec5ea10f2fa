"""Wire formats narrower than the values they stand for: blocks of elements with one scale each.

A block of 256 elements travels as 256 codes and one float32 scale, its largest magnitude over the largest code:

    format   code                            bytes per element   |x - decoded(x)| at most, per block
    int8     a whole number from -127 to 127       1.016          absmax / 254
    fp8      float8_e4m3fn, 448 at most            1.016          |x| / 16, and absmax / 2^18 near 0
    int4     a whole number from -7 to 7           0.516          absmax / 14

A block with an element that is not finite is decoded to one without a finite element: its scale is not finite.

Block-wise formats: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), section 2.1; on the
wire of ZeRO: Wang et al., "ZeRO++" (arXiv 2306.10209), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..core.layout import Span
from ..core.precision import dtype_of

BLOCK_NUMEL = 256
_PIECE_NUMEL = 4096 * BLOCK_NUMEL
"""Elements that are coded at a time: what is made of them meanwhile is in float32."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """One format.

    Attributes:
        largest: magnitude of a code.
        per_byte: codes in one byte.
        step_of_absmax, step_of_value: the distance between neighbouring codes, as a share of the block's largest magnitude, or
            of the value where that is more.
        pack: codes as float32 numbers of at most `largest`, not rounded yet, to bytes; 1-D, a multiple of `per_byte` long.
        unpack: back.
    """

    largest: float
    per_byte: int
    step_of_absmax: float
    step_of_value: float
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]

    def nbytes(self, numel: int) -> int:
        """Of so many elements. Whole blocks, so that scales are aligned."""
        return _blocks(numel) * (BLOCK_NUMEL // self.per_byte + _SCALE_BYTES)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, numel: int) -> None:
        """`values` into `out`.

        Args:
            values: 1-D, floating point, of at most `numel` elements; those that are missing are zeros.
            out: 1-D uint8 of `nbytes(numel)` bytes.
        """
        codes, scales = self._parts(out, numel)
        # What `values` lacks at its end is sent, too: left as the memory held it, it would be decoded into others' sums.
        scales.zero_()
        codes.zero_()
        for start in range(0, values.numel(), _PIECE_NUMEL):
            part = values[start : start + _PIECE_NUMEL].float()
            count = _blocks(part.numel())
            if part.numel() < count * BLOCK_NUMEL:
                part = torch.nn.functional.pad(part, (0, count * BLOCK_NUMEL - part.numel()))
            blocks, first = part.view(count, BLOCK_NUMEL), start // BLOCK_NUMEL
            absmax = blocks.abs().amax(1, keepdim=True)
            scales[first : first + count].copy_((absmax / self.largest).view(-1))
            # In [-1, 1] first: the inverse of a subnormal scale is infinite.
            shares = (blocks / absmax).nan_to_num_(0.0, 0.0, 0.0).mul_(self.largest)
            packed, low = self.pack(shares.view(-1)), start // self.per_byte
            codes[low : low + packed.numel()].copy_(packed)

    @torch.no_grad()
    def decode(self, sent: Tensor, out: Tensor, *, add: bool = False) -> None:
        """What `encode` has made of `out.numel()` elements, into `out` (1-D, floating point), or added to it."""
        codes, scales = self._parts(sent, out.numel())
        for start in range(0, out.numel(), _PIECE_NUMEL):
            target = out[start : start + _PIECE_NUMEL]
            count, low = _blocks(target.numel()), start // self.per_byte
            numbers = self.unpack(codes[low : low + count * BLOCK_NUMEL // self.per_byte]).view(count, BLOCK_NUMEL)
            first = start // BLOCK_NUMEL
            values = (numbers * scales[first : first + count].view(-1, 1)).view(-1)[: target.numel()]
            if add:
                target.add_(values)
            else:
                target.copy_(values)

    @torch.no_grad()
    def rounded(self, values: Tensor) -> Tensor:
        """What `decode` makes of them (1-D), in their own type."""
        sent = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode(values, sent, values.numel())
        out = torch.empty_like(values)
        self.decode(sent, out)
        return out

    @torch.no_grad()
    def step(self, values: Tensor) -> Tensor:
        """The distance between neighbouring codes at each of `values` (1-D, as `decode` gives them), in float32.

        The rounding of an element is at most half of it, in a block without an element that is not finite.
        """
        numel, count = values.numel(), _blocks(values.numel())
        magnitude = torch.nn.functional.pad(values.float().abs(), (0, count * BLOCK_NUMEL - numel)).view(
            count, BLOCK_NUMEL
        )
        floor = magnitude.amax(1, keepdim=True) * self.step_of_absmax
        return torch.maximum(magnitude * self.step_of_value, floor).view(-1)[:numel]

    def _parts(self, sent: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Codes, and scales in float32."""
        length = _blocks(numel) * BLOCK_NUMEL // self.per_byte
        return sent[:length], sent[length:].view(torch.float32)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)


def _pack(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return (numbers if dtype.is_floating_point else numbers.round_()).to(dtype).view(torch.uint8)


def _unpack(dtype: torch.dtype, codes: Tensor) -> Tensor:
    return codes.view(dtype).float()


def _pack_int4(numbers: Tensor) -> Tensor:
    low, high = (numbers.round_() + 8).to(torch.uint8).view(-1, 2).unbind(1)
    return low | (high << 4)


def _unpack_int4(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=1).view(-1).float() - 8


CODECS = {
    "int8": Codec(127.0, 1, 1 / 127, 0.0, partial(_pack, torch.int8), partial(_unpack, torch.int8)),
    "fp8": Codec(
        448.0, 1, 2.0**-17, 2.0**-3, partial(_pack, torch.float8_e4m3fn), partial(_unpack, torch.float8_e4m3fn)
    ),
    "int4": Codec(7.0, 2, 1 / 7, 0.0, _pack_int4, _unpack_int4),
}
"""By the name of the format."""


# In messages ----------------------------------------------------------------------------------------------------------


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
