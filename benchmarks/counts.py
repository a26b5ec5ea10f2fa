"""Count what one steady training step costs: Python calls, collectives, and bytes sent.

    make benchmark-counts                 # or: python benchmarks/counts.py
    python benchmarks/counts.py --output runs/counts.json

Two CPU ranks train a Llama model of twelve small blocks, so that a step is mostly what the engine does per unit.
A count above its bound is marked, and the exit status is 1. A rank that waits for another calls more: nothing else
may run on the machine. Bounds may be lowered at any time. Raise one only for a change that makes a program right that
was wrong before; its commit says which calls it adds.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import machine
from rich.console import Console
from rich.table import Table
from torch import nn

import hf_zero as zero

PACKAGE = str(Path(zero.__file__).parent)
WORLD = 2

CALLS = {(2, "none"): (3190, -2240), (3, "none"): (4620, -780), (3, "cpu"): (5880, 330)}
"""(stage, `offload_optimizer`) -> the most calls into or out of hf_zero, and the most calls in all beyond those of a
step without hf_zero. Of the rank that makes more. Python 3.11, torch 2.13."""
TRAFFIC = {
    0: {"gather": (0, 0), "reduce": (14, 132672), "scalar": (0, 0), "agree": (2, 208), "other": (0, 0)},
    1: {"gather": (14, 67072), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 208), "other": (0, 0)},
    2: {"gather": (14, 67072), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 208), "other": (0, 0)},
    3: {"gather": (26, 130048), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 268), "other": (0, 0)},
}
"""Stage -> kind of message -> collectives and bytes that this rank sends in a step. Exact."""


class Counted:
    """`with Counted() as counted`: calls of this thread, Python's and C's, and those into or out of hf_zero."""

    def __init__(self) -> None:
        self.all = self.ours = 0

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            self.all += 1
            caller = frame.f_back if event == "call" else None
            self.ours += _is_ours(frame) or (caller is not None and _is_ours(caller))

    def __enter__(self) -> Counted:
        gc.collect()
        gc.disable()  # callbacks of freed objects do not belong to the step
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def llama(width: int = 16) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=12,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def stepping(model: nn.Module, clip: Callable[[torch.optim.Optimizer], Callable[[], object]]) -> Callable[[], None]:
    """Return a training step of `model`, after five warm-up steps; `clip` is the function that clips."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    clipping = clip(optimizer)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        clipping()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return step


def fewest(step: Callable[[], None], rounds: int) -> tuple[int, int]:
    """Calls into or out of hf_zero, and all calls. The least of some steps: a rank that waits for another calls more."""
    found = []
    for _ in range(rounds):
        with Counted() as counted:
            step()
        found.append((counted.ours, counted.all))
    return min(found)


def sharded(stage: int, offload_optimizer: str = "none") -> tuple[zero.Engine, Callable[[], None]]:
    model = llama()
    made: list[zero.Engine] = []

    def shard(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        made.append(zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, offload_optimizer=offload_optimizer)))
        return lambda: made[0].clip_grad_norm_(1.0)

    step = stepping(model, shard)
    return made[0], step


def traffic_of(engine: zero.Engine, step: Callable[[], None]) -> dict[str, tuple[int, int]]:
    engine.traffic.reset()
    step()
    return {kind: (sent["calls"], sent["bytes"]) for kind, sent in engine.traffic.to_dict().items()}


def count(folder: Path, rounds: int) -> None:
    """Write this rank's counts to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = llama()
    _, plain = fewest(stepping(model, lambda _: lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)), rounds)
    calls, traffic = [], []
    for stage, tier in CALLS:
        engine, step = sharded(stage, tier)
        ours, everything = fewest(step, rounds)
        calls.append({"stage": stage, "offload_optimizer": tier, "calls": ours, "more_than_plain": everything - plain})
        engine.detach()
    for stage in TRAFFIC:
        engine, step = sharded(stage)
        first, second = traffic_of(engine, step), traffic_of(engine, step)
        if first != second:
            raise RuntimeError(f"stage {stage} sends {first} in one step and {second} in the next")
        traffic.append({"stage": stage, "sent": first})
        engine.detach()
    found = {"plain": plain, "calls": calls, "traffic": traffic}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launched(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="counts-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
        subprocess.run([*command, __file__, "--folder", folder, "--rounds", str(rounds)], check=True)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


def report(ranks: list[dict[str, Any]], console: Console) -> bool:
    """Print each count with its bound; return True if all are within."""
    fits = True
    table = Table(
        "stage", "offload_optimizer", "calls into or out of hf_zero", "bound", "calls beyond a plain step", "bound"
    )
    for at, (case, bounds) in enumerate(CALLS.items()):
        row = [str(case[0]), case[1]]
        for key, bound in zip(("calls", "more_than_plain"), bounds):
            found = max(rank["calls"][at][key] for rank in ranks)
            fits = fits and found <= bound
            row += [f"{found:,}" if found <= bound else f"[red]{found:,}[/red]", f"{bound:,}"]
        table.add_row(*row)
    console.print(table)
    sent = Table("stage", "message", "collectives", "bytes", "expected")
    for at, (stage, expected) in enumerate(TRAFFIC.items()):
        for kind, pair in expected.items():
            found_on = [tuple(rank["traffic"][at]["sent"].get(kind, (0, 0))) for rank in ranks]
            is_right = all(each == pair for each in found_on)
            fits = fits and is_right
            text = "equal" if is_right else f"[red]{pair[0]} and {pair[1]:,}[/red]"
            sent.add_row(str(stage), kind, str(found_on[0][0]), f"{found_on[0][1]:,}", text)
    console.print(sent)
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of which the cheapest counts")
    parser.add_argument("--output", type=Path, help="write the counts as JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        count(options.folder, options.rounds)
        return 0
    ranks = launched(options.rounds)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"machine": machine(WORLD), "ranks": ranks}, indent=1))
    return 0 if report(ranks, Console(width=130)) else 1


if __name__ == "__main__":
    sys.exit(main())
