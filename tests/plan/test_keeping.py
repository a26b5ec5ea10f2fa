"""How many units the plan keeps from a forward to its backward, and what that takes and saves."""

from __future__ import annotations

from typing import Any

import pytest

import hf_zero as zero
from hf_zero.plan.plan import Plan
from hf_zero.tiers.tier import Tier
from tests.kit.common import gpt2
from tests.plan.test_plan import FP32, layout_of, make

RANKS = 4


def made(ranks: int = RANKS, **settings: Any) -> Plan:
    model = gpt2(n_layer=6, n_embd=64, tie_word_embeddings=False)
    settings = {"stage": 3, **settings}
    return make(layout_of(model, zero.ZeroConfig(**settings).shards(ranks), FP32), ranks, **settings)


def test_more_room_keeps_more_and_never_more_than_fits() -> None:
    bare = made()
    order = bare.inputs.candidates(bare.placements)
    assert len(order) >= 5
    sizes = [bare.layout.units[at].gathered_bytes for at in order]
    seen = []
    for tenths in range(12):
        room = max(1024, tenths * sum(sizes) // 10)
        found = made(keep_gathered=room)
        seen.append(len(found.kept))
        assert found.kept == tuple(order[: len(found.kept)])
        kept = sum(sizes[: len(found.kept)])
        assert kept <= room
        assert len(found.kept) == len(order) or kept + sizes[len(found.kept)] > room
        assert found.traffic["gather"] == bare.traffic["gather"] - kept * (RANKS - 1) // RANKS
        assert found.traffic["reduce"] == bare.traffic["reduce"]
        assert found.memory.stored_bytes(Tier.DEVICE) == bare.memory.stored_bytes(Tier.DEVICE)
        assert 0 <= found.memory.at_peak(Tier.DEVICE) - bare.memory.at_peak(Tier.DEVICE) <= kept
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == len(order)
    told = next(line for line in made(keep_gathered=sum(sizes) // 2).reasons if "stay gathered" in line)
    assert f"of {len(order)} units" in told


@pytest.mark.parametrize(
    "settings", [{}, {"device_memory": "1GiB"}, {"stage": 2, "keep_gathered": "1GiB"}, {"keep_gathered": 1024}]
)
def test_nothing_is_kept_without_room(settings: dict[str, Any]) -> None:
    assert not made(**settings).kept


def test_one_rank_keeps_what_it_would_load_again() -> None:
    offloaded = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    bare, found = made(ranks=1, **offloaded), made(ranks=1, keep_gathered="1GiB", **offloaded)
    saved = sum(found.layout.units[at].gathered_bytes for at in found.kept)
    assert saved
    assert found.traffic["up"] == bare.traffic["up"] - saved
    assert not made(ranks=1, keep_gathered="1GiB").kept  # nothing is released
