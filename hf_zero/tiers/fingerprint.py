"""Fingerprints of values in memory: they detect writes, and differences between ranks."""

from __future__ import annotations

import struct
from typing import Any

import torch
import xxhash
from torch import Tensor

from .disk import bytes_of

_ROW, _SEEN = 4096, 16
"""A sample has the first `_SEEN` elements of each `_ROW`: what one cache line holds."""
_WORDS = 1 << 22
"""Words that `mixed_sums` mixes at a time: its temporary buffers are int64."""
_ODD = (-7046029254386353131, -4417276706812531889)  # 64-bit primes of XXH64, as int64; products wrap


def digest(values: Tensor) -> int:
    """Return a digest of all bits in order; 1-D. On CUDA the host waits for it."""
    if values.device.type == "cpu":
        memory: Any = bytes_of(values.detach().contiguous())
        return xxhash.xxh3_64_intdigest(memory)
    return int(mixed_sums(values)[0])


def sample(values: Tensor) -> int:
    """Return a digest of one element in 256, in short runs: enough to detect that all values were rewritten."""
    values = values.detach()
    if values.numel() < 4 * _ROW:
        return digest(values)
    whole = values.numel() // _ROW * _ROW
    return digest(torch.cat([values[:whole].view(-1, _ROW)[:, :_SEEN].reshape(-1), values[-_SEEN:]]))


def fingerprint(tensor: Tensor) -> Tensor:
    """Return 128 bits, as two int64, of a tensor's bytes in order. Comparable between devices of one kind."""
    if tensor.device.type == "cpu":
        data: Any = bytes_of(tensor.detach().contiguous().view(-1))
        found = xxhash.xxh3_128_digest(data)
        return torch.tensor(struct.unpack("<qq", found), dtype=torch.int64, device="cpu")
    return mixed_sums(tensor)


def mixed_sums(tensor: Tensor) -> Tensor:
    """Return a fingerprint by torch's own kernels: each word is mixed nonlinearly with its position, then all are summed."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.data_ptr() % 8:  # the words must not depend on the address
        data = data.clone()
    whole = data.numel() // 8 * 8
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for bits, before in ((data[:whole].view(torch.int64), 0), (data[whole:], whole)):
        for start in range(0, bits.numel(), _WORDS):
            words = bits[start : start + _WORDS].to(torch.int64)
            first = before + start + 1
            places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=tensor.device)
            for index, odd in enumerate(_ODD):
                mixed = (words + places * odd) * _ODD[1 - index]
                mixed = (mixed ^ (mixed >> 29)) * odd
                sums[index] += (mixed ^ (mixed >> 32)).sum()
    return sums
