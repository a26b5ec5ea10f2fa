"""hf-zero report and the report's text, on runs that an engine has recorded."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.cli import report as cli_report
from hf_zero.cli.main import main
from hf_zero.cli.report_page import charts_of
from hf_zero.plan.report import ChannelRow, TierRow, end, start
from tests.cli.test_hostile_input import refused
from tests.kit.common import batch, gpt2, optimizer_for

STEPS = 8


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, zero.Report]:
    """A run of one rank, state on the host, with an evaluation beside step 5."""
    folder = tmp_path_factory.mktemp("run")
    model = gpt2(n_embd=64)
    optimizer = optimizer_for(model, 1)
    config = zero.ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu")
    engine = zero.shard(model, optimizer, config, mixed_precision="bf16")
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
    """Facts and steps: without the line that says that training has ended."""
    found = [json.loads(line) for line in (folder / "zero_steps.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] in ("facts", "step")]


class Page(HTMLParser):
    """A page's text, ids, links to elsewhere, and the charts it draws."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.text = source, ""
        self.ids: list[str] = []
        self.links: list[str] = []
        self.charts: dict[str, Any] = {}
        self._inside: list[str] = []
        self.feed(source)
        self.close()
        assert self._inside == [], "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag not in ("meta", "link", "img", "br"):
            self._inside.append(f"{tag}#{given.get('id', '')}")
        self.ids += [given["id"]] if given.get("id") else []
        self.links += [given[name] or "" for name in ("src", "href") if name in given]

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop().startswith(f"{tag}#")

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "script#charts":
            self.charts = {chart["name"]: chart for chart in json.loads(data)}
        elif not inside.startswith(("script", "style")):
            self.text += data


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
    assert "\n\n\n" not in text
    assert "host, optimizer" in text
    assert f"{STEPS} steps recorded" in text
    assert re.search(r"^up +\d\.\d +\d\.\d +\d", text, re.M)
    assert report.comparison() in text
    assert "MiB per rank" not in report.comparison()
    assert json.loads(json.dumps(report.to_dict()))["steps"] == STEPS
    for row in report.tiers:
        same = [other for other in report.tiers if other.tier == row.tier and other.kind != "all"]
        if row.kind == "all":
            assert row.measured == sum(other.measured for other in same)
            assert row.predicted == sum(other.predicted for other in same)


def test_a_record_follows_no_link_and_keeps_logs_from_before_the_first_step(tmp_path: Path) -> None:
    """An evaluation may come before training; the folder may come from others."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    linked, target = tmp_path / "linked", tmp_path / "target"
    linked.mkdir()
    target.write_text("kept")
    (linked / "zero_steps.jsonl").symlink_to(target)
    with pytest.raises(zero.ConfigError, match="cannot be written on rank 0"):
        engine.record(linked)
    assert target.read_text() == "kept"
    recorder = engine.record(tmp_path / "out")
    recorder.log({"eval_loss": 1.5})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    recorder.close()
    found = [json.loads(line) for line in (tmp_path / "out" / "zero_steps.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in found] == ["facts", "log", "step", "end"]
    assert found[1]["values"] == {"eval_loss": 1.5}


def test_lines_before_and_after_training(recorded: tuple[Path, zero.Report]) -> None:
    """By hand: what fits, what was taken against the plan, what was waited for."""
    mib = 1 << 20
    roads = (
        ChannelRow("gather", mib, None, 0.1),
        ChannelRow("reduce", 2 * mib, None, 0.3),
        ChannelRow("up", 4 * mib, None, 0.0),
    )
    row = TierRow("device", "all", 0, 0, 100 * mib, 150 * mib)
    report = dataclasses.replace(recorded[1], tiers=(row,), roads=roads, step_s=2.0, predicted_step_s=0.25)
    text = str(report)
    assert re.search(r"^reduce +2\.0 +300\.0$", text, re.M)
    assert "2,000.0 ms each (predicted 250.0 ms)" in text
    for limit, words in ((50, "50.00 MiB budget, 200.0% DOES NOT FIT"), (200, "200.00 MiB budget, 50.0%")):
        begun = start(report, "Model", {"device": (limit * mib, "budget")}, {}).splitlines()
        assert begun[-1].split(maxsplit=1) == ["device", f"100.00 MiB of {words}"]
        assert "  sent      3.00 MiB per step and rank" in begun
    ended = end(report, 3, 3723.4, (0.0, 1234.5), None, None)
    assert "3 steps in 1 h 02 min, 2 s each (median), 1,234 tokens/s" in ended
    assert "150.00 MiB counted at peak, planned 100.00 MiB (+50.0%)" in ended
    assert "20% of a step, most for reduce (15%)" in ended


def test_json(recorded: tuple[Path, zero.Report], capsys: pytest.CaptureFixture[str]) -> None:
    folder, report = recorded
    out = shown(folder, capsys)
    assert (out["steps"], out["first_step"], out["last_step"]) == (STEPS, 1, STEPS)
    assert out["facts"]["config"]["offload_optimizer"] == "cpu"
    peaks = {(row["tier"], row["kind"]): row for row in out["memory"]}
    for row in report.tiers:
        assert peaks[row.tier, row.kind]["counted"] == row.measured_peak
        assert peaks[row.tier, row.kind]["predicted"] == row.predicted_peak
    moved = {row["road"]: row["counted"] for row in out["traffic"]}
    assert moved == {row.road: row.measured_bytes for row in report.roads if row.road != "optimizer"}
    (rank,) = out["ranks"]
    assert sum(rank["parts_s"].values()) == pytest.approx(rank["step_s"], rel=0.5)
    assert out["notes"] == []
    assert out["state"] == "ended"
    text = f"after step {STEPS}; memory within the plan"
    assert out["verdict"][-1] == {"topic": "Verdict", "ok": True, "value": "Finished", "text": text}


def test_tables(
    recorded: tuple[Path, zero.Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder, _ = recorded
    assert main(["report", str(folder / "zero_steps.jsonl")]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "stage 3 on 1 rank, optimizer state on cpu",
        "ok Verdict: Finished",
        "Peak memory of rank 0",
        "host, optimizer state",
        "per step (median)",
        "Time of a step",
    ):
        assert words in text


def test_a_page(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    folder, _ = recorded
    assert main(["report", str(folder), "--html", str(tmp_path / "a.html")]) == 0
    page = Page((tmp_path / "a.html").read_text())
    assert "host, optimizer state" in page.text
    for words in ("Tokens/s", "Peak memory", "memory within the plan", "Finished", "Time of a step"):
        assert words in page.text
    assert re.search("<title>.*at stage 3 on 1 rank, optimizer state on cpu.*</title>", page.source)
    assert page.links == [], "the page needs no other file"
    assert 'name="viewport"' in page.source
    assert "prefers-color-scheme: dark" in page.source
    assert [name for name in page.charts if name not in page.ids] == []
    assert {"speed", "memory-device", "memory-host", "process"} <= page.charts.keys()
    steps = page.charts["memory-host"]["lines"][0]
    counted = [line["peak"]["host"]["all"] for line in lines(recorded[0]) if line["kind"] == "step"]
    scale = counted[0] / steps["y"][0]
    assert steps["y"] == pytest.approx([value / scale for value in counted])
    assert steps["x"] == list(range(1, STEPS + 1))


def test_a_page_or_a_picture_needs_an_extra(
    recorded: tuple[Path, zero.Report],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module, flag, extra in (("matplotlib.figure", "png", "plot"), ("plotly.offline", "html", "report")):
        monkeypatch.setitem(sys.modules, module, None)  # what Python itself takes for "not to be found"
        assert main(["report", str(recorded[0]), f"--{flag}", str(tmp_path / f"a.{flag}")]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err == f"hf-zero: {module.partition('.')[0]} is not installed: pip install 'hf-zero[{extra}]'\n"


def test_damaged_lines_are_passed_over(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (recorded[0] / "zero_steps.jsonl").read_text().splitlines()
    texts = [*whole[:3], '{"kind": "step", "step"', "[1, 2]", *whole[3:], whole[-1][:50]]
    (tmp_path / "zero_steps.jsonl").write_bytes("\n".join(texts).encode() + b"\n\xff\xfe")
    out = shown(tmp_path, capsys)
    assert out["steps"] == STEPS
    assert out["notes"] == ["zero_steps.jsonl: skipped 4 damaged lines"]


def test_the_last_start_is_shown(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = lines(recorded[0])
    out = shown(write(tmp_path, [*records, *records[:4]]), capsys)
    assert out["steps"] == 3
    assert out["notes"] == ["zero_steps.jsonl: the last of 2 starts of training"]


def test_ranks(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(recorded[0])
    write(tmp_path, [{**records[0], "world_size": 11}, *records[1:]])
    for rank in (12, 10, 2):
        write(tmp_path, [{**records[0], "rank": rank}, *records[1:]], f"zero_steps.rank{rank}.jsonl")
    out = shown(tmp_path, capsys)
    assert [row["rank"] for row in out["ranks"]] == [0, 2, 10]
    assert out["notes"][0] == "left out rank 12: written by an earlier run with more ranks"
    assert main(["report", str(tmp_path)]) == 0
    assert re.search(r"│ 10 +│", capsys.readouterr().out)


def test_a_run_that_is_pushed(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    (tmp_path / "_zero").mkdir()
    write(tmp_path / "_zero", lines(recorded[0]))
    assert len(cli_report.read_all(tmp_path)[0].steps) == STEPS


def test_warnings(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, *steps = lines(recorded[0])
    for step in steps:
        step["seconds"], step["wait_s"]["optimizer"], step["wait_s"]["read"] = 2.0, 1.0, 0.3
        step["peak"]["host"]["optimizer"] += 64 << 20
        step["peak"]["host"]["all"] += 64 << 20
    out = shown(write(tmp_path, [facts, *steps]), capsys)
    memory, wait = out["warnings"]
    assert memory.startswith("host memory is above the plan: ")
    assert "Most of the difference: optimizer state (" in memory
    assert wait.startswith("50% of a step waits for: optimizer step of offloaded state. What helps: ")
    assert (out["verdict"][-1]["ok"], out["verdict"][-1]["value"]) == (False, "Check")
    assert "host memory above the plan" in out["verdict"][-1]["text"]


def test_less_than_planned_is_no_warning(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, *steps = lines(recorded[0])
    facts["predicted"]["peak"]["host"]["optimizer"] += 64 << 20
    facts["predicted"]["peak_bytes"]["host"] += 64 << 20
    for step in steps:
        step["seconds"] = 10.0
    out = shown(write(tmp_path, [facts, *steps]), capsys)
    assert out["warnings"] == []
    assert all(said["ok"] is not False for said in out["verdict"])


@pytest.mark.parametrize("case", ["absent", "empty", "no facts", "later"])
def test_no_run(
    case: str, recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, *steps = lines(recorded[0])
    folder, words = {
        "absent": (tmp_path / "nothing", "no such folder"),
        "empty": (tmp_path, "Train with ZeroCallback"),
        "no facts": (tmp_path, "no whole step"),
        "later": (tmp_path, "in another format"),
    }[case]
    content = {"no facts": steps, "later": [{**facts, "format": 99}, *steps]}.get(case)
    if content is not None:
        write(tmp_path, content)
    assert words in refused(capsys, "report", folder)


def test_masters_count_as_optimizer_state() -> None:
    model = gpt2()
    engine = zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=2), mixed_precision="bf16")
    report = engine.report()
    masters = sum(
        span.layout.slice_numel * 4
        for unit in engine.units
        for span in unit.spans
        if span.compute_dtype != span.master_dtype
    )
    assert masters > 0
    assert report.measured["optimizer"] == masters  # before the first step there is nothing else
    assert report.measured["parameters"] == report.predicted["parameters"]


def test_a_run_in_progress(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose other rank has not come to its first step; then of one where no rank has."""
    records = lines(recorded[0])
    facts = {**records[0], "world_size": 2, "about": {"max_steps": 50}}
    write(tmp_path, [facts, *records[1:4]])
    (tmp_path / "zero_steps.rank1.jsonl").write_text("")
    out = shown(tmp_path, capsys)
    assert (out["state"], out["steps"], out["max_steps"]) == ("not ended", 3, 50)
    assert out["verdict"][-1]["text"].startswith("in progress or killed: step 3 of 50, last written ")
    assert out["notes"] == ["rank 1: its first step is not over yet"]
    assert [row["rank"] for row in out["ranks"]] == [0]
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "a.html")]) == 0
    assert "step 3 of 50" in Page((tmp_path / "a.html").read_text()).text
    capsys.readouterr()

    (tmp_path / "zero_steps.jsonl").write_text("")
    out = shown(tmp_path, capsys)
    assert (out["state"], out["steps"]) == ("not ended", 0)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "b.html")]) == 0
    said = capsys.readouterr()
    assert "the first step is not over yet" in said.out
    assert "nothing to draw yet" in said.err
    assert not (tmp_path / "b.html").exists()


def test_throughput(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all ranks: added up where their files are here, as much again for each that is not."""
    facts, *steps = lines(recorded[0])
    rows, columns = batch(0, 0, 0).shape
    assert [(step["samples"], step["tokens"]) for step in steps] == [(rows, rows * columns)] * STEPS
    for step in steps:
        step["seconds"] = 2.0
    write(tmp_path, [{**facts, "world_size": 4}, *steps])
    write(tmp_path, [{**facts, "world_size": 4, "rank": 1}, *steps], "zero_steps.rank1.jsonl")
    rate = shown(tmp_path, capsys)["throughput"]
    assert rate == {"is_estimate": True, "samples_per_s": 2.0 * rows, "tokens_per_s": 2.0 * rows * columns}
    assert {*speed_in(tmp_path)["y"]} == {2.0 * rows * columns}
    (tmp_path / "zero_steps.rank1.jsonl").unlink()
    drawn = speed_in(write(tmp_path, [facts, *({**steps[0], "step": step} for step in range(1, 3201))]))["x"]
    assert drawn == [*range(1, 3201, 3)], "every third, to the end"


def speed_in(folder: Path) -> dict[str, Any]:
    runs = cli_report.read_all(folder)
    charts = {chart["name"]: chart for chart in charts_of(runs, cli_report.summary(runs))}
    found: dict[str, Any] = charts["speed"]["lines"][0]
    return found


def test_equal_ranks_are_seen(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    """Both of memory's charts draw equal ranks on top of each other: the first line is wider than the second."""
    facts, *steps = lines(recorded[0])
    write(tmp_path, [{**facts, "world_size": 2}, *steps])
    write(tmp_path, [{**facts, "world_size": 2, "rank": 1}, *steps], "zero_steps.rank1.jsonl")
    runs = cli_report.read_all(tmp_path)
    charts = {chart["name"]: chart for chart in charts_of(runs, cli_report.summary(runs))}
    for name in ("memory-device", "process"):
        wide, narrow = (line["width"] for line in charts[name]["lines"] if line["dash"] == "solid")
        assert wide > narrow, name


def test_parts_of_a_usual_step(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is neither waited nor between steps is computing. A step of more micro-batches than others is not usual."""
    facts, first, second, *_ = lines(recorded[0])
    waits = {**dict.fromkeys(second["wait_s"], 0.0), "read": 0.25}
    usual = {**second, "seconds": 1.0, "between_s": 0.5, "wait_s": waits}
    longer = {**usual, "forwards": usual["forwards"] + 1, "seconds": 9.0}
    (rank,) = shown(write(tmp_path, [facts, first, usual, longer]), capsys)["ranks"]
    assert rank["step_s"] == 1.0
    assert {part: s for part, s in rank["parts_s"].items() if s} == {"compute": 0.25, "read": 0.25, "between": 0.5}


def test_hostile_names_and_losses(
    recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, *steps = lines(recorded[0])
    facts["about"] = {"model": "</script><b>"}
    steps.insert(1, {"kind": "log", "step": 1, "values": {"loss": 3.0, "grad_norm": float("nan")}})
    steps.append({"kind": "log", "step": STEPS, "values": {"loss": float("nan")}})
    run = write(tmp_path, [facts, *steps])
    assert shown(run, capsys)["verdict"][0]["ok"] is False, "a loss that is no number"
    assert main(["report", str(run), "--html", str(tmp_path / "a.html")]) == 0
    assert f"Written to {tmp_path / 'a.html'}" in capsys.readouterr().out
    page = Page((tmp_path / "a.html").read_text())
    assert "</script><b>" in page.text, "names are text, whatever they are"
    assert page.charts["loss"]["lines"][0]["y"] == [3.0, None]


def test_two_runs(recorded: tuple[Path, zero.Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, *steps = lines(recorded[0])
    for step in steps:
        step["seconds"] *= 2
    (tmp_path / "<script><b>").mkdir(parents=True)
    other = write(tmp_path / "<script><b>", [facts, *steps])
    assert main(["report", str(recorded[0]), str(other), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    by_name = {row["what"]: row for row in out["differences"]}
    assert by_name["time per step (median)"]["change"] == pytest.approx(1.0)
    assert by_name["stage"]["values"] == [3, 3]
    assert len(out["runs"]) == 2
    assert main(["report", str(recorded[0]), str(other)]) == 0
    assert "Comparison" in capsys.readouterr().out
    assert "shows one run, found two" in refused(capsys, "report", recorded[0], other, "--html", tmp_path / "a.html")


@pytest.mark.parametrize(
    ("change", "gone", "kept"),
    [
        ({"parameters": 7}, ("host memory, highest rank", "tokens/s"), "stage"),
        (
            {"machine": {"device": "cuda:0", "cores": 2}},
            ("time per step (median)", "tokens/s"),
            "host memory, highest rank",
        ),
        ({"world_size": 4}, ("time per step (median)",), "tokens/s"),
    ],
)
def test_runs_are_compared_only_on_what_can_be_compared(
    change: dict[str, Any],
    gone: tuple[str, ...],
    kept: str,
    recorded: tuple[Path, zero.Report],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts, *steps = lines(recorded[0])
    other = write(tmp_path, [{**facts, **change}, *steps])
    assert main(["report", str(recorded[0]), str(other), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    names = {row["what"] for row in out["differences"]}
    assert kept in names
    assert not names & set(gone)
    assert len(out["not_compared"]) == 1


def test_a_picture(recorded: tuple[Path, zero.Report], tmp_path: Path) -> None:
    assert main(["report", str(recorded[0]), "--png", str(tmp_path / "a.png")]) == 0
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


@pytest.mark.parametrize(
    "words", [["--html", "/nope/a.html"], ["--png", "/nope/a.png"], ["--png", "a.gif"], ["--no-such-flag"], ["/nope"]]
)
def test_what_was_typed_cannot_be(
    words: list[str], recorded: tuple[Path, zero.Report], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, "report", recorded[0], *words)
