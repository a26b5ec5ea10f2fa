"""TRL's trainers on two ranks log, train and save what the same script does without one argument, under plain data parallel."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Trainer,
)

from tests.kit.jobs.harness import RANK, WORDS, arguments, barrier, fresh, tokenizer

pytestmark = [pytest.mark.gloo, pytest.mark.wide]

Build = Callable[[dict[str, Any]], Trainer]
"""A case: a Trainer that was given these arguments besides its own."""


def llama(tied: bool = False, seed: int = 0, kind: type[PreTrainedModel] = LlamaForCausalLM, **changes: Any) -> Any:
    """No biases: a key's bias has no true gradient, and Adam would make steps of its rounding."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": tied, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    return kind(LlamaConfig(**{**config, **changes}))


def stored() -> str:
    """Where the same model lies: trainers read an implicit reference from the path that the model came from."""
    folder = Path("trl")
    if RANK == 0 and not folder.exists():
        llama().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    barrier()
    return str(folder)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes
    )


def texts(rows: int, shortest: int = 3, longest: int = 12, seed: int = 5) -> list[str]:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    return [" ".join(f"w{number(0, WORDS)}" for _ in range(number(shortest, longest))) for _ in range(rows)]


def made(kind: str, common: dict[str, Any], data: Dataset | None, settings: Mapping[str, Any], **given: Any) -> Trainer:
    import trl  # takes seconds

    config = getattr(trl, f"{kind}Config")(**{**common, "gradient_checkpointing": False, **settings})
    trainer = getattr(trl, f"{kind}Trainer")
    return trainer(args=config, train_dataset=data, processing_class=tokenizer(), **given)


def sft(tied: bool = False, adapter: LoraConfig | None = None, **changes: Any) -> Build:
    def build(common: dict[str, Any]) -> Trainer:
        rows, held_out = (Dataset.from_dict({"text": texts(count, seed=seed)}) for count, seed in ((32, 5), (8, 4)))
        settings = {"max_length": 24, **changes}
        return made("SFT", common, rows, settings, model=llama(tied), eval_dataset=held_out, peft_config=adapter)

    return build


def preferences() -> Dataset:
    rows = 16
    answers = {"chosen": texts(rows, seed=7), "rejected": texts(rows, seed=8)}
    spaced = {key: [f" {text}" for text in column] for key, column in answers.items()}
    return Dataset.from_dict({"prompt": texts(rows, seed=6), **spaced})


def dpo(reference: str, **changes: Any) -> Build:
    def build(common: dict[str, Any]) -> Trainer:
        given = {
            "model": stored() if reference == "implicit" else llama(),
            "ref_model": llama(seed=1) if reference == "given" else None,
            "peft_config": lora() if reference == "lora" else None,
        }
        return made("DPO", common, preferences(), {"max_length": 24, **changes}, **given)

    return build


def kto(common: dict[str, Any]) -> Trainer:
    rows = 16
    columns = {
        "prompt": texts(rows, seed=6),
        "completion": [f" {text}" for text in texts(rows, seed=7)],
        "label": [row % 3 != 0 for row in range(rows)],
    }
    return made("KTO", common, Dataset.from_dict(columns), {"max_length": 24}, model=stored())


def reward(common: dict[str, Any]) -> Trainer:
    model = llama(kind=LlamaForSequenceClassification, num_labels=1)
    return made("Reward", common, preferences(), {"max_length": 24}, model=model)


def many_small_numbers(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between the completions of one prompt."""
    return [sum(int(word[1:]) % 7 for word in text.split() if word[1:].isdigit()) / 10 for text in completions]


def sampled(kind: str, **changes: Any) -> Build:
    """Sampling is by each rank's own seed; ranks stop at different lengths."""
    settings = {
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.1,
        **changes,
    }

    def build(common: dict[str, Any]) -> Trainer:
        prompts = Dataset.from_dict({"prompt": texts(16, seed=9)})
        return made(kind, common, prompts, settings, model=stored(), reward_funcs=many_small_numbers)

    return build


CASES: dict[str, Build] = {
    "sft": sft(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2),
    "sft bf16": sft(bf16=True),
    "sft tied": sft(tied=True),
    "sft packing": sft(packing=True),
    "sft checkpointing": sft(gradient_checkpointing=True),
    "sft lora": sft(adapter=lora()),
    "sft lora head": sft(adapter=lora(modules_to_save=["lm_head"])),
    "sft lora tokens": sft(adapter=lora(trainable_token_indices={"embed_tokens": [7, 8, 9]})),
    "dpo given": dpo("given"),
    "dpo implicit": dpo("implicit"),
    "dpo lora": dpo("lora"),
    "dpo synced": dpo("given", sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5),
    "kto": kto,
    "reward": reward,
    "grpo": sampled("GRPO"),
    "grpo twice": sampled("GRPO", num_iterations=2),
    "rloo": sampled("RLOO"),
}


SAVES = {"sft", "sft lora head", "sft lora tokens", "dpo lora", "reward"}


REL = 2e-5
SMALL = 1e-6
"""Of what is logged, differences of larger numbers (a divergence, a margin, a loss of centred advantages) have no more."""
_MEASURED = re.compile("^zero/|runtime|per_second|step_time|profiling|/tps|time$")


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """What was logged and is no measurement. `NaN` is a word: no two are equal."""
    return {
        key: float(value) if math.isfinite(value) else str(value)  # type: ignore[misc]
        for key, value in entry.items()
        if isinstance(value, (int, float)) and not _MEASURED.search(key)
    }


Tensors = dict[str, Tensor]


@functools.cache
def trained(case: str, stage: int | None) -> tuple[str, list[dict[str, float]], list[str], Tensors, Tensors]:
    """The class, the log, what has moved, weights, and files. `stage=None` is plain data parallel."""
    disable_progress_bar()
    fresh()
    torch.manual_seed(1)
    common = {
        "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "seed": 3, "optim": "adamw_torch", "bf16": False,
    }  # fmt: skip
    run = CASES[case](arguments(f"trl_{case}_{stage}", stage, dict, **common))
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    run.train()
    after = {key: value.clone() for key, value in run.model.state_dict().items()}  # of rank 0, under the plugin
    moved = [key for key in after if not torch.equal(after[key], before[key])] if RANK == 0 else []
    files = {}
    if case in SAVES:
        run.save_model()
        barrier()
        for path in Path(str(run.args.output_dir)).glob("*.safetensors"):
            files |= load_file(path)
    return type(run).__name__, [numbers(entry) for entry in run.state.log_history], moved, after, files


def assert_near(mine: Tensors, plain: Tensors) -> None:
    """To a part of the largest value of each."""
    assert mine.keys() == plain.keys()
    for key, value in plain.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            mine[key], value, rtol=0, atol=REL * scale, msg=lambda text, key=key: f"{key}: {text}"
        )


def equals_data_parallel(case: str, stage: int, rel: float = REL) -> None:
    name, logs, moved, weights, files = trained(case, stage)
    plain_name, plain_logs, plain_moved, plain_weights, plain_files = trained(case, None)
    assert name == f"Zero{plain_name}"
    assert len(logs) == len(plain_logs)
    for ours, theirs in zip(logs, plain_logs):
        assert ours == pytest.approx(theirs, rel=rel, abs=SMALL)
    if rel > REL:
        return  # weights follow to rounding, of which Adam makes steps
    if RANK == 0:
        assert plain_moved, "something was trained"
        assert moved == plain_moved
        assert_near(weights, plain_weights)
    assert_near(files, plain_files)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_equals_data_parallel(on_two: Callable[..., Any], case: str, stage: int) -> None:
    on_two(equals_data_parallel, case, stage, 5e-3 if "bf16" in case else REL)
