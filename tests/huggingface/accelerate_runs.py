"""Plain accelerate loops, sharded and not, and how two are compared."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_zero as zero
from tests.kit.jobs.harness import (
    RANK,
    Tokens,
    distance,
    fresh,
    gpt2,
    optimizer_distance,
)


@dataclass
class Run:
    """One prepared training run."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    loader: Any
    scheduler: Any


def accelerator_at(stage: int | None, **settings: Any) -> Accelerator:
    """`stage=None` is plain data parallel. Only the constructor's argument differs."""
    fresh()
    if stage is not None:
        settings["parallelism_config"] = zero.ZeroPlugin(stage=stage, stall_s=20)
    return Accelerator(cpu=True, **settings)


def descent(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Matrices decay, vectors do not; the rate falls."""
    decay, rest = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def start(stage: int | None, accumulation: int = 1, precision: str = "no", seed: int = 0) -> Run:
    accelerator = accelerator_at(stage, mixed_precision=precision, gradient_accumulation_steps=accumulation)
    model = gpt2(seed)
    optimizer, scheduler = descent(model)
    loader = DataLoader(Tokens(), batch_size=2)
    return Run(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def train(run: Run, steps: int = 8, clip: float | None = 0.5, skip: int = 0) -> dict[str, list[float]]:
    losses, norms = [], []
    for number, batch in enumerate(run.loader):
        if number < skip:
            continue
        if number >= skip + steps:
            break
        with run.accelerator.accumulate(run.model):
            loss = run.model(**batch).loss
            run.accelerator.backward(loss)
            if run.accelerator.sync_gradients and clip is not None:
                norms.append(float(run.accelerator.clip_grad_norm_(run.model.parameters(), clip)))
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad(set_to_none=True)
        losses.append(float(run.accelerator.gather(loss.detach()).mean()))
    return {"losses": losses, "norms": norms, "lr": [group["lr"] for group in run.optimizer.param_groups]}


def weights(run: Run) -> dict[str, Tensor]:
    return {name.removeprefix("module."): t for name, t in run.accelerator.get_state_dict(run.model).items()}


def evaluate(run: Run) -> float:
    run.model.eval()
    total = []
    with torch.no_grad():
        for batch in run.loader:
            total.append(run.accelerator.gather_for_metrics(run.model(**batch).loss.repeat(2)))
    run.model.train()
    return float(torch.cat(total).mean())


@functools.cache
def complete(stage: int | None, **settings: Any) -> dict[str, Any]:
    """Evaluated, trained, evaluated again. Made once for equal arguments: what others are compared with."""
    settings = dict(settings)
    clip = settings.pop("clip", 0.5)
    run = start(stage, **settings)
    out: dict[str, Any] = {"before": evaluate(run), **train(run, clip=clip), "after": evaluate(run)}
    out["weights"], out["optimizer"] = weights(run), run.optimizer.state_dict()
    return out


def rank_0_distance(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Rank 0 always has the values of a sharded model's `state_dict()`."""
    return distance(mine, reference) if RANK == 0 else 0.0


def equals_data_parallel(
    stage: int, rel: float, weights: float, optimizer: float = float("inf"), **settings: Any
) -> None:
    """Curves, and how far the weights and the optimizer's state are apart at the end."""
    mine, reference = complete(stage, **settings), complete(None, **settings)
    for name in ("losses", "norms", "lr", "before", "after"):
        assert mine[name] == pytest.approx(reference[name], rel=rel), (name, mine[name], reference[name])
    assert distance(mine["weights"], reference["weights"]) <= weights
    if RANK == 0:
        assert optimizer_distance(mine["optimizer"], reference["optimizer"]) <= optimizer
