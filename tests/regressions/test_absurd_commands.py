"""Commands with input that cannot be meant: one line, exit status 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hf_zero.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    assert main([str(each) for each in arguments]) == status
    said = capsys.readouterr().err
    assert said.startswith("hf-zero: ")
    assert said.count("\n") == 1
    assert "not expected" not in said
    assert said[:-1].isprintable()
    assert len(said) < 1000
    return said


@pytest.mark.parametrize("size", ["8", "1", "1.5", "999"])
def test_a_number_without_its_unit(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"Did you mean {size}B?" in refused(capsys, "plan", size)


@pytest.mark.parametrize("size", ["9999999B", "1000T", "999999999999999999"])
def test_a_model_larger_than_any(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is more than 100,000,000,000,000 parameters" in refused(capsys, "plan", size)


@pytest.mark.parametrize("size", ["0", "NaN", "inf", "1e9", "7GB", "7Q", "+7B", "0x10", "B", "7b7", "7B\x1b[2J"])
def test_numbers_that_are_not_sizes_are_not_looked_for_on_the_hub(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a size" in refused(capsys, "plan", size)


def test_a_long_name(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "simulate", "verify", "report", "migrate"):
        refused(capsys, command, "a" * 5000)
        refused(capsys, command, "a" * 300)
    refused(capsys, "plan", "9" * 400 + "B")


HUGE = ["1000000000000", "99999999999999999999999"]


FLAGS = ["world-size", "accumulation", "batch", "sequence", "zero-replicas"]


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    ("command", "flag"),
    [*(("plan", flag) for flag in FLAGS), *(("simulate", flag) for flag in (*FLAGS, "nodes"))],
)
def test_numbers_that_take_all_memory(command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "7B" if command == "plan" else "gpt2-tiny"
    assert f"Invalid value for '--{flag}'" in refused(capsys, command, model, f"--{flag}", value)


def test_a_world_of_a_billion_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan", "7B"], ["plan", "7B", "--zero-stage", "3"], ["simulate", "gpt2-tiny"]):
        assert "'--world-size'" in refused(capsys, *arguments, "--world-size", 10**9)
    assert "divide" in refused(capsys, "plan", "7B", "--zero-replicas", "3")


@pytest.mark.parametrize("flag", ["device-memory", "host-memory", "disk-space"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "9" * 400, "24XB", ""])
def test_memory_of_no_machine(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--{flag}" in refused(capsys, "plan", "7B", f"--{flag}", value)


def test_null_characters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (
        ["plan", "\0"],
        ["plan", "7B", "--machine", "\0"],
        ["simulate", "\0"],
        ["verify", "\0"],
        ["export", tmp_path, "--output", "\0"],
        ["report", "\0"],
        ["migrate", "\0"],
        ["doctor", "--offload-dir", "\0"],
    ):
        assert "null character" in refused(capsys, *arguments)


CONTENTS = {"empty": b"", "latin": b"\xff\xfe\x00{", "deep": b'{"a":' * 100_000, "list": b"[1]", "null": b"null"}


@pytest.mark.parametrize("content", CONTENTS)
def test_files_of_nothing(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, commands in {
        "config.json": ("plan", "simulate"),
        "adapter_config.json": ("plan", "simulate"),
        "zero_steps.jsonl": ("report",),
    }.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(CONTENTS[content])
        for command in commands if (name, content) != ("zero_steps.jsonl", "empty") else ():  # a run in its first step
            refused(capsys, command, folder)
    path = tmp_path / "settings.json"
    path.write_bytes(CONTENTS[content])
    refused(capsys, "migrate", path)
    refused(capsys, "plan", "7B", "--machine", path)
    (tmp_path / "zero_manifest.json").write_bytes(CONTENTS[content])
    refused(capsys, "verify", tmp_path, status=1)
    refused(capsys, "export", tmp_path, "--output", tmp_path.parent / "exported", status=1)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "zero_steps.jsonl", "zero_manifest.json"])
def test_folders_in_place_of_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).mkdir()
    refused(capsys, "plan", tmp_path)
    refused(capsys, "simulate", tmp_path)
    refused(capsys, "report", tmp_path)
    refused(capsys, "migrate", tmp_path)
    refused(capsys, "verify", tmp_path, status=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0)
    refused(capsys, "plan", tmp_path)
    refused(capsys, "migrate", tmp_path / "config.json")


def test_an_adapter_of_a_known_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, least in (("gpt2", 10**8), ("openai-community/gpt2", 10**8), ("gpt2-tiny", 10**6)):
        folder = adapter(tmp_path / name.replace("/", "-"), base_model_name_or_path=name)
        assert main(["plan", str(folder), "--zero-stage", "2", "--world-size", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["parameters"] > least


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"base_model_name_or_path": "/gone/base"}, "'/gone/base'"),
        ({"base_model_name_or_path": ".."}, "is missing"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": 7}, "names no base model"),
        ({"base_model_name_or_path": "gpt2", "target_modules": ["q_proj"]}, "'gpt2'"),
        ({"base_model_name_or_path": "gpt2", "r": -1}, "'gpt2'"),
    ],
    ids=str,
)
def test_adapters_that_cannot_be_planned(
    settings: dict[str, object], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapter(tmp_path / "adapter", **settings)
    assert part in refused(capsys, "plan", folder)


def adapter(folder: Path, **settings: object) -> Path:
    folder.mkdir()
    values = {"peft_type": "LORA", "r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder
