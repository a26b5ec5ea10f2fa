"""Formats of the wire: the error that each states, blocks that are not finite, any length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.comm.codec import BLOCK_NUMEL, CODECS, Codec, fits, gather_codec
from hf_zero.core.layout import Layout, ParamSpec

ROUNDING = 1 + 1e-5
"""Of float32, in the scale and in the product."""


def coded(codec: Codec, values: torch.Tensor, numel: int | None = None) -> torch.Tensor:
    numel = values.numel() if numel is None else numel
    sent = torch.full((codec.nbytes(numel),), 0xFF, dtype=torch.uint8)  # NaN in both parts
    codec.encode(values, sent, numel)
    out = torch.full((numel,), float("nan"))
    codec.decode(sent, out)
    return out


def bound(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """What the format states, by element; float32 has no number below 2^-149."""
    absmax, least = blocks.abs().amax(1, keepdim=True), CODECS[name].largest * 2.0**-148
    if name == "fp8":
        return torch.maximum(blocks.abs() / 16, absmax / 2**18) * ROUNDING + least
    return (absmax / (2 * CODECS[name].largest)).expand_as(blocks) * ROUNDING + least


@pytest.mark.parametrize("name", CODECS)
@given(
    seed=st.integers(0, 2**31),
    numel=st.integers(0, 5 * BLOCK_NUMEL),
    exponent=st.integers(-140, 120),
    spread=st.sampled_from((0.0, 3.0, 20.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_error_is_bounded(name, seed, numel, exponent, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp2(
        spread * torch.randn(numel, generator=generator).clamp(-1, 1)
    )
    values = torch.ldexp(values, torch.tensor(exponent)).clamp(-3e38, 3e38).to(dtype)
    found = coded(CODECS[name], values)
    blocks = torch.nn.functional.pad(values.float(), (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    gaps = (torch.nn.functional.pad(found, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL) - blocks).abs()
    assert bool((gaps <= bound(name, blocks)).all())
    step = CODECS[name].step(found)
    assert bool((gaps.view(-1)[:numel] <= step / 2 * ROUNDING + CODECS[name].largest * 2.0**-148).all())
    assert torch.equal(step, torch.cat([CODECS[name].step(part) for part in found.split(BLOCK_NUMEL)])), "of its block"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name, bad):
    values = torch.randn(3 * BLOCK_NUMEL)
    values[BLOCK_NUMEL + 7] = bad
    values[BLOCK_NUMEL : BLOCK_NUMEL + 3] = 0.0
    found = coded(CODECS[name], values).view(3, BLOCK_NUMEL)
    assert not bool(found[1].isfinite().any()), "zeros of the block too"
    assert bool(found[0].isfinite().all())
    assert bool(found[2].isfinite().all())


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_what_is_missing(name):
    codec = CODECS[name]
    assert not coded(codec, torch.zeros(300)).any()
    found = coded(codec, torch.ones(10), 2 * BLOCK_NUMEL + 5)
    assert torch.equal(found[:10], torch.ones(10))
    assert not found[10:].any()
    assert not coded(codec, torch.ones(0), 40).any()


@pytest.mark.parametrize("name", CODECS)
def test_decoded_again_is_the_same(name):
    """Values that came over the wire may be sent on: nothing is lost any more but the last bit."""
    once = coded(CODECS[name], torch.randn(4 * BLOCK_NUMEL))
    assert torch.allclose(coded(CODECS[name], once), once, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", CODECS)
def test_bytes(name):
    numel = 1 << 20
    assert 4 * numel >= 3.93 * CODECS[name].nbytes(numel)


@pytest.mark.parametrize("name", CODECS)
def test_what_codes_would_not_shorten_travels_as_it_is(name):
    for dtype, most in ((torch.float32, 65), (torch.bfloat16, 130), (torch.float64, 1 << 20)):
        assert not fits(CODECS[name], most, dtype)
        assert fits(CODECS[name], most + 1, dtype) is (dtype is not torch.float64)
    specs = [
        ParamSpec((n,), (64, 64), *["float32"] * 3, step_cost=cost, gathered_in=name)
        for n, cost in (("a", 0), ("b", 9))
    ]
    equal, ragged = Layout.build([("unit", specs)], 2).spans
    assert (gather_codec(equal), gather_codec(ragged)) == (CODECS[name], None)


@pytest.mark.parametrize("name", CODECS)
def test_pieces_make_no_difference(name):
    """Longer than what is coded at a time."""
    codec, values = CODECS[name], torch.randn((1 << 20) + 3000)
    whole = coded(codec, values)
    half = 1 << 19
    parts = torch.cat([coded(codec, values[:half]), coded(codec, values[half:])])
    assert torch.equal(whole, parts)
    total = whole.clone()
    sent = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, sent, values.numel())
    codec.decode(sent, total, add=True)
    assert torch.equal(total, 2 * whole)
