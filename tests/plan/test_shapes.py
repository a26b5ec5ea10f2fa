"""Published sizes against the real models, and sizes made for a number of parameters."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from hf_zero import ZeroConfig
from hf_zero.cli.models import build, look_up
from hf_zero.core.precision import Precision
from hf_zero.plan.machine import Machine
from hf_zero.plan.plan import plan
from hf_zero.plan.shapes import BUILT_IN, CONFIGS, Architecture, Shape, of_size
from hf_zero.plan.solve import PlanInputs

BF16 = Precision.of("bf16", None)
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def find_model(name: str) -> Any:
    return build(name, look_up(name))


def built(auto: Any, config: Any) -> Any:
    with torch.device("meta"):
        return auto.from_config(config)


def architecture_of(model: Any) -> Architecture | None:
    """As many key and value heads as heads is the same as none said."""
    found = Architecture.of(model.config, (key for key, _ in model.named_parameters()))
    return replace(found, key_value_heads=None) if found and found.key_value_heads == found.heads else found


def numel_of(model: Any) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_scripts_names_mean_the_scripts_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a name has a shape, which a plan finds without transformers."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "common.models", raising=False)
    from common import models

    config = models.BUILT_IN[name]()
    task = {"bert": "mlm", "t5": "summarization", "whisper": "transcription"}.get(CONFIGS[name].kind, "clm")
    model = built(models.AUTO_MODELS[task], config)
    planned = find_model(name.upper())
    assert planned.layout(BF16, 2).numel == numel_of(model)
    assert planned.architecture is not None
    names = (key for key, _ in model.named_parameters())
    expected = architecture_of(model) if name in BUILT_IN else Architecture.of(model.config, names)
    assert planned.architecture == expected


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2-xl", GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
        ("llama-7b", LlamaConfig(tie_word_embeddings=False)),
        (
            "llama-3-8b",
            LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, tie_word_embeddings=False),
        ),
    ],
)
def test_numbers_of_parameters(name: str, config: Any) -> None:
    model = built(AutoModelForCausalLM, config)
    assert BUILT_IN[name].numel == numel_of(model)
    assert BUILT_IN[name].architecture == architecture_of(model)


@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2-xl", "llama-7b"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_a_shape_takes_what_its_model_takes(name: str, stage: int, offload: str, tmp_path: Path) -> None:
    """To the byte: units, the order in which a pass uses them, and types are found in the same way."""
    configs = {
        "gpt2-124m": GPT2Config(),
        "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
        "llama-7b": LlamaConfig(tie_word_embeddings=False),
    }
    configs[name].architectures = ["LlamaForCausalLM" if name == "llama-7b" else "GPT2LMHeadModel"]
    configs[name].save_pretrained(tmp_path)
    found = []
    for model in (find_model(name), find_model(str(tmp_path))):
        config = ZeroConfig(stage=stage, offload_optimizer=offload, offload_params=offload)
        ranks = 1 if stage == 0 else 8
        made = plan(PlanInputs(model.layout(BF16, config.shards(ranks)), Machine(), config, ranks, BF16))
        found.append((made.memory, made.traffic, made.inputs.setup))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "parameters", [1_000_000, 10_000_000, 124_439_808, 350_000_000, 1_300_000_001, 7 * 10**9, 10**12]
)
def test_a_number_has_blocks(parameters: int) -> None:
    shape = of_size(parameters)
    assert isinstance(shape, Shape)
    assert shape.numel == parameters
    layout = find_model(str(parameters)).layout(BF16, 8)
    assert layout.numel == parameters
    largest = max(unit.numel for unit in layout.units)
    assert len(layout.units) > shape.layers  # each block and the embedding
    assert largest < parameters if parameters < 10**8 else largest < parameters / 3
    assert 0.4 <= shape.intermediate / shape.hidden / 4 <= 2 or parameters < 10**8


def test_a_published_number_is_near_the_published_shape() -> None:
    for name in ("llama-7b", "llama-13b", "gpt2-medium"):
        published = BUILT_IN[name]
        made = of_size(published.numel)
        assert made is not None
        assert made.layers == published.layers
        assert made.hidden == pytest.approx(published.hidden, rel=0.05)
        assert made.intermediate == pytest.approx(published.intermediate, rel=0.1)


def test_too_few() -> None:
    assert of_size(1000) is None
