"""`torch.compile` before and after sharding: block by block, equal to eager training, or eager with a message."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import adamw, gpt2, ids


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens = ids(rank, step)
    return model(input_ids=tokens, labels=tokens).loss


def losses(rank: int, stage: int, way: str) -> list[float]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw(model)
    used: nn.Module = torch.compile(model, backend="aot_eager") if way == "wrapped" else model
    engine = zero.shard(used, optimizer, zero.ZeroConfig(stage=stage))
    if way == "method":
        used.compile(backend="aot_eager")
    assert engine.is_compiled == (way != "plain")
    found = []
    for step in range(3):
        loss = loss_of(used, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    engine.detach()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
@on_ranks()
def test_equals_eager_training(rank: int, world: int, stage: int) -> None:
    plain = losses(rank, stage, "plain")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert losses(rank, stage, "method") == pytest.approx(plain, rel=1e-6)
    # Two blocks, forward and backward, and no new one in later steps.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] < 8
    assert losses(rank, stage, "wrapped") == pytest.approx(plain, rel=1e-6)
    early = gpt2()
    early.compile(backend="aot_eager")
    with pytest.raises(zero.ConfigError):  # hooks would be inside of its graphs
        zero.shard(early, adamw(early), zero.ZeroConfig(stage=stage))
    torch._dynamo.reset()


class Refused(Exception):
    """Of a backend."""


def test_a_block_that_cannot_be_compiled_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise Refused("no such device")

    torch.manual_seed(0)
    model = gpt2()
    expected = losses(0, 2, "plain")
    optimizer = adamw(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        model.compile(backend=backend)
        found = [loss_of(model, 0, 0).item() for _ in range(2)]
    engine.detach()
    torch._dynamo.reset()
    assert found == [pytest.approx(expected[0], rel=1e-6)] * 2
    text = said.getvalue() + caplog.text
    assert text.count("could not be compiled and runs as it is") == 1
    assert "no such device" in text
