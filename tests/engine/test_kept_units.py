"""Units that stay gathered from a forward to its backward (`keep_gathered`): bytes and memory as planned.

Programs: tests/programs/kept_units.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.common import gpt2, is_on_the_bar, optimizer_for, take_steps
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
ROOM = 400_000
"""For some units."""


def steady(rank: int, world: int, room: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the third step, and its peak, beside what is planned of both."""
    model = gpt2(n_layer=4, n_embd=64)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, keep_gathered=room, **settings))
    take_steps(model, optimizer, rank, 0, 1)
    engine.record()
    take_steps(model, optimizer, rank, 2)
    report = engine.report()
    (gathered,) = (row for row in report.tiers if (row.tier, row.kind) == ("device", "gathered"))
    (gather,) = (row for row in report.roads if row.road == "gather")
    sizes = {at: unit.gathered_bytes for at, unit in enumerate(engine.layout.units)}
    found = {
        "sent": gather.measured_bytes,
        "planned": gather.predicted_bytes,
        "peak": (gathered.measured_peak, gathered.predicted_peak),
        "largest": max(sizes.values()),
        "kept": sum(sizes[at] for at in engine.plan.kept),
        "agree": engine.traffic["agree"].calls,
        "weights": [zero.full_parameter(param).clone() for param in model.parameters()],
    }
    engine.detach()
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"offload_optimizer": "cpu", "offload_params": "cpu"}], ids=["device", "host"]
)
def test_bytes_and_memory_are_as_planned(two: RankPool, settings: dict[str, Any]) -> None:
    bare = two.run(steady, None, settings)
    for found, plain in zip(two.run(steady, ROOM, settings), bare):
        assert 0 < found["kept"] <= ROOM
        assert found["sent"] == found["planned"] == plain["sent"] - found["kept"] // 2
        measured, told = found["peak"]
        assert is_on_the_bar("gathered", told, measured, found["largest"])
        assert found["agree"] == plain["agree"]  # not a message more
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], plain["weights"], strict=True))
