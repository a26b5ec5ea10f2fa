"""How many units the plan keeps from a forward to its backward, and what that takes and saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hf_zero as zero
from hf_zero.core.layout import Layout
from hf_zero.core.precision import Precision
from hf_zero.plan.activations import Architecture, Batch
from hf_zero.plan.costs import Setup, memory_of
from hf_zero.plan.keeping import candidates
from hf_zero.plan.machine import Machine
from hf_zero.plan.plan import Drafter, Plan, plan
from hf_zero.plan.solve import PlanInputs
from hf_zero.tiers.tier import Tier
from tests.kit.common import gpt2

RANKS = 4


def made(batch: Batch | None = None, ranks: int = RANKS, **settings: Any) -> Plan:
    model = gpt2(n_layer=6, n_embd=64, tie_word_embeddings=False)
    config = zero.ZeroConfig(**{"stage": 3, **settings})
    precision = Precision.of("no", None)
    drafter = Drafter(model, precision)
    layout: Layout = drafter.layout(drafter.specs(dict.fromkeys(drafter.names, 0)), config.shards(ranks))
    return plan(PlanInputs(layout, Machine(), config, ranks, precision, batch=batch))


def test_more_room_keeps_more_and_never_more_than_fits() -> None:
    bare = made()
    order = candidates(bare.layout, bare.placements, bare.inputs.setup)
    assert len(order) >= 5
    least = bare.memory.at_most(Tier.DEVICE)
    whole = sum(bare.layout.units[at].gathered_bytes for at in order)
    seen = []
    for tenths in range(12):
        limit = least + tenths * whole // 10
        found = made(device_memory=limit)
        seen.append(len(found.kept))
        assert found.kept == tuple(order[: len(found.kept)])
        assert found.fits
        saved = sum(unit.gathered_bytes for unit in (bare.layout.units[at] for at in found.kept)) * (RANKS - 1) // RANKS
        assert found.traffic.gather == bare.traffic.gather - saved
        assert found.traffic.reduce == bare.traffic.reduce
        assert found.memory.at_rest(Tier.DEVICE) == bare.memory.at_rest(Tier.DEVICE)
        if len(found.kept) < len(order):  # one more does not fit
            more = replace(found.inputs.setup, kept=frozenset(order[: len(found.kept) + 1]))
            assert memory_at_most(found, more) > limit
    assert seen == sorted(seen)
    assert seen[0] < len(order) == seen[-1]
    told = next(line for line in made(device_memory=least + whole // 2).reasons if "stay gathered" in line)
    assert f"of {len(order)} units" in told


def memory_at_most(found: Plan, setup: Setup) -> int:
    return memory_of(found.layout, found.placements, setup).at_most(Tier.DEVICE)


def test_activations_leave_less_room() -> None:
    architecture = Architecture.of(gpt2(n_layer=6, n_embd=64).config)
    limit = 40 << 20
    counts = [len(made(Batch(rows, 16, architecture=architecture), device_memory=limit).kept) for rows in (1, 1 << 20)]
    assert counts[0] > counts[1] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stage": 2, "device_memory": "1GiB"},
        {"device_memory": "1GiB", "host_memory": "1GiB", "offload_optimizer": "auto"},
    ],
)
def test_nothing_is_kept_without_a_budget_that_has_room_to_spare(settings: dict[str, Any]) -> None:
    found = made(**settings)
    assert not found.kept
    assert not any("stay gathered" in line for line in found.reasons)


def test_one_rank_keeps_what_it_would_bring_up_again() -> None:
    offloaded = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    bare, found = made(ranks=1, **offloaded), made(ranks=1, device_memory="1GiB", **offloaded)
    saved = sum(found.layout.units[at].gathered_bytes for at in found.kept)
    assert saved
    assert found.traffic.up == bare.traffic.up - saved
    assert not made(ranks=1, device_memory="1GiB").kept  # nothing is released
