"""What fails on one rank fails on all of them, whatever it is."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from hf_zero.comm.agree import on_all_ranks
from hf_zero.comm.group_wire import open_wire
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
FAILURES = {
    "ours": zero.ConfigError("no"),
    "the program's": ValueError("no"),
    "memory": MemoryError("no"),
    "device memory": torch.OutOfMemoryError("no"),
    "Ctrl-C": KeyboardInterrupt("no"),
    "exit": SystemExit("no"),
}


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(2)
    yield ranks
    ranks.stop()


def fail_on_one(rank: int, world: int) -> dict[str, tuple[str, str, list[str]]]:
    wire = open_wire(torch.device("cpu"))
    found = {}
    for name, failure in FAILURES.items():
        try:
            with on_all_ranks(wire, "working"):
                if rank == 1:
                    raise failure
        except BaseException as error:
            # The ranks are together: what is exchanged next is not what another rank has sent before.
            found[name] = type(error).__name__, str(error), wire.exchange(name)
    return found


def test_whatever_one_rank_raises_reaches_the_others(pool):
    first, second = pool.run(fail_on_one)
    for name, failure in FAILURES.items():
        kind = type(failure).__name__
        assert first[name] == ("CheckpointError", f"working failed on rank 1: {kind}: no", [name, name])
        own = kind if name in ("ours", "Ctrl-C", "exit") else "CheckpointError"
        assert second[name][0] == own
        assert second[name][2] == [name, name]
