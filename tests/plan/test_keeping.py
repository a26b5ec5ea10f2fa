"""How many units the plan keeps from a forward to its backward, and what that takes and saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hf_zero as zero
from hf_zero.core.layout import Layout
from hf_zero.core.precision import Precision
from hf_zero.plan.costs import Setup, part_numel
from hf_zero.plan.machine import Machine
from hf_zero.plan.outline import Architecture, Batch
from hf_zero.plan.peaks import memory_of
from hf_zero.plan.plan import Drafter, Kept, Plan, candidates, plan
from hf_zero.plan.solve import PlanInputs
from hf_zero.tiers.tier import Tier
from tests.kit.common import gpt2

RANKS = 4


def made(batch: Batch | None = None, ranks: int = RANKS, node_ranks: int = 1, **settings: Any) -> Plan:
    model = gpt2(n_layer=6, n_embd=64, tie_word_embeddings=False)
    config = zero.ZeroConfig(**{"stage": 3, **settings})
    precision = Precision.of("no", None)
    drafter = Drafter(model, precision)
    layout: Layout = drafter.layout(drafter.specs(dict.fromkeys(drafter.names, 0)), config.shards(ranks))
    return plan(PlanInputs(layout, Machine(), config, ranks, precision, batch=batch, node_ranks=node_ranks))


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


def test_over_nodes_parts_come_first_and_whole_units_with_what_they_leave() -> None:
    bare = made(node_ranks=2)
    order = candidates(bare.layout, bare.placements, bare.inputs.setup)
    least = bare.memory.at_most(Tier.DEVICE)
    whole = sum(bare.layout.units[at].gathered_bytes for at in order)
    rows = []
    for tenths in range(15):
        limit = least + tenths * whole // 10
        found = made(node_ranks=2, device_memory=limit)
        count = len(found.kept) + len(found.kept_parts)
        rows.append((count, len(found.kept)))
        assert (*found.kept, *found.kept_parts) == tuple(order[:count])
        assert found.fits
        gathered = sum(bare.layout.units[at].gathered_bytes for at in order[:count])
        across = found.traffic.gather - found.traffic.node
        assert across == bare.traffic.gather - gathered * (RANKS - 1) // RANKS
        parts = [span for at in found.kept_parts for span in bare.layout.units[at].spans]
        assert found.traffic.node == sum(4 * part_numel(span, 2) for span in parts)
        assert found.traffic.reduce == bare.traffic.reduce
        for more in (Kept(0, count + 1) if count < len(order) else None, Kept(rows[-1][1] + 1, count)):
            if more is not None and more.whole <= len(order):
                assert memory_at_most(found, more.into(bare.inputs.setup, order)) > limit
        alone = made(device_memory=limit)
        assert count >= len(alone.kept)
    assert rows == sorted(rows)
    assert rows[0][0] < len(order)
    assert rows[-1] == (len(order), len(order))
    assert any(count == len(order) > kept for count, kept in rows)
    told = next(line for line in made(node_ranks=2, device_memory=least + whole // 5).reasons if "keep a part" in line)
    assert "2 ranks of a node" in told


@pytest.mark.parametrize(("node_ranks", "settings"), [(4, {}), (3, {}), (1, {}), (2, {"replicas": 2})])
def test_no_parts_where_parameters_are_not_sharded_over_whole_nodes(node_ranks: int, settings: dict[str, Any]) -> None:
    found = made(node_ranks=node_ranks, device_memory="3MiB", **settings)
    assert not found.kept_parts
    assert found.traffic.node == 0
