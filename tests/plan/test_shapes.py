"""Published sizes against the real models, and sizes made for a number of parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.cli.models import build, count_of, look_up
from hf_zero.core.precision import Precision
from hf_zero.plan.shapes import CONFIGS, NAMES, PUBLISHED, Architecture, built_in, of_size

BF16 = Precision.of("bf16", None)
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def find_model(name: str) -> Any:
    return build(name, *look_up(name))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_scripts_names_mean_the_scripts_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "common.models", raising=False)
    from common import models

    task = {"bert": "mlm", "t5": "summarization", "whisper": "transcription"}.get(CONFIGS[name].kind, "clm")
    with torch.device("meta"):
        model = models.AUTO_MODELS[task].from_config(models.BUILT_IN[name]())
    planned = find_model(name.upper())
    assert planned.layout(BF16, 2).numel == sum(param.numel() for param in model.parameters())
    assert planned.architecture == Architecture.of(model.config, (key for key, _ in model.named_parameters()))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-70b", 68.98), ("llama-3-70b", 70.55), ("llama-3-405b", 405.85), ("llama-30b", 32.53), ("gpt3-175b", 174.6),
        ("megatron-1t", 1008.0), ("pythia-70m", 0.0457), ("llama-3.2-1b", 1.236), ("llama-3.2-3b", 3.213),
    ],
)  # fmt: skip
def test_published_models_have_the_published_parameters(name: str, billions: float) -> None:
    """Pythia is planned with its head tied to the embedding."""
    assert find_model(name).parameters == pytest.approx(billions * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    "parameters", [10_000_000, 124_439_808, 350_000_000, 1_300_000_001, 7 * 10**9, 20 * 10**9, 10**12]
)
def test_a_number_becomes_a_decoder_of_about_that_size(parameters: int) -> None:
    """The error is at most half a block; what is shown is the decoder's own number."""
    name, config = of_size(parameters)
    assert name in PUBLISHED or name in CONFIGS
    model = find_model(str(parameters))
    layout = model.layout(BF16, 8)
    assert model.parameters == layout.numel
    block = max(unit.numel for unit in layout.units if "h." in unit.name or "layers." in unit.name)
    assert abs(layout.numel - parameters) <= block
    assert layout.numel == pytest.approx(parameters, rel=0.04)
    assert f"blocks of width {model.architecture.hidden:,}, as {name}" in model.source
    assert model.architecture.layers == config.settings.get("n_layer", config.settings.get("num_hidden_layers"))


def test_names_lead_to_their_own_sizes() -> None:
    for name in NAMES:
        found = built_in(name)
        assert found is not None
        expected = PUBLISHED.get(name) or CONFIGS.get(name)
        assert expected is None or found in (expected, CONFIGS.get(name)), name


def test_numbers_of_parameters() -> None:
    for text, count in (("1.3B", 1_300_000_000), ("7b", 7 * 10**9), ("350M", 350 * 10**6), ("1_500,000", 1_500_000)):
        assert count_of(text) == count
    assert count_of("7Q") is count_of("0") is None


def test_sizes_of_configurations() -> None:
    """Of the text in a model of images and text; gated where a parameter says so; four times as wide where nothing does."""
    text = SimpleNamespace(d_model=8, num_layers=3, num_heads=2, vocab_size=10)
    assert Architecture.of(SimpleNamespace(text_config=text, hidden_size=99)) == Architecture(8, 3, 2, 32, 10)
    for name, is_gated in (("mlp.gate_proj.weight", True), ("mlp.gate_up_proj", True), ("mlp.up_proj.weight", False)):
        assert Architecture.of(text, [name]).is_gated is is_gated
    assert Architecture.of(SimpleNamespace(hidden_size=8)) is None
