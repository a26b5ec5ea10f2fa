"""hf-zero simulate: its collectives are those that real ranks issue, and its time those of a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.cli import main as cli
from hf_zero.core.layout import ALIGN_NUMEL
from tests.cli.test_hostile_input import refused
from tests.kit.common import gpt2, optimizer_for

KINDS = ("gather", "reduce", "across")


def simulated(capsys: pytest.CaptureFixture[str], model: object, *flags: object) -> dict[str, Any]:
    assert cli.main(["simulate", str(model), "--sequence", "8", *map(str, flags), "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def issued(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, dict[str, int]]]:
    """Calls and bytes of the third step."""
    out = []
    for case in cases:
        accumulation, precision = case.get("accumulation", 1), case.get("precision", "no")
        settings = {name: value for name, value in case.items() if name not in ("accumulation", "precision")}
        model = AutoModelForCausalLM.from_pretrained(folder)
        optimizer = optimizer_for(model, 1)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings), mixed_precision=precision)
        ids = torch.zeros(1, 8, dtype=torch.long)
        for _ in range(3):
            engine.traffic.reset()
            for micro_batch in range(accumulation):
                with engine.no_sync() if micro_batch < accumulation - 1 else torch.enable_grad():
                    model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = engine.traffic.to_dict()
        out.append({kind: found[kind] for kind in KINDS if kind in found and found[kind]["calls"]})
        engine.detach()
    return out


CASES: list[dict[str, Any]] = [
    {"stage": 0}, {"stage": 0, "precision": "bf16"}, {"stage": 1, "accumulation": 2}, {"stage": 1, "wire": "int8"},
    {"stage": 1, "replicas": 4, "wire": "fp8"}, {"stage": 2, "precision": "bf16", "accumulation": 2},
    {"stage": 2, "replicas": 2, "wire": "int8"}, {"stage": 2, "replicas": 4}, {"stage": 3}, {"stage": 3, "replicas": 2},
    {"stage": 3, "precision": "bf16", "accumulation": 2}, {"stage": 3, "keep_gathered": "200KiB"},
]  # fmt: skip


@pytest.mark.gloo
def test_collectives_and_bytes_are_those_of_real_ranks(
    pools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2(n_layer=3, n_embd=64).save_pretrained(tmp_path)
    real = pools[4].run(issued, str(tmp_path), CASES, timeout_s=250)[0]
    assert any("across" in found for found in real)
    for case, found in zip(CASES, real):
        flags: list[object] = ["--world-size", 4, "--mixed-precision", case.get("precision", "no")]
        for name, flag in (("stage", "--zero-stage"), ("replicas", "--zero-replicas"), ("wire", "--zero-wire"),
                           ("accumulation", "--accumulation"), ("keep_gathered", "--keep-gathered")):  # fmt: skip
            flags += [flag, case[name]] if name in case else []
        counted = simulated(capsys, tmp_path, *flags)["by_kind"]
        assert {kind: row["collectives"] for kind, row in counted.items()} == {
            kind: row["calls"] for kind, row in found.items()
        }, case
        for kind, row in counted.items():  # gloo leaves out the padding of a span that is one parameter
            padding = 4 * (ALIGN_NUMEL - 1) * row["collectives"] if kind == "reduce" else 0
            assert 0 <= row["bytes_sent"] - found[kind]["bytes"] <= padding, case


def test_kept_units_save_time(capsys: pytest.CaptureFixture[str]) -> None:
    bare, kept = (
        simulated(capsys, "gpt2-tiny", "--world-size", 8, "--zero-stage", 3, *room)
        for room in ((), ("--keep-gathered", "4MB"))
    )
    assert kept["step_s"] < bare["step_s"]


def test_a_divided_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """Queries and outputs, keys and values: two exchanges in each layer and pass, each of half of what a rank has."""
    flags = ("gpt2-tiny", "--world-size", 2, "--zero-stage", 3, "--mixed-precision", "no", "--sequence", 64)
    one, two, again = (
        simulated(capsys, *flags, *more)
        for more in ((), ("--zero-sp-size", 2), ("--zero-sp-size", 2, "--gradient-checkpointing"))
    )
    assert "sequence" not in one["by_kind"]
    assert again["by_kind"]["sequence"]["collectives"] * 2 == 3 * two["by_kind"]["sequence"]["collectives"]
    assert again["by_kind"]["sequence"]["bytes_sent"] * 2 == 3 * two["by_kind"]["sequence"]["bytes_sent"]
    assert two["parts_s"]["passes sequence"] == pytest.approx(two["by_kind"]["sequence"]["seconds"])
    assert two["planned_peak_bytes"] < one["planned_peak_bytes"]


def test_offloaded_activations_and_chunks_of_the_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("gpt2-124m", "--zero-stage", 3, "--sequence", 4096)
    bare, chunked = (simulated(capsys, *flags, *more) for more in ((), ("--zero-chunked-loss", "true")))
    assert chunked["planned_peak_bytes"] < bare["planned_peak_bytes"]
    kept, moved = (
        simulated(capsys, *flags, *more)
        for more in (("--gradient-checkpointing",), ("--zero-offload-activations", "cpu"))
    )
    assert moved["planned_peak_bytes"] < kept["planned_peak_bytes"]
    assert moved["parts_s"]["passes down"] > 0
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MEASURED))
    moved = (*SMALL, "--zero-offload-activations", "cpu", "--machine", path)
    assert "has no link_down, link_up" in refused(capsys, "simulate", *moved)


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    values = simulated(capsys, "gpt2-tiny", "--world-size", 1)
    assert values["by_kind"] == {}
    assert values["step_s"] == pytest.approx(sum(values["parts_s"].values()))
    assert values["parts_s"]["passes compute"] > 0


def test_replicas_keep_gathers_within_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas of four ranks: a rank sends 3/4 of what is gathered in place of 7/8, over the near link alone."""
    one, two = (
        simulated(capsys, "gpt2-tiny", "--world-size", 8, "--nodes", 2, "--zero-stage", 3, "--zero-replicas", replicas)
        for replicas in (1, 2)
    )
    gathers = [found["by_kind"]["gather"] for found in (one, two)]
    assert gathers[1]["bytes_sent"] / gathers[0]["bytes_sent"] == pytest.approx((3 / 4) / (7 / 8), rel=1e-3)
    assert gathers[1]["seconds"] < gathers[0]["seconds"] / 2
    assert "across" not in one["by_kind"]
    assert two["by_kind"]["across"]["bytes_sent"] > 0


def test_a_model_far_larger_than_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "gpt3-13b", "--world-size", 4096, "--nodes", 512, "--zero-stage", 3)
    assert found["by_kind"]["reduce"]["bytes_sent"] == pytest.approx(4 * 12.85e9 * 4095 / 4096, rel=0.01)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "gpt2-tiny", "--world-size", "64", "--nodes", "8", "--zero-stage", "3"]) == 0
    printed = capsys.readouterr().out
    for words in ("stage 3, 64 ranks on 8 nodes", "gather", "reduce", "step at least", "planned peak"):
        assert words in " ".join(printed.split())


MEASURED = {
    "shares_memory": True,
    "collective": 1.5e9,
    "latency": 2e-4,
    "flops": {"float32": 7e10},
    "device_bandwidth": 1e10,
}
SMALL = ("gpt2-tiny", "--zero-stage", 3, "--mixed-precision", "no", "--world-size", 2)


def test_a_machine_that_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its rates price the step. A processor does everything itself: a step is the sum. A GPU hides the shorter of the two."""
    path = tmp_path / "machine.json"
    found = {}
    for is_cpu in (True, False):
        path.write_text(json.dumps(MEASURED | {"shares_memory": is_cpu}))
        found[is_cpu] = simulated(capsys, *SMALL, "--machine", path)
    cpu, gpu = found[True], found[False]
    kinds = cpu["by_kind"].values()
    sent_s = sum(
        kind["collectives"] * 2e-4 + kind["bytes_sent"] / 1.5e9 for kind in kinds
    )  # a hop to the other rank each
    assert sum(kind["seconds"] for kind in kinds) == pytest.approx(sent_s)
    parts = cpu["parts_s"]
    assert cpu["step_s"] == pytest.approx(sum(parts.values()))
    assert parts["passes gather"] + parts["passes reduce"] == pytest.approx(sent_s)
    assert gpu["step_s"] == pytest.approx(max(parts["passes compute"], sent_s) + parts["step device"])


def test_hops_and_the_slowest_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four ranks on two machines: a ring for each adapter, twice for an all-reduce; replicas gather within a machine."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MEASURED | {"collective": 1e12}))
    far_s, near_s, far_rate = 14e-6, 2e-4, 12.5e9  # of Ethernet, and of the file
    machine = ("gpt2-tiny", "--mixed-precision", "no", "--world-size", 4, "--nodes", 2, "--machine", path)

    def check(kind: str, hops_s: float, rate: float, *flags: object) -> None:
        row = simulated(capsys, *machine, "--network", "ethernet", *flags)["by_kind"][kind]
        assert row["seconds"] == pytest.approx(hops_s * row["collectives"] + row["bytes_sent"] / rate), (kind, flags)

    ring_s = (2 * far_s + 2 * near_s) * 3 / 4
    for stage, kind, turns in ((3, "gather", 1), (3, "reduce", 1), (0, "reduce", 2)):
        check(kind, turns * ring_s, 2 * far_rate, "--zero-stage", stage)
    check("gather", near_s, 1e12, "--zero-stage", 3, "--zero-replicas", 2)
    check("across", far_s, far_rate, "--zero-stage", 3, "--zero-replicas", 2)


@pytest.mark.parametrize("lacking", ["latency", "collective", "device_bandwidth", "flops"])
def test_what_a_machine_lacks_is_named(lacking: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({name: value for name, value in MEASURED.items() if name != lacking}))
    assert f"has no {lacking}" in refused(capsys, "simulate", *SMALL, "--machine", path)


def test_a_speed_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"latency": -2}')
    said = refused(capsys, "simulate", "gpt2-tiny", "--machine", path)
    assert "latency must be a number that is not negative, found -2" in said
