"""`offload_activations`: the same bits as without, nothing left behind, and named errors."""

from __future__ import annotations

import errno
import gc
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from tests.kit.injection import fails, instead
from tests.kit.pool import RankPool
from tests.models import adamw, generator, gpt2, ids, llama, t5

DEEP = 6
"""Blocks: more than are on their way to disk at once."""


class Nested(nn.Module):
    """Blocks that user code checkpoints, one of them inside another, with a mask and a shared input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEEP))

    def forward(self, x: Tensor, reentrant: bool = False) -> Tensor:
        shared = hidden = self.first(x)
        mask = torch.linspace(0, 1, 8)

        def inner(block: nn.Module, hidden: Tensor) -> Tensor:
            return torch.tanh(block(hidden))

        def outer(block: nn.Module, hidden: Tensor, shared: Tensor, mask: Tensor) -> Tensor:
            return checkpoint(partial(inner, block), hidden, use_reentrant=False) * mask + shared.T  # type: ignore[no-any-return]

        for block in self.blocks:
            hidden = checkpoint(partial(outer, block), hidden, shared, mask, use_reentrant=reentrant)
        return hidden


def lora() -> nn.Module:
    import peft

    base: Any = llama(num_hidden_layers=DEEP)
    made: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    made.enable_input_require_grads()
    return made  # type: ignore[no-any-return]


MODELS: dict[str, Any] = {
    "llama": partial(llama, num_hidden_layers=DEEP),
    "gpt2": gpt2,
    "t5": t5,
    "lora": lora,
    "nested": Nested,
}


def loss_of(model: Any, rank: int, step: int, reentrant: bool) -> Tensor:
    if isinstance(model, Nested):
        return model(torch.randn(8, 8, generator=generator(rank, step)), reentrant).square().mean()  # type: ignore[no-any-return]
    batch = ids(rank, step, 2, 12)
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def start(name: str, folder: Path, where: str, reentrant: bool = False, stage: int = 2, **more: Any) -> tuple[Any, ...]:
    torch.manual_seed(2)
    model = MODELS[name]().train()
    if name != "nested":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    optimizer = adamw(model)
    config = zero.ZeroConfig(stage=stage, offload_activations=where, offload_dir=str(folder), stall_s=20)
    return model, optimizer, zero.shard(model, optimizer, config, **more)


def trained(
    rank: int, name: str, folder: Path, stage: int, precision: str, where: str, reentrant: bool
) -> tuple[list[Tensor], dict[str, float]]:
    """Losses and gradients of two steps: one of two micro-batches, one of two forwards before a backward."""
    model, optimizer, engine = start(name, folder, where, reentrant, stage, mixed_precision=precision)
    recorder = engine.record()
    found = []
    for step in range(2):
        losses = []
        for micro in range(2):
            losses.append(loss_of(model, rank, 2 * step + micro, reentrant))
            if step == 0:
                with engine.no_sync() if micro == 0 else nullcontext():
                    losses[-1].backward()
        if step:
            (losses[0] + losses[1]).backward()
        found += [each.detach() for each in losses]
        found += [each for p in model.parameters() if p.requires_grad and (each := zero.full_gradient(p)) is not None]
        optimizer.step()
        optimizer.zero_grad()
    moved = {row.road: row.measured_bytes or 0.0 for row in engine.report().roads}
    recorder.close()
    engine.detach()
    return found, moved


def same(rank: int, world: int, folder: Path) -> None:
    for name, stage, precision, where, reentrant in (
        ("llama", 3, "no", "disk", False),
        ("llama", 1, "bf16", "cpu", True),
        ("gpt2", 0, "bf16", "disk", False),
        ("t5", 2, "no", "disk", True),
        ("lora", 3, "no", "cpu", False),
        ("nested", 2, "no", "cpu", True),
        ("nested", 3, "no", "disk", False),
    ):
        wanted, _ = trained(rank, name, folder, stage, precision, "none", reentrant)
        found, moved = trained(rank, name, folder, stage, precision, where, reentrant)
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted)), name
        assert moved["down"] > 0, name
        if where == "disk" and name == "llama":
            assert moved["write"] == moved["down"] > moved["read"] > 0


@pytest.mark.gloo
def test_the_same_bits(two: RankPool, tmp_path: Path) -> None:
    two.run(same, tmp_path, timeout_s=300)


def held(engine: zero.Engine) -> tuple[int, int]:
    """Bytes of activations in host memory and on disk. Unreachable graphs are collected."""
    gc.collect()
    with torch.no_grad():
        engine.model(ids(0, 0))
    rows = engine.report().tiers
    host = [row.measured for row in rows if (row.tier, row.kind) == ("host", "activations")]
    return sum(host), engine.report().process.get("disk file", 0)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_left(where: str, reentrant: bool, tmp_path: Path) -> None:
    model, _, engine = start("llama", tmp_path, where, reentrant)
    batch = ids(0, 0, 2, 12)

    def loss() -> Tensor:
        return model(batch, labels=batch).loss  # type: ignore[no-any-return]

    loss().backward()
    usual = held(engine)
    assert usual[0] > 0
    assert usual[1] == 0
    for _ in range(3):
        loss()  # a graph that no backward follows
    assert held(engine) == usual
    last = model.model.layers[-1]
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            loss()
    handle.remove()
    assert held(engine) == usual
    engine.optimizers[0].zero_grad()
    again = loss()
    again.backward(retain_graph=not reentrant)
    if not reentrant:
        once = [zero.full_gradient(p) for p in model.parameters()]
        again.backward()
        twice = [zero.full_gradient(p) for p in model.parameters()]
        assert all(b is not None and torch.equal(2 * a, b) for a, b in zip(once, twice) if a is not None)
    del again
    assert held(engine) == usual
    model.eval()
    assert model.generate(batch[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)
    engine.detach()
    assert checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=reentrant).grad_fn is not None
    assert not [name for name in os.listdir(tmp_path) if "hf_zero" in name]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_write_to_an_input(reentrant: bool, tmp_path: Path) -> None:
    """As torch: a block's input that is written after the block was called cannot be recomputed from."""
    model, _, engine = start("llama", tmp_path, "cpu", reentrant)
    batch = ids(0, 0, 2, 12)
    writes = model.model.layers[2].register_forward_hook(
        lambda module, args, output: (args[0].detach().add_(1), output)[1]
    )
    loss = model(batch, labels=batch).loss
    if not reentrant:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    writes.remove()
    engine.detach()


def test_without_checkpointing(tmp_path: Path) -> None:
    model, _, engine = start("llama", tmp_path, "cpu")
    model.gradient_checkpointing_disable()
    batch = ids(0, 0, 2, 12)
    with torch.no_grad():
        model(batch)
    model.eval()
    model(batch, labels=batch).loss.backward()  # an evaluation with a graph checkpoints nothing
    model.train()
    with pytest.raises(zero.ConfigError, match="gradient_checkpointing=True in the TrainingArguments"):
        model(batch, labels=batch)
    engine.detach()
    with pytest.raises(zero.ConfigError, match="offload_activations must be one of none, cpu, disk"):
        zero.ZeroConfig(offload_activations="nvme0")


def broken(rank: int, world: int, folder: Path, stage: int, call: str) -> str:
    """The disk of one rank fails; every rank raises, and trains on once there is room again."""
    model, optimizer, engine = start("llama", folder, "disk", stage=stage)
    loss_of(model, rank, 0, False).backward()
    before = loss_of(model, rank, 1, False) if call == "preadv" else None  # parts of pages are read to be written
    with instead(os, **{call: fails(errno.ENOSPC)}) if rank == 1 else nullcontext():
        with pytest.raises(zero.TierError) as raised:
            (loss_of(model, rank, 1, False) if before is None else before).backward()
    optimizer.zero_grad()
    loss_of(model, rank, 2, False).backward()
    optimizer.step()
    engine.detach()
    return str(raised.value)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "call"), [(2, "posix_fallocate"), (3, "pwritev"), (2, "preadv")])
def test_a_full_disk(two: RankPool, tmp_path: Path, stage: int, call: str) -> None:
    for text in two.run(broken, tmp_path, stage, call):
        assert "rank 1" in text
        assert "No space left" in text


def without_a_folder(rank: int, world: int, folder: Path) -> str:
    """The folder of one rank is a file; both ranks raise, and the model can be sharded afterwards."""
    wrong = folder / "file"
    wrong.touch()
    model = MODELS["llama"]()
    optimizer = adamw(model)

    def shard(where: Path) -> zero.Engine:
        config = zero.ZeroConfig(stage=3, offload_activations="disk", offload_dir=str(where), stall_s=20)
        return zero.shard(model, optimizer, config)

    with pytest.raises(zero.ZeroError) as raised:
        shard(wrong if rank == 1 else folder)
    shard(folder).detach()
    return str(raised.value)


@pytest.mark.gloo
def test_a_folder_that_one_rank_cannot_use(two: RankPool, tmp_path: Path) -> None:
    for text in two.run(without_a_folder, tmp_path):
        assert "rank 1" in text
