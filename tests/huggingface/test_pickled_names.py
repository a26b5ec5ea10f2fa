"""`training_args.bin` names what stays, `hf_zero.ZeroPlugin`, and no module inside the package, wherever the class is."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

import hf_zero as zero
from tests.kit.jobs.harness import Tokens, arguments, gpt2

ROOT = Path(__file__).resolve().parents[2]
READ = """
import sys, torch
args = torch.load(sys.argv[1], weights_only=False)
import hf_zero as zero
assert type(args.parallelism_config) is zero.ZeroPlugin, type(args.parallelism_config)
assert args.parallelism_config.config == zero.ZeroConfig(stage=3, full_precision="*.weight"), args.parallelism_config
print("READ", type(args) is zero.ZeroTrainingArguments)
"""


class Names(pickle.Unpickler):
    """Collects the names that a pickle loads from this package."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("hf_zero"):
            self.found.add(f"{module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> None:
        return None  # a tensor's memory


def ours(data: bytes) -> set[str]:
    names = Names(data)
    names.load()
    return names.found


def made(kind: str, folder: Path) -> TrainingArguments:
    settings = {"max_steps": 1, "save_steps": 1}
    if kind == "ours":
        given = {"zero_stage": 3, "zero_full_precision": "*.weight", **settings}
        return arguments(folder, None, zero.ZeroTrainingArguments, **given)
    return arguments(folder, None, parallelism_config=zero.ZeroPlugin(stage=3, full_precision="*.weight"), **settings)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arguments_pickle_under_public_names(protocol: int, tmp_path: Path) -> None:
    args = made("ours", tmp_path)
    data = pickle.dumps(args, protocol)
    assert ours(data) == {"hf_zero.ZeroPlugin", "hf_zero.ZeroTrainingArguments"}
    again = pickle.loads(data)
    assert type(again) is zero.ZeroTrainingArguments
    assert again.parallelism_config == args.parallelism_config


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_what_a_trainer_writes_is_read_in_a_fresh_process(kind: str, tmp_path: Path) -> None:
    Trainer(gpt2(), made(kind, tmp_path), train_dataset=Tokens()).train()
    path = tmp_path / "checkpoint-1" / "training_args.bin"
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        found = ours(archive.read(name))
    assert found == {"hf_zero.ZeroPlugin"} | ({"hf_zero.ZeroTrainingArguments"} if kind == "ours" else set())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READ, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert f"READ {kind == 'ours'}" in ended.stdout, ended.stderr
