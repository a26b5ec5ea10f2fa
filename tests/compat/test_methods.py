"""Methods of a sharded model that the engine answers or refuses; copies and pickles."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_zero import ConfigError, LayoutError, StateError, ZeroConfig, shard
from tests.kit.pool import RankPool
from tests.models import gpt2, ids

pytestmark = pytest.mark.gloo


def methods(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard(model, optimizer, ZeroConfig(stage=stage, stall_s=20))
    for move in (model.half, model.transformer.h[0].double, lambda: model.to("meta")):
        with pytest.raises(LayoutError, match="cannot be moved or cast"):
            move()
    assert model.to(torch.float32) is model
    model.added = nn.Linear(2, 2)
    assert model.added.half().weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="resize_token_embeddings"):
        model.resize_token_embeddings(8)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(model)
    tokens = ids(rank, 0)
    with model.no_sync():
        model(input_ids=tokens, labels=tokens).loss.backward()
        with pytest.raises(StateError, match=r"inside model\.no_sync"):
            optimizer.step()
    model.zero_grad()
    assert all(param.grad is None for param in model.transformer.parameters())
    copied = copy.deepcopy(model)
    assert type(copied.lm_head.weight) is nn.Parameter
    copied.half().state_dict()
    weight = model.transformer.h[0].mlp.c_fc.weight
    for one in (copy.deepcopy(weight), pickle.loads(pickle.dumps(copy.deepcopy(weight)))):
        assert type(one) is nn.Parameter
        assert torch.equal(one, weight)
    engine.detach()
    assert not {"no_sync", "zero_grad", "_apply", "__deepcopy__", "state_dict"} & set(model.__dict__)


@pytest.mark.parametrize("stage", [1, 3])
def test_methods(two: RankPool, stage: int) -> None:
    two.run(methods, stage)
