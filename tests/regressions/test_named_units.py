"""`ZeroConfig.units`: what is refused, and what the commands make of it. Training: tests/programs/named_units.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hf_zero as zero
from hf_zero.cli import main as cli
from tests.kit.pool import on_ranks
from tests.programs.named_units import Towers

pytestmark = pytest.mark.gloo


@on_ranks()
def test_a_pattern_that_nothing_has_is_refused(rank: int, world: int) -> None:
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


def test_a_value_that_is_no_pattern_is_refused() -> None:
    for wrong in (None, 3, {"a": 1}, (1,)):
        with pytest.raises(zero.ConfigError, match="units must be names or patterns of modules"):
            zero.ZeroConfig(units=wrong)
    assert zero.ZeroConfig(units=" *.experts, Mixture ,").units == ("*.experts", "Mixture")
    assert zero.ZeroPlugin(stage=3, units="Mixture").config.units == ("Mixture",)


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
