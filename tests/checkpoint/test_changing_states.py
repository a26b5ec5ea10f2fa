"""States whose types and lengths change in training: schedules and optimizers of users, and torch's milestones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR

import hf_zero as zero


class Halving(LRScheduler):
    """Keeps its rates and a text."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates: list[float] = []
        self.note: str | None = None
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.note = f"{len(self.rates)} before"
        self.rates.append(0.5 ** len(self.rates))
        return [rate * self.rates[-1] for rate in self.base_lrs]


class Remembers(torch.optim.SGD):
    """Keeps its rates and a text in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(rates=[], phase=None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["rates"].append(group["lr"])
            group.update(lr=0.1 / len(group["rates"]), phase="late" if len(group["rates"]) > 2 else "early")
        super().step()


def warmed_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [1, 2])], [4])


@pytest.mark.parametrize(
    ("kind", "schedule"), [(torch.optim.SGD, Halving), (torch.optim.SGD, warmed_up), (Remembers, None)]
)
def test_a_run_goes_on(kind: Any, schedule: Any, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters())
        return (
            model,
            optimizer,
            zero.shard(model, optimizer, zero.ZeroConfig(stage=2)),
            schedule and schedule(optimizer),
        )

    def train(model: Any, optimizer: Any, engine: Any, steps: Any, count: int) -> dict[str, Any]:
        for _ in range(count):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps is not None:
                steps.step()
        states = {"optimizer": optimizer.state_dict()["param_groups"], "schedule": steps and steps.state_dict()}
        return {**states, "weights": {name: value.tolist() for name, value in model.state_dict().items()}}

    whole, again = start(), start()
    train(*whole, count=3)
    whole[2].save(tmp_path / "ckpt", objects={} if schedule is None else {"schedule": whole[3]})
    again[2].load(tmp_path / "ckpt", objects={} if schedule is None else {"schedule": again[3]})
    assert train(*again, count=5) == train(*whole, count=5)
