"""Quantized wire formats: blocks of elements with one scale each.

A block of 256 elements is sent as 256 codes of one byte and one float32 scale, its largest magnitude over the largest code:

    format   code                              |x - decoded(x)| at most, per block
    int8     an integer from -127 to 127       absmax / 254
    fp8      float8_e4m3fn, 448 at most        |x| / 16, and absmax / 2^18 near 0

A block with a non-finite element decodes to non-finite elements only, because its scale is not finite.

Block-wise formats: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), section 2.1; on the
wire of ZeRO: Wang et al., "ZeRO++" (arXiv 2306.10209), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.layout import SpanLayout
from ..core.precision import dtype_of

BLOCK_NUMEL = 256
_PIECE_NUMEL = 4096 * BLOCK_NUMEL
"""Elements encoded at a time; bounds the temporary buffers, which are float32."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """One format.

    Attributes:
        dtype: of a code, one byte.
        largest: magnitude of a code.
        step_of_absmax, step_of_value: the distance between neighbouring codes, as a share of the block's largest magnitude, or
            of the value where that is more.
    """

    dtype: torch.dtype
    largest: float
    step_of_absmax: float
    step_of_value: float

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` elements. Blocks are whole, so that scales are aligned."""
        return _blocks(numel) * (BLOCK_NUMEL + _SCALE_BYTES)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, numel: int) -> None:
        """Write the codes of `values` into `out`.

        Args:
            values: 1-D, floating point, of at most `numel` elements; missing elements are zeros.
            out: 1-D uint8 of `nbytes(numel)` bytes.
        """
        codes, scales = self._parts(out, numel)
        # Padding is sent, too: uninitialized bytes would be decoded into other ranks' sums.
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
            shares = (blocks / absmax).nan_to_num_(0.0, 0.0, 0.0).mul_(self.largest).view(-1)
            if not self.dtype.is_floating_point:
                shares.round_()
            codes[start : start + shares.numel()].copy_(shares.to(self.dtype).view(torch.uint8))

    @torch.no_grad()
    def decode(self, sent: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write the values of `out.numel()` codes into `out` (1-D, floating point), or add them to it."""
        codes, scales = self._parts(sent, out.numel())
        for start in range(0, out.numel(), _PIECE_NUMEL):
            target = out[start : start + _PIECE_NUMEL]
            count, first = _blocks(target.numel()), start // BLOCK_NUMEL
            numbers = codes[start : start + count * BLOCK_NUMEL].view(self.dtype).float().view(count, BLOCK_NUMEL)
            values = (numbers * scales[first : first + count].view(-1, 1)).view(-1)[: target.numel()]
            if add:
                target.add_(values)
            else:
                target.copy_(values)

    @torch.no_grad()
    def rounded(self, values: Tensor) -> Tensor:
        """Encode `values` (1-D) and return them decoded, in their own dtype."""
        sent = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.encode(values, sent, values.numel())
        out = torch.empty_like(values)
        self.decode(sent, out)
        return out

    @torch.no_grad()
    def step(self, values: Tensor) -> Tensor:
        """Return the distance between neighbouring codes at each of `values` (1-D, as `decode` gives them), in float32.

        The rounding of an element is at most half of it, in a block of finite elements.
        """
        numel, count = values.numel(), _blocks(values.numel())
        magnitude = torch.nn.functional.pad(values.float().abs(), (0, count * BLOCK_NUMEL - numel)).view(
            count, BLOCK_NUMEL
        )
        floor = magnitude.amax(1, keepdim=True) * self.step_of_absmax
        return torch.maximum(magnitude * self.step_of_value, floor).view(-1)[:numel]

    def _parts(self, sent: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return codes, and scales in float32."""
        length = _blocks(numel) * BLOCK_NUMEL
        return sent[:length], sent[length:].view(torch.float32)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)


CODECS = {
    "int8": Codec(torch.int8, 127.0, 1 / 127, 0.0),
    "fp8": Codec(torch.float8_e4m3fn, 448.0, 2.0**-17, 2.0**-3),
}
"""By the name of the format."""


# In messages ----------------------------------------------------------------------------------------------------------


def fits(codec: Codec | None, numel: int, dtype: torch.dtype) -> bool:
    """Return True if coding makes slices of `numel` elements shorter. float64 and complex ones are never coded."""
    narrow = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return codec is not None and narrow and codec.nbytes(numel) < numel * dtype.itemsize


def gather_codec(span: SpanLayout) -> Codec | None:
    """Return the format in which a span's slices are gathered; None: their own dtype."""
    codec = CODECS.get(span.spec.gathered_in)
    if span.shards == 1 or span.cuts or not fits(codec, span.slice_numel, dtype_of(span.spec.compute_dtype)):
        return None
    return codec
