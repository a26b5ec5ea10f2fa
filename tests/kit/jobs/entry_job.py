"""Programs whose ranks do not know of each other, or that accelerate counts otherwise: `entry_job.py OUT`, on two CPU ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from harness import OUT, Tokens, arguments, check, fresh, gpt2, raised, watch
from torch.utils.data import DataLoader
from transformers import Trainer

import hf_zero as zero

os.environ.pop("ACCELERATE_USE_CPU", None)
LOADED = 4
"""Rows of each rank's batch."""


def sharded(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero.shard(model, optimizer, zero.ZeroConfig(**settings))
    return model, optimizer


def entered() -> None:
    with zero.Init():
        gpt2()


def alone_on_purpose() -> list[int]:
    """Two independent runs under one launcher: each process has a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = sharded(stage=3)
        model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
        optimizer.step()
        return [zero.engine_of(model).world_size]
    finally:
        dist.destroy_process_group()


def under_mpi() -> str:
    with mock.patch.dict(os.environ, OMPI_COMM_WORLD_SIZE="2"):
        del os.environ["WORLD_SIZE"]
        return raised(lambda: sharded(stage=2))


def trained(build: Callable[[], Trainer], use: str = "train") -> str:
    """What a Trainer raises, and whether the model came to see a batch."""
    fresh()

    def run() -> None:
        trainer = build()
        trainer.model.register_forward_pre_hook(_saw)
        {"train": trainer.train, "evaluate": trainer.evaluate, "predict": lambda: trainer.predict(Tokens(8))}[use]()

    said = raised(run)
    gc.collect()
    return said


def _saw(*_: object) -> None:
    raise RuntimeError("a batch was seen")


def stock(stage: int, **changes: Any) -> Callable[[], Trainer]:
    given = {"use_cpu": False, "max_steps": 1, "save_strategy": "no", **changes}
    return lambda: Trainer(
        gpt2(), arguments(OUT / "stock", stage, **given), train_dataset=Tokens(), eval_dataset=Tokens(8)
    )


def of_flags() -> Trainer:
    given = {"use_cpu": False, "max_steps": 1, "save_strategy": "no", "zero_stage": 2}
    args = arguments(OUT / "flags", None, zero.ZeroTrainingArguments, **given)
    return zero.ZeroTrainer(gpt2(), args, train_dataset=Tokens())


def batches() -> DataLoader[Any]:
    return DataLoader(Tokens(), batch_size=LOADED)


def accelerated(build: Callable[..., Accelerator], argument: str) -> str:
    fresh()
    return raised(lambda: build(**{argument: zero.ZeroPlugin(stage=2)}).prepare(batches()))


def joined_late() -> str:
    """The group is opened after the Accelerator, which has counted one process; only data is prepared with it."""
    fresh()
    with mock.patch.dict(os.environ):
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            del os.environ[name]
        accelerator = Accelerator(cpu=True, parallelism_config=zero.ZeroPlugin(stage=2))
    dist.init_process_group("gloo")
    try:
        return raised(lambda: accelerator.prepare(batches()))
    finally:
        dist.barrier()  # the store is rank 0's: another rank may still read it
        dist.destroy_process_group()


def in_a_loop(*, first: str, train: bool, cpu: bool = False, stage: int = 2) -> str:
    """`zero.shard` beside a stock Accelerator that prepares the data only."""
    fresh()

    def run() -> None:
        if first == "shard":
            model, optimizer = sharded(stage=stage)
            loader = Accelerator(cpu=cpu).prepare(batches())
        else:
            loader = Accelerator(cpu=cpu).prepare(batches())
            model, optimizer = sharded(stage=stage)
        seen = []
        model.transformer.register_forward_pre_hook(lambda *_: seen.append(1))
        for batch in loader:
            try:
                with torch.set_grad_enabled(train):
                    loss = model(**batch).loss
            except zero.ConfigError as error:
                raise zero.ConfigError(f"{error} [{len(seen)} batches seen]") from error
            if train:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    said = raised(run)
    fresh()
    gc.collect()
    return said


def own_rows() -> str:
    """An Accelerator for logging only; the loop deals its rows itself."""
    fresh()

    def run() -> None:
        Accelerator()
        model, _ = sharded(stage=2)
        model(torch.arange(12)[None] + dist.get_rank()).logits.sum().backward()

    said = raised(run)
    fresh()
    return said


def stock_trainer_of_a_sharded_model() -> str:
    fresh()

    def run() -> None:
        model, optimizer = sharded(stage=2)
        given = arguments(OUT / "bare", None, use_cpu=False, max_steps=1, save_strategy="no")
        Trainer(model, given, train_dataset=Tokens(), optimizers=(optimizer, None)).train()

    said = raised(run)
    fresh()
    return said


def another_port() -> None:
    """For the next process group: a rank that is early would meet the store of the one before."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def counted_wrong(when: str) -> None:
    """Every entrance, before the program opens a process group (accelerate then opens one itself) and after."""
    cases: dict[str, Callable[[], str]] = {}
    for use, stage in (("train", 0), ("train", 3), ("evaluate", 2), ("predict", 3)):
        cases[f"stock {use} {stage}"] = partial(trained, stock(stage), use)
    cases["ZeroTrainer"] = partial(trained, of_flags)
    for cls, name in ((Accelerator, "parallelism_config"), (zero.ZeroAccelerator, "zero_plugin")):
        cases[cls.__name__] = partial(accelerated, cls, name)
    for name, work in cases.items():
        if when == "before":
            another_port()
        check(f"{when} {name}", work)
        if when == "before" and dist.is_initialized():
            dist.barrier()  # the store is rank 0's: another rank may still read it
            dist.destroy_process_group()


def main() -> None:
    watch()
    for stage in (0, 1, 2, 3):
        check(f"no group {stage}", lambda stage=stage: raised(lambda: sharded(stage=stage)))
    check("no group Init", lambda: raised(entered))
    check("no group latest", lambda: raised(lambda: zero.latest_checkpoint(OUT / "none")))
    check("no group prune", lambda: raised(lambda: zero.prune_checkpoints(OUT / "none", 1)))
    check("no group mpi", under_mpi)
    check("alone on purpose", alone_on_purpose)
    counted_wrong("before")
    another_port()
    check("joined late", joined_late)
    another_port()
    dist.init_process_group("gloo")
    counted_wrong("after")
    for first in ("shard", "accelerator"):
        for train in (True, False):
            for stage in (1, 3):
                check(
                    f"loop {first} {train} {stage}",
                    lambda first=first, train=train, stage=stage: in_a_loop(first=first, train=train, stage=stage),
                )
    check("bare trainer", stock_trainer_of_a_sharded_model)
    check("own rows", own_rows)
    check("right loop", lambda: in_a_loop(first="accelerator", train=True, cpu=True))
    fresh()
    check("right trainer", lambda: raised(lambda: stock(3, use_cpu=True)().train()))
    fresh()
    check("right evaluation", lambda: raised(lambda: stock(2, use_cpu=True)().evaluate()))
    os._exit(0)


main()
