"""The files that README.md shows train one model when torchrun starts them on two CPU ranks: the model that DDP trains."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_zero.cli.main import main
from hf_zero.cli.show import short_size
from tests.kit.launch import launch
from tests.test_docs import ROOT, blocks_of

README = ROOT / "README.md"
FILES = {"Trainer": 0, "accelerate": 1, "torch": 2, "LoRA": 3}
STAGES = {"Trainer": 3, "accelerate": 2, "torch": 3, "LoRA": 3}
ROWS = {"Trainer": 32, "accelerate": 32, "torch": 32, "LoRA": 4}
"""How many rows one rank trains on."""


RUNS = {
    "a": ("2026-12-01-cpu-2rank-fp32-time.json", "time"),
    "b": ("2026-12-01-cpu-2rank-fp32-memory.json", "memory"),
}
"""The runs of README.md's comparison, by the letter of their command."""
ENGINES = {
    "hf_zero stage 2": "zero2",
    "hf_zero stage 3": "zero3",
    "FSDP2": "fsdp2",
    "DeepSpeed 0.19 stage 2": "deepspeed2",
}


def ranks_of(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"run{rank}.pt", weights_only=True) for rank in range(2)]


def test_each_file_is_run() -> None:
    assert len(blocks_of(README, "python")) == len(FILES)


def test_what_the_page_uses_is_installed() -> None:
    """`hf-zero report --html` stopped for want of plotly in an environment that was made as the page says."""
    text = README.read_text(encoding="utf-8")
    (extras,) = re.findall(r"^pip install '\.\[([\w,]+)\]'", text, re.M)
    needs = {
        "--html": "report",
        "--png": "plot",
        "scripts/": "examples",
        "import peft": "examples",
        "from peft": "examples",
    }
    used = {extra for word, extra in needs.items() if word in text}
    assert used
    assert used <= {*extras.split(",")}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama in bfloat16, in place of the 8B model of the LoRA file."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.gloo
@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_what_ddp_trains(name: str, tmp_path: Path, base: str) -> None:
    number = str(FILES[name])
    results = launch("readme_job", tmp_path / "ours", str(README), number, base)
    plain = launch("readme_job", tmp_path / "ddp", str(README), number, base, "--ddp")
    assert results("run") == {"ranks": 2, "stage": STAGES[name]}, results.output
    assert plain("run") == {"ranks": 2, "stage": None}
    ours, theirs = ranks_of(tmp_path / "ours"), ranks_of(tmp_path / "ddp")

    rows = [{tuple(row) for row in rank["rows"].tolist()} for rank in ours]
    assert len(rows[0]) == len(rows[1]) == ROWS[name]
    assert not rows[0] & rows[1], "ranks trained on the same rows"
    lora = name == "LoRA"
    for rank, plain_rank in zip(ours, theirs):
        assert torch.equal(rank["rows"], plain_rank["rows"])
        same(rank["weights"], ours[0]["weights"], rtol=0, atol=0)
        # AdamW's first steps are lr * sign(gradient), and autocast rounds: a gradient near 0 may change its sign.
        same(rank["weights"], plain_rank["weights"], atol=2e-4 if lora else 1e-6)
    if lora:
        adapters = [load_file(tmp_path / side / "adapter" / "adapter_model.safetensors") for side in ("ours", "ddp")]
        same(*adapters, atol=2e-4)
        assert any(value.any() for key, value in adapters[0].items() if "lora_B" in key), "the adapter did not train"
        merged = [AutoModelForCausalLM.from_pretrained(tmp_path / side / "merged") for side in ("ours", "ddp")]
        same(merged[0].state_dict(), merged[1].state_dict(), rtol=1e-2, atol=1e-3)
        before = AutoModelForCausalLM.from_pretrained(base).state_dict()
        assert any(not torch.equal(value, before[key]) for key, value in merged[0].state_dict().items())
    else:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "out").state_dict()
        same(ours[0]["weights"], {key: saved[key] for key in ours[0]["weights"]}, rtol=0, atol=0)


def measured(engine: str, malloc: str, letters: list[str]) -> tuple[str, str]:
    """Step time and memory of one configuration, as README.md prints them."""
    step, memory = "not measured", "not measured"
    for letter in letters:
        file, kind = RUNS[letter]
        results = json.loads((ROOT / "benchmarks" / file).read_text())["results"]
        if kind == "time":
            step = f"{results[engine]['ratio']:.2f}"
        else:
            mine, ddp = results[engine][f"memory_{malloc}"], results["ddp"][f"memory_{malloc}"]
            memory = ", ".join(f"{mine[what] / ddp[what]:.2f}" for what in ("steady", "peak"))
    return step, memory


def test_each_row_of_the_comparison_is_one_configuration() -> None:
    """Stage 2's time was one malloc setting's, and its memory another's."""
    text = README.read_text(encoding="utf-8")
    (table,) = re.findall(r"^## How it compares\n\n(.*?)\n\n", text, re.S | re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == 7
    for configuration, step, memory, source in rows:
        name, _, pinned = configuration.partition(", ")
        dates = {letter: each.strip()[:10] for each in source.split(";") for letter in re.findall(r"\((\w)\)", each)}
        assert (step, memory) == measured(ENGINES[name], pinned or "default", [*dates]), configuration
        for letter, date in dates.items():
            assert RUNS[letter][0].startswith(date), "the date is the run's"
            assert f"({letter}) `" in text.replace("\n", " "), "the command is shown"


def test_the_lora_recipe_takes_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes in the text are those of the command below it, which has the settings of the recipe."""
    text = README.read_text(encoding="utf-8")
    (intro,) = re.findall(r"^\*\*LoRA\*\* (.*?)\n\n", text, re.S | re.M)
    (command,) = re.findall(r"^hf-zero plan .*--zero-offload-params.*$", text, re.M)
    words = shlex.split(command)[1:]

    def peaks(words: list[str]) -> dict[str, str]:
        assert main([*words, "--json"]) == 0
        return {tier: short_size(size) for tier, size in json.loads(capsys.readouterr().out)["peak_bytes"].items()}

    offloaded = peaks(words)
    words[words.index("--zero-stage") + 1] = "2"
    at = words.index("--zero-offload-params")
    resident = peaks(words[:at] + words[at + 2 :])
    assert resident["host"] == "0"
    assert re.findall(r"[\d.]+ GiB", intro) == [offloaded["device"], offloaded["host"], resident["device"]]
    recipe = blocks_of(README, "python")[FILES["LoRA"]]
    assert all(
        part in recipe for part in ("stage=3", 'offload_params="cpu"', "r=16", "(64, 512)", "train_batch_size=1")
    )
