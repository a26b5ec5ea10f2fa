"""For tests of offloading: small blocks and records, cases that meet pairwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_zero as zero
from tests.kit.common import MODELS, Case, Result, loss_of, optimizer_for
from tests.kit.transports import SMALL, Roads

SMALL_ROADS = Roads(sizes=SMALL)


def unequal(ours: Result, reference: Result) -> list[str]:
    """What differs by a bit, on this rank."""
    out = [name for name in ("losses", "norms", "scale") if getattr(ours, name) != getattr(reference, name)]
    if list(ours.params) != list(reference.params) or list(ours.state) != list(reference.state):
        return [*out, "names"]
    out += [name for name, value in ours.params.items() if not same(value, reference.params[name])]
    for index, entries in reference.state.items():
        mine = ours.state[index]
        if list(mine) != list(entries):
            out.append(f"state {index}: {list(mine)} against {list(entries)}")
        else:
            out += [f"state {index} {key}" for key in entries if not same(mine[key], entries[key])]
    return out


def same(mine: Any, theirs: Any) -> bool:
    """Equal values, and of tensors equal types and shapes; on the meta device there are no values."""
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return bool(mine == theirs)
    if (mine.dtype, mine.shape, mine.device) != (theirs.dtype, theirs.shape, theirs.device):
        return False
    return mine.is_meta or torch.equal(mine, theirs)


def pairwise(
    dimensions: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Few combinations in which every two values of different dimensions meet, wherever one allowed combination has both.

    Greedy: each further combination has as many new pairs as any; of equals the first in the product's order.
    """
    everything = [c for c in (dict(zip(dimensions, v)) for v in itertools.product(*dimensions.values())) if allowed(c)]
    pairs = [set(itertools.combinations(combination.items(), 2)) for combination in everything]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & left))
        chosen.append(everything[best])
        left -= pairs[best]
    return chosen


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a run ends with: weights, and the optimizer's state in the order of its keys."""
    state = optimizer.state_dict()["state"]
    return [
        *(value.clone() for value in model.state_dict().values()),
        *(state[i][key] for i in state for key in sorted(state[i])),
    ]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))


PLACES: dict[str, dict[str, Any]] = {
    "memory": {"stage": 2},
    "host": {"stage": 2, "offload_optimizer": "cpu"},
    "disk": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    "host, parameters too": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "parameters on disk": {"stage": 3, "offload_params": "disk"},
}


class Run:
    """A training run in one place."""

    def __init__(self, place: str, dtype: str, rank: int, folder: str, seed: int) -> None:
        self.rank = rank
        case = Case("bert", dtype=dtype, groups=2, sizes=SMALL, **PLACES[place])
        self.model = MODELS["bert"]()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0.01 * seed)
        self.optimizer = optimizer_for(self.model, 2, lr=1e-3, amsgrad=True)
        self.engine = zero.shard(
            self.model, self.optimizer, case.config(folder), mixed_precision=dtype, **case.roads().given
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(self.model, self.rank, step)
            loss.backward()
            self.engine.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        self.engine.finish_step()
        return losses

    def save(self, folder: Path, **options: Any) -> None:
        self.engine.save(folder, objects={"scheduler": self.scheduler}, **options)

    def load(self, folder: Path, **options: Any) -> None:
        self.engine.load(folder, objects={"scheduler": self.scheduler}, **options)

    def values(self) -> list[Any]:
        return values(self.model, self.optimizer)
