"""TRL's SFT on packed rows with `sp_size`: what it logs is what one process logs on whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import VOCAB, generator, llama

pytestmark = [pytest.mark.gloo, pytest.mark.wide]

LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "accumulated, with an uneven last batch": {"gradient_accumulation_steps": 2},
    "checkpointed and offloaded": {"gradient_checkpointing": True},
    "LoRA": {},
}


def logged(rank: int, world: int, folder: str, case: str) -> list[list[float]]:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    AcceleratorState._reset_state(True)
    torch.manual_seed(5)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}))
    rows = [
        torch.randint(2, VOCAB, (3 + number * 5 % 9,), generator=generator(1, number)).tolist() for number in range(30)
    ]
    settings: dict[str, Any] = {"gradient_checkpointing": False, **CASES[case]}
    if world > 1:
        offloaded = {"offload_activations": "cpu"} if settings["gradient_checkpointing"] else {}
        settings["parallelism_config"] = zero.ZeroPlugin(stage=3, sp_size=world, **offloaded)
    args = SFTConfig(
        f"{folder}/{world}", use_cpu=True, bf16=False, packing=True, max_length=24, max_steps=5, logging_steps=1,
        per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no", report_to=[], disable_tqdm=True, **settings,
    )  # fmt: skip
    lora = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=llama(),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        peft_config=lora if case == "LoRA" else None,
    )
    trainer.train()
    return [[each[name] for name in LOGGED] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(pools: dict[int, RankPool], tmp_path: Path, case: str) -> None:
    (wanted,) = pools[1].run(logged, str(tmp_path), case)
    for found in pools[2].run(logged, str(tmp_path), case):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-5, atol=1e-6)
