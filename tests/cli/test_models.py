"""What a model may be called on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero import ConfigError
from hf_zero.cli.models import count_of, find_model
from hf_zero.core.precision import Precision
from tests.kit.common import gpt2

FP32 = Precision.of("no", None)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9), ("1.3b", 13 * 10**8), ("350M", 350 * 10**6), ("7_000_000", 7 * 10**6), ("1,000K", 10**6),
        ("2t", 2 * 10**12), ("gpt2", None), ("-7B", None), ("0", None), ("7BB", None), ("", None),
    ],
)  # fmt: skip
def test_numbers(text: str, count: int | None) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("name", ["7B", "1.3b", "350M", "gpt2-tiny", "GPT2-XL", "llama-3-8b"])
def test_names_that_need_no_network(name: str) -> None:
    model = find_model(name, None)
    assert model.layout(FP32, 4).shards == 4
    assert len(model.layout(FP32, 1).units) > 4
    assert model.architecture is not None
    assert ("assumed" in model.source) == (count_of(name) is not None)
    assert model.layout(FP32, 4) is model.layout(FP32, 4)


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(n_layer=2, n_embd=32)
    model.save_pretrained(tmp_path / "7B")
    monkeypatch.chdir(tmp_path)
    numel = sum(param.numel() for param in model.parameters())
    for given in ("7B", "7B/config.json", "7B/model.safetensors", "./7B", str(tmp_path / "7B")):
        assert find_model(given, None).layout(FP32, 1).numel == numel, given


@pytest.mark.parametrize(
    "given",
    [
        "/nope/folder",
        "./gone",
        "~/gone",
        "here/gone",
        "a/b/c",
        "gone.json",
        "gone.safetensors",
        "with space",
        "-7B",
        "",
    ],
)
def test_the_hub_is_not_asked_for_a_path(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder or file"):
        find_model(given or "a//b/", None)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="expected a config.json"):
        find_model(str(tmp_path / "notes.txt"), None)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model can be made of its configuration"):
        find_model(str(tmp_path / "broken.json"), None)


def test_one_of_both() -> None:
    for given, parameters in ((None, None), ("7B", "7B")):
        with pytest.raises(ConfigError, match="either a model or --parameters"):
            find_model(given, parameters)
