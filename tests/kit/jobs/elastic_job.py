"""A stock Trainer that resumes by itself, on any number of ranks.

`elastic_job.py OUT RUN [KILL_STEP KILL_RANK [EPOCHS [KIND]]]`

A step takes six rows, whatever the ranks. Each row begins with a token of its own, so that a hook on the model can note which
rows a step has seen: `RUN/rows.<world>.<rank>.jsonl`. The rank that is to be killed is, before that step. KIND: where the
model is: device, disk, auto, born (`zero.Init`); or dropout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import harness
import torch
from harness import RANK, WORLD, check, gpt2, watch
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hf_zero as zero

ROWS, FIRST = 24, 2


class NumberedRows(Dataset):
    """Random tokens after one that is the row's number."""

    def __init__(self, rows: int = ROWS, length: int = 8) -> None:
        self.ids = torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(1))
        self.ids[:, 0] = torch.arange(rows) + FIRST

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Notes(TrainerCallback):
    """Writes down the rows of each step as the model sees them; kills this rank before step `at`."""

    def __init__(self, path: Path, at: int = -1) -> None:
        self.path, self.at, self.step = path, at, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        if self.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def see(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            rows = (kwargs["input_ids"][:, 0] - FIRST).tolist()
            with self.path.open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "step": self.step, "rows": rows}) + "\n")


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "parallelism_config": zero.ZeroPlugin(stage=3),
        "per_device_train_batch_size": 3,  # of two ranks: six rows in a step
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": 2,
        "seed": 3,
        "optim": "adamw_torch",
    }
    return harness.arguments(folder, None, **{**settings, **changes})


def settings_of(kind: str, offload_dir: Path) -> dict[str, Any]:
    """For a `ZeroPlugin`."""
    if kind in ("device", "dropout", "born"):
        return {"stage": 3}
    offload_dir.mkdir(parents=True, exist_ok=True)
    return {"stage": 3, "offload_optimizer": kind, "offload_params": kind, "offload_dir": str(offload_dir)}


def model_of(kind: str) -> torch.nn.Module:
    rate = 0.1 if kind == "dropout" else 0.0
    model = gpt2(resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)
    if kind != "born":
        return model
    with zero.Init():
        born = GPT2LMHeadModel(model.config)
    born.load_state_dict(model.state_dict())
    return born


def run(folder: str, kill_step: int, kill_rank: int, epochs: int, kind: str) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    notes = Notes(Path(folder, f"rows.{WORLD}.{RANK}.jsonl"), kill_step if kill_rank == RANK else -1)
    plugin = zero.ZeroPlugin(**settings_of(kind, Path(folder, "tier")))
    args = arguments(folder, num_train_epochs=epochs, save_total_limit=3, parallelism_config=plugin)
    model = model_of(kind)  # after the arguments, which start the process group: `zero.Init` shares out over it
    model.register_forward_pre_hook(notes.see, with_kwargs=True)
    trainer = Trainer(model, args, train_dataset=NumberedRows(), callbacks=[notes])
    trainer.train(resume_from_checkpoint="latest")
    trainer.save_model(f"{folder}/final")
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in log] for name in ("loss", "grad_norm", "learning_rate", "step")}


if __name__ == "__main__":
    watch()
    words = [*sys.argv[2:], *("-1", "-1", "2", "device")[len(sys.argv) - 3 :]]
    check("run", lambda: run(words[0], *map(int, words[1:4]), words[4]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
