"""The Python blocks of the documents, run as they stand on two ranks: `snippets_job.py OUT PAGE…`.

A name that a block uses and does not define is a stand-in of the kind that the name says (`STAND_INS`); "…" is a folder with
a tiny model. The blocks of one page run in one folder, one after another. Pushing to the Hub has tests of its own, with a
server; here it goes to a folder.
"""

from __future__ import annotations

import ast
import builtins
import gc
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from harness import OUT, RANK, Tokens, barrier, check, fresh, gpt2, watch

import hf_zero as zero

MODEL = OUT / "model"


class Names(dict[str, Any]):
    """A block's globals; what is asked for and not there is made, and so is what it is made of."""

    def made(self, name: str) -> Any:
        if name not in self:
            self[name] = STAND_INS[name](self)
        return self[name]


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


def missing(block: str) -> list[str]:
    """Names that a block uses before it assigns or imports them, in their order."""
    defined: set[str] = set(dir(builtins))
    found: list[str] = []

    class Order(ast.NodeVisitor):
        def visit_Assign(self, node: ast.Assign) -> None:
            self.visit(node.value)
            for target in node.targets:
                self.visit(target)

        def visit_For(self, node: ast.For) -> None:
            self.visit(node.iter)
            self.visit(node.target)
            for line in node.body:
                self.visit(line)

        def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
            for loop in node.generators:
                self.visit(loop)
            self.visit(node.elt)

        visit_GeneratorExp = visit_ListComp

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            defined.update({node.name, *(argument.arg for argument in node.args.args)})
            self.generic_visit(node)

        def visit_ClassDef(self, node: ast.ClassDef) -> None:
            defined.add(node.name)
            self.generic_visit(node)

        def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)

        visit_ImportFrom = visit_Import

        def visit_Name(self, node: ast.Name) -> None:
            if isinstance(node.ctx, ast.Load) and node.id not in defined:
                found.append(node.id)
            defined.add(node.id)

    Order().visit(ast.parse(block))
    return found


def run(block: str) -> None:
    if RANK > 0 and ONE_PROCESS in block:
        return
    fresh()
    torch.manual_seed(0)
    names = Names()
    for name in missing(block):
        names.made(name)
    code = block.replace('"…"', repr(str(MODEL))).replace('"/fast/disk"', repr(str(OUT)))
    code = code.replace('push_to_hub="user/repo"', '"pushed"')
    exec(compile(code, "<block>", "exec"), names)  # noqa: S102
    names.clear()
    gc.collect()  # an engine's watch and folders go with it


def main() -> None:
    watch()
    torch.distributed.init_process_group("gloo")
    if RANK == 0:
        gpt2().save_pretrained(MODEL)
    barrier()
    for page in map(Path, sys.argv[2:]):
        folder = OUT / page.stem
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)):
            check(f"{page.name} {number}", lambda block=block: run(block))
            barrier()
    os._exit(0)


main()
