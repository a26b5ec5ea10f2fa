"""What state dicts of optimizers and checkpoints refuse. Checkpoints: tests/conformance; state dicts: tests/programs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

import hf_zero as zero
from hf_zero import CheckpointError, StateError, ZeroConfig
from hf_zero.engine import shard
from tests.models import inputs, mlp

pytestmark = pytest.mark.gloo


def refusals(rank: int, world: int, place: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 2e-2}], lr=1e-2)
    engine = shard(model, optimizer, ZeroConfig(stage=3))
    for step in range(3):
        model(inputs(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(StateError, match=r"'0\.weight'.*full_optimizer_state"):
        optimizer.state[model[0].weight]
    state = copy.deepcopy(optimizer.state_dict())
    fewer = {**state, "param_groups": state["param_groups"][:1]}
    with pytest.raises(CheckpointError, match="groups of"):
        optimizer.load_state_dict(fewer)
    engine.save(place, async_save=True)
    if rank == 1:
        optimizer.state.clear()
    with pytest.raises(CheckpointError, match="not every rank has made the same steps"):
        engine.save(place)
    engine.wait_for_save()
    if rank == 0:  # which removes what was staged
        assert not [*place.parent.glob(".*"), *place.glob(".*")]
    engine.load(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save(place)
    assert zero.verify(place).facts["world_size"] == 2
    engine.detach()


def test_what_is_refused_names_the_reason(pools, tmp_path):
    pools[2].run(refusals, tmp_path / "out")
