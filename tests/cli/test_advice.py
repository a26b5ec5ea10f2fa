"""What hf-zero plan recommends: settings that were tried, and that fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import hf_zero as zero
from hf_zero.cli.main import main

EIGHT = ("plan", "llama-3-8b", "--world-size", "4", "--batch", "4", "--sequence", "4096")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main([*arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out


def pasted(out: str) -> list[str]:
    """Lines to paste: flags."""
    return [line.strip() for line in out.splitlines() if line.startswith("    --zero-stage")]


def plan_flags(line: str) -> list[str]:
    """A script's flags as those of `plan`."""
    words, out = shlex.split(line), []
    renamed = {"--per-device-train-batch-size": "--batch", "--gradient-accumulation-steps": "--accumulation"}
    for word in words:
        out += ["--mixed-precision", "bf16"] if word == "--bf16" else [renamed.get(word, word)]
    return out


def test_what_is_recommended_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue's own case: Llama-8B, 4 x 4096, 24 GiB. Alone no change is enough; the line to paste is, by the planner itself."""
    status, out = run(capsys, *EIGHT, "--device-memory", "24GiB", "--host-memory", "64GiB")
    assert status == 1
    gains = [float(size) for size in re.findall(r"│ --\S.*?│ +([\d.]+) GiB │", out)]
    assert len(gains) >= 4
    assert gains == sorted(gains, reverse=True)
    assert "fits 24.00 GiB: stage 3 + gradient checkpointing" in out
    (line,) = pasted(out)
    flags = ["plan", "llama-3-8b", "--world-size", "4", "--sequence", "4096", *plan_flags(line)]
    status, out = run(capsys, *flags, "--device-memory", "24GiB", "--host-memory", "64GiB", "--json")
    assert status == 0
    assert json.loads(out)["fits"]
    assert json.loads(out)["peak_bytes"]["device"] <= 24 << 30


def test_each_gpu_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, "plan", "7B", "--mixed-precision", "bf16")
    assert status == 0
    lines = pasted(out)
    assert "24 GB: stage 3 + gradient checkpointing" in out
    assert any(re.match(r".*141 GB: stage 2", line) for line in out.splitlines())
    assert len(lines) >= 2
    assert all("--bf16" in line for line in lines)
    for plugin in re.findall(r"zero\.ZeroPlugin\(.*\)", out):
        assert eval(plugin, {"zero": zero}).config.stage in (2, 3)


def test_the_least_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """One rank fewer does not fit."""
    asked = ("plan", "7B", "--mixed-precision", "bf16", "--zero-stage", "3", "--device-memory", "12GiB")
    status, out = run(capsys, *asked, "--world-size", "4")
    assert status == 1
    (count,) = re.findall(r"(\d+) ranks \(--world-size \1\)", out)
    for ranks, wanted in ((int(count), 0), (int(count) - 1, 1)):
        status, _ = run(capsys, *asked, "--world-size", str(ranks), "--json")
        assert status == wanted


def test_one_changed_flag_gains_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*EIGHT, "--zero-stage", "3", "--json")
    _, before = run(capsys, *asked)
    _, after = run(capsys, *asked, "--gradient-checkpointing")
    gained = json.loads(before)["peak_bytes"]["device"] - json.loads(after)["peak_bytes"]["device"]
    _, out = run(capsys, *EIGHT, "--zero-stage", "3", "--device-memory", "24GiB")
    (said,) = re.findall(r"│ --gradient-checkpointing +│ +([\d.]+) GiB", out)
    assert float(said) == pytest.approx(gained / (1 << 30), rel=0.01)


def test_stages_1_and_2_are_explained_where_they_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "plan", "7B", "--world-size", "8")
    assert "stages 1 and 2 are equal here" in out
    _, out = run(capsys, "plan", "7B", "--world-size", "8", "--accumulation", "4")
    assert "are equal here" not in out


@pytest.mark.parametrize("more", [(), ("--sweep",), ("--zero-stage", "3", "--batch", "1"), ("--device-memory", "8GiB")])
def test_nothing_is_wider_than_the_terminal(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    _, out = run(capsys, "plan", "7B", "--mixed-precision", "bf16", *more)
    tables = [line for line in out.splitlines() if line and line[0] in "│┃┏├└┡"]
    assert tables
    assert all(len(line) <= 80 for line in tables)
    assert "…" not in out
    assert "0.00 GiB" not in out


def test_one_unit_system_for_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, "plan", "gpt2-tiny", "--world-size", "2")
    assert "MiB" in out.partition("What to use")[0]
    assert "0.00" not in out


def test_colour_only_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("plan", "7B", "--device-memory", "30GiB")
    _, plain = run(capsys, *asked)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, coloured = run(capsys, *asked)
    assert "\x1b[32m" in coloured
    assert "\x1b[1;31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    _, out = run(capsys, *asked)
    assert "\x1b[32m" not in out
    assert "\x1b[1;31m" not in out
