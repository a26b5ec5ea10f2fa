"""Weights that a program writes itself: the next step starts from them, or a named error says why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.errors import RankMismatchError, StateError
from tests.kit.common import autocast

pytestmark = pytest.mark.gloo

TIERS: list[dict[str, Any]] = [{}, {"offload_optimizer": "cpu"}, {"offload_optimizer": "disk"}]
RELEASED = [*TIERS, {"offload_optimizer": "cpu", "offload_params": "disk"}]


class Codes(nn.Module):
    """A code book that each forward writes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(9, 33), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(33))
        self.how, self.writes = how, True

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "counted":
            with torch.no_grad():
                self.gain.clamp_(-0.9, 0.9)
        out = x * self.gain.clone() + self.code.detach().sum(dim=0) * 0.01
        if self.training:
            match self.how:
                case "data":
                    self.code.data.add_(1)
                case "counted":
                    with torch.no_grad():
                        self.code.add_(1)
                case "replaced":
                    self.code.data = self.code.data + 1
                case "trained":  # first values made of a batch, and once more
                    if self.writes:
                        self.gain.data.mul_(0.5)
        return out


def bound(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


class Net(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 33)
        self.norm = nn.LayerNorm(33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.codes = nn.Sequential(Codes(how))
        self.how = how
        self.last = nn.Linear(33, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "bound":  # of a module of torch's, whose code does not say so
            bound(self.first)
        return self.last(self.codes(self.frozen(self.norm(self.first(x)))))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.5)


class Pair:
    """A sharded model, and a plain one that gets the mean of all ranks' gradients."""

    def __init__(
        self,
        rank: int,
        world: int,
        dtype: str,
        folder: Path,
        how: str = "",
        make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        **options: Any,
    ) -> None:
        self.rank, self.world, self.dtype = rank, world, dtype
        self.model, self.plain = Net(how), Net(how)
        self.optimizer, self.plain_optimizer = make(self.model), make(self.plain)
        config = zero.ZeroConfig(offload_dir=str(folder), **options)
        self.engine = zero.shard(self.model, self.optimizer, config, mixed_precision=dtype)
        self.tolerance = 5e-2 if dtype == "bf16" else 2e-5

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        inputs = [torch.randn(4, 9, generator=torch.Generator().manual_seed(r)) for r in range(self.world)]
        mine = self.model(inputs[self.rank])
        written = self.plain.training and self.plain.codes[0].how
        with autocast(self.dtype):
            plain = []
            for x in inputs:
                before = {n: p.detach().clone() for n, p in self.plain.named_parameters()} if written else {}
                plain.append(self.plain(x))
                if written and x is not inputs[-1]:  # every rank has a model of its own
                    for name, param in self.plain.named_parameters():
                        param.data = before[name]
        gap = (mine - plain[self.rank]).abs().max()
        assert gap <= self.tolerance * (1 + plain[self.rank].abs().max()), f"forward differs by {gap}"
        return mine, plain

    def backward(self) -> None:
        mine, plain = self.forward()
        mine.square().mean().backward()
        (sum(out.square().mean() for out in plain) / self.world).backward()

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        change(self.model)
        change(self.plain)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        state, plain = self.model.state_dict(), self.plain.state_dict()
        for name, param in self.model.named_parameters():
            for value in (zero.full_parameter(param), *([state[name]] if self.rank == 0 else [])):
                gap, most = (value - plain[name]).abs().max(), plain[name].abs().max()
                assert gap <= self.tolerance * (1 + most), f"{name} is off by {gap} of {most}"


def seeded(param: Tensor, seed: int) -> Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.3


@torch.no_grad()
def edit(model: nn.Module, kind: str, sharded: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        match kind:
            case "mul_":
                param.mul_(0.5)
            case "clamp_":
                param.data.clamp_(-0.1, 0.1)
            case "copy_":
                param.data.copy_(seeded(param, number))
            case "init":
                nn.init.constant_(param, 0.02 * (number % 5 - 2))  # torch draws other numbers in other types
            case "one element":
                param.data[(0,) * param.dim()] = 0.7
            case "data":
                param.data = seeded(param, number)
            case "some data":
                if number % 2:
                    param.data = seeded(param, number)


def everywhere(
    rank: int, world: int, folder: Path, stage: int, play: Callable[..., None], ways: tuple[tuple[str, ...], ...]
) -> None:
    """Every way in every tier, its kinds in turns (where there is one tier, all of them), and either in both precisions."""
    tiers = TIERS[:1] if stage == 0 else RELEASED if stage == 3 else TIERS
    dtypes = itertools.cycle(("no", "bf16"))
    chosen = [
        (tier, kind)
        for at, tier in enumerate(tiers)
        for kinds in ways
        for kind in (kinds if len(tiers) == 1 else [kinds[at % len(kinds)]])
    ]
    for (tier, kind), dtype in zip(chosen, dtypes):
        how = {"how": kind} if play is in_forward else {}
        pair = Pair(rank, world, dtype, folder, stage=stage, **tier, **how)
        try:
            play(pair, kind)
        except Exception as error:
            raise AssertionError(f"{kind}, {dtype}, {tier}: {error}") from error
        pair.engine.detach()


def between_steps(pair: Pair, kind: str) -> None:
    for step in range(4):
        if step in (1, 2):
            pair.both(lambda m: edit(m, kind, pair.model))
        pair.backward()
        if step == 2:
            pair.both(lambda m: edit(m, kind, pair.model))
        pair.step()
    pair.check()
    pair.both(lambda m: edit(m, kind, pair.model))
    pair.check()  # with no step between
    pair.forward()


SLOW = pytest.mark.slow  # stage 1 and more ranks go the same ways
WORLDS = [(1, 2), (2, 0), pytest.param(2, 1, marks=SLOW), (2, 2), (2, 3), pytest.param(3, 2, marks=SLOW)]
WAYS = (("mul_", "init"), ("clamp_", "copy_", "one element"), ("data", "some data"))
"""In place, where torch counts it; through `.data`, which it does not count; other memory."""


@pytest.mark.parametrize(("world", "stage"), WORLDS)
def test_writes_between_steps_are_carried_over(pools, tmp_path, world, stage):
    pools[world].run(everywhere, tmp_path, stage, between_steps, WAYS, timeout_s=100)


def in_forward(pair: Pair, kind: str) -> None:
    for step in range(3):
        pair.model.codes[0].writes = pair.plain.codes[0].writes = step != 1
        pair.backward()
        pair.step()
    pair.model.eval()
    pair.plain.eval()
    pair.forward()
    code = zero.full_parameter(pair.model.codes[0].code)
    if kind not in ("trained", "bound"):
        assert torch.equal(code, torch.full((9, 33), 3.0)), code
    pair.check()


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 2), (2, 3)])
def test_writes_in_a_forward_are_kept(pools, tmp_path, world, stage):
    kinds = (("data",), ("counted",), ("replaced",), ("trained",), ("bound",))
    pools[world].run(everywhere, tmp_path, stage, in_forward, kinds, timeout_s=100)


class FirstBatch(nn.Module):
    """Takes its first values from the first batch that it sees, which is another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(9, 5), nn.Parameter(torch.zeros(5))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if not self.ready:
            self.shift.data.copy_(-x.detach().mean(dim=0))
            self.ready = True
        return x + self.shift


def other_first_values(rank: int, world: int, folder: Path, stage: int) -> str:
    torch.manual_seed(0)
    model = FirstBatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    try:
        for step in range(2):
            model(
                torch.randn(4, 9, generator=torch.Generator().manual_seed(2 * step + rank))
            ).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RankMismatchError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_first_values_that_ranks_make_of_their_own_batches_are_refused_by_name(two, tmp_path, stage):
    for said in two.run(other_first_values, tmp_path, stage):
        assert "parameter 'shift' is not on rank 1 what it is on rank 0" in said, said


class Averaging(torch.optim.SGD):
    """As a schedule-free optimizer: its tensors are other points in training and in evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(2.0)


def averaging(model: nn.Module) -> torch.optim.Optimizer:
    return Averaging([p for p in model.parameters() if p.requires_grad], lr=0.02)


def schedule_free(pair: Pair, kind: str) -> None:
    for _ in range(2):
        pair.backward()
        pair.step()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.eval()
        with torch.no_grad():
            pair.forward()
        pair.check()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.train()


def shown_at_once(pair: Pair, kind: str) -> None:
    """No forward comes between the optimizer's `eval()` and who reads; nor does one between those and its `train()`."""

    def switch(to: str) -> None:
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            getattr(optimizer, to)()

    def compare() -> None:
        for mine, plain in zip(pair.model.parameters(), pair.plain.parameters()):
            torch.testing.assert_close(mine.detach().float(), plain.detach(), rtol=pair.tolerance, atol=pair.tolerance)

    for _ in range(2):
        pair.backward()
        pair.step()
        switch("eval")
        with zero.unsharded(pair.model):
            compare()
            switch("train")
            with torch.no_grad():
                pair.forward()
            switch("eval")
        if pair.engine.config.stage == 3:  # elsewhere nobody is asked
            compare()
        switch("train")
        pair.check()


def written_in_both(pair: Pair, kind: str) -> None:
    """Inside zero.unsharded: where parameters are copies there is no telling which counts."""
    if pair.engine.config.stage < 3:  # the same memory, or a carry of its own
        return
    pair.backward()
    pair.step()
    said = ""
    try:
        with zero.unsharded(pair.model):
            with torch.no_grad():
                pair.model.last.weight.fill_(0.5)
            with torch.no_grad():
                for param in pair.optimizer.param_groups[0]["params"]:
                    param.mul_(2.0)
    except StateError as error:
        said = str(error)
    assert "were both written inside zero.unsharded" in said, said


def perturbed(pair: Pair, kind: str) -> None:
    """As SAM: the optimizer's tensors are moved, and moved back before the step."""
    for _ in range(2):
        pair.backward()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.mul_(1.5)
            optimizer.zero_grad()
        pair.backward()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.div_(1.5)
        pair.step()
    pair.check()


def in_memory(rank: int, world: int, folder: Path, stage: int, play: Callable[..., None]) -> None:
    for dtype, tier in itertools.product(
        ("no", "bf16"), RELEASED[:1] if stage < 3 else ({}, {"offload_params": "cpu"})
    ):
        pair = Pair(rank, world, dtype, folder, make=sgd if play is perturbed else averaging, stage=stage, **tier)
        play(pair, "")
        pair.engine.detach()


@pytest.mark.parametrize("play", [schedule_free, shown_at_once, written_in_both, perturbed])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 0), pytest.param(2, 1, marks=SLOW), (2, 2), (2, 3)])
def test_writes_to_the_optimizers_tensors_are_followed(pools, tmp_path, world, stage, play):
    pools[world].run(in_memory, tmp_path, stage, play, timeout_s=60)


def refused(rank: int, world: int, folder: Path) -> list[str]:
    said = []

    def say(stage: int, dtype: str, change: Callable[[Pair], Any]) -> None:
        pair = Pair(rank, world, dtype, folder, stage=stage)
        pair.backward()
        pair.step()
        with torch.no_grad():
            change(pair)
        try:
            pair.forward()
            said.append("nothing")
        except zero.StateError as error:
            said.append(str(error))
        pair.engine.reset()

    for stage in (2, 3):
        say(stage, "no", lambda pair: setattr(pair.model.last.weight, "data", torch.ones(4, 33)))
    say(2, "bf16", lambda pair: [p.data.mul_(2) for p in pair.optimizer.param_groups[0]["params"]])
    return said


def test_what_cannot_be_carried_is_refused_by_name(two, tmp_path):
    for said in two.run(refused, tmp_path, timeout_s=60):
        *shapes, masters = said
        assert all("'last.weight'" in shape and "(4, 33)" in shape for shape in shapes)
        assert "through `.data`" in masters


def updated_in_backward(rank: int, world: int, folder: Path) -> list[str]:
    """With `step_in_backward`: a write between steps counts; one before the step, when another thread updates, is refused."""
    said = []
    for stage, dtype, place, change in (
        (2, "bf16", "cpu", lambda p: p.mul_(2)),
        (2, "bf16", "disk", lambda p: setattr(p, "data", p.data * 2)),
        (1, "no", "cpu", lambda p: p.mul_(2)),
        (3, "bf16", "cpu", lambda p: p.fill_(2.0)),
    ):
        pair = Pair(rank, world, dtype, folder, stage=stage, offload_optimizer=place, step_in_backward=True)
        for _ in range(2):
            pair.backward()
            pair.step()
            if stage != 3:
                for model in (pair.model, pair.plain):
                    edit(model, "copy_", pair.model)
        pair.check()
        pair.backward()
        with torch.no_grad():
            change(pair.model.last.weight)
        try:
            pair.optimizer.step()
            said.append("nothing")
        except zero.StateError as error:
            said.append(str(error))
        pair.engine.reset()
        pair.engine.detach()
    return said


def test_a_write_to_what_is_being_updated_is_refused_by_name(two, tmp_path):
    for said in two.run(updated_in_backward, tmp_path, timeout_s=60):
        assert ["'last.weight'" in text for text in said] == [True] * 4, said


def swapped(rank: int, world: int, stage: int, folder: Path) -> None:
    """Averaged weights for an evaluation and a checkpoint, and back."""
    pair = Pair(rank, world, "no", folder, stage=stage)
    pair.backward()
    pair.step()
    kept = [p.detach().clone() for p in pair.model.parameters()]
    values = [p.detach().clone() for p in pair.plain.parameters()]
    pair.both(lambda m: edit(m, "copy_", pair.model))
    with torch.no_grad():
        pair.forward()
    pair.engine.save(folder / "averaged")
    pair.check()
    for model, before in ((pair.model, kept), (pair.plain, values)):
        for param, value in zip(model.parameters(), before):
            param.data.copy_(value)
    pair.backward()
    pair.step()
    pair.check()
    pair.engine.load(folder / "averaged")
    for param, plain in zip(pair.model.parameters(), Net().parameters()):
        edit_value = zero.full_parameter(param)
        assert edit_value.shape == plain.shape
    pair.both(lambda m: edit(m, "copy_", pair.model))
    pair.check()
    pair.engine.detach()


@pytest.mark.parametrize("stage", [1, 2])
def test_averaged_weights_for_a_while(two, tmp_path, stage):
    two.run(swapped, stage, tmp_path, timeout_s=60)


def mixed_with_access(rank: int, world: int, stage: int, folder: Path) -> None:
    """A write, and then another way to write a parameter of the same block."""
    for dtype in ("no", "bf16"):
        pair = Pair(rank, world, dtype, folder, stage=stage)
        pair.backward()
        pair.step()
        pair.both(lambda m: setattr(m.first.weight, "data", seeded(m.first.weight, 1)))
        value = seeded(pair.plain.first.bias, 2)
        zero.set_full_parameter(pair.model.first.bias, value)
        pair.plain.first.bias.data.copy_(value)
        pair.check()
        with zero.GatheredParameters([pair.model.last.weight], modifier_rank=0), torch.no_grad():
            pair.model.last.weight.mul_(2)
        pair.plain.last.weight.data.mul_(2)
        pair.check()
        pair.model.load_state_dict(pair.plain.state_dict())
        pair.backward()
        pair.step()
        pair.check()
        pair.engine.detach()


@pytest.mark.parametrize("stage", [1, 3])
def test_ways_to_write_do_not_undo_each_other(two, tmp_path, stage):
    two.run(mixed_with_access, stage, tmp_path, timeout_s=60)


def written_while_gathered(rank: int, world: int, stage: int, folder: Path) -> None:
    """After a forward with a graph the last unit is still whole: that is no edit of what is written now."""
    model = nn.Sequential(nn.Linear(33, 33), Codes(""))
    engine = zero.shard(model, sgd(model), zero.ZeroConfig(stage=stage, offload_dir=str(folder)))
    code, x = model[1].code, torch.ones(2, 33)

    def gathered(value: Tensor) -> None:
        with zero.GatheredParameters(code, modifier_rank=0), torch.no_grad():
            code.copy_(value)

    ways: list[Callable[[Tensor], object]] = [
        lambda value: zero.set_full_parameter(code, value),
        lambda value: zero.set_local_parameter(code, zero.local_parameter(code) * 0 + value[0, 0]),
        lambda value: model.load_state_dict({"1.code": value}, strict=False),
        gathered,
    ]
    for number, way in enumerate(ways, 1):
        model(x)
        way(torch.full((9, 33), float(number)))
        engine.refresh()
        assert torch.equal(zero.full_parameter(code), torch.full((9, 33), float(number))), number
    engine.detach()


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_while_the_last_unit_is_whole_counts(two, tmp_path, stage):
    two.run(written_while_gathered, stage, tmp_path, timeout_s=60)
