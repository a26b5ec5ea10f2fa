"""`ZeroConfig.replicas`: values that are refused, before a parameter has changed, and on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import mlp

pytestmark = pytest.mark.gloo


def refused(rank: int, world: int, replicas: int) -> str:
    model = mlp()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(zero.ConfigError) as caught:
        zero.shard(model, None, zero.ZeroConfig(stage=2, replicas=replicas))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    return str(caught.value)


@pytest.mark.parametrize(("world", "replicas"), [(3, 2), (2, 4), (1, 2)])
def test_ranks_that_replicas_do_not_divide(pools: dict[int, RankPool], world: int, replicas: int) -> None:
    for text in pools[world].run(refused, replicas):
        assert f"replicas={replicas} does not divide {world} rank" in text


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", None])
def test_not_a_number_of_replicas(replicas: Any) -> None:
    with pytest.raises(zero.ConfigError, match="replicas"):
        zero.ZeroConfig(replicas=replicas)


def test_stage_0_has_no_replicas() -> None:
    with pytest.raises(zero.ConfigError, match="replicas=2 needs stage 1, 2 or 3"):
        zero.ZeroConfig(stage=0, replicas=2)


def other_replicas(rank: int, world: int) -> None:
    with pytest.raises(zero.RankMismatchError, match="replicas"):
        zero.shard(mlp(), None, zero.ZeroConfig(stage=2, replicas=1 + rank % 2))


def test_other_replicas_on_some_ranks(two: RankPool) -> None:
    two.run(other_replicas)


def test_training_argument(tmp_path: Path) -> None:
    given = zero.ZeroTrainingArguments(output_dir=str(tmp_path), zero_replicas=2, use_cpu=True)
    assert given.parallelism_config.config.replicas == 2
