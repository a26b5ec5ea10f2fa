"""Fingerprints of tensors differ for every permutation of elements."""

from __future__ import annotations

import torch

from hf_zero.tiers.fingerprint import fingerprint, mixed_sums, sample


def test_fingerprints_see_every_permutation() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = (torch.randn(160, 4096, generator=generator) * 3).to(dtype)
        x[1] = torch.roll(x[0], 1)
        for print_of in (fingerprint, mixed_sums):
            seen = {tuple(print_of(x).tolist())}
            others = [x.flip(0), x.flip(1), x.roll(1, 0), x.roll(1, 1), x.clone(), x.clone(), x.clone()]
            others[4][[140, 150]] = x[[150, 140]]  # beyond the first 64 rows of 4096
            others[5][[0, 1]] = x[[1, 0]]
            others[6][159, [4000, 4001, 4002]] = x[159, [4001, 4002, 4000]]
            changed = [other for other in others if not torch.equal(other, x)]
            seen |= {tuple(print_of(other).tolist()) for other in changed}
            assert len(seen) == 1 + len(changed)
            assert torch.equal(print_of(x), print_of(x.clone()))
    for size in (1, 2, 7, 8, 9, 23):  # bytes that fill no word, and such that begin inside one
        data = torch.arange(size + 1, dtype=torch.uint8)
        assert torch.equal(mixed_sums(data[1:]), mixed_sums(data[1:].clone()))
        changed = data.clone()
        changed[-1] += 1
        assert not torch.equal(mixed_sums(data), mixed_sums(changed))
    assert fingerprint(torch.zeros(0)).shape == fingerprint(torch.tensor(1.0)).shape == (2,)


def test_a_sample_sees_its_ends_and_every_row() -> None:
    values = torch.zeros(5 * 4096 + 100)
    seen = {sample(values)}
    for place in (0, 4 * 4096, 5 * 4096 + 99):
        changed = values.clone()
        changed[place] = 1.0
        seen.add(sample(changed))
    assert len(seen) == 4
