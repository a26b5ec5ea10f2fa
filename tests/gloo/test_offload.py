"""What rests elsewhere than on the device makes no difference: every number is that of the run in memory, to the bit."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.common import Case, train_engine
from tests.offloading import mixed, pairwise, small_blocks, unequal

pytestmark = pytest.mark.gloo

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "offload_optimizer": ("none", "cpu", "disk", "mixed"),
    "offload_params": ("none", "cpu", "disk"),
    "stage": (0, 1, 2, 3),
    "dtype": ("no", "bf16", "fp16"),
    "model": ("gpt2", "bert"),
    "accumulation": (1, 3),
    "clip": (None, 0.5),
    "groups": (1, 2),
    "checkpointing": (False, True),
    "small": (True, False),
}


def cases(world: int, dimensions: dict[str, tuple[Any, ...]], full: bool) -> list[tuple[Case, bool]]:
    stages = (0, 3) if world == 1 else (1, 2, 3)

    def allowed(values: dict[str, Any]) -> bool:
        return (
            values["stage"] in stages
            and (values["offload_optimizer"], values["offload_params"]) != ("none", "none")
            and (world == 1 or values["stage"] == 3 or values["offload_params"] == "none")
        )

    if full:
        chosen = [c for c in (dict(zip(dimensions, v)) for v in itertools.product(*dimensions.values())) if allowed(c)]
    else:
        chosen = pairwise(dimensions, allowed)
    return [(Case(**{k: v for k, v in c.items() if k != "small"}, steps=4), c["small"]) for c in chosen]


def compare(rank: int, world: int, chosen: list[tuple[Case, bool]], folder: str) -> list[str]:
    """On every rank: what differs from the run in memory."""
    wrong: list[str] = []
    references: dict[Case, Any] = {}
    for case, small in chosen:
        in_memory = replace(case, offload_optimizer="none", offload_params="none")
        if in_memory not in references:
            references[in_memory] = train_engine(rank, world, in_memory)[0]
        with mixed(case), small_blocks() if small else contextlib.nullcontext():
            ours, engine = train_engine(rank, world, case, folder)
            engine.detach()
        different = unequal(ours, references[in_memory])
        if different:
            wrong.append(f"rank {rank}: {case}, small {small}: {len(different)} differ, among them {different[:3]}")
    return wrong


def run(pool: Any, chosen: list[tuple[Case, bool]], folder: Path, timeout_s: float) -> None:
    wrong = [line for lines in pool.run(compare, chosen, str(folder), timeout_s=timeout_s) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_the_run_in_memory(pools, tmp_path, world):
    run(pools[world], cases(world, DIMENSIONS, full=False), tmp_path, timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_the_run_in_memory_in_full(pools, tmp_path, world, dtype):
    dimensions = {**DIMENSIONS, "dtype": (dtype,)}
    run(pools[world], cases(world, dimensions, full=True), tmp_path, timeout_s=3500)
