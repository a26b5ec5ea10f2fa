"""What a process loads because of hf_zero: nothing that it would not load without, but torch. What works without extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    "datasets", "evaluate", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "sklearn", "trl", "huggingface_hub",
    "transformers", "transformers.trainer", "accelerate", "rich",
)  # fmt: skip

LOOP = """
import tempfile
from accelerate import Accelerator
from torch import nn

if {ours}:
    import hf_zero as zero
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=zero.ZeroPlugin(stage=3))
else:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
if {hub}:
    from transformers import GPT2Config, GPT2LMHeadModel
    options = dict(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**options))
    ids = torch.ones(1, 3, dtype=torch.long)
    loss_of = lambda: model(input_ids=ids, labels=ids).loss
else:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    loss_of = lambda: model(torch.ones(2, 3)).sum()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(2):
    with accelerator.accumulate(model):
        accelerator.backward(loss_of())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder + "/state")
    accelerator.save_model(model, folder + "/model")
    accelerator.load_state(folder + "/state")
"""

TRAINER = """
import tempfile
from torch import nn
from transformers import Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, x, labels=None):
        return {{"loss": self.layer(x).square().mean()}}

with tempfile.TemporaryDirectory() as folder:
    more = {{}}
    if {ours}:
        import hf_zero as zero
        more["parallelism_config"] = zero.ZeroPlugin(stage=2)
    args = TrainingArguments(folder, max_steps=2, report_to=[], use_cpu=True, save_steps=2, disable_tqdm=True, **more)
    data = [{{"x": torch.ones(3), "labels": 0}}] * 8
    Trainer(Model(), args, train_dataset=data).train()
"""

FRESH = "\nfrom accelerate.state import AcceleratorState\nAcceleratorState._reset_state(True)\n"
"""After a loop: accelerate's settings are the process's."""

NAMES = f"""
import hf_zero as zero
dir(zero)
for name in zero.__all__:
    if not name.lower().startswith("zero") or name in ("ZeroConfig", "ZeroError"):
        getattr(zero, name)
zero.verify({str(ROOT / "tests/kit/golden/adamw_bf16/whole")!r})
"""
"""What is exported without accelerate or transformers; the Hub's client is needed only once something goes to the Hub."""

# A process in which these cannot be found, as in an environment without the extras. `tokenizers` is transformers' own need.
WITHOUT_EXTRAS = """
import importlib, json, os, runpy, sys
from importlib.machinery import PathFinder

EXTRAS = ("datasets", "evaluate", "matplotlib")

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
for name in EXTRAS:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    sys.exit(name + " is still found")

import torch, accelerate, transformers.trainer

for name, code in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{name}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
        exec(code)
        sys.exit()
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Runs programs by name, each in a fork: to import torch and transformers is what takes the time."""
WITHOUT_EXTRAS_WORKS = """
import hf_zero as zero, hf_zero.cli.main, tempfile, torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
before = model.weight.detach().clone()
accelerator.backward(model(torch.ones(2, 3)).sum())
optimizer.step()
assert not torch.equal(model.weight, before)
print("LOOP")
AcceleratorState._reset_state(True)

from transformers import GPT2Config, GPT2LMHeadModel, Trainer
options = dict(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    args = zero.ZeroTrainingArguments(folder, zero_stage=3, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    data = [{"input_ids": torch.ones(3, dtype=torch.long), "labels": torch.ones(3, dtype=torch.long)}] * 8
    trainer = Trainer(GPT2LMHeadModel(GPT2Config(**options)), args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 1
    print("TRAINER")
    assert hf_zero.cli.main.main(["plan", folder, "--zero-stage", "3"]) == 0
"""


def loaded(*codes: str) -> list[set[str]]:
    """The heavy modules that are there after each of these, run one after the other in one process."""
    tail = f"\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])\n"
    ended = subprocess.run(
        [sys.executable, "-c", "import torch\n" + "".join(code + tail for code in codes)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
    )
    assert ended.returncode == 0, ended.stderr
    return [set(line.split()[1:]) for line in ended.stdout.splitlines() if line.startswith("LOADED")]


def test_imports_and_names_of_the_engine() -> None:
    assert loaded("import hf_zero", "import hf_zero.cli.main", NAMES) == [set()] * 3


def test_loops() -> None:
    """Prepared, trained, saved and loaded, each beside the same without hf_zero; `transformers` brings what its models need."""
    codes = [LOOP.format(ours=ours, hub=hub) for hub in (False, True) for ours in (False, True)]
    codes += [TRAINER.format(ours=ours) for ours in (False, True)]
    found = loaded(*(code + FRESH for code in codes))
    assert found[1::2] == found[::2]
    assert not found[3] & {"datasets", "pandas", "peft", "evaluate", "matplotlib", "sklearn"}


PROGRAMS = {
    "works": WITHOUT_EXTRAS_WORKS,
    **{
        name: f"runpy.run_path({str(ROOT / 'scripts' / name) + '.py'!r}, run_name='__main__')"
        for name in ("finetune", "finetune_no_trainer")
    },
}


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit status, output and errors of each program."""
    folder = tmp_path_factory.mktemp("without_extras")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(PROGRAMS), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}", "HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return {
        name: (int(status), *((folder / f"{name}.{kind}").read_text() for kind in ("out", "err")))
        for name, status in map(str.split, ended.stdout.splitlines())
    }


def test_works_without_the_extras(without_extras: dict[str, tuple[int, str, str]]) -> None:
    status, output, errors = without_extras["works"]
    assert status == 0, errors
    assert re.search(r"LOOP.*TRAINER.*1,040 parameters", output, re.S), output


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("finetune", 1, "error: datasets is not installed: pip install 'hf-zero[examples]'\n"),
        ("finetune_no_trainer", 1, "error: datasets is not installed: pip install 'hf-zero[examples]'\n"),
    ],
)
def test_a_program_says_which_extra_is_missing(
    without_extras: dict[str, tuple[int, str, str]], name: str, status: int, error: str
) -> None:
    assert without_extras[name] == (status, "", error)
