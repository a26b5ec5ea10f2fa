"""Optimizer state and parameters in host memory and on disk: the same bits as without offload, and failures of the disk."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import ConfigError, StateError, ZeroConfig
from hf_zero.engine import shard
from hf_zero.tiers.array import OnDisk
from tests.kit.common import gpt2
from tests.kit.offloading import SMALL
from tests.kit.pool import RankPool
from tests.kit.rows import each_value
from tests.kit.transports import Link, Storage

ELSEWHERE = [("cpu", "none"), ("disk", "none"), ("cpu", "cpu"), ("disk", "disk"), ("cpu", "disk"), ("none", "cpu")]
"""Tiers of optimizer and parameters."""


class Branches(nn.Module):
    """A network whose `rare` layer, and whose `shift` on one rank, only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.rare, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.scale, self.shift, self.slope = (nn.Parameter(torch.full((32,), value)) for value in (1.0, 0.1, 0.9))

    def forward(self, x: Tensor, rare: bool = False, shift: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        hidden = hidden + torch.tanh(self.often(hidden)) + (torch.tanh(self.rare(hidden)) if rare else 0)
        out = self.last(hidden) * self.slope
        return out + self.shift if shift else out


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    if isinstance(model, Branches):
        x = torch.randn(3, 32, generator=generator)
        # All have a gradient first: segments that have state are split later.
        return model(x, rare=step % 3 == 0, shift=step % 3 == 0 or (step % 3 == 1 and rank == 0)).pow(2).mean()
    ids = torch.randint(1, 97, (2, 12), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    kinds: dict[str, Any] = {
        "adamw": partial(torch.optim.AdamW, lr=1e-2),
        "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    }
    made: torch.optim.Optimizer = kinds[name](groups)
    return made


def start(
    rank: int, folder: str, model: nn.Module, name: str, dtype: str, *, link: type[Link] = Link, **config: Any
) -> tuple[Any, Any]:
    """An engine whose blocks and slabs are small; its optimizer."""
    optimizer = optimizer_of(name, model)
    settings = ZeroConfig(offload_dir=folder, **config)
    storage = partial(Storage, open_link=link, sizes=SMALL)
    return shard(model, optimizer, settings, mixed_precision=dtype, open_storage=storage), optimizer


def train(rank: int, folder: str, build: Any, name: str, dtype: str, accumulate: int, **config: Any) -> list[Any]:
    """Losses, norms and weights of a run."""
    model = build()
    engine, optimizer = start(rank, folder, model, name, dtype, **config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    found: list[Any] = []
    for step in range(3):
        for micro in range(accumulate):
            with nullcontext() if micro == accumulate - 1 else engine.no_sync():
                loss = loss_of(model, rank, step * accumulate + micro) / accumulate
                loss.backward()
            found.append(loss.item())
        if accumulate > 1:
            found.append(float(engine.clip_grad_norm_(0.05)))
            engine.clip_grad_value_(0.001)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    engine.detach()
    return [*found, *(param.detach().clone() for param in model.parameters())]


class LinkApart(Link):
    """A link that copies, as to a device with memory of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_one_memory = False


def compare(
    rank: int, world: int, folder: str, stage: int, dtype: str, name: str, link: type[Link] = Link
) -> list[str]:
    """The settings whose results differ by a bit."""
    wrong = []
    places = [each for each in ELSEWHERE if each[1] == "none" or stage == 3 or world == 1]
    for build, accumulate in ((mlp, 1), (mlp, 2), (gpt2, 1 + world % 2)):
        run = partial(train, rank, folder, build, name, dtype, accumulate, stage=stage, link=link)
        plain = run()
        for optimizer, params in places if build is mlp else places[:4]:
            for early in (False, True) if accumulate == 1 and optimizer != "none" else (False,):
                mine = run(offload_optimizer=optimizer, offload_params=params, step_in_backward=early)
                if not all(bool(torch.as_tensor(a == b).all()) for a, b in zip(mine, plain, strict=True)):
                    wrong.append(f"{build.__name__} {accumulate} {optimizer}/{params} {early}")
    return wrong


@pytest.mark.parametrize(
    ("case", "world"),
    each_value([(1, "no", "amsgrad"), (2, "bf16", "adamw"), (3, "bf16", "sgd"), (3, "no", "adamw")], [1, 2]),
)
def test_same_bits_as_without_offload(
    pools: dict[int, RankPool], tmp_path: Any, case: tuple[int, str, str], world: int
) -> None:
    found = pools[world].run(compare, str(tmp_path), *case)
    assert found == [[]] * world


def compare_apart(rank: int, world: int, folder: str) -> list[str]:
    """As `compare`, where host memory and the device's memory are two."""
    return compare(rank, world, folder, 3, "no", "adamw", link=LinkApart)


def test_same_bits_through_copies(two: RankPool, tmp_path: Any) -> None:
    assert two.run(compare_apart, str(tmp_path)) == [[], []]


def stored(rank: int, world: int, folder: str, tier: str) -> None:
    model = gpt2()
    engine, optimizer = start(rank, folder, model, "adamw", "no", stage=2, offload_optimizer=tier)
    loss_of(model, rank, 0).backward()
    grads = [span.bucket.grad for unit in engine.units for span in unit.trained]
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert moments
    assert all(isinstance(value, OnDisk if tier == "disk" else Tensor) for value in [*moments, *grads])
    if tier == "disk":
        with pytest.raises(StateError, match="on disk"):
            moments[0].add_(1)
    engine.detach()


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_states_and_gradients_are_in_their_tier(two: RankPool, tmp_path: Any, tier: str) -> None:
    two.run(stored, str(tmp_path), tier)


def refused(rank: int, world: int, folder: str) -> None:
    model = mlp()
    engine, _ = start(rank, folder, model, "adamw", "no", stage=2, offload_optimizer="cpu", step_in_backward=True)
    with pytest.raises(StateError, match="step_in_backward"):
        engine.clip_grad_norm_(1.0)
    span = engine.units[0].trained[0]
    before = span.values().clone()
    loss_of(model, rank, 0).backward()
    assert not torch.equal(span.values(), before), "the unit is updated in the backward"
    with pytest.raises(StateError, match="no_sync"):
        loss_of(model, rank, 1).backward()
    with pytest.raises(ConfigError, match="fp16"):
        shard(mlp(), None, ZeroConfig(offload_optimizer="disk", offload_dir=folder), mixed_precision="fp16")
    model = mlp()
    several = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.first, model.last)]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="2 optimizers"):
        shard(model, several, ZeroConfig(offload_optimizer="cpu", step_in_backward=True))


def test_what_offload_refuses(two: RankPool, tmp_path: Any) -> None:
    two.run(refused, str(tmp_path))
