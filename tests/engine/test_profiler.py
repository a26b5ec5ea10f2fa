"""Names of units in a profiler's trace: while one is on, and from the engine's own places."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

import hf_zero as zero
from tests.kit.common import gpt2, optimizer_for, take_steps
from tests.kit.pool import on_ranks

pytestmark = pytest.mark.gloo


@on_ranks()
def test_units_have_names_in_a_trace(rank: int, world: int) -> None:
    """The trained units, and how often each of our ranges is in the trace of one step."""
    model: Any = gpt2(n_embd=64, n_layer=3, tie_word_embeddings=False)
    optimizer = optimizer_for(model, 2)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))

    def step(number: int) -> None:
        take_steps(model, optimizer, rank, number)

    step(0)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(1)
    step(2)
    events = Counter(event.name for event in seen.events() if event.name.startswith("hf_zero::"))
    units = [unit.name for unit in engine.units]
    assert len(units) > 3
    for unit in units:
        for what in ("gather", "wait for gather", "forward", "reduce", "wait for reduce"):
            assert events[f"hf_zero::{what} {unit}"] >= 1, f"{what} of {unit}"
    assert {name.partition("::")[2].rpartition(" ")[2] for name in events} <= set(units)
    (block,) = [unit for unit in units if unit.endswith(".h.1")]  # the first and the last one's units have norms, too
    assert events[f"hf_zero::forward {block}"] == 1
