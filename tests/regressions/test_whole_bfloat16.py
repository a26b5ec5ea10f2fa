"""Parameters that are bf16 themselves in optimizers over whole matrices: the values are those of stage 0, in every tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests.models import Mixed, ids, token_loss
from tests.optimizers import Lars, MuonAndAdam

pytestmark = pytest.mark.gloo


def life(rank: int, **config: Any) -> list[Tensor]:
    """Parts in groups of their own are unfrozen, and others frozen. The optimizer has all matrices from the start."""
    torch.manual_seed(0)
    model = Mixed().bfloat16()
    late = list(model.blocks[1].parameters())
    for param in late:
        param.requires_grad_(False)
    optimizer = MuonAndAdam([p for p in model.parameters() if p.requires_grad])
    optimizer.add_param_group({"params": [p for p in late if p.dim() == 2], "use_muon": True})
    optimizer.add_param_group({"params": [p for p in late if p.dim() < 2], "use_muon": False})
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**config))
    found = []
    for step in range(6):
        if step == 2:
            for param in late:
                param.requires_grad_(True)
        if step == 4:
            model.blocks[0].requires_grad_(False)
        rows = ids(rank, step)
        token_loss(model(rows), rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [zero.full_parameter(p).clone() for p in model.parameters()]
    engine.detach()
    return found


def narrow(rank: int, **config: Any) -> list[Tensor]:
    """Gradients are stored in the type they come in; with and without clipping."""
    torch.manual_seed(0)
    model = Mixed().bfloat16()
    optimizer = Lars(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**config))
    for step in range(3):
        rows = ids(rank, step)
        token_loss(model(rows), rows).backward()
        if step == 1:
            engine.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [zero.full_parameter(p) for p in model.parameters()]


def differing(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    ways = {
        life: [{"stage": 0}, {"stage": 1}, {"stage": 3}, {"stage": 3, "offload_optimizer": "cpu"}],
        narrow: [{"stage": 2}, {"stage": 2, "offload_optimizer": "cpu"}],
    }
    for way, (first, *others) in ways.items():
        if way is narrow and world > 1:
            continue
        first, *others = [first, *others, {**others[-1], "offload_optimizer": "disk"}]
        wanted = way(rank, **first)
        for config in others:
            config = {**config, "offload_dir": folder}
            found = way(rank, **config)
            wrong += [f"{way.__name__} {config} {n}" for n, (a, b) in enumerate(zip(found, wanted)) if not a.equal(b)]
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_stages_and_tiers_agree(pools, tmp_path, world):
    answers = pools[world].run(differing, str(tmp_path), timeout_s=120)
    assert not any(answers), answers
