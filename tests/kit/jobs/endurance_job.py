"""A long run with saves and evaluations: `endurance_job.py OUT WAY TIER STEPS EVERY RUN`. Every EVERY steps it looks at itself.

WAY is trainer, accelerate or plain. TIER is device, disk, auto, or born (`zero.Init`); stage 3. Temporary files go to a folder
of this rank's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from elastic_job import NumberedRows, arguments, model_of, settings_of
from harness import OUT, RANK, WORLD, check, watch
from transformers import Trainer, TrainerCallback

import hf_zero as zero
from tests.kit.health import Health

ROWS, TIER = NumberedRows(), OUT / "tier"


class Looks:
    """Of this rank at itself, between steps."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, OUT / f"looks{RANK}.jsonl"

    def __call__(self, step: int, model: torch.nn.Module) -> None:
        engine = zero.engine_of(model)
        engine.wait_for_save()  # one that is under way has a thread and files open, or has none any more
        ledger_bytes = sum(engine.report().measured.values())
        with self.path.open("a") as file:
            file.write(
                json.dumps(asdict(Health.look(step, (self.run, self.run / "checkpoints", TIER), ledger_bytes))) + "\n"
            )


class Looking(TrainerCallback):
    def __init__(self, looks: Looks, every: int) -> None:
        self.looks, self.every = looks, every

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step and state.global_step % self.every == 0:
            self.looks(state.global_step, model)


def trainer(tier: str, steps: int, every: int, run: Path) -> float:
    args = arguments(
        str(run),
        parallelism_config=zero.ZeroPlugin(**settings_of(tier, TIER), async_save=tier != "device"),
        per_device_train_batch_size=12 // WORLD,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
    )
    looking = Looking(Looks(run), every)
    run_ = Trainer(model_of(tier), args, train_dataset=ROWS, eval_dataset=NumberedRows(8), callbacks=[looking])
    run_.train(resume_from_checkpoint="latest")
    return float(run_.evaluate()["eval_loss"])


def with_accelerate(tier: str, steps: int, every: int, run: Path) -> float:
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(run), automatic_checkpoint_naming=True, total_limit=2),
        parallelism_config=zero.ZeroPlugin(**settings_of(tier, TIER), async_save=tier != "device"),
    )
    model = model_of(tier)
    loader = torch.utils.data.DataLoader(ROWS, 12 // WORLD)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    looks, step, loss = Looks(run), 0, torch.zeros(())
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % every == 0:
                with torch.no_grad():
                    model(**batch)
                accelerator.save_state()
                looks(step, model)
    accelerator.end_training()
    return loss.item()


def plain(tier: str, steps: int, every: int, run: Path) -> float:
    torch.distributed.init_process_group("gloo")
    model = model_of(tier)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings_of(tier, TIER)))
    looks, loss = Looks(run), torch.zeros(())
    for step in range(1, steps + 1):
        ids = ROWS.ids[(torch.arange(RANK, 12, WORLD) + 12 * step) % len(ROWS)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            with torch.no_grad():
                model(input_ids=ids)
            model.state_dict()
            engine.save(run / f"checkpoint-{step}", async_save=step % (2 * every) == 0)
            zero.prune_checkpoints(run, keep=2)
            if zero.latest_checkpoint(run) is None:
                raise RuntimeError("no checkpoint")
            looks(step, model)
    engine.wait_for_save()
    engine.detach()
    return loss.item()


if __name__ == "__main__":
    watch()
    warnings.simplefilter("ignore")
    way, tier, steps, every, run = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6])
    own = OUT / f"tmp{RANK}"
    own.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(own)
    run.mkdir(parents=True, exist_ok=True)
    ways = {"trainer": trainer, "accelerate": with_accelerate, "plain": plain}
    check("run", lambda: ways[way](tier, steps, every, run))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
