"""Architectures of transformers that no other test knows: equal to plain training, or a named error.

`ARCHITECTURES=60 SEED=3 pytest -m wide tests/sequence/test_architectures.py` draws 60; by default 40, by seed 0. Each must do
what `architectures.json` has, which `python -m tests.sequence.test_architectures` writes: a refusal is no pass where it was
equal. That command tries all of them, and prints how many did what.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.architectures import VARIANTS, batch, build, names
from tests.kit.pool import RankFailure, RankPool
from tests.sequence.test_parity import error

OUTCOMES = Path(__file__).with_name("architectures.json")
DRAWN = sorted(names())
random.Random(os.environ.get("SEED", "0")).shuffle(DRAWN)
del DRAWN[int(os.environ.get("ARCHITECTURES", "40")) :]
ROUNDING = 1e-5
"""Between float32 in two orders of summation; what is wrong differs by more."""
NO_REFERENCE = ("random", "stock fails")
"""The model draws numbers in its forward, or fails without hf_zero."""


def trained(model: Any, given: list[dict[str, Tensor]], is_plain: bool) -> list[Tensor]:
    """Losses and weights of two steps of AdamW; plain: over gradients that ranks average."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    engine = None if is_plain else zero.shard(model, optimizer, zero.ZeroConfig(stage=3, stall_s=30))
    found = []
    for each in given:
        loss = model(**each).loss
        loss.backward()
        found.append(loss.detach())
        if is_plain:
            averaged(model)
        optimizer.step()
        optimizer.zero_grad()
    found += [(param if is_plain else zero.full_parameter(param)).detach().clone() for param in model.parameters()]
    if engine is not None:
        engine.detach()
    return found


def averaged(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        dist.all_reduce(has := torch.tensor(param.grad is not None, dtype=torch.int32))
        if has:
            grad = torch.zeros_like(param) if param.grad is None else param.grad / 2
            dist.all_reduce(grad)
            found[name] = param.grad = grad
    return found


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(rank: int, world: int, name: str, is_padded: bool) -> dict[str, str]:
    """What each check found; empty for a model that does not train alike twice without hf_zero, in none of its variants."""
    warnings.simplefilter("ignore")
    for variant in range(len(VARIANTS)):
        with contextlib.suppress(Exception):
            plain = build(name, variant)
            given = [batch(name, plain, 10 * step + rank, 3 - step, 12 - step) for step in range(2)]
            wanted = trained(plain, given, True)
            again = trained(build(name, variant), given, True)
            if all(map(torch.equal, wanted, again)) and all(each.isfinite().all() for each in wanted):
                break
    else:
        return {}

    def in_init() -> str:
        with zero.Init():
            model = build(name, variant)
        return same(trained(model, given, False))

    def same(found: list[Tensor]) -> str:
        return "equal" if all(map(torch.equal, found, wanted)) else "different"

    def gradients(rows: dict[str, Tensor], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        plain = build(name, variant)
        torch.manual_seed(seed)
        loss: Tensor = plain(**rows).loss
        loss.backward()
        return loss.detach(), averaged(plain)

    def against_plain(**settings: Any) -> str:
        model, divides = build(name, variant), "sp_size" in settings
        rows = batch(name, model, 5 if divides else rank, 2, 13)
        if divides and is_padded and "input_ids" in rows:
            rows["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
            rows["attention_mask"][1, 9:] = 0
        try:
            loss, wanted = gradients(rows, 1)
        except Exception:
            return "stock fails"
        if divides and not alike(wanted, gradients(rows, 2)[1]):
            return "random"  # a part of the tokens draws other numbers
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad])
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, stall_s=30, **settings))
        torch.manual_seed(1)
        out: Any = model(**(engine.local_sequence(rows) if divides else rows))
        out.loss.backward()
        worst = error(model, out.loss.detach(), loss, wanted)
        engine.detach()
        return "equal" if worst < ROUNDING else "different"

    checks: dict[str, Callable[[], str]] = {
        "stage 3": lambda: same(trained(build(name, variant), given, False)),
        "zero.Init": in_init,
        "sp_size": lambda: against_plain(sp_size=2),
        "chunked_loss": lambda: against_plain(chunked_loss=True),
    }
    found = {}
    for title, act in checks.items():
        try:
            found[title] = act()
        except zero.ZeroError as refusal:
            found[title] = f"{type(refusal).__name__}: {refusal}"
    return found


def outcome(pool: RankPool, name: str) -> dict[str, str]:
    """What each check found on both ranks: `equal`, `different`, one of `NO_REFERENCE`, or the class of the error."""
    first, second = pool.run(check, name, len(name) % 2 == 1)
    assert first == second
    return {title: text.partition(":")[0] for title, text in first.items()}


@pytest.mark.gloo
@pytest.mark.wide
@pytest.mark.parametrize("name", DRAWN)
def test_architecture(two: RankPool, name: str) -> None:
    found, known = outcome(two, name), json.loads(OUTCOMES.read_text())
    if not found:
        pytest.skip("does not train in these sizes, or not twice alike")
    assert (found["stage 3"], found["zero.Init"]) == ("equal", "equal")
    assert {*found.values()} <= {"equal", "ConfigError", *NO_REFERENCE}
    if known["transformers"] == transformers.__version__:
        assert found == known["outcomes"][name]


def main() -> None:
    """Try every architecture; write what it did, and print the counts."""
    pool, found = RankPool(2), dict[str, dict[str, str]]()
    for name in sorted(names()):
        try:
            found[name] = outcome(pool, name)
        except RankFailure as failure:
            found[name] = {"failed": str(failure).strip().splitlines()[-1]}
        print(name, found[name], flush=True)
    pool.stop()
    text = json.dumps({"transformers": transformers.__version__, "outcomes": found}, indent=1)
    OUTCOMES.write_text(text + "\n", encoding="utf-8")
    for title in dict.fromkeys(title for each in found.values() for title in each):
        print(title, dict(Counter(each[title] for each in found.values() if title in each)))


if __name__ == "__main__":
    main()
