"""`check_tier`: what every storage tier must do, whatever it stores bytes in.

A new tier brings an adapter with the methods of `Tier` and one row in `test_tiers.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from hf_zero import TierError
from hf_zero.comm.inflight import Inflight

PAGE = 4096
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
NUMELS = (0, 1, 3, 511, 1024, 4095, 4096, 4097, 10_000)
LARGE_BYTES = (8 << 20) + 12_345
"""More than the tier moves at a time."""
HUGE_NUMEL = 1 << 26
"""Elements of float32 that do not fit where a tier is full."""


class Array(Protocol):
    """`numel` elements of `dtype` in a tier. Transfers start at once and are over when they were waited for."""

    def write(self, start: int, values: Tensor) -> Inflight:
        """Store `values` (1-D, contiguous, of this type) from element `start` on."""

    def read(self, start: int, values: Tensor) -> Inflight:
        """Fill `values` from element `start` on."""

    def close(self) -> None:
        """Free the space."""


class Tier(Protocol):
    """A tier as the checks use it.

    Attributes:
        can_fail: kinds of transfer (`read`, `write`) that can fail.
    """

    can_fail: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """What open arrays take."""

    def array(self, numel: int, dtype: torch.dtype) -> Array:
        """Raises:
        TierError: no space.
        """

    def full(self) -> AbstractContextManager[Any]:
        """Inside, `HUGE_NUMEL` elements do not fit."""

    def failing(self, kind: str) -> AbstractContextManager[Any]:
        """Inside, transfers of this kind fail."""


def buffer(numel: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
    """Return memory that begins `shift` bytes after a page's start."""
    memory = torch.empty(numel * dtype.itemsize + 2 * PAGE, dtype=torch.uint8)
    at = -memory.data_ptr() % PAGE + shift
    return memory[at : at + numel * dtype.itemsize].view(dtype)


def pattern(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bytes; NaN among them."""
    nbytes = numel if dtype is torch.bool else numel * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw > 127 if dtype is torch.bool else raw.view(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@contextmanager
def between_neighbours(tier: Tier, numel: int, dtype: torch.dtype) -> Iterator[Array]:
    """Yield an array. Those before and after it must keep their bytes, and all space must be free at the end."""
    before = tier.nbytes
    arrays = [tier.array(1000, torch.float32), tier.array(numel, dtype), tier.array(1000, torch.float32)]
    marks = [pattern(1000, torch.float32, seed) for seed in (91, 92)]
    beside = [arrays[0], arrays[2]]
    for array, mark in zip(beside, marks):
        array.write(0, mark).close()
    yield arrays[1]
    for array, mark in zip(beside, marks):
        found = torch.empty(1000)
        array.read(0, found).wait()
        assert same(found, mark), "a transfer changed the bytes of another array"
    for array in arrays:
        array.close()
        array.close()
    assert tier.nbytes == before, "closed arrays still take space"


def contents(array: Array, numel: int, dtype: torch.dtype) -> Tensor:
    found = buffer(numel, dtype)
    array.read(0, found).wait()
    return found


# The checks -----------------------------------------------------------------------------------------------------------


def any_type_and_size(tier: Tier) -> None:
    sizes = [(numel, dtype) for dtype in DTYPES for numel in NUMELS] + [(LARGE_BYTES, torch.uint8)]
    for numel, dtype in sizes:
        for shift in (0, 8):
            with between_neighbours(tier, numel, dtype) as array:
                values = buffer(numel, dtype, shift).copy_(pattern(numel, dtype, numel))
                array.write(0, values).close()
                found = buffer(numel, dtype, shift)
                array.read(0, found).wait()
                assert same(found, values), f"{numel} x {dtype}, {shift} bytes after a page's start"


def latest_bytes_win(tier: Tier) -> None:
    """Random reads and overlapping writes of any offset, length and address, against a copy in memory."""
    numel = 40_000
    edges = (0, 1, 511, 512, 4095, 4096, 4097, 8192, 39_999, numel)
    for seed in range(12):
        chance = random.Random(seed)
        model = pattern(numel, torch.uint8, seed)
        with between_neighbours(tier, numel, torch.uint8) as array:
            array.write(0, model.clone()).close()
            for turn in range(20):
                ends = [chance.choice(edges) if chance.random() < 0.5 else chance.randrange(numel + 1) for _ in "ab"]
                start, stop = min(ends), max(ends)
                part = buffer(stop - start, torch.uint8, chance.choice((0, 1, 64, 512)))
                if chance.random() < 0.5:
                    part.copy_(pattern(stop - start, torch.uint8, turn + 100))
                    model[start:stop] = part
                    array.write(start, part).close()
                    part.fill_(0)  # a closed transfer has let go of its source
                else:
                    array.read(start, part).wait()
                    assert same(part, model[start:stop]), f"seed {seed}, turn {turn}: bytes {start} to {stop}"
            assert same(contents(array, numel, torch.uint8), model), f"seed {seed}"


def several_in_flight(tier: Tier) -> None:
    """Adjoining parts, many to a block of the disk, all started before any is waited for; then a ring of three blocks."""
    numel = 65_536
    for turn in range(5):
        values = pattern(numel, torch.uint8, turn)
        with between_neighbours(tier, numel, torch.uint8) as array:
            array.write(0, torch.zeros(numel, dtype=torch.uint8)).close()
            moves = [array.write(at, values[at : at + 999]) for at in range(0, numel, 999)]
            for move in reversed(moves) if turn % 2 else moves:
                move.close()
            found = torch.zeros_like(values)
            moves = [array.read(at, found[at : at + 777]) for at in range(0, numel, 777)]
            for move in moves if turn % 2 else reversed(moves):
                move.wait()
            assert same(found, values), "parts that were under way at the same time"
    for block, dtype in ((1024, torch.float32), (999, torch.bfloat16)):
        with between_neighbours(tier, 10_000, dtype) as array:
            values = torch.arange(10_000).to(dtype)
            array.write(0, values).close()
            ring, moves = [torch.empty(block, dtype=dtype) for _ in range(3)], list[Inflight]()
            for index, start in enumerate(range(0, 10_000, block)):
                if index >= 3:
                    moves[index - 3].close()
                part = ring[index % 3][: min(block, 10_000 - start)]
                array.read(start, part).wait()
                moves.append(array.write(start, part.mul_(2)))
            for move in moves:
                move.close()
            assert same(contents(array, 10_000, dtype), values * 2), "read, updated and written block by block"


def several_threads(tier: Tier) -> None:
    wrong: list[str] = []
    with between_neighbours(tier, 8 * 5000, torch.uint8) as array:

        def work(index: int) -> None:
            part = buffer(5000, torch.uint8, 8 * index)
            for turn in range(25):
                array.write(5000 * index, part.fill_(turn)).close()
                part.fill_(255)
                array.read(5000 * index, part).wait()
                if not bool((part == turn).all()):
                    wrong.append(f"thread {index}, turn {turn}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def only_the_target_is_filled(tier: Tier) -> None:
    with between_neighbours(tier, 9000, torch.uint8) as array:
        array.write(0, torch.full((9000,), 7, dtype=torch.uint8)).close()
        for start, stop in ((1, 2), (100, 4096), (4096, 8192), (5, 8999)):
            whole = torch.zeros(9000, dtype=torch.uint8)
            array.read(9000 - (stop - start), whole[start:stop]).wait()
            assert whole[start:stop].eq(7).all()
            assert int(whole.sum()) == 7 * (stop - start), "bytes beside the target were written"


def space_is_used_again(tier: Tier) -> None:
    """Arrays that come and go in any order never share a byte."""
    chance, held = random.Random(0), list[tuple[Array, Tensor]]()
    before = tier.nbytes
    for turn in range(60):
        if chance.random() < 0.6 or not held:
            values = pattern(chance.randrange(1, 20_000), torch.uint8, turn)
            held.append((tier.array(values.numel(), torch.uint8), values))
            held[-1][0].write(0, values).close()
        else:
            array, values = held.pop(chance.randrange(len(held)))
            assert same(contents(array, values.numel(), torch.uint8), values)
            array.close()
        assert tier.nbytes - before >= sum(values.numel() for _, values in held)
    for array, values in held:
        assert same(contents(array, values.numel(), torch.uint8), values)
        array.close()
    assert tier.nbytes == before


def no_space(tier: Tier) -> None:
    with between_neighbours(tier, 5000, torch.float32) as array:
        array.write(0, values := pattern(5000, torch.float32)).close()
        before = tier.nbytes
        with tier.full(), pytest.raises(TierError, match=f"{4 * HUGE_NUMEL} bytes"):
            tier.array(HUGE_NUMEL, torch.float32)
        assert tier.nbytes == before, "an array that did not fit takes space"
        assert same(contents(array, 5000, torch.float32), values)
        tier.array(5000, torch.float32).close()


def failed_transfers(tier: Tier) -> None:
    for kind in tier.can_fail:
        with between_neighbours(tier, LARGE_BYTES, torch.uint8) as array:
            values = pattern(LARGE_BYTES, torch.uint8)
            array.write(0, values).close()
            with tier.failing(kind):
                move = getattr(array, kind)(0, values.clone())
                with pytest.raises(TierError):
                    move.wait()
                with pytest.raises(TierError):  # again, for the next caller
                    move.close()
            array.write(0, values).close()
            assert same(contents(array, LARGE_BYTES, torch.uint8), values), f"after a failed {kind}"


CHECKS: tuple[Callable[[Tier], None], ...] = (
    any_type_and_size,
    latest_bytes_win,
    several_in_flight,
    several_threads,
    only_the_target_is_filled,
    space_is_used_again,
    no_space,
    failed_transfers,
)


def check_tier(tier: Tier) -> None:
    """Raise AssertionError where a tier breaks its promise. The tier must be empty, and is empty afterwards."""
    for check in CHECKS:
        try:
            check(tier)
        except BaseException as error:
            error.add_note(f"check_tier: {check.__name__}")
            raise
        assert tier.nbytes == 0, check.__name__
