"""TRL's trainers on two ranks: the stock script, and the same with one argument more."""

from __future__ import annotations

from typing import Any

import torch
from comparing import Build, compare, llama
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from harness import OUT, RANK, barrier
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, Trainer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = 60
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    names = {f"{word[1:-1]}_token": word for word in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def stored() -> str:
    """Where the same model lies: trainers read an implicit reference from the path that the model came from."""
    folder = OUT / "model"
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


def sft(**changes: Any) -> Build:
    tied, peft_config = changes.pop("tied", False), changes.pop("lora", None)

    def build(common: dict[str, Any]) -> Trainer:
        return SFTTrainer(
            model=llama(tied),
            args=SFTConfig(**{**common, "gradient_checkpointing": False, "max_length": 24, **changes}),
            train_dataset=Dataset.from_dict({"text": texts(32)}),
            eval_dataset=Dataset.from_dict({"text": texts(8, seed=4)}),
            processing_class=tokenizer(),
            peft_config=peft_config() if peft_config else None,
        )

    return build


def preferences() -> Dataset:
    rows = 16
    answers = {"chosen": texts(rows, seed=7), "rejected": texts(rows, seed=8)}
    spaced = {key: [f" {text}" for text in column] for key, column in answers.items()}
    return Dataset.from_dict({"prompt": texts(rows, seed=6), **spaced})


def dpo(reference: str, **changes: Any) -> Build:
    def build(common: dict[str, Any]) -> Trainer:
        return DPOTrainer(
            model=stored() if reference == "implicit" else llama(),
            ref_model=llama(seed=1) if reference == "given" else None,
            args=DPOConfig(**common, gradient_checkpointing=False, max_length=24, **changes),
            train_dataset=preferences(),
            processing_class=tokenizer(),
            peft_config=lora() if reference == "lora" else None,
        )

    return build


def kto(common: dict[str, Any]) -> Trainer:
    rows = 16
    columns = {
        "prompt": texts(rows, seed=6),
        "completion": [f" {text}" for text in texts(rows, seed=7)],
        "label": [row % 3 != 0 for row in range(rows)],
    }
    return KTOTrainer(
        model=stored(),
        args=KTOConfig(**common, gradient_checkpointing=False, max_length=24),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
    )


def reward(common: dict[str, Any]) -> Trainer:
    return RewardTrainer(
        model=llama(kind=LlamaForSequenceClassification, num_labels=1),
        args=RewardConfig(**common, gradient_checkpointing=False, max_length=24),
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )


def many_small_numbers(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between the completions of one prompt."""
    return [sum(int(word[1:]) % 7 for word in text.split() if word[1:].isdigit()) / 10 for text in completions]


def sampled(trainer: Any, config: Any, **changes: Any) -> Build:
    """Sampling is by each rank's own seed; ranks stop at different lengths."""

    def build(common: dict[str, Any]) -> Trainer:
        return trainer(
            model=stored(),
            reward_funcs=many_small_numbers,
            args=config(
                **common,
                gradient_checkpointing=False,
                gradient_accumulation_steps=2,
                num_generations=4,
                max_completion_length=8,
                beta=0.1,
                **changes,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts(16, seed=9)}),
            processing_class=tokenizer(),
        )

    return build


CASES: dict[str, Build] = {
    "sft": sft(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2),
    "sft bf16": sft(bf16=True),
    "sft tied": sft(tied=True),
    "sft packing": sft(packing=True),
    "sft checkpointing": sft(gradient_checkpointing=True),
    "sft lora": sft(lora=lora),
    "sft lora head": sft(lora=lambda: lora(modules_to_save=["lm_head"])),
    "sft lora tokens": sft(lora=lambda: lora(trainable_token_indices={"embed_tokens": [7, 8, 9]})),
    "dpo given": dpo("given"),
    "dpo implicit": dpo("implicit"),
    "dpo lora": dpo("lora"),
    "dpo synced": dpo("given", sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5),
    "kto": kto,
    "reward": reward,
    "grpo": sampled(GRPOTrainer, GRPOConfig),
    "grpo twice": sampled(GRPOTrainer, GRPOConfig, num_iterations=2),
    "rloo": sampled(RLOOTrainer, RLOOConfig),
}


SAVES = {"sft", "sft lora head", "sft lora tokens", "dpo lora", "reward"}


if __name__ == "__main__":
    disable_progress_bar()
    compare(CASES, SAVES)
