"""Every Python block of the documents runs as it stands, on two ranks; README.md's are whole files (`test_readme.py`).

A name that a block uses and does not define is a stand-in of the kind that the name says (`STAND_INS`); "…" is a folder with
a tiny model. The blocks of one page run in one folder, one after another. Pushing to the Hub has tests of its own, with a
server; here it goes to a folder.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers

import hf_zero as zero
from tests.kit.jobs.harness import Tokens, fresh, gpt2
from tests.kit.pool import RankPool
from tests.test_docs import PAGES, ROOT, blocks_of, name_of

WITH_CODE = [page for page in PAGES if page != ROOT / "README.md" and blocks_of(page, "python")]


class Names(dict[str, Any]):
    """A block's globals. Those that it lacks, Python looks for among the built-in names, which make them."""

    def __init__(self) -> None:
        super().__init__(__builtins__=BuiltIn(self))

    def made(self, name: str) -> Any:
        if name not in self:
            self[name] = STAND_INS[name](self)
        return self[name]


class BuiltIn(dict[str, Any]):
    def __init__(self, names: Names) -> None:
        super().__init__(vars(builtins))
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names.made(name)


STAND_INS: dict[str, Callable[[Names], Any]] = {
    "torch": lambda names: torch,
    "zero": lambda names: zero,
    "AutoModelForCausalLM": lambda names: transformers.AutoModelForCausalLM,
    "Trainer": lambda names: transformers.Trainer,
    "TrainingArguments": lambda names: transformers.TrainingArguments,
    "get_peft_model": lambda names: peft.get_peft_model,
    "LoraConfig": lambda names: peft.LoraConfig,
    "lora": lambda names: peft.LoraConfig(task_type="CAUSAL_LM", r=2),
    "dora": lambda names: peft.LoraConfig(task_type="CAUSAL_LM", r=2, use_dora=True),
    "model": lambda names: gpt2(n_positions=600),
    "config": lambda names: gpt2().config,
    "dataset": lambda names: Tokens(),
    "ids": lambda names: torch.arange(12)[None],
    "loader": lambda names: [{"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}] * 2,
    "optimizer": lambda names: torch.optim.AdamW(names.made("model").parameters()),
    "scheduler": lambda names: torch.optim.lr_scheduler.LambdaLR(names.made("optimizer"), lambda step: 1.0),
    "x": lambda names: torch.arange(12)[None],
    "y": lambda names: None,
    "micro_batches": lambda names: [(torch.arange(12)[None], None)] * 2,
    "loss_fn": lambda names: lambda output, y: output.logits.square().mean(),
    "average": lambda names: torch.optim.swa_utils.AveragedModel(gpt2(n_positions=600)),
    "engine": lambda names: zero.shard(names.made("model"), names.made("optimizer"), zero.ZeroConfig(stage=3)),
}
ONE_PROCESS = "zero.export("
"""A block with this is for one process."""


def run(rank: int, world: int, place: Path, page: str, blocks: list[str]) -> None:
    (place / page).mkdir(parents=True, exist_ok=True)
    for number, block in enumerate(blocks):
        if rank == 0 or ONE_PROCESS not in block:
            fresh()
            torch.manual_seed(0)
            code = block.replace('"…"', repr(str(place / "model"))).replace('"/fast/disk"', repr(str(place)))
            code = code.replace('push_to_hub="user/repo"', '"pushed"')
            compiled, names = compile(code, f"<block {number} of {page}>", "exec"), Names()
            found = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
            assigned = {node.id for node in found if isinstance(node.ctx, ast.Store)}
            for name in compiled.co_names:  # an engine must exist before its model is used
                if name in STAND_INS and name not in assigned:
                    names.made(name)
            with contextlib.chdir(place / page), mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
                exec(compiled, names)  # noqa: S102
            names.clear()
            gc.collect()  # an engine's watch and folders go with it
        torch.distributed.barrier()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snippets")
    gpt2().save_pretrained(folder / "model")
    return folder


@pytest.mark.gloo
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, place: Path, two: RankPool) -> None:
    two.run(run, place, page.name, blocks_of(page, "python"))
