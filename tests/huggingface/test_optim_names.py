"""`optim=` of the Trainer: each name trains, saves and resumes, or is refused before the first step. Never broken at a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_zero as zero
from tests.kit.jobs.harness import Tokens, arguments, distance, fresh, gpt2

BITSANDBYTES = (
    "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit",
    "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
)  # fmt: skip
WORK: dict[str, str | None] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")),
    **dict.fromkeys(BITSANDBYTES, "bitsandbytes"),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), "schedulefree"),
    "stable_adamw": "optimi",
}
"""By the package that each needs."""
REFUSED: dict[str, str | None] = {
    **dict.fromkeys(("lomo", "adalomo", "galore_adamw", "galore_adafactor_layerwise", "apollo_adamw_layerwise")),
    "apollo_adamw": None,
    "grokadamw": "grokadamw",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
}


def trainer(folder: Path, name: str, stage: int, seed: int = 0, **changes: Any) -> Trainer:
    fresh()
    settings = {"max_steps": 8, "optim": name, "logging_strategy": "no", "seed": 3, "learning_rate": 1e-2}
    args = arguments(folder, stage, **settings, **changes)
    wide = gpt2(seed, n_embd=64, n_layer=1)  # 8-bit optimizers leave fewer than 4,096 elements in 32 bits
    return Trainer(wide, args, train_dataset=Tokens())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", WORK)
def test_trains_saves_and_resumes(name: str, stage: int, tmp_path: Path) -> None:
    """On one rank, where whole parameters are at every stage."""
    if WORK[name] is not None:
        pytest.importorskip(WORK[name])
    whole = trainer(tmp_path, name, stage, save_steps=4)
    whole.train()
    before = gpt2(0, n_embd=64, n_layer=1).state_dict()
    after = {key: value.clone() for key, value in whole.model.state_dict().items()}
    assert distance(before, after) > 1e-5, "it trains"
    again = trainer(tmp_path, name, stage, seed=5, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert distance(dict(again.model.state_dict()), after) == 0.0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str, stage: int, tmp_path: Path) -> None:
    if REFUSED[name] is not None:
        pytest.importorskip(REFUSED[name])
    changes: Any = {"optim_target_modules": "all-linear"} if name.startswith(("galore", "apollo")) else {}
    with pytest.raises((zero.ConfigError, zero.UnsupportedOptimizerError)):
        trainer(tmp_path, name, stage, **changes).train()
    assert not (tmp_path / "checkpoint-4").exists()
