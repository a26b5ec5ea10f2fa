"""Fingerprints of values in memory: they detect writes, and differences between ranks."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
import xxhash
from torch import Tensor

from .disk import bytes_of

_BLOCK_BYTES = 8 << 20
_ROW, _SEEN = 4096, 16
"""A sample has the first `_SEEN` elements of each `_ROW`: what one cache line holds."""


def digest(values: Tensor) -> int:
    """Return a digest of all bits in order; 1-D. On CUDA the host waits for it."""
    data = values.detach().contiguous().view(torch.uint8)
    if data.device.type == "cpu":
        memory: Any = bytes_of(data)
        return xxhash.xxh3_64_intdigest(memory)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for block in data.split(_BLOCK_BYTES):
        whole = block.numel() // 4 * 4
        weights = _weights(block.device)
        words = block[:whole].view(torch.int32) if block.data_ptr() % 4 == 0 else block[:whole].to(torch.int32)
        found = (words * weights[: words.numel()]).sum()
        rest = (block[whole:].to(torch.int64) * weights[-4:][: block.numel() - whole]).sum()
        total = total * 0x5851F42D4C957F2D + found + 3 * rest
    return int(total)


def sample(values: Tensor) -> int:
    """Return a digest of one element in 256, in short runs: enough to detect that all values were rewritten."""
    values = values.detach()
    if values.numel() < 4 * _ROW:
        return digest(values)
    whole = values.numel() // _ROW * _ROW
    return digest(torch.cat([values[:whole].view(-1, _ROW)[:, :_SEEN].reshape(-1), values[-_SEEN:]]))


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Return a large odd number for each place in a block: exchanged values give another sum."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    return (torch.randint(0, 2**62, (_BLOCK_BYTES,), generator=generator, device="cpu") * 2 + 1).to(device)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return 128 bits, as two int64, of a tensor's bytes in order. Comparable between devices of one kind."""
    if tensor.device.type == "cpu":
        data: Any = bytes_of(tensor.detach().contiguous().view(-1))
        digest = xxhash.xxh3_128_digest(data)
        return torch.tensor(struct.unpack("<qq", digest), dtype=torch.int64, device="cpu")
    return mixed_sums(tensor)


def mixed_sums(tensor: Tensor) -> Tensor:
    """Return a fingerprint by torch's own kernels: each word is mixed with its place, nonlinearly, before it is summed."""
    words_by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    word = words_by_size.get(tensor.element_size(), torch.uint8)
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).view(word)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _PIECE_NUMEL):
        words = bits[start : start + _PIECE_NUMEL].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=tensor.device)
        for index, odd in enumerate(_ODD):
            mixed = (words + places * odd) * _ODD[1 - index]
            mixed = (mixed ^ (mixed >> 29)) * odd
            sums[index] += (mixed ^ (mixed >> 32)).sum()
    return sums


_PIECE_NUMEL = 1 << 22
_ODD = (-7046029254386353131, -4417276706812531889)  # 64-bit primes of XXH64, as int64; products wrap
