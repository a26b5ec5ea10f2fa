"""`torch.compile` before and after sharding: block by block, equal to eager training, or eager with a message."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankPool
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


def compared(rank: int, world: int, stage: int) -> tuple[list[float], list[float], list[float], int, int]:
    plain = losses(rank, stage, "plain")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    method = losses(rank, stage, "method")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    wrapped = losses(rank, stage, "wrapped")
    refused = 0
    early = gpt2()
    early.compile(backend="aot_eager")
    with contextlib.suppress(zero.ConfigError):
        zero.shard(early, adamw(early), zero.ZeroConfig(stage=stage))
        refused -= 1
    torch._dynamo.reset()
    return plain, method, wrapped, graphs, refused


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_equals_eager_training(two: RankPool, stage: int) -> None:
    for plain, method, wrapped, graphs, refused in two.run(compared, stage):
        assert method == pytest.approx(plain, rel=1e-6)
        assert wrapped == pytest.approx(plain, rel=1e-6)
        assert 0 < graphs < 8  # two blocks, forward and backward, and no new one in later steps
        assert refused == 0  # compiled before it was sharded, hooks would be inside of its graphs


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
