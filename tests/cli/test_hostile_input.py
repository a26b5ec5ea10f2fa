"""Commands on files that somebody else made: one line, the right exit status, no traceback, and an end."""

from __future__ import annotations

import json
import os
import shutil
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


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit status, and the one line."""
    status = main([str(each) for each in arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("hf-zero: ")
    assert said.count("\n") == 1
    return status, said


SETTINGS: dict[str, tuple[str, str]] = {
    "aliases.yaml": (BOMB, "aliases"),
    "merged.yaml": (MERGED, "aliases"),
    "deep.yaml": ("[" * 5000, "nested too deeply"),
    "object.yaml": ("a: !!python/object/apply:os.system ['touch ran']", "is not valid YAML"),
    "tag.yaml": ("a: !secret x", "is not valid YAML"),
    "control.yaml": ("a: \x1b[2J", "is not valid YAML"),
    "list.yaml": ("- 1", "found list"),
    "other.yaml": ("1: 2\n2020-01-01: 3\n", "neither a DeepSpeed config"),
    "deep.json": ('{"a":' * 5000, "nested too deeply"),
    "number.json": ('{"a":' + "9" * 5000 + "}", "cannot be read"),
    "latin.yaml": ("a: \udcff", "is not valid YAML"),
    "empty.yaml": ("", "found NoneType"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_nobody_means(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, words = SETTINGS[name]
    (tmp_path / name).write_text(text, errors="surrogateescape")
    status, said = refused(capsys, "migrate", tmp_path / name)
    assert status == 2
    assert words in said
    assert name in said
    assert not (tmp_path / "ran").exists()


def test_settings_that_are_no_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.yaml")
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 40)
    for name, words in (
        ("pipe.yaml", "it is a pipe"),
        ("large.yaml", "more than"),
        ("", "it is a folder"),
        ("no", "No such"),
    ):
        status, said = refused(capsys, "migrate", tmp_path / name)
        assert status == 2
        assert words in said
    (tmp_path / "to.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: /dev/zero}\n"
    )
    status, said = refused(capsys, "migrate", tmp_path / "to.yaml")
    assert (status, "/dev/zero cannot be read: it is a device" in said) == (2, True)


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


def test_records_that_are_no_file(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "zero_steps.jsonl")
    status, said = refused(capsys, "report", tmp_path / "run")
    assert (status, "it is a pipe" in said) == (2, True)


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
    ],
    ids=str,
)
def test_configurations_of_no_model(config, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config})
    )
    status, said = refused(capsys, "plan", tmp_path, "--world-size", "2")
    assert status == 2
    assert str(tmp_path) in said


@pytest.mark.parametrize("command", ["verify", "export"])
def test_folders_of_no_checkpoint(command, tmp_path, capsys):
    folder = tmp_path / "odd"
    folder.mkdir()
    output = ["--output", tmp_path / "to"] if command == "export" else []
    assert refused(capsys, command, folder, *output)[0] == 1
    os.mkfifo(folder / "zero_manifest.json")
    status, said = refused(capsys, command, folder, *output)
    assert (status, "zero_manifest.json cannot be read: it is a pipe" in said) == (1, True)
    os.unlink(folder / "zero_manifest.json")
    Path(folder / "zero_manifest.json").symlink_to("/etc/hostname")
    status, said = refused(capsys, command, folder, *output)
    assert (status, "leads out of" in said) == (1, True)
