"""Models whose blocks are split into small units equal the same models in plain training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.core.units import Limits
from tests.kit.pool import RankPool
from tests.programs.architectures import ARCHITECTURES

pytestmark = pytest.mark.gloo
Loss = Callable[[nn.Module, int, int], Tensor]


SMALL_UNITS = Limits(unit_bytes=600, run_bytes=300)
"""Blocks of these models are several units, down to single layers."""
STEPS = 4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def reference(build: Callable[[], nn.Module], loss: Loss, world: int) -> dict[str, Tensor]:
    """Weights after the same steps with gradients averaged over all ranks' batches."""
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model)
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        sums: list[Tensor | None] = [None] * len(params)
        for rank in range(world):
            model.zero_grad()
            loss(model, rank, step).backward()
            for index, p in enumerate(params):
                if p.grad is not None:
                    grad, total = p.grad.to_dense() if p.grad.is_sparse else p.grad, sums[index]
                    sums[index] = grad if total is None else total + grad
        for total, p in zip(sums, params):
            p.grad = None if total is None else total / world  # what no rank has used has none
        optimizer.step()
    return model.state_dict()


def check(rank: int, world: int, name: str) -> None:
    build, loss = ARCHITECTURES[name]
    expected = reference(build, loss, world) if rank == 0 else {}
    for stage in (2, 3):
        torch.manual_seed(0)
        model = build()
        names = list(model.state_dict())
        optimizer = sgd(model)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), limits=SMALL_UNITS)
        for step in range(STEPS):
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stage == 3:
                held = [span for unit in engine.units for span in unit.spans if span.full.untyped_storage().nbytes()]
                assert not held, f"still gathered after the step: {held}"
        ours = model.state_dict()
        assert list(ours) == names
        for key, value in expected.items():
            gap = (ours[key].double() - value.double()).abs().max().item() if value.numel() else 0.0
            assert gap <= 1e-6, f"stage {stage}: {key} off by {gap}"
            assert ours[key].dtype == value.dtype


@pytest.mark.wide
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_small_units(two: RankPool, name: str) -> None:
    two.run(check, name)
