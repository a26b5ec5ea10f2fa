"""A run, or its second half on another number of ranks: six rows in every step, however many ranks share them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import WORLD, Tokens, arguments, check, gpt2, watch
from transformers import Trainer


def run(resume: bool) -> dict[str, Any]:
    args = arguments(
        sys.argv[2],
        1 if resume else 3,
        per_device_train_batch_size=6 // WORLD,
        max_steps=8,
        learning_rate=3e-3,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=4,
        save_total_limit=None,
        save_strategy="no" if resume else "steps",
        seed=3,
        optim="adamw_torch",
    )
    trainer = Trainer(gpt2(seed=99 if resume else 0), args, train_dataset=Tokens(rows=48))
    trainer.train(resume_from_checkpoint=f"{sys.argv[2]}/checkpoint-4" if resume else None)
    log = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 4]
    return {"world": WORLD, **{name: [entry[name] for entry in log] for name in ("loss", "grad_norm")}}


if __name__ == "__main__":
    watch()
    check("run", lambda: run(sys.argv[3:] == ["resume"]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
