"""hf-zero report and the report's text, on runs that an engine has recorded."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.cli import report as cli_report
from hf_zero.cli.main import main
from tests.kit.common import batch, gpt2, optimizer_for

STEPS = 8


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, zero.Report]:
    """A run of one rank, state on the host, with an evaluation beside step 5."""
    folder = tmp_path_factory.mktemp("run")
    model = gpt2(n_embd=64)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, offload_optimizer="cpu"), mixed_precision="bf16")
    recorder = engine.record(folder)
    for step in range(STEPS):
        ids = batch(step, 0, 0)
        if step == 4:
            with torch.no_grad():
                model(input_ids=ids)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = engine.report()
    recorder.close()
    return folder, report


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "zero_steps.jsonl").read_text().splitlines()]


def write(folder: Path, records: list[dict[str, Any]], name: str = "zero_steps.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(folder), "--json"]) == 0
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_text_of_a_report(recorded: tuple[Path, zero.Report]) -> None:
    _, report = recorded
    text = str(report)
    assert text.count("MiB per rank") == 1
    assert "host, optimizer" in text
    assert f"{STEPS} steps recorded" in text
    assert re.search(r"^down +0\.\d +0\.\d +\d", text, re.M)
    assert report.comparison() in text
    assert "MiB per rank" not in report.comparison()
    assert json.loads(json.dumps(report.to_dict()))["steps"] == STEPS
    for row in report.tiers:
        same = [other for other in report.tiers if other.tier == row.tier and other.kind != "all"]
        if row.kind == "all":
            assert row.measured == sum(other.measured for other in same)
            assert row.predicted == sum(other.predicted for other in same)


def test_json(recorded: tuple[Path, zero.Report], capsys: pytest.CaptureFixture[str]) -> None:
    folder, report = recorded
    out = shown(folder, capsys)
    assert (out["steps"], out["first_step"], out["last_step"]) == (STEPS, 1, STEPS)
    assert out["facts"]["config"]["offload_optimizer"] == "cpu"
    peaks = {(row["tier"], row["kind"]): row for row in out["memory"]}
    for row in report.tiers:
        assert peaks[row.tier, row.kind]["measured"] == row.measured_peak
        assert peaks[row.tier, row.kind]["predicted"] == row.predicted_peak
    moved = {row["road"]: row["measured"] for row in out["traffic"]}
    assert moved == {row.road: row.measured_bytes for row in report.roads if row.road != "optimizer"}
    time = out["time"]
    assert time["rest_s"] + time["between_s"] + sum(time["wait_s"].values()) == pytest.approx(time["step_s"], rel=0.5)
    slowest = sorted((record["seconds"] for record in lines(folder)[1:]), reverse=True)[:5]
    assert [row["seconds"] for row in out["slowest"]] == slowest
    assert out["notes"] == []


def test_tables(recorded: tuple[Path, zero.Report], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = recorded
    assert main(["report", str(folder / "zero_steps.jsonl")]) == 0
    text = capsys.readouterr().out
    for words in ("stage 3 on 1 rank", "memory at its peak", "host, optimizer", "per step (median)", "slowest steps"):
        assert words in text


def test_pictures(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    folder, _ = recorded
    assert main(["report", str(folder), "--png", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html")]) == 0
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000
    page = (tmp_path / "a.html").read_text()
    assert "data:image/png;base64," in page
    assert "host, optimizer" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page needs no other file"


def test_pictures_need_an_extra(
    recorded: tuple[Path, zero.Report],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what Python itself takes for "not to be found"
    assert main(["report", str(recorded[0]), "--png", str(tmp_path / "a.png")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hf-zero: matplotlib is not installed: pip install 'hf-zero[plot]'\n"


def test_damaged_lines_are_passed_over(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (recorded[0] / "zero_steps.jsonl").read_text().splitlines()
    texts = [*whole[:3], '{"kind": "step", "step"', "[1, 2]", '{"kind": "step"}', *whole[3:], whole[-1][:50]]
    (tmp_path / "zero_steps.jsonl").write_bytes("\n".join(texts).encode() + b"\n\xff\xfe")
    out = shown(tmp_path, capsys)
    assert out["steps"] == STEPS
    assert out["notes"] == ["zero_steps.jsonl: 5 damaged lines passed over"]


def test_the_last_start_is_shown(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = lines(recorded[0])
    out = shown(write(tmp_path, [*records, *records[:4]]), capsys)
    assert out["steps"] == 3
    assert out["notes"] == ["zero_steps.jsonl: the last of 2 starts of training"]


def test_ranks(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(recorded[0])
    write(tmp_path, records)
    for rank in (10, 2):
        write(tmp_path, [{**records[0], "rank": rank}, *records[1:]], f"zero_steps.rank{rank}.jsonl")
    out = shown(tmp_path, capsys)
    assert [row["rank"] for row in out["ranks"]] == [0, 2, 10]
    assert main(["report", str(tmp_path)]) == 0
    assert re.search(r"│ 10 +│", capsys.readouterr().out)


def test_a_run_that_is_pushed(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    (tmp_path / "_zero").mkdir()
    write(tmp_path / "_zero", lines(recorded[0]))
    assert len(cli_report.read_all(tmp_path)[0].steps) == STEPS


def test_warnings(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, *steps = lines(recorded[0])
    facts["predicted"]["peak"]["host"]["optimizer"] += 64 << 20
    facts["predicted"]["peak_bytes"]["host"] += 64 << 20
    facts["predicted"]["traffic"]["down"] = 50 << 20
    facts["predicted"]["step_s"] = 1.0
    for step in steps:
        step["seconds"], step["wait_s"]["optimizer"], step["wait_s"]["read"] = 2.0, 1.0, 0.3
    out = shown(write(tmp_path, [facts, *steps]), capsys)
    memory, down, seconds, wait = out["warnings"]
    assert re.match(r"host memory at peak: .* predicted .* \(-\d+%\), most of it in optimizer", memory)
    assert down.startswith("down: ")
    assert "2.000 s, predicted 1.000 s (+100%)" in seconds
    assert wait.startswith("50% of the step is waiting for the step over offloaded state. What helps: ")


def test_no_warnings_where_all_is_as_predicted(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, *steps = lines(recorded[0])
    facts["predicted"]["peak"]["host"]["staging"] = steps[-1]["peak"]["host"]["staging"]
    for step in steps:
        step["seconds"] = 10.0
    assert shown(write(tmp_path, [facts, *steps]), capsys)["warnings"] == []


@pytest.mark.parametrize("case", ["absent", "empty", "no steps", "no facts", "later"])
def test_no_run(
    case: str, recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, *steps = lines(recorded[0])
    folder, words = {
        "absent": (tmp_path / "nothing", "no such folder"),
        "empty": (tmp_path, "train with ZeroCallback"),
        "no steps": (tmp_path, "no whole step"),
        "no facts": (tmp_path, "no whole step"),
        "later": (tmp_path, "in another format"),
    }[case]
    content = {"no steps": [facts], "no facts": steps, "later": [{**facts, "format": 99}, *steps]}.get(case)
    if content is not None:
        write(tmp_path, content)
    assert main(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_masters_count_as_optimizer_state() -> None:
    model = gpt2()
    engine = zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=2), mixed_precision="bf16")
    report = engine.report()
    masters = sum(
        flat.span.slice_numel * 4
        for unit in engine.units
        for flat in unit.flats
        if flat.compute_dtype != flat.master_dtype
    )
    assert masters > 0
    assert report.measured["optimizer"] == masters  # before the first step there is nothing else
    assert report.measured["parameters"] == report.predicted.parameters
