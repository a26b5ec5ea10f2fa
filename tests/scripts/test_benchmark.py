"""`benchmarks/compare.py` and `benchmarks/offload.py` at toy size: every kind of measurement, on real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.wide
@pytest.mark.gloo
@pytest.mark.parametrize("peers", [[], pytest.param(["fsdp2"], marks=pytest.mark.wide)], ids=len)
def test_measures_engines(tmp_path: Path, peers: list[str]) -> None:
    output = tmp_path / "runs" / "benchmark.json"
    toy = [
        "--model-size",
        "tiny",
        "--device",
        "cpu",
        "--sequence",
        "16",
        "--blocks",
        "2",
        "--steps",
        "2",
        "--clip",
        "0",
    ]
    done = run("compare.py", *toy, "--engines", "zero2-sockets", *peers, "--measure", "time", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    assert record["failures"] == {}
    assert record["machine"]["versions"]["torch"]
    assert list(record["results"]) == ["ddp", "zero2-sockets", *peers]
    for engine, row in record["results"].items():
        assert engine in done.stdout
        assert row["ratio"] > 0
        assert len(row["losses"]) == 10
    # Two ranks: a full all-reduce sends 4Ψ from each; stage 2 sends as much, in two halves.
    assert record["results"]["ddp"]["sent"] == pytest.approx(1, rel=0.03)
    assert record["results"]["zero2-sockets"]["sent"] == pytest.approx(1, rel=0.03)
    assert record["results"]["zero2-sockets"]["loss_difference"] == 0
    assert record["results"]["ddp"]["collectives_by_kind"] == {"allreduce": 1}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "engine",
    ["ddp", pytest.param("zero3", marks=pytest.mark.wide)],  # ddp's launches are among those of any other engine
)
@pytest.mark.wide
def test_memory_and_calls(tmp_path: Path, engine: str) -> None:
    output = tmp_path / "benchmark.json"
    toy = ["--model-size", "tiny", "--device", "cpu", "--world-size", "1", "--sequence", "16", "--steps", "1"]
    done = run("compare.py", *toy, "--engines", engine, "--measure", "memory", "calls", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(output.read_text())["results"][engine]
    for malloc in ("pinned", "default"):
        assert 0 < row[f"memory_{malloc}"]["steady"] <= row[f"memory_{malloc}"]["peak"]
    assert 0 < row["python_calls"] <= 8_000


@pytest.mark.gloo
def test_a_failing_launch_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "benchmark.json"
    done = run("compare.py", "--engines", "ddp", "--measure", "calls", "--timeout", "0.5", "--output", str(output))
    assert done.returncode == 1
    assert "not done after" in done.stdout
    assert json.loads(output.read_text())["failures"]


def test_bad_options_end_at_once() -> None:
    done = run("compare.py", "--world-size", "0")
    assert done.returncode == 2
    assert "--world-size must be positive, got 0" in done.stderr


@pytest.mark.wide
@pytest.mark.gloo
def test_offloaded_steps(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "offload.json"
    folder = tmp_path / "disk"
    # DeepSpeed, where it is installed, would compile its operators for minutes; a GPU would be given all that fits.
    small = ["--no-peers", "--numel", "4096", "--steps", "2", "--ranks", "1", "--dtype", "bf16", "--gpu-model", "tiny"]
    small += ["--folder", str(folder)]
    done = run("offload.py", "--kinds", "step-host", "step-disk", "gpu", *small, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    assert record["failures"] == {}
    assert str(tmp_path) not in json.dumps(record)
    in_place, to_device = record["results"]["step-host"]
    for row in (in_place, to_device):
        assert row["bytes"] == 28 * row["numel"]  # gradient and parameter of 2 bytes, three states read and written
        assert set(row["ratios"]) == {"streams", "fused", "operators"}
    assert record["results"]["step-disk"][0]["bytes"] == 24 * 4096
    for rows in record["results"].values():
        assert all(len(ratios) == 2 and min(ratios) > 0 for row in rows for ratios in row["ratios"].values())
    assert list(folder.iterdir()) == []
    assert "step-disk: DeepSpeed left out, --no-peers" in record["skipped"]
    if not torch.cuda.is_available():
        assert "gpu: left out, there is no CUDA device" in record["skipped"]


@pytest.mark.gloo
@pytest.mark.wide
def test_offloaded_training(tmp_path: Path) -> None:
    output = tmp_path / "offload.json"
    small = ["--model-size", "tiny", "--steps", "1", "--ranks", "2", "--dtype", "fp32"]
    done = run("offload.py", "--kinds", "train", *small, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["results"]
    assert len(results["train"]) == 5
    assert all(row["loss_difference"] == 0 and row["tokens_per_second"] > 0 for row in results["train"])


def test_bad_offload_options_end_at_once() -> None:
    done = run("offload.py", "--ranks", "0")
    assert done.returncode == 2
    assert "--ranks must be positive, got 0" in done.stderr
