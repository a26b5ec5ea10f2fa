"""Architectures of transformers that no other test knows: equal to plain training, or a named error.

`ARCHITECTURES=60 SEED=3 pytest -m wide tests/sequence/test_architectures.py` draws 60; by default 40, by seed 0.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.architectures import VARIANTS, batch, build, names
from tests.kit.pool import RankPool
from tests.sequence.test_parity import error

DRAWN = sorted(names())
random.Random(os.environ.get("SEED", "0")).shuffle(DRAWN)
del DRAWN[int(os.environ.get("ARCHITECTURES", "40")) :]
ROUNDING = 1e-5
"""Between float32 in two orders of summation; what is wrong differs by more."""


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

    def in_init() -> bool:
        with zero.Init():
            model = build(name, variant)
        return all(map(torch.equal, trained(model, given, False), wanted))

    def against_plain(**settings: Any) -> bool:
        model, plain = build(name, variant), build(name, variant)
        rows = batch(name, plain, 5 if settings.get("sp_size") else rank, 2, 13)
        if settings.get("sp_size") and is_padded:
            rows["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
            rows["attention_mask"][1, 9:] = 0
        loss = plain(**rows).loss
        loss.backward()
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad])
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, stall_s=30, **settings))
        out: Any = model(**(engine.local_sequence(rows) if settings.get("sp_size") else rows))
        out.loss.backward()
        worst = error(model, out.loss.detach(), loss.detach(), averaged(plain))
        engine.detach()
        return worst < ROUNDING

    checks: dict[str, Callable[[], bool]] = {
        "stage 3": lambda: all(map(torch.equal, trained(build(name, variant), given, False), wanted)),
        "zero.Init": in_init,
        "sp_size": lambda: against_plain(sp_size=2),
        "chunked_loss": lambda: against_plain(chunked_loss=True),
    }
    found = {}
    for title, act in checks.items():
        try:
            found[title] = "equal" if act() else "different"
        except zero.ZeroError as refusal:
            found[title] = f"{type(refusal).__name__}: {refusal}"
    return found


@pytest.mark.gloo
@pytest.mark.wide
@pytest.mark.parametrize("name", DRAWN)
def test_architecture(two: RankPool, name: str) -> None:
    first, second = two.run(check, name, len(name) % 2 == 1)
    assert first == second
    if not first:
        pytest.skip("does not train in these sizes, or not twice alike")
    fine = {"sp_size": ("equal", "ConfigError"), "chunked_loss": ("equal", "ConfigError")}
    assert {title: text for title, text in first.items() if not text.startswith(fine.get(title, "equal"))} == {}
