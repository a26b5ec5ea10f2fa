"""Ranks with different numbers of samples, samples and ranks of different weight: the gradient is one process's."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_zero as zero

pytestmark = pytest.mark.gloo

# rows of each rank in each micro-batch of each step; a rank may have none in a micro-batch, or in a whole step
ROWS = (((5, 0, 2), (1, 3, 0)), ((1, 4, 0), (0, 1, 0)))
CLIP = 1e3  # above the norms, which are compared
FACTORS = (1.0, 0.25, 3.0)  # of the ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))


def rows(step: int, micro: int, rank: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes, and a weight for each sample."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randint(0, 11, (count, 4), generator=generator)
    y = torch.randint(0, 5, (count,), generator=generator)
    return x, y, torch.rand(count, generator=generator) + 0.1


def weighted_mean(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """NaN for no samples, as torch's own means are."""
    return (cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam: it hides a factor before all gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def reference(world: int, micros: int) -> tuple[list[Tensor], list[float]]:
    """One process, all samples of a step in one batch."""
    model = build()
    optimizer = optimizer_for(model)
    norms = []
    for step, counts in enumerate(ROWS):
        parts = []
        for micro in range(micros):
            for rank in range(world):
                x, y, weights = rows(step, micro, rank, counts[micro][rank])
                parts.append((x, y, weights * FACTORS[rank]))
        x, y, weights = (torch.cat(column) for column in zip(*parts))
        weighted_mean(model, x, y, weights).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], norms


def train(rank: int, world: int, micros: int, settings: dict[str, Any]) -> None:
    weights_expected, norms = reference(world, micros)
    in_backward = settings.get("step_in_backward", False)
    model = build()
    optimizer = optimizer_for(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings))
    for step, counts in enumerate(ROWS):
        batches = [rows(step, micro, rank, counts[micro][rank]) for micro in range(micros)]
        total = None
        if micros > 1:
            total = engine.total_weight(sum(float(weights.sum()) for _, _, weights in batches) * FACTORS[rank])
        for micro, (x, y, weights) in enumerate(batches):
            if micro + 1 < micros:
                with engine.no_sync():
                    loss = weighted_mean(model, x, y, weights)
                    engine.weigh(loss, weights.sum() * FACTORS[rank], total).backward()
            else:
                loss = weighted_mean(model, x, y, weights)
                engine.weigh(loss, weights.sum() * FACTORS[rank], total).backward()
        if not in_backward:
            assert engine.clip_grad_norm_(CLIP).item() == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), weights_expected):
        found = zero.full_parameter(parameter)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# micro-batches in a step, settings
CASES: list[tuple[int, dict[str, Any]]] = [(2, {"stage": stage}) for stage in (0, 1, 2, 3)]
CASES += [(1, {"stage": 3, "offload_optimizer": "cpu"})]
CASES += [(2, {"stage": 2, "offload_optimizer": "cpu", "step_in_backward": True})]


def every_case(rank: int, world: int) -> None:
    for micros, settings in CASES:
        train(rank, world, micros, settings)


@pytest.mark.parametrize("world", [1, 3])
def test_every_sample_counts_as_in_one_process(pools: Any, world: int) -> None:
    pools[world].run(every_case)


def refusals(rank: int, world: int) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    x, y, weights = rows(0, 0, rank, 3)

    def refused(text: str, loss: Tensor, weight: Any, total: float | None = None) -> None:
        with pytest.raises(zero.ConfigError, match=re.escape(text)):
            engine.weigh(loss, weight, total)

    loss = weighted_mean(model, x, y, weights)
    refused("rank 1: expected a weight that is a finite number", loss, (1, -2)[rank])
    refused("rank 0: expected a weight that is a finite number", loss, (math.nan, 1)[rank])
    refused("found 'many'", loss, (1, "many")[rank])
    refused("rank 1: expected a loss of one floating-point number", loss if rank == 0 else loss.repeat(2), 1)
    refused("the weights of all ranks are 0", loss, 0)
    refused("from 0 to the total", loss, 3, total=2.0)
    refused("expected a loss of one floating-point number", loss.repeat(2), 1, total=2.0)
    with pytest.raises(zero.ConfigError, match="all ranks are 0"):
        engine.total_weight(0)
    before = engine.traffic.to_dict()["scalar"]["calls"]
    engine.weigh(loss, 3).backward()  # nothing above has left anything behind
    assert engine.traffic.to_dict()["scalar"]["calls"] == before + 1
    optimizer.step()


def test_what_cannot_be_weighed_is_refused_on_every_rank(two: Any) -> None:
    two.run(refusals)
