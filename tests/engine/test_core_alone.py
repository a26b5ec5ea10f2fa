"""The core without observers (`hf_zero.engine.shard`) trains ordinary models in ordinary loops; its errors.

Lost without observers is only what their files in `compat/` and `diagnostics/` are for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_zero import ConfigError, LayoutError, StateError, ZeroConfig
from hf_zero.engine import shard
from tests.kit.pool import ON_CPU, RankPool, on_ranks
from tests.models import mlp
from tests.programs import PROGRAMS
from tests.settings import Setting
from tests.test_programs import check

NAMES = (
    *(name for name in PROGRAMS if name.startswith("failures.")),
    "architectures.checkpoint_of_several_blocks", "architectures.frozen_bottom",
    "architectures.lone_parameters_of_some_ranks", "architectures.module_called_several_times",
    "architectures.reentrant_checkpoint_of_several_blocks", "branches.early_exit", "loops.bert_with_a_frozen_layer",
    "loops.gpt2_clipped_and_accumulated", "loops.plain", "loops.t5_shared_embedding", "micro_batches.micro_batches",
    "paths.alternating_heads", "paths.another_head_on_each_rank", "paths.checkpoints", "paths.forgotten_forward",
    "paths.layer_drop_by_rank", "paths.reentrant_checkpoints", "paths.retained_graph", "paths.tied",
    "paths.two_backwards", "paths.uneven_forwards", "paths.unused_head", "steps.evaluated_around_steps",
)  # fmt: skip
ROWS = (Setting(stage=3), Setting(stage=1, precision="bf16"))
MORE_ROWS = (
    *ROWS,
    Setting(stage=2, precision="bf16"),
    Setting(stage=1),
    Setting(stage=0),
    Setting(stage=3, tier="disk/disk"),
    Setting(ranks=3, stage=3),
    Setting(ranks=4, stage=1, replicas=2),
)


def alone(name: str, rows: Sequence[Setting]) -> list[Setting]:
    """Return those of the rows that the program goes with."""
    accepted = {*PROGRAMS[name].rows}
    return [replace(row, alone=True) for row in rows if row in accepted]


@pytest.mark.parametrize("name", NAMES)
def test_equals_data_parallel(pools: dict[int, RankPool], name: str) -> None:
    """Under one of the rows that the program goes with, in turn."""
    first = NAMES.index(name) % len(ROWS)
    check(pools, name, alone(name, ROWS[first:] + ROWS[:first])[:1])


@pytest.mark.parametrize("name", NAMES)
def test_equals_data_parallel_under_more_rows(pools: dict[int, RankPool], name: str) -> None:
    check(pools, name, alone(name, MORE_ROWS))


def test_neither_folder_is_loaded(tmp_path: Path) -> None:
    """A process of its own: tests load both. It trains, saves and loads."""
    code = f"""if True:
        import sys, torch
        from hf_zero import ZeroConfig
        from hf_zero.engine import shard
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        engine = shard(model, optimizer, ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu"))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        engine.save({str(tmp_path / "saved")!r})
        engine.load({str(tmp_path / "saved")!r})
        print(*[name for name in sys.modules if name.startswith(("hf_zero.compat", "hf_zero.diagnostics"))])
    """
    environment = {**os.environ, **ON_CPU}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == []


@on_ranks()
def test_what_the_core_refuses(rank: int, world: int) -> None:
    model = mlp()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(LayoutError, match="not one of the sharded model"):
        shard(model, other, ZeroConfig(stage=3))
    shard(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(stage=3))
    with pytest.raises(ConfigError, match="sharded already"):
        shard(model, None, ZeroConfig(stage=3))
    with pytest.raises(StateError, match="sharded over the ranks"):
        model[0].weight.sum()
