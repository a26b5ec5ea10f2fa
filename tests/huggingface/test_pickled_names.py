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

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import sys, torch
from torch import nn
from transformers import Trainer, TrainingArguments
import hf_zero as zero

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}

common = dict(max_steps=1, report_to=[], use_cpu=True, save_steps=1, disable_tqdm=True)
data = [{"x": torch.ones(3), "labels": 0}] * 8
for kind in ("ours", "stock"):
    folder = f"{sys.argv[1]}/{kind}"
    if kind == "ours":
        args = zero.ZeroTrainingArguments(folder, zero_stage=3, zero_full_precision="*.weight", **common)
    else:
        plugin = zero.ZeroPlugin(stage=3, full_precision=("*.weight",))
        args = TrainingArguments(folder, parallelism_config=plugin, **common)
    Trainer(Model(), args, train_dataset=data, callbacks=[zero.ZeroCallback(report=False)]).train()
"""

READ = """
import sys, torch
args = torch.load(sys.argv[1], weights_only=False)
import hf_zero as zero
assert type(args.parallelism_config) is zero.ZeroPlugin, type(args.parallelism_config)
assert args.parallelism_config.config == zero.ZeroConfig(stage=3, full_precision="*.weight"), args.parallelism_config
print("READ", type(args) is zero.ZeroTrainingArguments)
"""


def run(code: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arguments_pickle_under_public_names(protocol: int, tmp_path: Path) -> None:
    import hf_zero as zero

    args = zero.ZeroTrainingArguments(str(tmp_path), zero_stage=3, use_cpu=True, report_to=[])
    data = pickle.dumps(args, protocol)
    assert ours(data) == {"hf_zero.ZeroPlugin", "hf_zero.ZeroTrainingArguments"}
    again = pickle.loads(data)
    assert type(again) is zero.ZeroTrainingArguments
    assert again.parallelism_config == args.parallelism_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both kinds of Trainer have saved."""
    folder = tmp_path_factory.mktemp("pickled")
    run(TRAIN, str(folder))
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_what_a_trainer_writes_is_read_in_a_fresh_process(kind: str, trained: Path) -> None:
    path = trained / kind / "checkpoint-1" / "training_args.bin"
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        found = ours(archive.read(name))
    assert found == {"hf_zero.ZeroPlugin"} | ({"hf_zero.ZeroTrainingArguments"} if kind == "ours" else set())
    assert f"READ {kind == 'ours'}" in run(READ, str(path))
