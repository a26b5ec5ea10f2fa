"""Weights that are gathered as codes: every rank computes with the same rounded values, and masters stay exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.codec import CODECS
from hf_zero.tiers.tier import Sizes
from tests.kit.common import Case, batch, gpt2, loss_of, optimizer_for, train_engine
from tests.kit.deferred_wire import Mode, Watch

pytestmark = pytest.mark.gloo
TEXT = "".join(kind.__doc__ or "" for kind in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.MultiheadAttention))


def sharded(stage: int, name: str, dtype: str = "no", replicas: int = 1, **settings: Any) -> zero.Engine:
    model = gpt2(n_embd=64)
    config = zero.ZeroConfig(stage=stage, wire=name, replicas=replicas, **settings)
    return zero.shard(model, optimizer_for(model, 1), config, mixed_precision=dtype)


def step(engine: zero.Engine, number: int, rank: int) -> float:
    loss = loss_of(engine.model, rank, number)
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
        engine.model(input_ids=batch(0, 0, rank))
    for handle in handles:
        handle.remove()
    return seen


def rounded(engine: zero.Engine, name: str) -> dict[str, Tensor]:
    """What codes of the exact values stand for, slice by slice, of matrices; everything else as it is."""
    exact = masters(engine)
    out = {}
    for span in engine.layout.spans:
        whole = torch.zeros(span.numel)
        for slot in span.slots:
            whole[slot.offset : slot.stop] = exact[slot.spec.name].reshape(-1)
        if len(span.spec.shape) > 1:
            for part in whole.split(span.slice_numel):
                part.copy_(CODECS[name].rounded(part.to(getattr(torch, span.spec.compute_dtype))))
        for slot in span.slots:
            out[slot.spec.name] = whole[slot.offset : slot.stop].view(slot.spec.shape)
    return out


def masters(engine: zero.Engine) -> dict[str, Tensor]:
    return {name: zero.full_parameter(param).clone().float() for name, param in engine.model.named_parameters()}


def shown(rank: int, world: int, stage: int, name: str, dtype: str, replicas: int) -> list[str]:
    """Before the first step, after steps, in evaluation: what differs from the rounded masters, or between ranks."""
    engine = sharded(stage, name, dtype, replicas)
    wrong = []
    for number in range(3):
        found, expected, exact = computed_with(engine, rank), rounded(engine, name), masters(engine)
        for key, value in found.items():
            if not torch.equal(value.float(), expected[key]):
                wrong.append(f"step {number}: {key} is not what its codes stand for")
            if value.dim() > 1 and torch.equal(value.float(), exact[key]):
                wrong.append(f"step {number}: {key} was not rounded")
        digests = {key: value.double().sum().item() for key, value in found.items()}
        wrong += [
            f"step {number}: rank {r} has other values"
            for r, d in enumerate(engine_exchange(engine, digests))
            if d != digests
        ]
        step(engine, number, rank)
    engine.detach()
    return wrong


def engine_exchange(engine: zero.Engine, value: Any) -> list[Any]:
    return engine.sharded.wire.exchange(value)


@pytest.mark.parametrize(
    ("world", "stage", "name", "dtype", "replicas"),
    [
        (2, 1, "int8", "no", 1),
        (2, 3, "int8", "bf16", 1),
        (4, 3, "int4", "no", 2),
        pytest.param(3, 2, "fp8", "bf16", 1, marks=pytest.mark.slow),
        pytest.param(4, 2, "int8", "no", 2, marks=pytest.mark.slow),
    ],
)
def test_every_rank_computes_with_what_the_codes_stand_for(pools, world, stage, name, dtype, replicas):
    assert pools[world].run(shown, stage, name, dtype, replicas) == [[]] * world


# Stages and tiers -----------------------------------------------------------------------------------------------------


def losses(rank: int, world: int, cases: list[Case], folder: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    out = []
    for case in cases:
        result, engine = train_engine(rank, world, case, folder)
        engine.detach()
        out.append((result.losses, result.params))
    return out


def test_stages_and_tiers_have_the_same_numbers(two, tmp_path):
    """A master is exact wherever it rests, and what is gathered is made of it alone."""
    case = Case(steps=5, wire="int8", stage=1)
    cases = [
        case,
        replace(case, stage=2, offload_optimizer="cpu"),
        replace(case, stage=3),
        replace(case, stage=3, offload_optimizer="cpu", offload_params="cpu"),
        replace(case, stage=3, offload_optimizer="disk", offload_params="disk"),
        replace(case, stage=2, offload_optimizer="mixed", sizes=Sizes(block_numel=96, slab_numel=256)),
    ]
    told = two.run(losses, cases, str(tmp_path))[0]
    for found, params in told[1:]:
        assert found == told[0][0]
        assert all(torch.equal(value, told[0][1][name]) for name, value in params.items())


def deferred(rank: int, world: int, mode: Mode, folder: str) -> list[str]:
    wrong: list[str] = []
    for case in (
        Case(stage=3, steps=2, wire="int8", offload_optimizer="cpu", offload_params="cpu"),
        Case(stage=1, steps=2, wire="int8"),
    ):
        watch = Watch(mode)
        ours, engine = train_engine(rank, world, case, folder, roads=watch.roads, made=watch.watch)
        wrong += watch.finish()
        engine.detach()
        theirs, engine = train_engine(rank, world, case, folder)
        engine.detach()
        wrong += [] if ours.losses == theirs.losses else ["other losses"]
    return wrong


@pytest.mark.parametrize("mode", list(Mode))
def test_bytes_may_move_late_or_early(two, tmp_path, mode):
    assert two.run(deferred, mode, str(tmp_path)) == [[]] * 2


# What a program writes --------------------------------------------------------------------------------------------------


def writes(rank: int, world: int, stage: int, dtype: str) -> list[str]:
    """Edits between steps, one after another: what masters are afterwards."""
    engine = sharded(stage, "int8", dtype)
    name, param = next((n, p) for n, p in engine.model.named_parameters() if n.endswith("mlp.c_fc.weight"))
    wrong = []

    def look(what: str, expected: Tensor, within: Tensor | float) -> None:
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
            look("a decay", before * (1 - 2**-9), distance() * 2**-10 + 1e-8)
        before = masters(engine)[name]
        with torch.no_grad():
            param[0, 0] = 0.5
            param[0, 1] = -0.5
        expected = before.clone()
        expected[0, :2] = torch.tensor([0.5, -0.5])
        look("two elements, that make their blocks' scales larger", expected, 1e-8)
        with torch.no_grad():
            param[1, 0] = 0.75
        expected[1, 0] = 0.75
        look("one more", expected, 1e-8)
        step(engine, number, rank)
        before = masters(engine)[name]
        apart = distance()
        target = (0.1 * torch.randn(before.shape, generator=torch.Generator().manual_seed(number))).bfloat16().float()
        param.data = target.to(param.dtype)
        now = masters(engine)[name]
        is_far = (target - before).abs() > 1.5 * apart
        if not torch.equal(now[is_far], target[is_far]) or not bool(is_far.any()):
            wrong.append(f"stage {stage}: what was given to .data is not the master")
        look("given to .data", target, apart / 2)
        exact = masters(engine)[name]
        with torch.no_grad():
            param.copy_(exact.to(param.dtype))
        look("written as it is", exact, 1e-8)
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
    found, expected_all = computed_with(engine, rank), rounded(engine, "int8")
    wrong += [key for key, value in found.items() if not torch.equal(value.float(), expected_all[key])]
    with zero.unsharded(engine.model):
        if not torch.equal(param.float(), masters(engine)[name].to(param.dtype).float()):
            wrong.append(f"stage {stage}: zero.unsharded shows other values than the masters")
    engine.detach()
    return wrong


@pytest.mark.parametrize(("stage", "dtype"), [(1, "no"), (3, "no"), pytest.param(2, "bf16", marks=pytest.mark.slow)])
def test_edits_reach_the_masters(two, stage, dtype):
    assert two.run(writes, stage, dtype) == [[]] * 2


# Checkpoints ----------------------------------------------------------------------------------------------------------


def saves(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = sharded(3, "int8")
    for number in range(2):
        step(engine, number, rank)
    engine.save(folder)
    half = masters(engine)
    after = [step(engine, number, rank) for number in (2, 3)]
    engine.detach()
    return half, after


def resumes(rank: int, world: int, folder: str, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    engine = sharded(stage, "int8")
    engine.load(folder)
    half = masters(engine)
    after = [step(engine, number, rank) for number in (2, 3)]
    engine.detach()
    return half, after


def test_a_resume_has_the_exact_masters(pools, tmp_path):
    folder = str(tmp_path / "saved")
    half, after = pools[2].run(saves, folder)[0]
    for world, stage in ((2, 3), (2, 1), (3, 2)):
        mine, goes_on = pools[world].run(resumes, folder, stage)[0]
        assert all(torch.equal(value, half[name]) for name, value in mine.items()), (world, stage)
        assert world != 2 or goes_on == after, "to the bit"


# Learning -------------------------------------------------------------------------------------------------------------


def learns(rank: int, world: int, name: str, stage: int, seed: int) -> list[float]:
    """Characters of a text, a small GPT-2; `seed`: of the order in which the text is read."""
    tokens = torch.tensor(list(TEXT.encode("ascii", "replace"))) % 128
    model = gpt2(n_embd=64, vocab_size=128)
    engine = zero.shard(model, optimizer_for(model, 2, lr=3e-3), zero.ZeroConfig(stage=stage, wire=name))
    found = []
    for number in range(60):
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + rank)
        at = torch.randint(0, len(tokens) - 16, (8,), generator=generator)
        ids = torch.stack([tokens[start : start + 16] for start in at.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        found.append(loss.item())
    engine.detach()
    return found


def test_a_model_learns_as_without_codes(two):
    """The loss at the end is within what another order of the same text makes of it, on either side."""

    def last(name: str, seed: int) -> float:
        losses = two.run(learns, name, 3, seed)[0]
        assert sum(losses[:5]) / 5 - sum(losses[-5:]) / 5 > 1.0, "it has learnt"
        return sum(losses[-20:]) / 20

    seeds = range(3)
    exact, coded = ([last(name, seed) for seed in seeds] for name in ("none", "int8"))
    noise = max(exact) - min(exact)
    assert abs(sum(coded) - sum(exact)) / len(seeds) < noise, (exact, coded)


# What else moves or reads values ----------------------------------------------------------------------------------------


def lives(rank: int, world: int, stage: int) -> list[str]:
    """Born in slices, written by one rank, away in host memory for a while, evaluated in another type, given back."""
    wrong: list[str] = []
    with zero.Init():
        model = gpt2(n_embd=64)
    engine = zero.shard(model, optimizer_for(model, 2), zero.ZeroConfig(stage=stage, wire="int8"))
    step(engine, 0, rank)

    def look(what: str, expected: dict[str, Tensor] | None = None) -> None:
        exact, found = masters(engine), computed_with(engine, rank)
        wrong.extend(f"{what}: {key}" for key in expected or {} if not torch.equal(exact[key], (expected or {})[key]))
        codes = rounded(engine, "int8")
        wrong.extend(
            f"{what}: {key} is not what its codes stand for" for key in found if not torch.equal(found[key], codes[key])
        )

    expected = masters(engine)
    name, param = next((n, p) for n, p in engine.model.named_parameters() if n.endswith("mlp.c_fc.weight"))
    with zero.GatheredParameters([param], modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                param[0] = 0.125
    expected[name][0] = 0.125
    look("written inside GatheredParameters", expected)
    with zero.unsharded(model), torch.no_grad():
        param[1] = 0.25
    expected[name][1] = 0.25
    now = masters(engine)
    wrong.extend(f"written inside zero.unsharded: {key}" for key in now if not torch.equal(now[key], expected[key]))
    step(engine, 1, rank)
    expected = masters(engine)
    engine.offload_states()
    engine.reload_states()
    look("away and back", expected)
    model.load_state_dict({key: value.clone() for key, value in expected.items()}, strict=False)
    look("loaded as it is", expected)
    for number, each in enumerate(model.parameters()):
        each.requires_grad_(number % 3 > 0)
    step(engine, 2, rank)
    expected = masters(engine)
    look("after some were frozen", expected)
    engine.detach()
    plain = dict(model.named_parameters())
    return wrong + [f"given back: {key}" for key in plain if not torch.equal(plain[key].detach(), expected[key])]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_masters_stay_exact_wherever_they_go(two, stage):
    assert two.run(lives, stage) == [[]] * 2
