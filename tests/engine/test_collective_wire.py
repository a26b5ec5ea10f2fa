"""The wire that CUDA uses, here over gloo's own collectives, trains as the wire between CPU ranks does."""

from __future__ import annotations

import itertools

import pytest

from tests.kit.common import Case, differences, train_engine
from tests.kit.transports import CollectiveWire, Roads

pytestmark = pytest.mark.gloo


def collective(rank: int, world: int) -> list[tuple[int, str, float, float]]:
    """The same buffers and waits, and the backend's order of sums."""
    out = []
    for stage, dtype in itertools.product((0, 1, 2, 3), ("no", "bf16")):
        case = Case(stage=stage, dtype=dtype, accumulation=2, clip=0.5, groups=2, steps=4)
        ours, theirs = (train_engine(rank, world, case, roads=roads)[0] for roads in (Roads(wire=CollectiveWire), None))
        if rank == 0:
            out.append((stage, dtype, *differences(ours, theirs)))
    return out


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_collective_wire(pools, world):
    for stage, dtype, largest, rms in pools[world].run(collective)[0]:
        assert rms < (2e-5 if dtype == "no" else 1e-4), (stage, dtype, rms)
        assert largest < 1e-2, (stage, dtype, largest)
