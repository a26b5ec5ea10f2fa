"""Collectives and bytes per step, counted exactly against the ZeRO paper's volumes."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from tests.kit.common import batch, bert, gpt2, loss_of, optimizer_for

pytestmark = pytest.mark.gloo


def count(rank: int, world: int, stage: int, micros: int, defer: bool = False) -> dict:
    model = gpt2(n_layer=4)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    out = {
        "units": len(engine.units),
        "numel": sum(span.numel for span in engine.layout.spans),
        "used": engine.layout.numel,
    }
    for step in range(3):
        engine.traffic.reset()
        for micro in range(micros):
            ids = batch(step, micro, rank)
            with engine.no_sync(defer=defer):
                if micro < micros - 1:
                    model(input_ids=ids, labels=ids).loss.backward()
            if micro == micros - 1:
                model(input_ids=ids, labels=ids).loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        out[step] = engine.traffic.to_dict()
    return out


@pytest.mark.parametrize("stage", [2, 3])
def test_deferred_gradients_travel_once(two, stage):
    """The reduces of one micro-batch for four of them; all else as without `defer`."""
    deferred, sent, single = (two.run(count, stage, *args)[0] for args in ((4, True), (4,), (1,)))
    for step in (0, 1, 2):
        assert deferred[step]["reduce"] == single[step]["reduce"]
        for kind in ("gather", "scalar", "other"):
            assert deferred[step][kind] == sent[step][kind], kind


def frozen_base(rank: int, world: int, stage: int) -> None:
    """What no step changes is not sent after a step; what a load has written is."""
    model = bert()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    trained = [span for span in engine.layout.spans if span.is_updated]
    assert len(trained) < len(list(engine.layout.spans))
    for step in range(3):
        loss_of(model, rank, step).backward()
        engine.traffic.reset()
        optimizer.step()
        optimizer.zero_grad()
        gathers = engine.traffic["gather"]
        assert (gathers.calls, gathers.bytes) == (
            len(trained),
            sum(4 * span.slice_numel * (world - 1) for span in trained),
        )
    changed = {name: value + 1 for name, value in bert(frozen=False).state_dict().items()}
    model.load_state_dict(changed)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    assert frozen
    for name, param in model.named_parameters():
        assert torch.equal(param, changed[name]), name
    engine.detach()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_base_is_not_sent_after_a_step(pools, stage):
    pools[3].run(frozen_base, stage)
