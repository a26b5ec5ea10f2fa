"""`check_wire`: what every wire must do, over whichever transport. It runs on every rank of the wire at once.

All ranks can make the values of every other rank, so what must arrive is known without a message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from hf_zero.comm.agreement import on_all_ranks
from hf_zero.comm.codec import CODECS
from hf_zero.comm.wire import Wire, average_in_order

SIZES = (0, 1, 3, 64, 4096, (1 << 18) + 3)
"""Elements of a slice; the last are more than is moved at a time."""
TAGS = (0, 7, 4095, 4096, 3 * 4096)
"""Spans, also more than a transport may have room for."""
SHAPES = ((), (1,), (2,), (3, 2), (0,), (1, 1, 5))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    found = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank)) * 100
    return found.to(dtype)


class Slices:
    """Whose slices a wire gathers and reduces: those of a replica where it knows of replicas, else all ranks'."""

    def __init__(self, wire: Wire) -> None:
        group = wire.shard_group or wire
        self.rank, self.size = group.rank, group.size
        first = wire.rank - wire.rank % self.size if wire.shard_group is not None else 0
        self.ranks = [*range(first, first + self.size)]
        """Of the whole wire, those of this rank's slices."""
        self.takes_cuts = wire.ragged
        """gloo's own collectives take equal slices only."""
        self.replicas = [[*range(at, at + self.size)] for at in range(0, wire.size, self.size)]

    def cuts(self) -> list[list[int]]:
        """Where uneven slices may begin."""
        n = self.size
        if not self.takes_cuts:
            return []
        return [[0] + [6] * n, [0] * n + [70_000], [0, *range(10, 10 + n)], [0] * (n + 1), [*range(0, 5 * n + 1, 5)]]


def mean(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parts) == 1:
        return parts[0].to(dtype)
    out = torch.empty(parts[0].shape, dtype=dtype)
    average_in_order(parts, out)
    return out


def averaged(slices: Slices, make: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
    """Of each replica's ranks, then of the replicas."""
    within = [mean([make(rank) for rank in ranks], dtype) for ranks in slices.replicas]
    return mean(within, dtype)


def close_to(found: Tensor, wanted: Tensor, exact: bool, what: str, sent_as: torch.dtype = torch.float32) -> None:
    if exact:
        assert torch.equal(found, wanted), what
    else:  # sums are made in another order, or in the type that is sent
        rounding = 0.01 if sent_as is torch.bfloat16 else 1e-6
        assert torch.allclose(found, wanted, rtol=rounding, atol=400 * rounding), what


# The checks -----------------------------------------------------------------------------------------------------------


def gathers(wire: Wire, exact: bool) -> None:
    slices = Slices(wire)
    cases: list[tuple[list[int], bool]] = [([n * at for at in range(slices.size + 1)], True) for n in SIZES]
    cases += [(cuts, False) for cuts in slices.cuts()] if wire.size > 1 else []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        for number, (cuts, even) in enumerate(cases):
            wanted = torch.cat([values(r, b - a, dtype) for r, a, b in zip(slices.ranks, cuts, cuts[1:])])
            for in_place in (False, True):
                full = torch.full((cuts[-1],), 3, dtype=dtype)
                place = full[cuts[slices.rank] : cuts[slices.rank + 1]]
                own = place if in_place else torch.empty_like(place)
                own.copy_(values(wire.rank, own.numel(), dtype))
                if slices.size == 1:
                    full = own  # nothing to do for one rank: the slice is the whole
                move = wire.gather(full, own, number, () if even else cuts)
                move.wait()
                assert torch.equal(full, wanted), f"gather of {cuts} x {dtype}, in place: {in_place}"
                move.close()


def reduces(wire: Wire, exact: bool) -> None:
    slices = Slices(wire)
    cases: list[tuple[list[int], bool]] = [([n * at for at in range(slices.size + 1)], True) for n in SIZES]
    cases += [(cuts, False) for cuts in slices.cuts()] if wire.size > 1 else []
    for dtype, into in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        for number, (cuts, even) in enumerate(cases):
            low, high = cuts[slices.rank], cuts[slices.rank + 1]
            for missing in (0, 1, 5) if even and wire.ragged and high > low else (0,):
                source = values(wire.rank, cuts[-1], dtype)[: max(0, cuts[-1] - missing)]
                wanted = averaged(slices, lambda r, d=dtype, c=cuts: values(r, c[-1], d), into)  # type: ignore[misc]
                wanted[len(source) :] = 0
                out = torch.full((high - low,), 7.0, dtype=into)
                wire.reduce(source, out, number, () if even else cuts).close()
                close_to(out, wanted[low:high], exact, f"reduce of {cuts} x {dtype}, {missing} elements missing", dtype)


def averages(wire: Wire, exact: bool) -> None:
    for numel in (1, 5, 4097):
        out = torch.empty(numel)
        wire.average(values(wire.rank, numel), out, 2).close()
        close_to(out, mean([values(r, numel) for r in range(wire.size)], torch.float32), False, f"average of {numel}")
        assert len({tuple(each) for each in wire.exchange(out.tolist())}) == 1, "ranks have other bits"


def several_in_flight(wire: Wire, exact: bool) -> None:
    """Of many spans and of one span, with ranks late by turns, closed in other orders; closed buffers are written at once."""
    slices = Slices(wire)
    for turn in range(4):
        if wire.rank == turn % wire.size:
            time.sleep(0.05)
        begun = []
        for number, tag in enumerate([*TAGS, *TAGS[:2], *TAGS[:1] * 4]):  # more than a transport has room for
            full, own = torch.full((100 * slices.size,), 7.0), values(wire.rank, 100, seed=number)
            source, out = values(wire.rank, 100 * slices.size, seed=50 + number), torch.empty(100)
            if slices.size == 1:
                full = own
            moves = [wire.gather(full, own, tag), wire.reduce(source, out, tag)]
            begun.append((number, full, own, source, out, moves))
        order = (
            begun if turn % 2 or not wire.waits_in_any_order or not exact else begun[::-1] if wire.rank % 2 else begun
        )
        for _, _, own, source, _, moves in order:
            for move in moves:
                move.wait()
                move.close()
            source.fill_(-1.0)
            if slices.size > 1:
                own.fill_(-1.0)
        for number, full, _, _, out, _ in begun:
            if slices.size > 1:
                assert torch.equal(full, torch.cat([values(r, 100, seed=number) for r in slices.ranks])), (
                    f"gather {number}"
                )
            whole = averaged(slices, lambda r, n=number: values(r, 100 * slices.size, seed=50 + n), torch.float32)  # type: ignore[misc]
            close_to(out, whole[100 * slices.rank :][:100], exact, f"reduce {number}")


def narrower_formats(wire: Wire, exact: bool) -> None:
    """Gathers and reduces in a codec's format: within its rounding, the same bits on every rank, NaN where NaN was."""
    slices = Slices(wire)
    numel = 5 * 128 + 37
    for name, codec in CODECS.items() if wire.size > 1 else ():
        full, own = torch.zeros(numel * slices.size), values(wire.rank, numel)
        own[3] = torch.nan
        move = wire.gather_coded(full, own, codec, 3)
        own.fill_(0)  # it may be written at once
        move.close()
        for rank, part in zip(slices.ranks, full.split(numel)):
            sent = values(rank, numel)
            sent[3] = torch.nan
            assert torch.equal(part.isnan(), codec.rounded(sent).isnan()), name
            assert torch.equal(part.nan_to_num(), codec.rounded(sent).nan_to_num()), f"{name}: slice of rank {rank}"
        before, wire.codec = wire.codec, codec
        try:
            out = torch.empty(numel)
            wire.reduce(values(wire.rank, numel * slices.size), out, 4).close()
        finally:
            wire.codec = before
        whole = averaged(slices, lambda r: values(r, numel * slices.size), torch.float32)
        step = (
            2 * max(values(r, numel * slices.size).abs().max().item() for r in range(wire.size)) / (2 * codec.largest)
        )
        gap = (out - whole[numel * slices.rank :][:numel]).abs().max().item()
        assert gap <= max(step, 400 / 16), f"{name}: off by {gap}"


def scalars(wire: Wire, exact: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        for shape in SHAPES:
            count = torch.Size(shape).numel()
            each = [values(rank, count, dtype).view(shape) for rank in range(wire.size)]
            mine = each[wire.rank].clone()
            total, most = wire.sum_scalar(mine), wire.max_scalar(mine)
            assert torch.equal(mine, each[wire.rank]), "the argument was written"
            wanted = torch.stack(each).double().sum(0).to(dtype)
            assert (total.shape, total.dtype, most.dtype) == (torch.Size(shape), dtype, dtype)
            assert torch.allclose(total, wanted, rtol=1e-5, atol=1e-3), f"sum of {shape} x {dtype}"
            assert torch.equal(most, torch.stack(each).amax(0)), f"maximum of {shape} x {dtype}"
            assert len({str(found) for found in wire.exchange(total.tolist())}) == 1, "ranks have other bits"
    for length in (1, 2, 5):
        numbers = [[(rank * 7 + at * 3) % 11 - 5 for at in range(length)] for rank in range(wire.size)]
        first = wire.start_maximum(numbers[wire.rank])
        assert first() == [max(column) for column in zip(*numbers)]
        assert wire.start_maximum(numbers[wire.rank], at_end=True)() == [max(column) for column in zip(*numbers)]


def small_exchanges(wire: Wire, exact: bool) -> None:
    for source in range(wire.size):
        for numel in (0, 1, 5000):
            tensor = values(wire.rank, numel)
            wire.broadcast(tensor, source)
            assert torch.equal(tensor, values(source, numel)), f"broadcast of {numel} from rank {source}"
            landing = torch.full((numel,), 7.0)
            wire.send_to_rank_0(values(wire.rank, numel) if wire.rank == source else None, landing, source)
            if wire.rank == 0:
                assert torch.equal(landing, values(source, numel)), f"carried from rank {source}"
    told = {"rank": wire.rank, "text": "ü" * wire.rank, "none": None}
    assert wire.exchange(told) == [{**told, "rank": r, "text": "ü" * r} for r in range(wire.size)]
    wire.barrier()
    assert wire.local_world_size() == wire.size


def beside(wire: Wire, exact: bool) -> None:
    """A wire for another thread, used at the same time."""
    other, found, late = wire.background_wire(), list[Any](), threading.Event()

    def work() -> None:
        for turn in range(5):
            found.append(other.exchange((turn, other.rank)))
        late.set()

    thread = threading.Thread(target=work)
    thread.start()
    for turn in range(5):
        assert wire.exchange(turn) == [turn] * wire.size
        gathers_once(wire, turn)
    thread.join(60)
    assert late.is_set()
    assert found == [[(turn, rank) for rank in range(wire.size)] for turn in range(5)]


def gathers_once(wire: Wire, seed: int) -> None:
    slices = Slices(wire)
    full, own = torch.zeros(10 * slices.size), values(wire.rank, 10, seed=seed)
    if slices.size > 1:
        wire.gather(full, own, 1).close()
        assert torch.equal(full, torch.cat([values(r, 10, seed=seed) for r in slices.ranks]))


FAILURES: Sequence[BaseException] = (
    zero.ConfigError("no"),
    ValueError("no"),
    MemoryError("no"),
    torch.OutOfMemoryError("no"),
    KeyboardInterrupt("no"),
    SystemExit("no"),
)


def raise_on(rank: int, wire: Wire, failure: BaseException) -> None:
    if wire.rank == rank:
        raise failure


def ends_what_others_are_in(wire: Wire, is_plain: bool, failure: Exception | None = None) -> None:
    """The last rank leaves a block where the others are in two blocks inside it, at the end or before."""
    with on_all_ranks(wire, "working"):
        if wire.rank < wire.size - 1:
            with on_all_ranks(wire, "deeper"), on_all_ranks(wire, "deepest"):
                if is_plain:
                    wire.exchange(wire.rank)
        elif failure is not None:
            raise failure


def agrees(wire: Wire, exact: bool) -> None:
    """Whatever one rank raises in what all do together, all ranks raise; they stay in step."""
    last = wire.size - 1
    for failure in FAILURES:
        kept = isinstance(failure, (zero.ZeroError, KeyboardInterrupt, SystemExit)) and wire.rank == last
        with pytest.raises(type(failure) if kept else zero.CheckpointError) as raised, on_all_ranks(wire, "working"):
            raise_on(last, wire, failure)
        if not kept:
            assert str(raised.value) == f"working failed on rank {last}: {type(failure).__name__}: no"
        name = type(failure).__name__
        assert wire.exchange(name) == [name] * wire.size, "another rank is at another exchange"
    words = "working failed on rank 0: ValueError: 0"
    with pytest.raises(zero.CheckpointError, match=words), on_all_ranks(wire, "working"):
        raise ValueError(wire.rank)
    if wire.size > 1:
        error = zero.CheckpointError if wire.rank == last else zero.RankMismatchError
        for is_plain in (True, False):
            with pytest.raises(error, match=f"^working failed on rank {last}: ValueError: no"):
                ends_what_others_are_in(wire, is_plain, ValueError("no"))
            with pytest.raises(zero.RankMismatchError, match="^working was ended by one rank.*Make the same calls"):
                ends_what_others_are_in(wire, is_plain)
    with on_all_ranks(wire, "working") as report:
        report.local = wire.rank
    assert report.by_rank == [*range(wire.size)]


def counts(wire: Wire, exact: bool) -> None:
    """Bytes are those that this rank sends of the payload."""
    slices = Slices(wire)
    wire.traffic.reset()
    gathers_once(wire, 0)
    wire.barrier()
    if wire.size > 1 and slices.size > 1:
        assert (wire.traffic["gather"].calls, wire.traffic["gather"].bytes) == (1, 40 * (slices.size - 1))
        wire.reduce(values(wire.rank, 10 * slices.size), torch.empty(10), 1).close()
        assert (wire.traffic["reduce"].calls, wire.traffic["reduce"].bytes) == (1, 40 * (slices.size - 1))


CHECKS: tuple[Callable[[Wire, bool], None], ...] = (
    gathers,
    reduces,
    averages,
    several_in_flight,
    narrower_formats,
    scalars,
    small_exchanges,
    beside,
    agrees,
    counts,
)


def check_wire(wire: Wire, exact: bool = True, but: Sequence[str] = ()) -> None:
    """Raise AssertionError where a wire, which has started, breaks a promise.

    Args:
        exact: sums are made in rank order, to the bit.
        but: names of checks that do not apply.
    """
    for check in CHECKS:
        if check.__name__ in but:
            continue
        try:
            check(wire, exact)
        except BaseException as error:
            error.add_note(f"check_wire: {check.__name__}")
            raise
