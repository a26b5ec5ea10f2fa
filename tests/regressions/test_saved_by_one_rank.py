"""Rank 0 alone saves by the functions of transformers, accelerate and safetensors, where it has all values."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_model
from torch import nn

import hf_zero as zero
from tests.kit.common import gpt2

pytestmark = pytest.mark.gloo


def save_plain(model: nn.Module, folder: Path) -> dict[str, Any]:
    torch.save(model.state_dict(), folder / "weights.pt")
    one = model.state_dict()["transformer.ln_f.bias"]
    torch.save(one, folder / "one.pt")
    assert (folder / "one.pt").stat().st_size < 4096
    return torch.load(folder / "weights.pt", weights_only=True)


def save_pretrained(model: nn.Module, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())


def save_safetensors(model: nn.Module, folder: Path) -> dict[str, Any]:
    save_model(model, str(folder / "model.safetensors"))
    return load_file(folder / "model.safetensors")


def save_accelerate(model: nn.Module, folder: Path) -> dict[str, Any]:
    from accelerate.utils import save

    save(model.state_dict(), folder / "model.safetensors", safe_serialization=True)
    return load_file(folder / "model.safetensors")


WAYS = (save_plain, save_pretrained, save_safetensors, save_accelerate)


def saved(rank: int, world: int, stage: int, dtype: str, whole: bool, folder: Path, settings: dict[str, Any]) -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True)  # accelerate logs by it
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, stall_s=20, **settings), mixed_precision=dtype)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    with zero.unsharded(model) if whole else contextlib.nullcontext():
        if rank == 0:
            for way in WAYS:
                place = folder / way.__name__
                place.mkdir()
                found = way(model, place)
                for name, value in expected.items():
                    key = name if name in found else "lm_head.weight"  # tied
                    assert torch.equal(found[key], value), (way.__name__, name)
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("stage", "dtype", "whole", "settings"),
    [
        (0, "no", False, {}), (0, "bf16", False, {}), (1, "no", False, {}), (2, "no", False, {}),
        (2, "no", False, {"offload_optimizer": "cpu"}), (1, "bf16", True, {}), (2, "no", True, {}), (3, "no", True, {}),
        (3, "bf16", True, {"offload_optimizer": "cpu", "offload_params": "cpu"}),
    ],
    ids=str,
)  # fmt: skip
def test_rank_0_saves_alone(two, tmp_path, stage, dtype, whole, settings):
    two.run(saved, stage, dtype, whole, tmp_path, settings)
