"""hf-zero doctor: on this machine as it is, and with what would get in the way."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from hf_zero.cli.main import main
from hf_zero.tiers.disk import MEMORY_FILE_SYSTEMS, file_system


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own, and a folder that accelerate finds from the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/hf")
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "hf"


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = main(["doctor", "--json", *arguments])
    values = json.loads(capsys.readouterr().out)
    assert status == (0 if values["well"] else 1)
    return status, {check["what"]: check for check in values["checks"]}


def test_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, checks = doctor(capsys, "--offload-dir", str(tmp_path))
    for package in ("torch", "transformers", "accelerate"):
        assert checks[package]["found"].startswith(importlib.metadata.version(package))
        assert checks[package]["verdict"] == "ok"
    assert file_system(tmp_path) in checks["disk tier"]["found"]
    assert checks["accelerate launch"]["verdict"] == "ok"
    assert checks["measured speeds"]["verdict"] == "note"


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(("kind", "engine"), [("DEEPSPEED", "DeepSpeed"), ("FSDP", "FSDP")])
def test_another_engine_is_configured(kind: str, engine: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "accelerate").mkdir(parents=True)
    path = home / "accelerate" / "default_config.yaml"
    path.write_text(f"distributed_type: {kind}\nnum_processes: 2\n")
    status, checks = doctor(capsys)
    assert status == 1
    assert engine in checks["accelerate launch"]["found"]
    assert f"hf-zero migrate {path}" in checks["accelerate launch"]["advice"]


def test_a_launcher_alone_is_well(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    _, checks = doctor(capsys)
    assert checks["accelerate launch"]["verdict"] == "ok"
    assert "MULTI_GPU, 2 processes" in checks["accelerate launch"]["found"]


def test_an_environment_for_another_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    status, checks = doctor(capsys)
    assert status == 1
    assert "ACCELERATE_USE_FSDP" in checks["environment"]["found"]


def test_a_folder_that_is_missing_or_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, checks = doctor(capsys, "--offload-dir", str(tmp_path / "typo"))
    assert status == 1
    assert checks["disk tier"]["advice"] == "no such folder"
    assert not (tmp_path / "typo").exists()
    if file_system("/dev/shm") in MEMORY_FILE_SYSTEMS:
        status, checks = doctor(capsys, "--offload-dir", "/dev/shm")
        assert status == 1
        assert "is memory" in checks["disk tier"]["advice"]
