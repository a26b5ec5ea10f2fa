"""Weights that are gathered as codes: every rank computes with the same rounded values, and masters stay exact."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.bits import check_bits
from tests.kit.pool import RankPool, on_ranks
from tests.models import adamw, gpt2, ids
from tests.oracle import Run
from tests.settings import Setting

pytestmark = pytest.mark.gloo
APART = {"int8": 1 / 127, "fp8": 1 / 8}
"""Neighbouring codes at most, as a share of the largest value of a block."""


def sharded(stage: int, wire: str, dtype: str = "no", **settings: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = gpt2(n_embd=64)
    config = zero.ZeroConfig(stage=stage, wire=wire, **settings)
    return zero.shard(model, adamw(model, lr=1e-3), config, mixed_precision=dtype)


def step(engine: zero.Engine, number: int, rank: int) -> float:
    tokens = ids(rank, number)
    loss = engine.model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


def computed_with(engine: zero.Engine, rank: int) -> dict[str, Tensor]:
    """What a forward without a graph has as each parameter."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, *_: object) -> None:
        for param in module.parameters(recurse=False):
            seen[names[param]] = param.data.clone()

    names = {param: name for name, param in engine.model.named_parameters()}
    handles = [module.register_forward_hook(note) for module in engine.model.modules()]
    with torch.no_grad():
        engine.model(input_ids=ids(rank, 0))
    for handle in handles:
        handle.remove()
    return seen


def masters(engine: zero.Engine) -> dict[str, Tensor]:
    return {name: zero.full_parameter(param).clone().float() for name, param in engine.model.named_parameters()}


def wrong_values(engine: zero.Engine, wire: str, rank: int) -> list[str]:
    """Matrices that are not within half a code of their masters, or are them; everything that differs between ranks."""
    found, exact, wrong = computed_with(engine, rank), masters(engine), []
    for key, value in found.items():
        shown, master = value.float(), exact[key]
        own = 2**-7 if value.dtype == torch.bfloat16 else 0.0
        allowed = master.abs() * own + (master.abs().max() * APART[wire] / 2 * 1.01 if value.dim() > 1 else 0.0)
        if bool(((shown - master).abs() > allowed).any()):
            wrong.append(f"{key} is not what its codes stand for")
        if value.dim() > 1 and torch.equal(shown, master.to(value.dtype).float()):
            wrong.append(f"{key} was not rounded")
    digests = {key: value.double().sum().item() for key, value in found.items()}
    return wrong + [f"rank {r} has other values" for r, d in enumerate(engine.exchange(digests)) if d != digests]


@pytest.mark.parametrize(
    ("world", "stage", "wire", "dtype", "replicas"),
    [
        (2, 1, "int8", "no", 1),
        (2, 3, "int8", "bf16", 1),
        (4, 3, "fp8", "no", 2),
        (3, 2, "fp8", "bf16", 1),
        pytest.param(4, 2, "int8", "no", 2, marks=pytest.mark.wide),
    ],
)
@on_ranks(None)
def test_every_rank_computes_with_what_the_codes_stand_for(
    rank: int, world: int, stage: int, wire: str, dtype: str, replicas: int
) -> list[str]:
    """Before the first step, and after steps."""
    engine = sharded(stage, wire, dtype, replicas=replicas)
    wrong = []
    for number in range(2):
        wrong += [f"step {number}: {line}" for line in wrong_values(engine, wire, rank)]
        step(engine, number, rank)
    return wrong


# Stages and tiers -----------------------------------------------------------------------------------------------------


def coded(run: Run) -> None:
    model = run.trained_model(functools.partial(gpt2, n_embd=64), functools.partial(adamw, lr=1e-3))
    for number in range(3):
        tokens = run.ids(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        run.see(loss, "loss")
        run.update()


def test_stages_and_tiers_have_the_same_numbers(two: RankPool, tmp_path: Path) -> None:
    """A master is exact wherever it is stored, and what is gathered is made of it alone."""
    places = [(1, "none"), (2, "cpu"), (3, "none"), (3, "cpu/cpu"), (3, "disk/disk")]
    check_bits(two, coded, [Setting(stage=stage, tier=tier, wire="int8") for stage, tier in places], tmp_path)


# What user code writes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), [(1, "no"), (3, "no"), (2, "bf16")])
@on_ranks()
def test_edits_reach_the_masters(rank: int, world: int, stage: int, dtype: str) -> list[str]:
    """Edits between steps, one after another: what masters are afterwards."""
    engine = sharded(stage, "int8", dtype)
    name, param = next((n, p) for n, p in engine.model.named_parameters() if n.endswith("mlp.c_fc.weight"))
    wrong = []

    def check(what: str, expected: Tensor, within: Tensor | float) -> None:
        now = masters(engine)[name]
        if not bool(((now - expected).abs() <= within).all()):
            wrong.append(f"stage {stage}, {what}: off by {float((now - expected).abs().max())}")

    def distance() -> Tensor:
        """Of neighbouring codes, at most, with float32's own rounding."""
        return masters(engine)[name].abs().max() / 127 * 1.01

    for number in range(2):
        step(engine, number, rank)
        before = masters(engine)[name]
        with torch.no_grad():
            param.mul_(1 - 2**-9)
        if dtype == "no":  # the decay of what is shown differs from that of the master by 2^-9 of half a rounding
            check("a decay", before * (1 - 2**-9), distance() * 2**-10 + 1e-8)
        before = masters(engine)[name]
        with torch.no_grad():
            param[0, 0] = 0.5
            param[0, 1] = -0.5
        expected = before.clone()
        expected[0, :2] = torch.tensor([0.5, -0.5])
        check("two elements, that make their blocks' scales larger", expected, 1e-8)
        with torch.no_grad():
            param[1, 0] = 0.75
        expected[1, 0] = 0.75
        check("one more", expected, 1e-8)
        step(engine, number, rank)
        before = masters(engine)[name]
        apart = distance()
        target = (0.1 * torch.randn(before.shape, generator=torch.Generator().manual_seed(number))).bfloat16().float()
        param.data = target.to(param.dtype)
        now = masters(engine)[name]
        is_far = (target - before).abs() > 1.5 * apart
        if not torch.equal(now[is_far], target[is_far]) or not bool(is_far.any()):
            wrong.append(f"stage {stage}: what was given to .data is not the master")
        check("given to .data", target, apart / 2)
        exact = masters(engine)[name]
        with torch.no_grad():
            param.copy_(exact.to(param.dtype))
        check("written as it is", exact, 1e-8)
    before = masters(engine)[name]
    with torch.no_grad():
        param[2, 0] = torch.inf
    before[2, 0] = torch.inf
    if not torch.equal(masters(engine)[name], before):
        wrong.append(f"stage {stage}: an infinity went into its neighbours")
    with torch.no_grad():
        param[2, 0] = before[2, 0] = 0.25
    if not torch.equal(masters(engine)[name], before):
        wrong.append(f"stage {stage}: what was not finite cannot be written")
    step(engine, 2, rank)
    wrong += wrong_values(engine, "int8", rank)
    with zero.unsharded(engine.model):
        if not torch.equal(param.float(), masters(engine)[name].to(param.dtype).float()):
            wrong.append(f"stage {stage}: zero.unsharded shows other values than the masters")
    return wrong


# Checkpoints ----------------------------------------------------------------------------------------------------------


def saves(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = sharded(3, "int8")
    for number in range(2):
        step(engine, number, rank)
    engine.save(folder)
    half = masters(engine)
    return half, [step(engine, number, rank) for number in (2, 3)]


def resumes(rank: int, world: int, folder: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    engine = sharded(stage, "int8")
    engine.load(folder)
    half = masters(engine)
    return half, [step(engine, number, rank) for number in (2, 3)]


def test_a_resume_has_the_exact_masters(pools: dict[int, RankPool], tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    half, after = pools[2].run(saves, folder)[0]
    for world, stage in ((2, 3), (2, 1), (3, 2)):
        mine, goes_on = pools[world].run(resumes, folder, stage)[0]
        assert all(torch.equal(value, half[name]) for name, value in mine.items()), (world, stage)
        assert world != 2 or goes_on == after, "to the bit"


# What else moves or reads values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_masters_stay_exact_wherever_they_go(rank: int, world: int, stage: int) -> list[str]:
    """Created deferred, written by one rank, offloaded for a while, loaded, frozen in part, detached."""
    wrong: list[str] = []
    torch.manual_seed(0)
    with zero.Init():
        model = gpt2(n_embd=64)
    engine = zero.shard(model, adamw(model, lr=1e-3), zero.ZeroConfig(stage=stage, wire="int8"))
    step(engine, 0, rank)

    def check(what: str, expected: dict[str, Tensor]) -> None:
        exact = masters(engine)
        wrong.extend(f"{what}: {key}" for key in expected if not torch.equal(exact[key], expected[key]))
        wrong.extend(f"{what}: {line}" for line in wrong_values(engine, "int8", rank))

    expected = masters(engine)
    name, param = next((n, p) for n, p in engine.model.named_parameters() if n.endswith("mlp.c_fc.weight"))
    with zero.GatheredParameters([param], modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                param[0] = 0.125
    expected[name][0] = 0.125
    check("written inside GatheredParameters", expected)
    with zero.unsharded(model), torch.no_grad():
        param[1] = 0.25
    expected[name][1] = 0.25
    now = masters(engine)
    wrong.extend(f"written inside zero.unsharded: {key}" for key in now if not torch.equal(now[key], expected[key]))
    step(engine, 1, rank)
    expected = masters(engine)
    engine.offload_states()
    engine.reload_states()
    check("away and back", expected)
    model.load_state_dict({key: value.clone() for key, value in expected.items()}, strict=False)
    check("loaded as it is", expected)
    for number, each in enumerate(model.parameters()):
        each.requires_grad_(number % 3 > 0)
    step(engine, 2, rank)
    expected = masters(engine)
    check("after some were frozen", expected)
    engine.detach()
    plain = dict(model.named_parameters())
    return wrong + [f"given back: {key}" for key in plain if not torch.equal(plain[key].detach(), expected[key])]
