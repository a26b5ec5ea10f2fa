"""The checkpoints beside this file, as the code of their day wrote them: `python -m tests.kit.golden.make FOLDER`.

They are kept as they are: what is loaded from them may never change. Making them again is for a format that has moved on
for a good reason, and then into a new folder beside the old one.

    adamw_bf16/whole/           Engine.save, one file per kind
    adamw_bf16/pieces/          the same moment, in files of at most 4 KB
    adamw_bf16/expected.*       weights, buffers and states by rank 0's own `state_dict()`s, written by safetensors; the rest
                                as JSON. Nothing of hf_zero is needed to read them
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.common import gpt2
from tests.kit.pool import RankPool

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "adamw_bf16"
STEPS = 2


def build(seed: int) -> nn.Module:
    """GPT-2 of an odd width with a tied head, a frozen weight, and buffers: two that persist, one that does not."""
    model = gpt2(n_embd=10, vocab_size=29, n_positions=12)
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    model.transformer.ln_f.bias.requires_grad_(False)
    model.register_buffer("average", torch.randn(3))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    return model


def optimizer_of(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    wide = {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1}
    narrow = {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 3 * lr}
    return torch.optim.AdamW([wide, narrow], lr=lr, betas=(0.8, 0.9))


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    ids = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(10 * number + rank))
    with torch.no_grad():
        model.count += 1
        model.average += 0.25
        model.passing += 1
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def write(rank: int, world: int, folder: str) -> None:
    random.seed(rank)
    np.random.seed(rank)
    model = build(seed=1)
    optimizer = optimizer_of(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3), mixed_precision="bf16")
    scheduler = scheduler_of(optimizer)
    for number in range(STEPS):
        step(model, optimizer, rank, number)
        scheduler.step()
    target = Path(folder)
    engine.save(target / "whole", objects={"scheduler": scheduler})
    engine.save(target / "pieces", objects={"scheduler": scheduler}, max_shard_size="4KB")
    weights, states = model.state_dict(), optimizer.state_dict()
    drawn = torch.rand(3)  # what comes next where the generators are as they were saved
    if rank == 0:
        tensors, rest = plain(model, weights, states)
        tensors["drawn"] = drawn
        save_file(tensors, target / "expected.safetensors")
        rest["scheduler"] = scheduler.state_dict()
        (target / "expected.json").write_text(json.dumps(rest, indent=1, sort_keys=True) + "\n")


def plain(
    model: nn.Module, weights: dict[str, Tensor], states: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What training goes on from, by name: tensors, and what JSON holds."""
    tensors = {f"model.{name}": value.clone() for name, value in weights.items() if name != "lm_head.weight"}
    trained = {id(param): name for name, param in model.named_parameters()}
    names = [trained[id(param)] for group in optimizer_of(model).param_groups for param in group["params"]]
    for index, entries in states["state"].items():
        tensors.update({f"{state}.{names[index]}": value.clone() for state, value in entries.items()})
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in states["param_groups"]]
    return tensors, json.loads(json.dumps({"groups": groups}))


if __name__ == "__main__":
    pool = RankPool(2)
    Path(sys.argv[1]).mkdir(parents=True)
    pool.run(write, sys.argv[1])
    pool.stop()
