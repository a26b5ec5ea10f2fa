"""After `shard` no unit, span, bucket, buffer or parameter is replaced, whatever user code does to groups, flags and values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import inputs, mlp


def objects(engine: zero.Engine) -> Iterator[object]:
    yield from (engine.units, engine.bindings, *engine.units, *engine.model.parameters())
    for span in (span for unit in engine.units for span in unit.spans):
        yield from (span, span.bucket, span.full, span.local, *span.views)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_nothing_is_replaced(rank: int, world: int, stage: int, tmp_path: Path) -> None:
    model = mlp(depth=4)
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": others[:3]}, {"params": others[3:]}])
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    before = list(objects(engine))
    for step in range(4):
        model[:6](inputs(rank, step)).square().mean().backward()  # the last layer has no gradient
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": [first]})
            model[2].requires_grad_(False)
            kept = first.data
            first.data = kept * 2
        if step == 1:
            engine.save(tmp_path / "saved")
            model[2].requires_grad_(True)
            with zero.unsharded(model):
                model(inputs(rank, step))
            model.load_state_dict(model.state_dict())
        if step == 2:
            engine.load(tmp_path / "saved")
        if step == 3:
            engine.bind(torch.optim.SGD(model[0].parameters(), lr=0.1))
    after = list(objects(engine))
    assert len(after) == len(before)
    assert all(old is new for old, new in zip(before, after))
