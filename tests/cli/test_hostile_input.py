"""Commands on files that somebody else made, and with words that cannot be meant: one line, the right exit status, an end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hf_zero as zero
from hf_zero import ConfigError
from hf_zero.cli.files import read_settings
from hf_zero.cli.main import main
from hf_zero.cli.migrate import migrate

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join(['*a' if n == 0 else f'*b{n - 1}'] * 9)}]}}\n" for n in range(9)
)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 2) -> str:
    """The one line."""
    signal.alarm(60)  # a command that waits for ever ends the test
    found = main([str(each) for each in arguments])
    signal.alarm(0)
    assert found == status
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("hf-zero: ")
    assert said.count("\n") == 1
    assert "not expected" not in said
    assert said[:-1].isprintable()
    assert len(said) < 1000
    return said


# Files of any command -------------------------------------------------------------------------------------------------

ODD: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "latin": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "deep": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "a long number": lambda path: path.write_bytes(b'{"a":' + b"9" * 5000 + b"}"),
    "a list": lambda path: path.write_bytes(b"[1]"),
    "null": lambda path: path.write_bytes(b"null"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
}
READS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "plan": ("config.json", ("plan", "{folder}"), 2),
    "simulate": ("config.json", ("simulate", "{folder}"), 2),
    "plan an adapter": ("adapter_config.json", ("plan", "{folder}"), 2),
    "simulate an adapter": ("adapter_config.json", ("simulate", "{folder}"), 2),
    "plan on a machine": ("machine.json", ("plan", "7B", "--machine", "{file}"), 2),
    "report": ("zero_steps.jsonl", ("report", "{folder}"), 2),
    "migrate JSON": ("settings.json", ("migrate", "{file}"), 2),
    "migrate YAML": ("settings.yaml", ("migrate", "{file}"), 2),
    "verify": ("zero_manifest.json", ("verify", "{folder}"), 1),
    "export": ("zero_manifest.json", ("export", "{folder}", "--output", "{folder}-to"), 1),
}
"""The file that each reads, the command, its status."""


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("reads", READS)
def test_files_of_nothing(reads: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (reads, kind) == ("report", "empty"):
        pytest.skip("is a run in its first step")
    name, words, status = READS[reads]
    ODD[kind](tmp_path / name)
    said = refused(capsys, *(word.format(folder=tmp_path, file=tmp_path / name) for word in words), status=status)
    assert str(tmp_path) in said
    assert kind != "a pipe" or name == "adapter_config.json" or "it is a pipe" in said


SETTINGS: dict[str, tuple[str, str]] = {
    "aliases.yaml": (BOMB, "aliases"),
    "merged.yaml": (MERGED, "aliases"),
    "deep.yaml": ("[" * 5000, "nested too deeply"),
    "object.yaml": ("a: !!python/object/apply:os.system ['touch ran']", "is not valid YAML"),
    "tag.yaml": ("a: !secret x", "is not valid YAML"),
    "control.yaml": ("a: \x1b[2J", "is not valid YAML"),
    "other.yaml": ("1: 2\n2020-01-01: 3\n", "neither a DeepSpeed config"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_nobody_means(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, words = SETTINGS[name]
    (tmp_path / name).write_text(text)
    said = refused(capsys, "migrate", tmp_path / name)
    assert words in said
    assert name in said
    assert not (tmp_path / "ran").exists()


def test_settings_that_are_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 40)
    assert "more than" in refused(capsys, "migrate", tmp_path / "large.yaml")
    assert "No such" in refused(capsys, "migrate", tmp_path / "no")
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: /dev/zero}\n"
    (tmp_path / "to.yaml").write_text(text)
    assert "/dev/zero cannot be read: it is a device" in refused(capsys, "migrate", tmp_path / "to.yaml")


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(), st.binary(max_size=3),
    st.sampled_from(["auto", "cpu", "nvme", "FULL_SHARD"]),
)  # fmt: skip
KEYS = st.sampled_from(
    ["zero_optimization", "stage", "offload_optimizer", "offload_param", "device", "nvme_path", "bf16", "fp16",
     "enabled", "optimizer", "distributed_type", "fsdp", "fsdp_config", "fsdp_sharding_strategy", "mixed_precision",
     "fsdp_offload_params", "num_processes", "deepspeed_config", "zero_stage", "x"]
)  # fmt: skip
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
    ),
    min_size=1,
    max_size=6,
)


@QUICK
@given(tree=TREES)
def test_any_settings_become_ours_or_are_refused(tree, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    try:
        made = migrate(path)
    except ConfigError:
        return
    json.dumps([made.settings, made.trainer, [found.value for found in made.findings]])


def test_what_is_to_be_pasted_into_a_shell_is_quoted(tmp_path):
    path = tmp_path / "ds.json"
    offload = {"device": "nvme", "nvme_path": "/nvme; touch ran"}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}}))
    assert "--zero-offload-dir '/nvme; touch ran'" in migrate(path).command_line


@QUICK
@given(raw=st.binary(max_size=200), suffix=st.sampled_from([".json", ".yaml"]))
def test_any_bytes_are_settings_or_refused(raw, suffix, tmp_path):
    path = tmp_path / f"any{suffix}"
    path.write_bytes(raw)
    try:
        read_settings(path)
    except ConfigError as error:
        told = str(error)
    else:
        told = path.name
    assert path.name in told


# report ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a run of three steps."""
    folder = tmp_path_factory.mktemp("recorded")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = zero.shard(model, optimizer, zero.ZeroConfig(stage=2)).record(folder)
    for step in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.log({"loss": float(step)})
    recorder.close()
    return [json.loads(line) for line in (folder / "zero_steps.jsonl").read_text().splitlines()]


@QUICK
@given(data=st.data())
def test_any_record_is_shown_or_refused(records, data, tmp_path, capsys):
    """One value of a run's records is something else."""
    changed = json.loads(json.dumps(records))
    record = data.draw(st.sampled_from(changed))
    while True:
        key = data.draw(st.sampled_from(sorted(record)))
        if not isinstance(record[key], dict) or not record[key] or data.draw(st.booleans()):
            break
        record = record[key]
    record[key] = data.draw(
        LEAVES.filter(lambda value: not hasattr(value, "isoformat") and not isinstance(value, bytes))
    )
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "zero_steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))
    status = main(["report", str(folder)])
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "not expected" not in said.err
    assert "Traceback" not in said.err


# plan, verify, export ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 1e30},
        {"hidden_size": 2**62},
        {"hidden_size": -4},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"vocab_size": 2**70},
        {"model_type": "x", "auto_map": {"AutoConfig": "code.X"}},
    ],
    ids=str,
)
def test_configurations_of_no_model(config, tmp_path, capsys):
    """Nor does it ask whether to run the folder's code."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config})
    )
    assert str(tmp_path) in refused(capsys, "plan", tmp_path, "--world-size", "2")


@pytest.mark.parametrize("command", ["verify", "export"])
def test_folders_of_no_checkpoint(command, tmp_path, capsys):
    folder = tmp_path / "odd"
    folder.mkdir()
    words = [command, folder, *(["--output", tmp_path / "to"] if command == "export" else [])]
    refused(capsys, *words, status=1)
    Path(folder / "zero_manifest.json").symlink_to("/etc/hostname")
    assert "leads out of" in refused(capsys, *words, status=1)


# Words ----------------------------------------------------------------------------------------------------------------

NAMES = {
    "Did you mean {}B?": ("8", "1", "1.5", "999"),
    "is more than 100,000,000,000,000 parameters": ("9999999B", "1000T", "999999999999999999"),
    "File name too long": ("9" * 400 + "B",),
    "is not a size": ("0", "NaN", "inf", "1e9", "7GB", "7Q", "+7B", "0x10", "B", "7b7", "7B\x1b[2J"),
    "no such folder or file": (
        "/nope/folder", "./gone", "~/gone", "~nobody-here/gone", "here/gone", "a/b/c", "gone.json", "gone.safetensors",
        "with space", "a//b/",
    ),
    "expected a folder with a config.json": ("notes.txt",),
    "no model can be made of its configuration": ("broken.json",),
    "too few parameters for a transformer": ("100K",),
}  # fmt: skip


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in NAMES.items() for name in names])
def test_names_of_no_model_are_not_looked_for_on_the_hub(
    part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert part.format(name) in refused(capsys, "plan", name)


TYPED = {
    "frobnicate": "No such command 'frobnicate'",
    "plan": "Missing argument 'MODEL'",
    "plan 7B --no-such-flag": "No such option: --no-such-flag",
    "plan 7B --world-size 0": "Invalid value for '--world-size'",
    "plan 7B --world-size 1000000000": "Invalid value for '--world-size'",
    "plan 7B --zero-stage 3 --world-size 1000000000": "Invalid value for '--world-size'",
    "simulate gpt2-tiny --world-size 1000000000": "Invalid value for '--world-size'",
    "simulate gpt2-tiny --world-size 10 --nodes 3": "10 ranks do not divide by 3 nodes",
    "plan 7B --batch 0": "Invalid value for '--batch'",
    "plan 7B --zero-replicas 3": "divide",
    "plan 7B --world-size 4 --zero-stage 3 --zero-replicas 3": "does not divide 4 ranks",
    "plan 7B --machine /nowhere.json": "not a machine file",
    "plan 7B --device-memory lots --zero-stage 1": "--device-memory: expected a size",
    "plan 7B --device-memory -5GiB": "--device-memory: expected a size",
    "plan 7B --device-memory 24": "did you mean",
    "plan gpt2 --load-in-4bit": "needs --lora",
    "plan gpt2 --zero-sp-size 5 --world-size 5": "must divide the model's 12 attention heads",
    "plan gpt2 --zero-step-in-backward --mixed-precision fp16": "does not go with fp16",
    "plan \0": "null character",
    "plan 7B --machine \0": "null character",
    "simulate \0": "null character",
    "verify": "Missing argument 'DIR'. See hf-zero verify --help.",
    "verify \0": "null character",
    "export . --output \0": "null character",
    "report \0": "null character",
    "migrate \0": "null character",
    "probe --output /nowhere/m.json": "no folder /nowhere",
    "doctor --offload-dir \0": "null character",
}


@pytest.mark.parametrize("words", TYPED)
def test_words_that_cannot_be(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert TYPED[words] in refused(capsys, *words.split())


def test_a_long_name(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "simulate", "verify", "report", "migrate"):
        refused(capsys, command, "a" * 5000)
        refused(capsys, command, "a" * 300)


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


@pytest.mark.parametrize("flag", ["device-memory", "host-memory", "disk-space"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "9" * 400, "24XB", ""])
def test_memory_of_no_machine(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--{flag}" in refused(capsys, "plan", "7B", f"--{flag}", value)


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
    folder = adapter(tmp_path / "beside", base_model_name_or_path="gpt2")
    (folder / "gpt2").mkdir()
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "architectures": ["GPT2LMHeadModel"]}
    (folder / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert main(["plan", str(folder), "--zero-stage", "2", "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] < 10**5, "a folder in the adapter's goes before a name"


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
