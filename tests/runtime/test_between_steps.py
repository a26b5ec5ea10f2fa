"""What a program may do between steps, in any order: every rank's values stay those of plain training, to the bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from hf_zero.runtime.transports import Roads
from tests.kit.offloading import SMALL_ROADS

pytestmark = pytest.mark.gloo

WIDTH = 33
STEPS = 24


class Adapted(nn.Module):
    """Each block has frozen and trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"base": nn.Linear(WIDTH, WIDTH), "added": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["norm"](x + block["base"](x) + block["added"](x))
        return self.head(x)


def adamw(model: nn.Module, frozen: set[str]) -> torch.optim.Optimizer:
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


class Twins:
    """A sharded model, and what plain data parallel training makes of an equal one. Every method does the same to both."""

    OPERATIONS = (
        "train", "train", "train", "evaluate", "bind", "load_state_dict", "set_full", "set_local", "gathered", "away",
        "save", "load", "load_optimizer",
    )  # fmt: skip

    def __init__(self, rank: int, world: int, folder: Path, seed: int, options: dict[str, Any]) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.random = random.Random(seed)
        self.model, self.plain = Adapted(), Adapted()
        self.params = {name: (p, q) for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters())}
        self.names = list(self.params)
        self.frozen = {name for name in self.names if "base" in name}
        self.optimizer, self.plain_optimizer = adamw(self.model, self.frozen), adamw(self.plain, self.frozen)
        config = zero.ZeroConfig(offload_dir=str(folder / "tier"), **options)
        self.engine = zero.shard(self.model, self.optimizer, config, roads=SMALL_ROADS)
        self.step = 0
        self.saved: dict[str, Tensor] | None = None

    def train(self, away: bool = False) -> None:
        self.step += 1
        inputs = [
            torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * self.step + r))
            for r in range(self.world)
        ]
        self.model(inputs[self.rank]).square().mean().backward()
        if self.random.random() < 0.3:
            self.away()
        totals: dict[str, Tensor] = {}
        for x in inputs:
            self.plain(x).square().mean().backward()
            for name, (_, q) in self.params.items():
                if q.grad is not None:
                    totals[name] = totals[name] + q.grad if name in totals else q.grad
                    q.grad = None
        for name, total in totals.items():
            self.params[name][1].grad = total * (1.0 / self.world)
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        x = torch.ones(2, WIDTH)
        assert torch.equal(self.model(x), self.plain(x))

    def bind(self) -> None:
        """One parameter is frozen or thawed."""
        self.frozen ^= {self.random.choice(self.names)}
        self.optimizer, self.plain_optimizer = adamw(self.model, self.frozen), adamw(self.plain, self.frozen)
        self.engine.bind(self.optimizer)

    def load_state_dict(self) -> None:
        some = {name: value + 0.01 for name, value in self.plain.state_dict().items() if self.random.random() < 0.5}
        self.model.load_state_dict(some, strict=False)
        self.plain.load_state_dict(some, strict=False)

    @torch.no_grad()
    def set_full(self) -> None:
        param, plain = self.params[self.random.choice(self.names)]
        plain.mul_(1.5)
        zero.set_full_parameter(param, plain.detach())

    @torch.no_grad()
    def set_local(self) -> None:
        """By the ranks that have a part of it."""
        param, plain = self.params[self.random.choice(self.names)]
        plain.mul_(0.5)
        mine = zero.local_parameter(param)
        if len(mine):
            zero.set_local_parameter(param, mine * 0.5)
        self.engine.refresh()

    @torch.no_grad()
    def gathered(self) -> None:
        pairs = [self.params[name] for name in self.random.sample(self.names, 3)]
        modifier = self.random.randrange(self.world)
        with zero.GatheredParameters([param for param, _ in pairs], modifier_rank=modifier):
            for param, plain in pairs[:2]:
                plain.add_(0.03)
                if self.rank == modifier:
                    param.add_(0.03)

    def away(self) -> None:
        states = ("parameters", "gradients", "optimizer")
        self.engine.offload_states(self.random.sample(states, self.random.randint(1, 3)))
        self.engine.reload_states()

    def save(self) -> None:
        self.engine.save(self.folder / "saved", save_optimizer=False)
        self.saved = {name: value.clone() for name, value in self.plain.state_dict().items()}

    def load(self) -> None:
        if self.saved is not None:
            self.engine.load(self.folder / "saved", load_optimizer=False)
            self.plain.load_state_dict(self.saved)

    def load_optimizer(self) -> None:
        self.optimizer.load_state_dict(self.engine.exchange(self.optimizer.state_dict())[0])

    def differing(self) -> list[str]:
        out = []
        for name, (param, plain) in self.params.items():
            if self.engine.config.stage < 3 and not torch.equal(param.detach(), plain.detach()):
                out.append(f"{name} on rank {self.rank}")
            if not torch.equal(zero.full_parameter(param), plain.detach()):
                out.append(f"the master of {name}")
        return out


def play(rank: int, world: int, folder: Path, seed: int, options: dict[str, Any]) -> None:
    done: list[str] = []
    twins = Twins(rank, world, folder, seed, options)
    for _ in range(STEPS):
        done.append(twins.random.choice(Twins.OPERATIONS))
        getattr(twins, done[-1])()
        assert not (wrong := twins.differing()), (wrong, done)
    twins.engine.detach()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"stage": 1}),
        (3, {"stage": 2}),
        (2, {"stage": 3}),
        (2, {"stage": 2, "offload_optimizer": "disk"}),
        (3, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "disk"}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_sequence_equals_plain_training(pools, tmp_path, world, options, seed):
    pools[world].run(play, tmp_path, seed, options, timeout_s=60)


def written_by_one(rank: int, world: int, stage: int) -> Tensor:
    """A frozen parameter is written by the rank that owns it, and `engine.refresh` comes steps later."""
    model = Adapted()
    optimizer = adamw(model, {name for name, _ in model.named_parameters() if "base" in name})
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    param = model.blocks[0]["base"].bias
    mine = zero.local_parameter(param)
    assert {len(part) for part in engine.exchange(mine)} == {0, WIDTH}
    if len(mine):
        zero.set_local_parameter(param, mine + 1)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.refresh()
    value = param.detach().clone()
    engine.detach()
    return value - Adapted().blocks[0]["base"].bias.detach()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_alone_writes_what_no_step_changes(two, stage):
    for difference in two.run(written_by_one, stage, timeout_s=30):
        torch.testing.assert_close(difference, torch.ones(WIDTH))


def saved_then_away(rank: int, world: int, folder: Path) -> None:
    """A save has looked at the memory of the parameters; it can be given back all the same."""
    model = Adapted()
    optimizer = adamw(model, set())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=1))
    engine.save(folder / "saved")
    engine.load(folder / "saved")
    engine.offload_states()
    assert all(flat.full.untyped_storage().nbytes() == 0 for unit in engine.units for flat in unit.flats)
    engine.reload_states()
    for param, plain in zip(model.parameters(), Adapted().parameters()):
        assert torch.equal(param.detach(), plain.detach())
    engine.detach()


def test_states_leave_after_a_save(two, tmp_path):
    two.run(saved_then_away, tmp_path)


def resume(rank: int, world: int, place: str, kind: str, folder: Path) -> list[Tensor]:
    """Two steps, the state loaded in an older or narrower form, two steps; `place` is where state rests, or plain."""
    model = Adapted()
    optimizer = adamw(model, set())
    if place != "plain":
        zero.shard(model, optimizer, zero.ZeroConfig(stage=0, offload_optimizer=place, offload_dir=str(folder)))
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            for entries in state["state"].values():
                match kind:
                    case "int":
                        entries["step"] = int(entries["step"])
                    case "float":
                        entries["step"] = float(entries["step"])
                    case "bfloat16":
                        entries.update({key: entries[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")})
            optimizer.load_state_dict(state)
        model(torch.full((2, WIDTH), 1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["int", "float", "bfloat16"])
@pytest.mark.parametrize("place", ["none", "cpu", "disk"])
def test_a_state_dict_of_another_form_is_taken_as_torch_takes_it(pools, tmp_path, kind, place):
    (ours,), (plain,) = (pools[1].run(resume, where, kind, tmp_path) for where in (place, "plain"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


class Slow(PairWire):
    """Peers have taken what this rank sends of a gather only when it has been waited for."""

    sources: list[tuple[int, int]]

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        move, extent = super().gather(full, own, tag, cuts), (own.data_ptr(), own.data_ptr() + own.nbytes)
        self.sources.append(extent)

        def taken() -> None:
            move.close()
            self.sources.remove(extent)

        return Inflight((), (SimpleNamespace(wait=taken),), move.wait)


def written_early(rank: int, world: int, settings: dict[str, Any], dtype: str) -> int:
    """Looks, wherever a program may write to a weight, whether peers are still being sent that memory."""
    model = Adapted()
    optimizer = adamw(model, set())
    Slow.sources = []
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings), mixed_precision=dtype, roads=Roads(wire=Slow))
    seen = 0

    def look(module: nn.Module, *_: object) -> None:
        nonlocal seen
        for param in module.parameters(recurse=settings["stage"] < 3):
            seen += 1
            begin, end = param.data_ptr(), param.data_ptr() + param.nbytes
            assert all(end <= first or last <= begin for first, last in Slow.sources)

    for module in model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for step in range(3):
        loss = model(torch.full((2, WIDTH), 1.0 + step)).square().mean()
        assert not Slow.sources, "a program may write to the optimizer's tensors now"
        loss.backward()
        assert not Slow.sources
        optimizer.step()
        look(model)
        optimizer.zero_grad()
    engine.detach()
    return seen


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload_params": "cpu", "offload_optimizer": "cpu"}],
    ids=["1", "2", "3", "3-cpu"],
)
def test_what_a_program_may_write_is_no_longer_sent(two, settings, dtype):
    """Else a peer that is late would get what was written to it in the meantime (SAM, noise, `p.data.mul_`)."""
    assert all(seen > 20 for seen in two.run(written_early, settings, dtype))
