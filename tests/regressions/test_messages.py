"""Errors that say what to do instead, with names that the reader has."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import hf_zero as zero
from tests.kit.common import gpt2

pytestmark = pytest.mark.gloo


def net() -> nn.Module:
    """Every rank of two has elements of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def said(call: Callable[[], object], kind: type[zero.ZeroError]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def inference(rank: int, world: int, stage: int) -> list[str]:
    with torch.inference_mode():
        whole = net()
    base = net()
    with torch.inference_mode():
        base[0] = nn.Linear(8, 8).requires_grad_(False)
    with torch.inference_mode(), zero.Init():
        deferred = net()
    late = net()
    config = zero.ZeroConfig(stage=stage)

    def around() -> None:
        with torch.inference_mode():
            zero.shard(late, torch.optim.AdamW(late.parameters()), config)

    out = [
        said(lambda m=model: zero.shard(m, torch.optim.AdamW(m.parameters()), config), zero.ConfigError)
        for model in (whole, base, deferred)
    ]
    return [*out, said(around, zero.ConfigError)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_was_made_in_inference_mode(two, stage):
    for whole, base, deferred, around in two.run(inference, stage, timeout_s=30):
        for each in (whole, base, deferred):
            assert "'0.weight'" in each
            assert "torch.inference_mode()" in each
            assert "outside" in each
        assert "zero.shard was called inside" in around


def scheduled(rank: int, world: int, tier: str, folder: str) -> str:
    """A schedule of a sum over the optimizer's state."""
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    config = zero.ZeroConfig(stage=2, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None)
    zero.shard(model, opt, config)

    def run(how: Callable[[Any], Any]) -> None:
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            opt.param_groups[0]["lr"] = sum(float(how(state["exp_avg_sq"])) for state in opt.state.values())

    if tier == "disk":
        assert "zero.full_optimizer_state" in said(lambda: run(torch.sum), zero.StateError)
        return said(lambda: run(lambda state: state.sum()), zero.StateError)
    return said(lambda: run(lambda state: state.sum()), zero.RankMismatchError)


@pytest.mark.parametrize("tier", ["none", "cpu", "disk"])
def test_a_sum_over_the_optimizers_state(two, tier, tmp_path):
    for each in two.run(scheduled, tier, str(tmp_path), timeout_s=30):
        assert "zero.full_optimizer_state" in each


class Holder(Dataset):
    """Tokenizes with the model at hand."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 1


def held(rank: int, world: int) -> list[str]:
    model = gpt2()
    zero.shard(model, torch.optim.AdamW(model.parameters()), zero.ZeroConfig(stage=1))
    return [
        said(lambda: pickle.dumps(Holder(model)), zero.StateError),  # as DataLoader(num_workers=1, …="spawn") does
        said(lambda: model.resize_token_embeddings(128), zero.ConfigError),
        said(lambda: model.half(), zero.LayoutError),
    ]


def test_a_dataset_that_holds_the_model_and_a_resize(two):
    for pickled, resized, cast in two.run(held, timeout_s=30):
        assert "DataLoader" in pickled
        assert "collate_fn" in pickled
        for each in (resized, cast):
            assert "zero.engine_of(model).detach()" in each
