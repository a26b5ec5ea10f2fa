"""Messages that ranks of one machine read out of each other's memory: the values that sockets bring, and no endless wait."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero as zero
from hf_zero.comm.direct import DirectTransfers, Reader, open_direct
from hf_zero.comm.group_wire import P2PWire
from tests.kit.common import gpt2, loss_of, optimizer_for
from tests.kit.pool import RankFailure, RankPool

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")


def started(kind: type[P2PWire] = P2PWire, stall_s: float = 30.0) -> P2PWire:
    wire = kind(CPU)
    wire.start(stall_s)
    return wire


def until(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Held(DirectTransfers):
    """Rank 0's thread stops between looking for message 1 and looking for message 2, of which it knows, until both are sent."""

    place: Path

    def find(self, key: int, number: int, step: int) -> dict[int, int] | None:
        there = super().find(key, number, step)
        if self.rank == 0 and number == 1 and (self.place / "begun").exists() and not (self.place / "looked").exists():
            is_second = (self.place / "known").exists()  # both were begun before this sweep over what is waited for
            (self.place / ("looked" if is_second else "known")).touch()
            if is_second:
                until(self.place / "sent")
        return there


def both_at_once(rank: int, world: int, place: Path) -> None:
    """Two messages of one span come at such a moment."""
    wire = started(stall_s=3.0)
    opened = open_direct(wire, lambda: Reader(wire))
    assert opened is not None
    direct = Held(wire, opened.mailbox, opened.peers, opened.reader)
    direct.place = place
    full = [torch.full((200,), float(number)) for number in range(2)]
    own = [whole[100 * rank : 100 * rank + 100].clone() for whole in full]
    for whole in full:
        whole[100 * (1 - rank) : 100 * (2 - rank)] = 7.0
    if rank == 1:
        until(place / "looked")
    moves = [direct.gather(whole, mine, 0, (0, 100, 200), "gather") for whole, mine in zip(full, own)]
    (place / ("sent" if rank else "begun")).touch()
    for move, mine in zip(moves, own):
        move.close()
        mine.fill_(-1.0)
    assert [whole[99:101].tolist() for whole in full] == [[0.0, 0.0], [1.0, 1.0]]


def test_messages_of_one_span_are_taken_in_order(two, tmp_path):
    two.run(both_at_once, tmp_path)


def another_step(rank: int, world: int) -> None:
    """What belongs to another step is not taken."""
    wire = started(stall_s=2.0)
    wire.watch.step = 5 + rank
    wire.gather(torch.empty(20), torch.ones(10), 0).close()


def test_messages_of_another_step_are_not_taken():
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure, match="StallError"):
            pool.run(another_step, timeout_s=60)
    finally:
        pool.stop()


def dies(rank: int, world: int, seconds: float, told: Path) -> None:
    """Rank 1 is killed, before or while rank 0 waits for it."""
    wire = started()
    if rank == 1:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 - seconds / 2)
    start = time.monotonic()
    with pytest.raises(zero.StallError, match="rank 0.*the connection to another rank has broken"):
        wire.gather(torch.empty(20), torch.ones(10), 0).close()
    told.write_text(str(time.monotonic() - start))


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_killed_rank_is_noticed(tmp_path, seconds):
    pool, told = RankPool(2), tmp_path / "seconds"
    try:
        with pytest.raises(RankFailure, match="rank 1"):
            pool.run(dies, seconds, told, timeout_s=20)
        for _ in range(100):
            if told.exists() and told.read_text():
                break
            time.sleep(0.1)
        assert float(told.read_text()) < 5.0
    finally:
        pool.stop()


class Elsewhere(P2PWire):
    """Rank 1's machine has another name."""

    def exchange(self, value: Any) -> list[Any]:
        is_told = isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str)
        return super().exchange(("another", *value[1:]) if is_told and self.rank == 1 else value)


def apart(rank: int, world: int) -> tuple[bool, bool]:
    return started(Elsewhere).direct is not None, started().direct is not None


def test_ranks_of_two_machines_use_sockets(two):
    assert two.run(apart) == [(False, True)] * 2


def threads_of(rank: int, world: int) -> int:
    for _ in range(3):
        model = gpt2()
        optimizer = optimizer_for(model, 1)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        engine.detach()
    return sum(thread.name == "hf_zero reader" for thread in threading.enumerate())


def test_one_thread_reads_for_all_engines(two):
    assert two.run(threads_of) == [1, 1]


def abandoned(rank: int, world: int) -> None:
    """Rank 0 begins what rank 1 never does, and lets go of it: neither tensors nor a thread that looks for it stay."""
    wire = started()
    if rank == 0:
        full, out = torch.empty(2000), torch.empty(1000)
        gone = [weakref.ref(full), weakref.ref(out)]
        moves = [wire.gather(full, torch.ones(1000), 0), wire.reduce(torch.ones(2000), out, 1)]
        time.sleep(0.05)  # the thread looks for them
        del full, out, moves
        deadline = time.monotonic() + 20
        while any(each() is not None for each in gone):
            assert time.monotonic() < deadline, "somebody holds tensors of a transfer that nobody waits for"
            gc.collect()
            time.sleep(0.01)
    wire.barrier()
    full = torch.empty(2000)
    wire.gather(full, torch.full((1000,), float(rank)), 2).close()
    assert full[999:1001].tolist() == [0, 1]


def test_what_nobody_waits_for_is_given_up(two):
    two.run(abandoned)


def let_go(rank: int, world: int) -> None:
    """Rank 1 lets go of its process group, and lives: its mailbox is no longer answered, nor given to anybody else."""
    wire = started()
    if rank == 1:
        del wire
        dist.destroy_process_group()
        gc.collect()
        time.sleep(3.0)
        return
    time.sleep(0.5)
    start = time.monotonic()
    with pytest.raises(zero.StallError):
        wire.gather(torch.empty(20), torch.ones(10), 0).close()
    assert time.monotonic() - start < 3.0


def test_a_rank_that_let_go_of_its_group_is_noticed():
    pool = RankPool(2)
    try:
        pool.run(let_go, timeout_s=60)
    finally:
        pool.stop()
