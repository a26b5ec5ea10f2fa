"""Every example against itself at stage 0: two ranks, a few steps, the same losses, norms, evaluation and weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import finetune_vision
from common import inception, models

from tests.kit.launch import Results, launch
from tests.kit.pool import free_port

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]

COMMON = ["--max-steps=3", "--logging-steps=1", "--per-device-train-batch-size=3", "--max-train-samples=30"]
COMMON += ["--max-eval-samples=7", "--disable-tqdm=true", "--report-to=none"]
TEXT = ["--block-size=48", "--corpus-size=60000"]
# the script, its words, the stage that is compared with stage 0
CASES: dict[str, tuple[str, list[str], int]] = {
    "llama": ("finetune", [*TEXT, "--model=llama-tiny"], 3),
    "qwen3": ("finetune", [*TEXT, "--model=qwen3-tiny"], 2),
    "moe": ("finetune", [*TEXT, "--model=moe-tiny", "--gradient-accumulation-steps=2"], 3),
    "tags": ("finetune", [*TEXT, "--task=token-classification", "--gradient-accumulation-steps=2"], 3),
    "questions": ("finetune", ["--block-size=128", "--corpus-size=400000", "--task=question-answering"], 3),
    "t5": ("finetune_seq2seq", ["--block-size=48", "--corpus-size=300000"], 3),
    "speech": ("finetune_seq2seq", ["--task=transcription"], 3),
    "vit": ("finetune_vision", ["--model=vit-tiny", "--max-train-samples=20", "--max-steps=8"], 3),
    "resnet": ("finetune_vision", ["--model=resnet-tiny"], 3),
    "inception": ("finetune_vision", ["--model=inception-tiny"], 3),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def job(place: Path) -> Results:
    runs = {
        f"{name} {at}": (script, [*COMMON, *words, f"--zero-stage={at}"], free_port())
        for name, (script, words, stage) in CASES.items()
        for at in (0, stage)
    }
    return launch("examples_job", place, json.dumps(runs), ranks=2, timeout=300)


def history(folder: Path) -> list[dict[str, float]]:
    timed = ("runtime", "per_second", "zero/", "total_flos", "memory")
    logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in log.items() if not any(word in key for word in timed)} for log in logs]


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_the_same_at_its_stage_as_at_stage_0(job: Results, place: Path, name: str) -> None:
    folders = [place / f"{name} {at}" for at in (0, CASES[name][2])]
    for folder in folders:
        job(folder.name)
        job(folder.name, 1)
    plain, sharded = (history(folder) for folder in folders)
    assert len(plain) == len(sharded) >= 5
    for expected, found in zip(plain, sharded):
        assert found == pytest.approx(expected, rel=2e-4, abs=1e-5)
    losses = [log["loss"] for log in plain if "loss" in log]
    assert len(losses) >= 3
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    for key, expected in weights[0].items():
        torch.testing.assert_close(weights[1][key], expected, rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")


@pytest.mark.wide
def test_generation_and_spans_are_measured(job: Results) -> None:
    assert job("t5 3")["eval_rouge_l"] >= 0
    assert job("speech 3")["eval_word_errors"] > 0
    assert 0 <= job("questions 3")["eval_exact_match"] <= 1
    assert 0 < job("tags 3")["eval_accuracy"] < 1


def test_full_sizes_are_the_published_ones() -> None:
    """Parameters of Inception-v3 and ResNet-50 for 1,000 classes (torchvision's, without the auxiliary head), of GPT-3's."""
    labels = [str(number) for number in range(1000)]
    with torch.device("meta"):
        classifiers = [finetune_vision.load_model(name, None, labels)[0] for name in ("inception-v3", "resnet-50")]
    assert [model.num_parameters() for model in classifiers] == [23_834_568, 25_557_032]
    assert isinstance(classifiers[0], inception.InceptionForImageClassification)
    with torch.device("meta"):
        auto = models.AUTO_MODELS["clm"]
        sizes = {n: auto.from_config(models.BUILT_IN[n]()).num_parameters() for n in ("gpt3-125m", "gpt3-6.7b")}
    assert sizes["gpt3-125m"] == pytest.approx(125e6, rel=0.01)
    assert sizes["gpt3-6.7b"] == pytest.approx(6.7e9, rel=0.01)
