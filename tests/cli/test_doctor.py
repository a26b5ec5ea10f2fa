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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


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
    assert checks["measured speeds"]["verdict"] == "note"


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert all(len(line) <= 80 for line in lines)


def test_a_folder_that_is_missing_or_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, checks = doctor(capsys, "--offload-dir", str(tmp_path / "typo"))
    assert status == 1
    assert checks["disk tier"]["advice"] == "no such folder"
    assert not (tmp_path / "typo").exists()
    if file_system("/dev/shm") in MEMORY_FILE_SYSTEMS:
        status, checks = doctor(capsys, "--offload-dir", "/dev/shm")
        assert status == 1
        assert "is memory" in checks["disk tier"]["advice"]
