"""The command line itself: help without torch, exit statuses, one-line errors in the words that were typed, completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from hf_zero.cli import USAGE, WRONG
from hf_zero.cli.main import app, main
from hf_zero.cli.show import as_command, short_size

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("plan", "probe", "simulate", "verify", "export", "report", "migrate", "doctor")
LIGHT = """
import sys, time
from hf_zero.cli.main import app, main
status = main(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "rich", "transformers", "accelerate", "scipy") if name in sys.modules]
print("LOADED", status, time.process_time(), *heavy)
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment},
    )


def light(*arguments: str) -> str:
    """Return what a command prints that must load nothing heavy."""
    ended = python("-c", LIGHT, *arguments)
    printed, _, found = ended.stdout.rpartition("LOADED")
    status, spent_s, *heavy = found.split()
    assert status == "0", ended.stderr
    assert heavy == []
    assert float(spent_s) < 0.5  # of a processor, not of time: the machine's load does not matter
    assert all(len(line) <= 100 for line in printed.splitlines())
    return printed


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_help_loads_no_torch(argument: str) -> None:
    light(argument)


def test_no_line_of_the_help_is_cut() -> None:
    assert "..." not in light("--help").partition("Commands:")[2]


def test_it_runs_as_a_module() -> None:
    ended = python("-m", "hf_zero", "--version")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", ended.stdout)


def test_a_shell_completes_commands_and_choices() -> None:
    typed_so_far = {"COMP_WORDS": "hf-zero pl", "COMP_CWORD": "1"}
    ended = python("-c", "from hf_zero.cli.main import main\nmain()", _HF_ZERO_COMPLETE="complete_bash", **typed_so_far)
    assert ended.stdout.split() == ["plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_accepted(command: str) -> None:
    """The command parses each to the end; the help loads no torch."""
    group: Any = typer.main.get_command(app)
    shown = [
        line.strip() for line in light(command, "--help").splitlines() if re.match(r"  +(hf-zero|torchrun) ", line)
    ]
    assert shown
    for words in map(shlex.split, shown):
        try:
            group.commands[command].make_context(command, words[words.index(command) + 1 :])
        except typer.BadParameter as error:
            if "does not exist" not in str(error):  # the folder of the example
                raise


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(list(arguments))
    return status, capsys.readouterr().err


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({"a": torch.zeros(3)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_statuses_and_one_line(capsys: pytest.CaptureFixture[str], model_folder: Path, tmp_path: Path) -> None:
    """docs/commands.md says so. What was typed cannot be: 2. Looked, and something is wrong: 1."""
    table = (tmp_path / "table.csv").write_text("a,b\n") and str(tmp_path / "table.csv")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("x")
    for arguments, status, words in (
        (("verify", str(tmp_path / "gone")), USAGE, "does not exist"),
        (("verify", table), USAGE, "table.csv' is a file"),
        (("verify", str(model_folder)), WRONG, "is a model folder without zero_manifest.json"),
        (("export", str(model_folder)), USAGE, "--push-to-hub"),
        (("export", str(tmp_path / "gone"), "--output", str(tmp_path / "out")), USAGE, "does not exist"),
        (("export", str(model_folder), "--output", table), USAGE, "table.csv is a file, expected a folder"),
        (("export", str(model_folder), "--output", str(full)), USAGE, "or --overwrite"),
        (("report", str(tmp_path)), USAGE, "zero_steps"),
        (("probe", "--offload-dir", str(tmp_path / "typo")), USAGE, "does not exist"),
        (("migrate", str(tmp_path / "gone.json")), USAGE, "is missing"),
    ):
        found, text = said(capsys, *arguments)
        assert (found, text.count("\n")) == (status, 1), (arguments, text)
        assert words in text, (arguments, text)
        assert "Errno" not in text
        assert "=True" not in text
    assert not (tmp_path / "typo").exists()  # a probe makes no folder


def test_a_traceback_only_with_debug(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, text = said(capsys, "verify", str(tmp_path / "gone"))
    assert "Traceback" not in text
    status, text = said(capsys, "verify", str(tmp_path / "gone"), "--debug")
    assert status == USAGE
    assert "Traceback" in text
    assert text.splitlines()[-1].startswith("hf-zero: Invalid value for 'DIR': dir")


def test_an_export_as_json(capsys: pytest.CaptureFixture[str], model_folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(model_folder), "--output", str(tmp_path / "out"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["output"] == str(tmp_path / "out")
    assert "nothing vouches" in values["notes"][0]


def test_a_verification_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(ROOT / "tests/kit/golden/adamw_bf16/whole"), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["whole"]
    assert values["files"] > 1
    assert values["facts"]["world_size"] >= 1


def test_sizes_and_commands_that_are_shown() -> None:
    sizes = (1.234, 12.34, 123.4, 0)
    assert [short_size(size * 2**30) for size in sizes] == ["1.23 GiB", "12.3 GiB", "123 GiB", "0"]
    for ranks, launched in ((None, "RANKS"), (4, "4"), (12, "12"), (8, "8")):
        assert as_command(ranks, {}, {}) == f"torchrun --nproc-per-node {launched} train.py --output-dir out"
    for ranks, machines, launched in ((16, 4, "--nnodes 4"), (8, 2, "--nnodes 2"), (16, 1, "--nproc-per-node 16 ")):
        assert launched in as_command(ranks, {}, {}, machines)
    assert as_command(24, {"stage": 3}, {"bf16": True, "fp16": False}) == (
        "torchrun --nnodes 3 --node-rank NODE --master-addr HOST --master-port 29500 --nproc-per-node 8 "
        "train.py --output-dir out --zero-stage 3 --bf16"
    )
