"""The scripts without Hugging Face on three ranks: the MLP at each stage and resumed, and what private training does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import finetune_private as private
import torch
import train_mlp
from harness import OUT, RANK, WORLD, check, watch
from torch import Tensor

import hf_zero as zero

watch()
TRAIN = ["--max-steps=5", "--max-train-samples=100", "--batch-size=40"]  # the third batch of an epoch has 20 images
COUNTS = (3, 0, 5)  # images of each rank
CLIP, EXPECTED = 0.5, 7.0


def train(name: str, *words: str) -> Any:
    check(name, lambda: train_mlp.main([*TRAIN, f"--output-dir={OUT / name}", *words]))


for stage in (0, 2, 3):
    train(f"stage {stage}", f"--zero-stage={stage}")
train("resumed", "--zero-stage=3", "--max-steps=3")
train("resumed", "--zero-stage=1", "--resume")


def private_gradients(stage: int, counts: tuple[int, ...], **settings: Any) -> list[Tensor]:
    """Of one private backward; images come from one list, in the order of the ranks."""
    model = train_mlp.mlp([64, 64], 10)
    engine = zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.ZeroConfig(stage=stage))
    images = train_mlp.digits().train
    first = sum(counts[:RANK])
    batch = train_mlp.rows_of(images, range(first, first + counts[RANK]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1000 + RANK)
    given = {"max_grad_norm": CLIP, "noise_multiplier": 0.0, "expected": EXPECTED, "generator": generator}
    norms = private.private_backward(engine, *batch, **{**given, **settings})
    if len(norms) != counts[RANK]:
        raise RuntimeError(f"{len(norms)} norms of {counts[RANK]} images")
    found = [zero.full_gradient(param) for param in model.parameters()]
    engine.detach()
    return [gradient for gradient in found if gradient is not None]


def expected_gradients(count: int) -> list[Tensor]:
    """One process, one image at a time, clipped by torch's own function."""
    model = train_mlp.mlp([64, 64], 10)
    total = [torch.zeros_like(param) for param in model.parameters()]
    images = train_mlp.digits().train
    for row in range(count):
        pixels, classes = train_mlp.rows_of(images, [row], torch.device("cpu"))
        torch.nn.functional.cross_entropy(model(pixels), classes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for gradient, param in zip(total, model.parameters()):
            gradient += param.grad
            param.grad = None
    return [gradient / EXPECTED for gradient in total]


def gap(stage: int) -> float:
    pairs = zip(private_gradients(stage, COUNTS), expected_gradients(sum(COUNTS)), strict=True)
    return max(float((found - wanted).abs().max()) for found, wanted in pairs)


def influence(stage: int) -> float:
    """How far one image more moves the sum, in units of the bound."""
    with_it, without = private_gradients(stage, (3, 0, 5)), private_gradients(stage, (3, 0, 4))
    moved = torch.stack([(a - b).square().sum() for a, b in zip(with_it, without)]).sum().sqrt()
    return float(moved) * EXPECTED / CLIP


def deviations(stage: int, each: bool) -> list[float]:
    """Of the noise in the sum, in units of sigma * C: of all elements, then of each large parameter. No images: noise alone."""
    found = private_gradients(stage, (0,) * WORLD, noise_multiplier=1.7, each=each)
    parts = [torch.cat([gradient.flatten() for gradient in found])]
    parts += [gradient.flatten() for gradient in found if gradient.numel() > 4000]
    return [float(part.std()) * EXPECTED / (1.7 * CLIP) for part in parts]


for stage in (1, 2, 3):
    check(f"gap {stage}", lambda stage=stage: gap(stage))
    check(f"influence {stage}", lambda stage=stage: influence(stage))
    check(f"total {stage}", lambda stage=stage: deviations(stage, False))
    check(f"each {stage}", lambda stage=stage: deviations(stage, True))
words = ["--max-steps=3", "--batch-size=30", "--seed=1", f"--output-dir={OUT / 'private'}"]
check("private", lambda: private.main([*words, "--zero-stage=3", "--noise-multiplier=0"]))
torch.distributed.destroy_process_group()
