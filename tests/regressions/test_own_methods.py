"""Methods of an optimizer's own: those that only read may be called on one rank, those that write give DDP's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


class Own(torch.optim.SGD):
    """SGD with what optimizers of other packages have besides `step`."""

    def current_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @property
    def lr(self) -> float:
        return self.current_lr()

    def describe(self) -> str:
        return f"{self!r} {len(self.state)} {sum(p.numel() for group in self.param_groups for p in group['params'])}"

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def forget(self) -> None:
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def raises(self) -> None:
        raise KeyError("of the optimizer's own")

    def _params(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def eval(self) -> None:
        for param in self._params():
            param.data.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for param in self._params():
            param.data.mul_(2.0)

    @torch.no_grad()
    def shrink(self) -> None:
        torch._foreach_mul_([*self._params()], 0.75)

    def replace(self) -> None:
        for param in self._params():
            param.data = param.detach() * 0.5

    @torch.no_grad()
    def first_step(self) -> None:
        self._kept = [param.data.clone() for param in self._params()]
        for param in self._params():
            param.mul_(1.5)

    @torch.no_grad()
    def second_step(self) -> None:
        for param, value in zip(self._params(), self._kept, strict=True):
            param.data = value
        self.step()

    @contextmanager
    def halved(self) -> Iterator[None]:
        self.eval()
        yield
        self.train()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 7), nn.Linear(7, 3, bias=False))
    with torch.no_grad():
        model[0].weight[16:] = 0  # where one rank has only zeros, no value changes there
    return model


def own(model: nn.Module) -> Own:
    return Own(model.parameters(), lr=0.05, momentum=0.5)


class Pair:
    """A sharded model, and a plain one that gets the mean of all ranks' gradients."""

    def __init__(self, rank: int, world: int, make: Any = own, **settings: Any) -> None:
        self.rank, self.world = rank, world
        self.models = net(), net()
        self.optimizers = [make(model) for model in self.models]
        self.engine = zero.shard(self.models[0], self.optimizers[0], zero.ZeroConfig(**settings))
        self._batches = itertools.count()

    def backward(self) -> None:
        seed = next(self._batches)
        inputs = [torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * seed + r)) for r in range(self.world)]
        self.models[0](inputs[self.rank]).square().mean().backward()
        plain = torch.stack([self.models[1](x).square().mean() for x in inputs])
        plain.mean().backward()

    def both(self, name: str, *arguments: Any) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, name)(*arguments)

    def step(self) -> None:
        self.both("step")
        self.both("zero_grad")

    def outputs(self) -> None:
        x = torch.ones(2, 9)
        with torch.no_grad():
            torch.testing.assert_close(self.models[0](x), self.models[1](x), rtol=1e-5, atol=1e-6)

    def check(self) -> None:
        self.outputs()
        for mine, plain in zip(self.models[0].parameters(), self.models[1].parameters(), strict=True):
            torch.testing.assert_close(zero.full_parameter(mine), plain.detach(), rtol=1e-5, atol=1e-6)


SETTINGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "offload_optimizer": "cpu"},
    {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
]


def read_on_one_rank(rank: int, world: int, settings: dict[str, Any]) -> None:
    pair = Pair(rank, world, **settings)
    optimizer = pair.optimizers[0]

    def read() -> None:
        if rank != 0:
            return
        assert optimizer.current_lr() == optimizer.lr == 0.05
        assert "Own" in optimizer.describe()
        with pytest.raises(KeyError):
            optimizer.raises()
        assert optimizer.param_groups[0]["params"][0].numel() >= 0

    for _ in range(3):
        read()
        pair.backward()
        read()
        if rank == 1:
            optimizer.set_lr(0.05)
        pair.step()
        read()
        if settings["stage"] == 3:  # the read gathers, on every rank
            [param.detach().sum() for param in pair.models[0].parameters()]
            read()
            [param.detach().sum() for param in pair.models[0].parameters()]
        with zero.unsharded(pair.models[0]):
            read()
        pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_method_that_reads_may_be_called_on_one_rank(two: RankPool, settings: dict[str, Any]) -> None:
    two.run(read_on_one_rank, settings, timeout_s=60)


def disk_reads(rank: int, world: int, folder: Path) -> None:
    read_on_one_rank(rank, world, {"stage": 2, "offload_optimizer": "disk", "offload_dir": str(folder)})


def test_a_method_that_reads_on_one_rank_over_the_disk_tier(two: RankPool, tmp_path: Path) -> None:
    two.run(disk_reads, tmp_path, timeout_s=60)


def cleared_on_one_rank(rank: int, world: int, settings: dict[str, Any]) -> None:
    """Before a forward there is nothing to clear."""
    pair = Pair(rank, world, **settings)
    for _ in range(2):
        if rank == 0:
            pair.optimizers[0].zero_grad()
        pair.backward()
        pair.step()
        pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_zero_grad_on_one_rank(two: RankPool, settings: dict[str, Any]) -> None:
    two.run(cleared_on_one_rank, settings, timeout_s=60)


def write_on_all_ranks(rank: int, world: int, settings: dict[str, Any]) -> None:
    pair = Pair(rank, world, **settings)
    for _ in range(2):
        pair.backward()
        pair.step()
        for name in ("eval", "train", "shrink", "replace"):
            pair.both(name)
            pair.outputs()
        pair.both("eval")
        pair.check()
        pair.both("train")
        pair.backward()
        pair.both("first_step")
        pair.both("zero_grad")
        pair.backward()
        pair.both("second_step")
        pair.both("zero_grad")
        pair.check()
        pair.both("forget")
        with pair.optimizers[0].halved(), pair.optimizers[1].halved():
            pair.outputs()
        pair.check()
        with zero.unsharded(pair.models[0]):
            pair.both("eval")
        pair.both("train")
        pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_methods_that_write_give_plain_numbers(two: RankPool, settings: dict[str, Any]) -> None:
    two.run(write_on_all_ranks, settings, timeout_s=60)


class Lookahead(torch.optim.Optimizer):
    """A wrapper that shares its base's groups, as published implementations do."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2) -> None:
        self.base, self.k, self.count = base, k, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    @torch.no_grad()
    def sync(self) -> None:
        fast = [param for group in self.param_groups for param in group["params"]]
        if self.slow:
            for slow, param in zip(self.slow, fast, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)
        else:
            self.slow = [param.detach().clone() for param in fast]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            self.sync()

    def steps(self) -> int:
        return self.count

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def looked_ahead(rank: int, world: int, settings: dict[str, Any]) -> None:
    """The base is sharded; the wrapper is the program's."""
    pair = Pair(rank, world, **settings)
    wrappers = [Lookahead(optimizer) for optimizer in pair.optimizers]
    for _ in range(5):
        pair.backward()
        for wrapper in wrappers:
            wrapper.step()
            wrapper.zero_grad()
        if rank == 0:
            assert wrappers[0].steps() > 0
            assert wrappers[0].current_lr() == 0.05
        pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("stage", range(4))
def test_a_wrapper_around_the_optimizer(two: RankPool, stage: int) -> None:
    two.run(looked_ahead, {"stage": stage}, timeout_s=60)


class Muon(torch.optim.Muon):
    def current_lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


def matrices(rank: int, world: int, stage: int) -> None:
    def make(model: nn.Module) -> Muon:
        return Muon([param for param in model.parameters() if param.dim() == 2], lr=0.05)

    pair = Pair(rank, world, make, stage=stage)
    for _ in range(2):
        if rank == 0:
            assert pair.optimizers[0].current_lr() == 0.05
        pair.backward()
        pair.step()
        pair.both("shrink")
        pair.models[1].zero_grad()
        pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("stage", range(4))
def test_whole_matrices(two: RankPool, stage: int) -> None:
    two.run(matrices, stage, timeout_s=60)
