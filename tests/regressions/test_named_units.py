"""`ZeroConfig.units`: modules that are gathered as one, so that ranks may run different parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.cli import main as cli
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
WIDTH, EXPERTS = 8, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Runs only the experts that its batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[:, [each]] * self.experts[each](x) for each in chosen)


class Towers(nn.Module):
    """Mixtures outside of any block: each expert is a unit, where nothing else is said."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Mixture(), Mixture()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.head(self.second(self.first(self.embed(x), chosen), chosen[::-1][:1]))


def inputs(rank: int, step: int) -> tuple[Tensor, list[int]]:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return x, [(rank + step) % EXPERTS] if step % 2 else [rank, 3 - rank, 2][: 1 + rank]


def pair() -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Towers())
    return models[0], models[1]


def step_plain(plain: nn.Module, optimizer: torch.optim.Optimizer, world: int, step: int) -> None:
    for peer in range(world):
        (plain(*inputs(peer, step)).square().mean() / world).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(rank: int, model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    if rank == 0:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def trains(rank: int, world: int, units: Any, config: dict[str, Any], folder: str = "") -> None:
    model, plain = pair()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    engine = zero.shard(model, optimizers[0], zero.ZeroConfig(units=units, **config))
    for step in range(7):
        model(*inputs(rank, step)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        step_plain(plain, optimizers[1], world, step)
        if step == 3:
            with torch.no_grad():
                model(*inputs(rank, step))
    assert_same(rank, model, plain)
    if folder:
        engine.save(folder)
        for others in ((), ("Mixture",), ("first", "*.experts"), ("Expert",)):
            again, optimizer = pair()[0], None
            optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
            resumed = zero.shard(again, optimizer, zero.ZeroConfig(units=others, **config))
            resumed.load(folder)
            assert_same(rank, again, plain)
            resumed.detach()


UNITS = [
    ("Mixture",),
    "Mixture",
    ("first", "second"),
    "*.experts",
    ["first.experts", "second"],
    ("Towers",),
    ("*",),
    ("Mixture", "*.experts.*"),
]


@pytest.mark.parametrize("units", UNITS, ids=str)
def test_ranks_run_different_parts_of_a_unit(two: RankPool, units: Any) -> None:
    two.run(trains, units, {"stage": 3, "stall_s": 20.0})


def test_without_units_the_same_ranks_stall(two: RankPool) -> None:
    with pytest.raises(AssertionError, match="StallError"):
        two.run(trains, (), {"stage": 3, "stall_s": 3.0})


@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
def test_checkpoints_do_not_depend_on_units(two: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    two.run(trains, ("Mixture",), {**config, "stall_s": 20.0}, str(tmp_path / "saved"))


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_named_units_in_other_tiers(two: RankPool, tier: str) -> None:
    two.run(trains, "*.experts", {"stage": 3, "stall_s": 20.0, "offload_params": tier, "offload_optimizer": tier})


def refused(rank: int, world: int) -> None:
    for units, close in (
        (("*.expert",), r"'\*\.experts'|'first\.experts'"),
        (("Mixtur",), "'Mixture'"),
        (("frst",), "'first'"),
    ):
        with pytest.raises(zero.ConfigError, match="units: ") as caught:
            zero.shard(Towers(), None, zero.ZeroConfig(stage=3, units=units))
        assert caught.match(repr(units[0]).replace("*", r"\*"))
        assert caught.match(close)
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(zero.ConfigError, match="no module with parameters"):
        zero.shard(model, None, zero.ZeroConfig(stage=3, units="ReLU"))
    zero.shard(model, None, zero.ZeroConfig(stage=3, units="Linear"))  # nothing was left behind


def test_a_pattern_that_nothing_has_is_refused(two: RankPool) -> None:
    two.run(refused)


def test_a_value_that_is_no_pattern_is_refused() -> None:
    for wrong in (None, 3, {"a": 1}, (1,)):
        with pytest.raises(zero.ConfigError, match="units must be names or patterns of modules"):
            zero.ZeroConfig(units=wrong)
    assert zero.ZeroConfig(units=" *.experts, Mixture ,").units == ("*.experts", "Mixture")
    assert zero.ZeroPlugin(stage=3, units="Mixture").config.units == ("Mixture",)


def deferred(rank: int, world: int) -> None:
    torch.manual_seed(0)
    with zero.Init():
        model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3, units="Mixture", stall_s=20.0))
    plain = pair()[1]
    plain.load_state_dict(dict(zip(plain.state_dict(), broadcast(model))))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(5):
        model(*inputs(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_plain(plain, plain_optimizer, world, step)
    assert_same(rank, model, plain)


def broadcast(model: nn.Module) -> list[Tensor]:
    return [zero.full_parameter(param) for param in model.parameters()]


def test_named_units_of_a_deferred_model(two: RankPool) -> None:
    two.run(deferred)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    status = cli.main(["plan", "moe-tiny", "--zero-stage", "3", "--json", *flags])
    found = capsys.readouterr()
    return json.loads(found.out) if status == 0 else found.err


def test_the_plan_knows_named_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys) != planned(capsys, "--zero-units", "*.layers"), "all layers are gathered at once"
    assert "units: no module with parameters has the name or class '*.expert'" in planned(
        capsys, "--zero-units", "*.expert"
    )


def test_deepspeed_settings_become_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "accelerate.json"
    engine = {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"}
    file.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": engine}))
    assert cli.main(["migrate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"stage": 3, "units": "MixtralSparseMoeBlock"}
