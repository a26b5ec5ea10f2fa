"""On one CUDA device: the same numbers as plain PyTorch, and memory that does not grow."""

from __future__ import annotations

import pytest
import torch

import hf_zero as zero
from tests.kit.common import gpt2, optimizer_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def train(stage: int | None, dtype: str, checkpointing: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = gpt2(n_layer=4, n_embd=64).cuda()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = optimizer_for(model, 2)
    engine = (
        zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=dtype) if stage is not None else None
    )
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=dtype == "fp16")
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    losses = []
    for step in range(6):
        ids = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(step)).cuda()
        with torch.autocast("cuda", dtype=types.get(dtype), enabled=dtype in types):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if engine is not None:
            engine.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_device_equals_plain(stage, dtype, checkpointing):
    plain, ours = train(None, dtype, checkpointing), train(stage, dtype, checkpointing)
    torch.testing.assert_close(ours, plain, rtol=1e-4 if dtype == "no" else 2e-2, atol=1e-4)


def test_memory_does_not_grow():
    model = gpt2(n_layer=4, n_embd=64).cuda()
    optimizer = optimizer_for(model, 1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3), mixed_precision="bf16")
    seen = []
    for _ in range(30):
        ids = torch.randint(0, 97, (2, 8)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] == seen[2]
