"""A Trainer with `enable_jit_checkpoint=True`: one rank alone is told to end; both save the same step, and training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from harness import OUT, RANK, Tokens, arguments, barrier, check, distance, fresh, gpt2, watch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import hf_zero as zero

STEPS = 6


class Signal(TrainerCallback):
    """SIGTERM to rank 1, between two micro-batches of step 3."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: Path, stage: int, callbacks: list[TrainerCallback], resume: bool = False) -> Trainer:
    fresh()
    args = arguments(
        folder,
        stage,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=100,
        logging_steps=1,
        enable_jit_checkpoint=True,
    )
    trainer = Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def ended(stage: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    whole = train(OUT / f"whole{stage}", stage, [])
    whole.save_model(str(OUT / f"whole{stage}" / "final"))
    cut = train(OUT / f"cut{stage}", stage, [Signal()])
    assert cut.state.global_step == 3, cut.state.global_step
    assert signal.getsignal(signal.SIGTERM) is before
    barrier()
    assert [path.name for path in (OUT / f"cut{stage}").glob("checkpoint-*")] == ["checkpoint-3"]
    zero.verify(OUT / f"cut{stage}" / "checkpoint-3")
    again = train(OUT / f"cut{stage}", stage, [], resume=True)
    again.save_model(str(OUT / f"cut{stage}" / "final"))
    assert again.state.global_step == STEPS
    files = [load_file(OUT / f"{run}{stage}" / "final" / "model.safetensors") for run in ("whole", "cut")]
    assert distance(*files) == 0.0


watch()
for number in (2, 3):
    check(f"stage {number}", lambda number=number: ended(number))
