"""Numbers do not depend on when bytes move, and nothing on its way is touched: what holds on streams, shown on a CPU."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.common import Case, Result, train_engine
from tests.deferred import Mode, Watch
from tests.offloading import mixed, pairwise, small_blocks, unequal

pytestmark = pytest.mark.gloo

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "dtype": ("no", "bf16"),
    "accumulation": (1, 3),
    "offload_optimizer": ("none", "cpu", "disk", "mixed"),
    "offload_params": ("none", "cpu", "disk"),
    "model": ("gpt2", "bert"),
    "clip": (None, 0.5),
    "checkpointing": (False, True),
    "groups": (1, 2),
}


def cases(world: int, full: bool) -> list[Case]:
    def allowed(values: dict[str, Any]) -> bool:
        if world == 1:
            return values["stage"] in (0, 3)
        in_memory = values["offload_optimizer"] == "none" or values["stage"] > 0
        return values["stage"] == 3 or (values["offload_params"] == "none" and in_memory)

    everything = (dict(zip(DIMENSIONS, values)) for values in itertools.product(*DIMENSIONS.values()))
    chosen = [values for values in everything if allowed(values)] if full else pairwise(DIMENSIONS, allowed)
    return [Case(**values, steps=3) for values in chosen]


def train(rank: int, world: int, case: Case, folder: str, watch: Watch) -> Result:
    with mixed(case), small_blocks():
        result, engine = train_engine(rank, world, case, folder, watch.roads, watch.watch)
        watch.check()
        engine.detach()
    return result


def compare(rank: int, world: int, chosen: list[Case], mode: Mode, collective: bool, folder: str) -> list[str]:
    """What a watched run finds, and where its numbers are not those of the run in memory over plain roads."""
    wrong: list[str] = []
    references: dict[Case, Result] = {}
    for case in chosen:
        in_memory = replace(case, offload_optimizer="none", offload_params="none")
        if in_memory not in references:
            plain = Watch(mode, collective)
            roads = replace(plain.roads, wire=plain.open_plain_wire)
            references[in_memory], engine = train_engine(rank, world, in_memory, roads=roads)
            engine.detach()
        watch = Watch(mode, collective)
        result = train(rank, world, case, folder, watch)
        found = watch.finish() + unequal(result, references[in_memory])
        wrong += [f"rank {rank}: {case}: {line}" for line in found[:4]]
    return wrong


def run(pool: Any, chosen: list[Case], mode: Mode, collective: bool, folder: Path, timeout_s: float = 200) -> None:
    found = pool.run(compare, chosen, mode, collective, str(folder), timeout_s=timeout_s)
    wrong = [line for lines in found for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("world", "collective"), [(1, False), (2, False), (2, True)])
def test_numbers_do_not_depend_on_when_bytes_move(pools, tmp_path, world, collective, mode):
    run(pools[world], cases(world, full=False), mode, collective, tmp_path)
