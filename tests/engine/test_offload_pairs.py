"""What rests elsewhere than on the device makes no difference: every number is that of the run in memory, to the bit.

In blocks of two sizes; see also tests/programs/steps.py and long_arrays.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hf_zero as zero
from hf_zero.tiers.tier import SIZES, Tier
from tests.kit.common import Case, Result, train_engine
from tests.kit.offloading import SMALL, pairwise, unequal

pytestmark = pytest.mark.gloo

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "offload_optimizer": ("none", "cpu", "disk"),
    "offload_params": ("none", "cpu", "disk"),
    "stage": (0, 1, 2, 3),
    "dtype": ("no", "bf16", "fp16"),
    "model": ("gpt2", "bert"),
    "accumulation": (1, 3),
    "clip": (None, 0.5),
    "groups": (1, 2),
    "checkpointing": (False, True),
    "sizes": (SMALL, SIZES),
}

PLACED = {"none": {Tier.DEVICE}, "cpu": {Tier.HOST}, "disk": {Tier.DISK}}


def cases(world: int, dimensions: dict[str, tuple[Any, ...]]) -> list[Case]:
    stages = (0, 3) if world == 1 else (1, 2, 3)

    def allowed(values: dict[str, Any]) -> bool:
        return (
            values["stage"] in stages
            and (values["offload_optimizer"], values["offload_params"]) != ("none", "none")
            and (world == 1 or values["stage"] == 3 or values["offload_params"] == "none")
        )

    return [Case(**c, steps=3) for c in pairwise(dimensions, allowed)]


def misplaced(engine: zero.Engine, case: Case) -> list[str]:
    """Parity says little of states that never left the device."""
    tiers = {span.tier for unit in engine.units for span in unit.trained}
    rest = {span.copy_tier for unit in engine.units for span in unit.spans}
    optimizer, params = PLACED[case.offload_optimizer], PLACED[case.offload_params]
    wrong = [] if tiers == optimizer else [f"{case}: states rest in {tiers}"]
    if engine.context.storage.sizes != case.sizes:
        wrong.append(f"{case}: found {engine.context.storage.sizes}")
    # What has its master's type rests with it, so not everything need be where it was asked for.
    return wrong if params <= rest or case.dtype == "no" else [*wrong, f"{case}: parameters rest in {rest}"]


@functools.cache  # by each rank of a pool, which has one number of ranks: all of them run it or none
def run_in_memory(rank: int, world: int, case: Case) -> Result:
    return train_engine(rank, world, case)[0]


def compare(rank: int, world: int, chosen: list[Case], folder: str) -> list[str]:
    """On every rank: what differs from the run in memory."""
    wrong: list[str] = []
    for case in chosen:
        in_memory = replace(case, offload_optimizer="none", offload_params="none", step_in_backward=False, sizes=SIZES)
        expected = run_in_memory(rank, world, in_memory)
        ours, engine = train_engine(rank, world, case, folder)
        wrong += misplaced(engine, case)
        engine.detach()
        different = unequal(ours, expected)
        if different:
            wrong.append(f"rank {rank}: {case}: {len(different)} differ, among them {different[:3]}")
    return wrong


def run(pool: Any, chosen: list[Case], folder: Path, timeout_s: float) -> None:
    wrong = [line for lines in pool.run(compare, chosen, str(folder), timeout_s=timeout_s) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_the_run_in_memory(pools, tmp_path, world):
    run(pools[world], cases(world, DIMENSIONS), tmp_path, timeout_s=200)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_in_backward_equals_the_run_in_memory(pools, tmp_path, world):
    dimensions = {**DIMENSIONS, "dtype": ("no", "bf16"), "clip": (None,)}
    chosen = [replace(case, step_in_backward=True) for case in cases(world, dimensions)]
    run(pools[world], chosen, tmp_path, timeout_s=200)
