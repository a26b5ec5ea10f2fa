"""Measured memory is what the report predicts, and the theory of ZeRO; gathered bytes stay within two units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import gpt2, ids, sgd

pytestmark = pytest.mark.gloo


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = ids(0, step)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bytes_of(rank: int, world: int, stage: int) -> None:
    """To the byte, between backward and step and after the step."""
    model = gpt2(n_embd=64)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    tokens = torch.arange(8).view(1, 8)
    sizes = []
    for _ in range(20):
        model(input_ids=tokens, labels=tokens).loss.backward()
        held = engine.report()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append((dict(held.measured), dict(engine.report().measured)))
    assert sizes[1] == sizes[-1], "no growth"
    predicted, measured = engine.report().predicted, held.measured
    assert measured["parameters"] == predicted.parameters
    assert measured["gradients"] == predicted.gradients
    counters = measured["optimizer"] - predicted.optimizer
    assert 0 < counters <= 4 * len([*model.parameters()])
    assert sizes[-1][1]["gradients"] == 0
    # 4 bytes of an element for parameters, 4 for gradients, 8 for Adam, each divided where the stage divides it.
    elements = sum(p.numel() for p in model.parameters())
    ideal = {0: 16, 1: 4 + 12 / world, 2: 4 + 12 / world, 3: 16 / world}[stage] * elements
    assert sum(measured.values()) <= ideal * 1.05
    assert "MiB per rank" in str(engine.report())
    assert engine.report().to_dict()["stage"] == stage


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_those_predicted(two: RankPool, stage: int) -> None:
    two.run(bytes_of, stage)


def gathered(rank: int, world: int) -> None:
    """The tied embedding is used first and last, and stays gathered in between."""
    model = gpt2(n_layer=6)
    block = sum(p.nbytes for p in model.transformer.h[0].parameters())
    embedding = model.transformer.wte.weight.nbytes
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    engine.record()
    for step in range(3):
        train(model, optimizer, step)
    (row,) = (row for row in engine.report().tiers if (row.tier, row.kind) == ("device", "gathered"))
    assert 0 < row.measured_peak <= row.predicted_peak <= 1.1 * (2 * block + embedding)
    assert row.measured == 0


def test_gathered_bytes_stay_within_two_units(two: RankPool) -> None:
    two.run(gathered)
