"""What one steady step costs, as counts that no busy machine changes: Python calls, collectives, bytes on the wire.

The model is the one whose calls `benchmarks/compare.py --measure calls` counts: twelve small blocks, so that what an engine
does per unit is most of what there is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero as zero

pytestmark = pytest.mark.gloo
PACKAGE = str(Path(zero.__file__).parent)

# (stage, where optimizer state rests) -> (calls into or out of hf_zero, all calls of the step less those of the same step
# without hf_zero), on the one of two ranks that makes more, as they were when they were frozen (Python 3.11, torch 2.13).
# They may be lowered at any time. They may be raised only by a change that makes a program right that was wrong before, and
# that says in its commit which calls it adds and why once for all steps is not enough. Moving, renaming and splitting files
# is no such change.
CALLS = {(2, "none"): (3202, -2234), (3, "none"): (4457, -940), (3, "cpu"): (5680, 63)}

# stage -> kind -> (collectives, bytes that this rank sends). Exact: a change that alters them alters what is sent.
TRAFFIC = {
    0: {"gather": (0, 0), "reduce": (14, 132736), "scalar": (0, 0), "agree": (2, 744), "other": (0, 0)},
    1: {"gather": (14, 67072), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 744), "other": (0, 0)},
    2: {"gather": (14, 67072), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 744), "other": (0, 0)},
    3: {"gather": (26, 130048), "reduce": (14, 67072), "scalar": (1, 8), "agree": (2, 752), "other": (0, 0)},
}


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
        gc.disable()  # what is freed when, and with which callbacks, is not the step's
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def stepping(
    model: nn.Module, rank: int, clip: Callable[[torch.optim.Optimizer], Callable[[], object]]
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
    clipping = clip(optimizer)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        clipping()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):  # the order of use is known by then
        step()
    return step


def fewest(step: Callable[[], None]) -> tuple[int, int]:
    """(calls into or out of hf_zero, all calls); the least of some steps: a rank that waits for the other calls more often."""
    found = []
    for _ in range(12):
        with Counted() as counted:
            step()
        found.append((counted.ours, counted.all))
    return min(found)


def count_calls(rank: int, world: int) -> tuple[int, dict[tuple[int, str], tuple[int, int]]]:
    """All calls of a step without hf_zero; case of `CALLS` -> what `fewest` says."""
    model = llama()
    _, plain = fewest(stepping(model, rank, lambda _: lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    out = {}
    for case in CALLS:
        engine, step = sharded(rank, *case)
        out[case] = fewest(step)
        for _ in range(5):  # where the machine is busy, a rank may have waited in each of these steps
            if not is_true_anywhere(bool(grown(case, out[case], plain))):
                break
            out[case] = min(out[case], fewest(step))
        engine.detach()
    return plain, out


def grown(case: tuple[int, str], found: tuple[int, int], plain: int) -> str:
    """Which of the calls are more than they may be, if any."""
    ours, more = CALLS[case]
    rows = zip(("into or out of hf_zero", "in all"), found, (ours, plain + more))
    return ", ".join(f"{now} calls {what}, {frozen} when frozen" for what, now, frozen in rows if now > 1.02 * frozen)


def is_true_anywhere(flag: bool) -> bool:
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def sharded(rank: int, stage: int, offload_optimizer: str = "none") -> tuple[zero.Engine, Callable[[], None]]:
    model = llama()
    made: list[zero.Engine] = []

    def shard(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        made.append(zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, offload_optimizer=offload_optimizer)))
        return lambda: made[0].clip_grad_norm_(1.0)

    step = stepping(model, rank, shard)
    return made[0], step


def test_python_calls_of_a_step_do_not_grow(two):
    for rank, (plain, found) in enumerate(two.run(count_calls, timeout_s=250)):
        for case in CALLS:
            assert not grown(case, found[case], plain), f"{case}, rank {rank}"


def send(rank: int, world: int) -> dict[int, dict[str, tuple[int, int]]]:
    out = {}
    for stage in range(4):
        engine, step = sharded(rank, stage)
        seen = []
        for _ in range(2):
            engine.traffic.reset()
            step()
            seen.append({kind: (n["calls"], n["bytes"]) for kind, n in engine.traffic.to_dict().items()})
        assert seen[0] == seen[1], "not the same in two steps"
        out[stage] = seen[0]
        engine.detach()
    return out


def test_collectives_and_bytes_of_a_step(two):
    assert two.run(send, timeout_s=250) == [TRAFFIC, TRAFFIC]
