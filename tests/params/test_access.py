"""A group that is added in training changes segments alone."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import gpt2, ids

pytestmark = pytest.mark.gloo


def regrouped(rank: int, world: int, stage: int) -> None:
    """A group of parameters of two units: spans stay, and no full parameter is sent."""
    torch.manual_seed(0)
    model = gpt2(n_layer=4)
    late = [p for block in (0, 2) for p in model.transformer.h[block].parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if all(p is not q for q in late)], lr=1e-3)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    tokens = ids(rank, 0)

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    before = zero.full_parameter(late[0])
    spans = [span for unit in engine.units for span in unit.spans]
    optimizer.add_param_group({"params": late, "lr": 1e-2})
    sent = engine.traffic["gather"].bytes
    engine.bind(optimizer)  # as the next forward would
    assert engine.traffic["gather"].bytes == sent
    assert [span for unit in engine.units for span in unit.spans] == spans
    assert torch.equal(zero.full_parameter(late[0]), before)
    train()
    assert not torch.equal(zero.full_parameter(late[0]), before)
    assert zero.full_optimizer_state(late[0], "step") == 1.0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_group_splits_segments(two: RankPool, stage: int) -> None:
    two.run(regrouped, stage)
