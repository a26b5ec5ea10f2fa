"""Micro-batches of Hugging Face models: reduced one by one or once, recomputed, scaled, with units that are kept gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models import bert, gpt2, sgd
from tests.oracle import Run, program
from tests.settings import KEEPS

DEBUG = {"debug": (False, True)}


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-3)


def recomputed(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        model.gradient_checkpointing_enable()
        return model

    return build


def _train(
    run: Run,
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    micros: int = 3,
    steps: int = 4,
    defer: bool = False,
    **config: Any,
) -> None:
    model = run.build(make)
    model = run.shard(model, optimizer(model), **config)
    for step in range(steps):
        for micro in range(micros):
            waits = run.no_sync(model, defer=defer) if micro + 1 < micros else contextlib.nullcontext()
            with waits:
                batch = run.ids(micros * step + micro)
                loss = model(input_ids=batch, labels=batch).loss / micros
                loss.backward()
            run.see(loss, "loss")
        run.update()


@program(more={"ranks": (1, 2, 3), **DEBUG})
def micro_batches(run: Run) -> None:
    _train(run, gpt2, in_groups)


@program(more={"ranks": (1, 2, 3), **DEBUG}, exact=True)
def deferred(run: Run) -> None:
    """Added up on each rank and averaged once, as in DDP."""
    _train(run, gpt2, defer=True)


@program(more=DEBUG, exact=True)
def deferred_in_groups(run: Run) -> None:
    """Some of the model is frozen."""
    _train(run, recomputed(bert), in_groups, defer=True)


@program(only={"stage": (2, 3), "tier": ("none", "cpu", "cpu/cpu", "cpu/disk")}, more=DEBUG)
def deferred_and_updated_in_backward(run: Run) -> None:
    _train(run, gpt2, defer=True, step_in_backward=True)


@program(more=DEBUG, exact=True)
def past_learning(run: Run) -> None:
    """More backwards than those in which the engine looks at saved tensors."""
    _train(run, recomputed(gpt2), in_groups, micros=1, steps=8)


@program(only={"stage": (3,), "kept": (False,), "tier": ("none/cpu", "cpu/cpu", "cpu/disk", "disk/disk")})
def kept_units_of_offloaded_parameters(run: Run) -> None:
    for options in ({}, {"step_in_backward": True}):
        for make in (gpt2, recomputed(bert)):
            _train(run, make, micros=2, defer=True, **{KEEPS: "1GiB"}, **options)


@program(only={"precision": ("bf16",), "stage": (1, 2, 3), "kept": (False,)}, more=DEBUG)
def reduced_in_bfloat16(run: Run) -> None:
    _train(run, gpt2, in_groups, reduce_dtype="bfloat16")


@program(reference="average")
def clipped_between_micro_batches(run: Run) -> None:
    """Inside `no_sync`, too, the mean over the ranks is clipped, and later gradients are added to it."""
    model = run.mlp()
    for step in range(3):
        with run.no_sync(model):
            run.loss(2 * step).backward()
        run.clip_grad_norm_(model, 0.02)
        run.forget_gradients()
        run.loss(2 * step + 1).backward()
        run.update()
