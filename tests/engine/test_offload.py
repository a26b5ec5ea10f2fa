"""Optimizer state and parameters in host memory and on disk: the same bits as without offload, and failures of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero import ConfigError, StateError, ZeroConfig
from hf_zero.engine import shard
from tests.kit.bits import check_bits
from tests.kit.pool import RankPool, on_ranks
from tests.kit.transports import ROADS
from tests.models import adamw, inputs, mlp
from tests.programs.branches import rare_parts, rare_parts_of_micro_batches
from tests.programs.loops import gpt2_clipped_and_accumulated
from tests.programs.options import steps_in_backward
from tests.settings import Setting

ELSEWHERE = ("cpu", "disk", "cpu/cpu", "disk/disk", "cpu/disk", "disk/cpu", "none/cpu")


def compare(pool: RankPool, folder: Path, stage: int, precision: str, world: int, roads: str = "small blocks") -> None:
    for function in (rare_parts, rare_parts_of_micro_batches, gpt2_clipped_and_accumulated, steps_in_backward):
        tiers = ELSEWHERE if function is steps_in_backward else ("none", *ELSEWHERE)
        every = [Setting(ranks=world, stage=stage, tier=tier, precision=precision, roads=roads) for tier in tiers]
        rows = [row for row in every if row.is_valid]
        check_bits(pool, function, rows, folder)


@pytest.mark.parametrize(
    ("stage", "precision", "world"),
    [
        (1, "fp32", 1),
        (3, "bf16", 1),
        *(
            pytest.param(*row, marks=pytest.mark.wide)
            for row in [(2, "bf16", 2), (3, "fp32", 2), (1, "fp32", 2), (2, "bf16", 1), (3, "bf16", 2), (3, "fp32", 1)]
        ),
    ],
)
def test_same_bits_as_without_offload(
    pools: dict[int, RankPool], tmp_path: Path, stage: int, precision: str, world: int
) -> None:
    compare(pools[world], tmp_path, stage, precision, world)


def test_same_bits_through_copies(two: RankPool, tmp_path: Path) -> None:
    """Where host memory and the device's memory are two."""
    compare(two, tmp_path, 3, "fp32", 2, "small blocks, copied")


def backward(model: torch.nn.Module, rank: int, step: int = 0) -> None:
    model(inputs(rank, step)).square().mean().backward()


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@on_ranks()
def test_states_and_gradients_are_in_their_tier(rank: int, world: int, tmp_path: Path, tier: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    config = ZeroConfig(stage=2, offload_optimizer=tier, offload_dir=tmp_path)
    engine = shard(model, optimizer, config, **ROADS["small blocks"].given)
    backward(model, rank)
    grads = [span.bucket.grad for unit in engine.units for span in unit.trained]
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert moments
    kinds = {type(value).__name__ for value in [*moments, *grads]}
    assert kinds == ({"OnDisk"} if tier == "disk" else {"Tensor"})
    if tier == "disk":
        with pytest.raises(StateError, match="on disk"):
            moments[0].add_(1)
    engine.detach()


@on_ranks()
def test_what_offload_refuses(rank: int, world: int, tmp_path: Path) -> None:
    model = mlp()
    engine = shard(model, adamw(model), ZeroConfig(stage=2, offload_optimizer="cpu", step_in_backward=True))
    span = engine.units[0].trained[0]
    before = span.values().clone()
    backward(model, rank)
    assert not torch.equal(span.values(), before), "the unit is updated in the backward"
    with pytest.raises(StateError, match="no_sync"):
        backward(model, rank, 1)
    with pytest.raises(ConfigError, match="fp16"):
        shard(mlp(), None, ZeroConfig(offload_optimizer="disk", offload_dir=tmp_path), mixed_precision="fp16")
