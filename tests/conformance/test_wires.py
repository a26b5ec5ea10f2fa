"""`check_wire` over every wire: direct reads, sockets, the backend's collectives, replicas, groups of ranks, one rank."""

from __future__ import annotations

import pytest
import torch

from hf_zero.comm.group_wire import PIECE_BYTES
from hf_zero.comm.hybrid import in_replicas
from tests.conformance.wire import check_wire
from tests.kit.pool import RankPool
from tests.kit.transports import CollectiveWire, P2PWire, Sockets, Wire, open_wire

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")
KINDS = {"direct": P2PWire, "sockets": Sockets, "collectives": CollectiveWire}


def started(kind: type[P2PWire | CollectiveWire]) -> P2PWire | CollectiveWire:
    open_wire(CPU)
    wire = kind(CPU)
    wire.start(30.0)
    return wire


def whole(rank: int, world: int, kind: str) -> None:
    wire = started(KINDS[kind])
    if kind == "direct":
        reads = isinstance(wire, P2PWire) and wire.direct is not None
        assert reads, "this machine lets no process read another's memory: nothing was tested"
    check_wire(wire, exact=kind != "collectives")


def parts(rank: int, world: int, kind: str) -> None:
    """Groups of two ranks each; then replicas of two ranks, and replicas of one."""
    wire = started(KINDS[kind])
    wire.open_groups()
    ranks = [*range(world)]
    part = wire.subgroup([ranks[at : at + 2] for at in ranks[::2]])
    # These are of all ranks, whichever wire is asked.
    check_wire(part, kind != "collectives", but=("averages", "small_exchanges", "beside"))
    for replicas in (2, 4):
        hybrid = in_replicas(started(KINDS[kind]), replicas)
        hybrid.open_groups()
        # Only where a replica is one rank it averages whole gradients.
        check_wire(
            hybrid, exact=False, but=("narrower_formats", "beside", *(("averages",) if replicas < world else ()))
        )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_world(kind: str, world: int, pools: dict[int, RankPool]) -> None:
    pools[world].run(whole, kind, timeout_s=200)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_world(kind: str, pools: dict[int, RankPool]) -> None:
    pools[4].run(parts, kind, timeout_s=200)


def long_slice(rank: int, world: int) -> None:
    wire, numel = started(Sockets), 5 * PIECE_BYTES // 4  # two pieces and a half of two bytes each
    values = torch.arange(numel, dtype=torch.int32).remainder_(251).to(torch.bfloat16)
    out = torch.empty(numel)
    wire.reduce(torch.cat([values + rank, values + rank]), out, 3).close()
    assert torch.equal(out, values.float() + 0.5)


def test_a_reduce_in_pieces(two: RankPool) -> None:
    two.run(long_slice)


def test_one_rank() -> None:
    check_wire(Wire())
