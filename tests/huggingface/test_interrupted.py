"""Ctrl-C in the stock Trainer, caught by the program: what it saves and what it goes on with are of a whole step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

import hf_zero as zero
from tests.kit.jobs.harness import Tokens, arguments, gpt2

STEPS, AT = 5, 3


class Interrupts(TrainerCallback):
    """Ctrl-C before the optimizer's step number `AT`, or in it."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 != AT:
            return
        if not self.inside:
            os.kill(os.getpid(), signal.SIGINT)
        optimizer = kwargs["optimizer"]
        inner = getattr(optimizer, "optimizer", optimizer)

        def interrupt(*_: Any) -> None:
            handle.remove()
            os.kill(os.getpid(), signal.SIGINT)

        handle = inner.register_step_pre_hook(interrupt)


def trained(folder: Path, *callbacks: Any, steps: int = STEPS) -> Trainer:
    settings = {"max_steps": steps, "lr_scheduler_type": "constant", "save_steps": AT - 1}
    ours = {"zero_stage": 3, "zero_offload_optimizer": "cpu"}
    args = arguments(folder, None, zero.ZeroTrainingArguments, **settings, **ours)
    torch.manual_seed(0)
    return Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=list(callbacks))


def weights(trainer: Trainer, folder: Path) -> dict[str, Any]:
    trainer.save_model(str(folder))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupted_trainer(tmp_path: Path, inside: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer = trained(tmp_path / "run", Interrupts(inside))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        found = weights(trainer, tmp_path / "found")
        made = trained(tmp_path / "short", steps=AT if inside else AT - 1)
        made.train()
        expected = weights(made, tmp_path / "expected")
        assert all(torch.equal(found[name], expected[name]) for name in expected)

        trainer = trained(tmp_path / "run")
        trainer.train(resume_from_checkpoint=True)
        whole = trained(tmp_path / "whole")
        whole.train()
        found, expected = weights(trainer, tmp_path / "resumed"), weights(whole, tmp_path / "all")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        signal.signal(signal.SIGINT, before)
