"""Programs that are right raise nothing with `debug=True`, whatever they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.oracle import Run, program
from tests.programs.usual import FP32

DEBUG = {"debug": (True,)}


class AdaptedExperts(nn.Module):
    """Batch norm, dropout, an adapter on a frozen base, experts that are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False))
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        self.seen += len(x)
        x = self.norm(x)
        x = self.base(x) + self.adapter(x)
        x = checkpoint(self.experts[expert], self.drop(x), use_reentrant=False)
        return self.head(torch.relu(x))


class Signs(torch.optim.Optimizer):
    """An element-wise optimizer that the package does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.2)
                    p.sub_(mean.clamp(-1e-2, 1e-2), alpha=group["lr"] * 100)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=torch.tensor(0.01), eps=1e-3),
    "Signs": Signs,
}


def _train(run: Run, expert: int) -> None:
    """Units freeze and unfreeze, weights are written, a step is left out after a NaN."""
    for name, make in OPTIMIZERS.items():
        model = run.build(AdaptedExperts)
        model = run.shard(model, make([p for p in model.parameters() if p.requires_grad]))
        torch.manual_seed(run.rank)
        for step in range(6):
            model.experts[0].requires_grad_(step not in (2, 3))
            if step == 4:
                model.head.bias.data = torch.full((5,), 0.5)
            scale = float("nan") if step == 3 and run.rank == 1 else 1.0
            loss = cross_entropy(model(run.inputs(step), expert).float(), torch.arange(4)) * scale
            loss.backward()
            run.see(loss, f"loss with {name}")
            if run.clip_grad_norm_(model, 1.0).isfinite():
                run.optimizer.step()
            run.optimizer.zero_grad()


# Batch norm and the signs of nearly equal gradients amplify rounding.
@program(only={**FP32, **DEBUG, "tier": ("none", "cpu")}, loose=20.0)
def one_expert(run: Run) -> None:
    _train(run, 1)


@program(only={**FP32, **DEBUG, "tier": ("none", "cpu"), "stage": (0, 1, 2)}, loose=20.0)
def another_expert_on_each_rank(run: Run) -> None:
    _train(run, run.rank)
