"""Hybrid sharding: replicas of what a stage shards equal plain data parallel, and send what they should to whom they should."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.common import (
    Case,
    batch,
    bert,
    differences,
    gpt2,
    loss_of,
    optimizer_for,
    take_steps,
    train_engine,
    train_reference,
)
from tests.kit.deferred_wire import Mode, Watch
from tests.kit.pool import RankFailure, RankPool
from tests.kit.random_calls import Case as Program
from tests.kit.random_calls import Op, Setting
from tests.kit.random_models import Arch, Block
from tests.kit.random_programs import Runner, random_case

pytestmark = pytest.mark.gloo
STEPS = 4


def compare(rank: int, world: int, cases: list[Case], folder: str) -> list[str]:
    """What is not the reference, by rank 0. Sums are taken in the same order there: within a replica, then over replicas."""
    wrong = []
    for case in cases:
        ours, engine = train_engine(rank, world, case, folder)
        engine.detach()
        if rank != 0:
            continue
        reference = train_reference(world, case)
        largest, rms = differences(ours, reference)
        # Clipping multiplies by a coefficient that two right norms may round differently. Where a replica is one rank the
        # backend's all-reduce sums, of more than two in an order of its own.
        exact = case.clip is None and not (case.replicas == world > 2) and case.reduce_dtype is None
        if (largest > 0.0) if exact else (rms > (2e-3 if case.reduce_dtype else 1e-4)):
            wrong.append(f"{case}: largest difference {largest:.2e}, rms {rms:.2e}")
        if ours.scale != reference.scale or len(ours.norms) != len(reference.norms):
            wrong.append(f"{case}: scale {ours.scale}, {reference.scale}")
        if any(abs(a - b) > 2e-3 * b for a, b in zip(ours.norms, reference.norms)):
            wrong.append(f"{case}: norms {ours.norms}, {reference.norms}")
    return wrong


def cases_of(replicas: int) -> list[Case]:
    """What no row of the programs' settings holds."""
    case = Case(steps=STEPS, replicas=replicas)
    return [
        replace(case, stage=2, dtype="fp16", clip=0.5, model="bert", steps=6),
        replace(case, stage=3, dtype="bf16", reduce_dtype="bfloat16"),
        replace(case, stage=3, accumulation=2, offload_optimizer="mixed"),
        replace(case, stage=2, offload_optimizer="cpu", step_in_backward=True),
    ]


@pytest.mark.parametrize(
    ("world", "replicas"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 2), (3, 3), (4, 4)))]
)
def test_equals_data_parallel(pools, tmp_path, world, replicas):
    wrong = pools[world].run(compare, cases_of(replicas), str(tmp_path), timeout_s=300)[0]
    assert not wrong, "\n".join(wrong)


# Bytes ----------------------------------------------------------------------------------------------------------------


def send(rank: int, world: int, stage: int, replicas: int) -> list[Any]:
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=replicas))
    spans = [(span.slice_numel, span.used_numel, len(span.slots), span.shards) for span in engine.layout.spans]
    for step in range(4):
        engine.traffic.reset()
        loss_of(model, rank, step).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    counts = {kind: (count["calls"], count["bytes"]) for kind, count in engine.traffic.to_dict().items()}
    memory = engine.plan.memory.rest
    kept = sum(shard.master.nbytes for unit in engine.units for flat in unit.flats for shard in flat.shards)
    engine.detach()
    return [spans, counts, {tier.value: dict(kinds) for tier, kinds in memory.items()}, kept]


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_within_a_replica_and_across(pools, stage):
    alone = pools[2].run(send, stage, 1)[0]
    found = pools[4].run(send, stage, 2)
    for rank, (spans, counts, memory, kept) in enumerate(found):
        assert (spans, memory, kept) == (alone[0], alone[2], alone[3]), (
            "cut and planned as on the two ranks of a replica"
        )
        assert all(shards == 2 for *_, shards in spans)
        assert counts["gather"] == alone[1]["gather"]
        # Of one parameter, what lies past its end is not sent; then the two ranks of a replica send different numbers.
        part = rank % 2
        sent = sum(
            4 * (max(0, min(slice_numel, used - (1 - part) * slice_numel)) if slots == 1 else slice_numel)
            for slice_numel, used, slots, _ in spans
        )
        assert counts["reduce"] == (len(spans), sent)
        # A reduce-scatter and an all-gather of a slice between two ranks: half of it each.
        assert counts["across"] == (2 * len(spans), sum(4 * slice_numel for slice_numel, *_ in spans))
        assert counts["scalar"] == (1, 8), "the norm is that of the two slices of a replica"
        assert counts["other"] == (0, 0)


def test_one_rank_per_replica_sends_what_plain_data_parallel_does(two):
    plain, found = two.run(send, 0, 1)[0], two.run(send, 2, 2)[0]
    assert found[1]["gather"] == found[1]["reduce"] == (0, 0)
    assert found[1]["across"] == plain[1]["reduce"]
    assert found[3] == plain[3], "optimizer state of all parameters on each rank"


# Whatever else looks at the ranks' slices -----------------------------------------------------------------------------


def saves(rank: int, world: int, folder: str, stage: int, replicas: int) -> tuple[Any, Any]:
    """Two steps, a checkpoint, two more; what the weights and Adam's states are at the checkpoint and at the end."""
    with zero.Init():
        model = gpt2()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=replicas))
    half: Any = None
    for step in range(4):
        if step == 2:
            engine.save(folder)
            half = look(model, optimizer)
        take_steps(model, optimizer, rank, step)
    end = look(model, optimizer)
    engine.detach()
    return half, end


def goes_on(rank: int, world: int, folder: str, stage: int, replicas: int) -> tuple[Any, Any]:
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=replicas))
    engine.load(folder)
    half = look(model, optimizer)
    take_steps(model, optimizer, rank, 2, 3)
    end = look(model, optimizer)
    engine.detach()
    return half, end


def look(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole, the same on every rank."""
    found = {name: zero.full_parameter(param).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        state = zero.full_optimizer_state(param, "exp_avg_sq")
        if state is not None:
            found[f"exp_avg_sq of {name}"] = state.clone()
    return found


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_checkpoints_know_no_replicas(pools, tmp_path, stage):
    folder = str(tmp_path / "saved")
    told = pools[4].run(saves, folder, stage, 2)
    assert all(same(half, told[0][0]) and same(end, told[0][1]) for half, end in told)
    zero.verify(folder)
    for world, replicas in ((4, 2), (4, 1), (2, 2), (3, 1), (1, 1)):
        for half, end in pools[world].run(goes_on, folder, 3, replicas):
            assert same(half, told[0][0]), (world, replicas)
            if (world, replicas) == (4, 2):
                assert same(end, told[0][1])


def edits(rank: int, world: int) -> None:
    model = bert()
    engine = zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=3, replicas=2))
    first, *_ = params = list(model.parameters())
    with zero.GatheredParameters(params, modifier_rank=3):
        if rank == 3:
            for param in params:
                param.data.add_(1.0)
    expected = {name: value + 1.0 for name, value in bert().named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), expected[name]), name
    zero.set_full_parameter(first, torch.full_like(expected[next(iter(expected))], 7.0))
    values = model.state_dict()
    assert all(value.is_meta == (rank != 0) for value in values.values())
    assert rank != 0 or bool((next(iter(values.values())) == 7.0).all())
    model.load_state_dict(bert().state_dict())
    for name, param in bert().named_parameters():
        assert torch.equal(zero.full_parameter(dict(model.named_parameters())[name]), param), name
    engine.detach()
    assert all(torch.equal(param, theirs) for param, theirs in zip(model.parameters(), bert().parameters()))


def test_parameters_are_read_and_written(pools):
    pools[4].run(edits)


@pytest.mark.parametrize("mode", list(Mode))
def test_bytes_may_move_late_or_early(pools, mode):
    assert pools[4].run(deferred, mode) == [[]] * 4


def deferred(rank: int, world: int, mode: Mode) -> list[str]:
    watch = Watch(mode)
    case = Case(stage=3, steps=3, replicas=2, accumulation=2)
    ours, engine = train_engine(rank, world, case, roads=watch.roads, made=watch.watch)
    faults = watch.finish()
    engine.detach()
    if rank == 0:
        largest, _ = differences(ours, train_reference(world, case))
        faults += [f"off by {largest}"] if largest else []
    return faults


# Random programs, in replicas -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(pools: dict[int, RankPool]) -> Runner:
    return Runner(60.0, pools)


def in_replicas(seed: int, ranks: int, replicas: int, stage: int) -> Any:
    case = random_case(seed, ranks=(ranks,), stages=(stage,))
    return replace(case, setting=replace(case.setting, replicas=replicas))


@pytest.mark.parametrize(
    ("seed", "ranks", "replicas", "stage"),
    [
        (22, 2, 2, 3),
        (65, 4, 2, 3),
        (311, 4, 2, 2),
        *(
            pytest.param(seed, ranks, replicas, stage, marks=pytest.mark.slow)
            for seed, (ranks, replicas), stage in itertools.product(
                range(9000, 9008), ((2, 2), (3, 3), (4, 2)), (1, 2, 3)
            )
        ),
    ],
)
def test_programs(runner: Runner, seed: int, ranks: int, replicas: int, stage: int) -> None:
    wrong = runner.check(in_replicas(seed, ranks, replicas, stage))
    assert not wrong, wrong


def test_ranks_take_other_paths(runner: Runner) -> None:
    """Which units take part all ranks agree on together: a slice is averaged across replicas, or not sent at all."""
    arch = Arch((Block("mlp"), Block("experts"), Block("dropout")), width=8)
    ops = tuple(
        Op(kind, 7) for kind in ("rank_branches", "rank_experts", "clip_norm", "rank_forwards", "rank_losses", "step")
    )
    wrong = runner.check(Program(0, Setting(stage=2, ranks=4, replicas=2), arch, ops))
    assert not wrong, wrong


# What debug mode finds -----------------------------------------------------------------------------------------------


def drifts(rank: int, world: int, stage: int) -> str:
    """One rank's slice changes, as no program can: the other replica has another copy from then on."""
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=2, debug=True))
    try:
        for step in range(3):
            if step == 2 and rank == 3:
                engine.units[1].trained[0].shards[0].master.data.view(-1)[5] += 1.0
            take_steps(model, optimizer, rank, step)
    except zero.RankMismatchError as error:
        return str(error)
    finally:
        engine.detach()
    return ""


def test_debug_compares_replicas(pools):
    for text in pools[4].run(drifts, 3):
        assert "ranks differ in step" in text
        assert "ranks 2, 3" in text, "the replica that has gathered it"


# Ranks that do not come -------------------------------------------------------------------------------------------------


def stalls(rank: int, world: int, stage: int, absent: tuple[int, ...]) -> str:
    """Two steps; in the third, ranks of `absent` exchange something in the middle of their backward, and the others do not."""
    model = gpt2(n_layer=3)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=2, stall_s=1.0))
    try:
        for step in range(3):
            if step == 2 and rank in absent:
                model.transformer.h[0].register_full_backward_pre_hook(lambda *_: engine.exchange(None))
            take_steps(model, optimizer, rank, step)
    except zero.StallError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "absent", "words"),
    [
        (2, (2, 3), " from the other replicas (ranks 0, 2)"),
        (3, (3,), " within replica 1 (ranks 2, 3)"),
    ],
)
def test_a_stall_is_named_with_its_group_on_every_rank(stage, absent, words):
    pool = RankPool(4)  # its groups are of no use afterwards
    try:
        texts = pool.run(stalls, stage, absent, timeout_s=90)
    finally:
        pool.stop()
    for text in texts:
        assert words in text, texts


def ends(rank: int, world: int, folder: str) -> None:
    """A program that one rank's process leaves; each of the others ends with its error, as programs do."""
    model = gpt2()
    optimizer = optimizer_for(model, 1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3, replicas=2, stall_s=1.0))
    for step in range(3):
        if step == 2 and rank == 3:
            os._exit(7)
        ids = batch(step, 0, rank)
        try:
            model(input_ids=ids, labels=ids).loss.backward()
        except zero.StallError as error:
            Path(folder, f"rank{rank}").write_text(str(error))
            os._exit(8)
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_ends_ends_all(tmp_path):
    pool = RankPool(4)
    try:
        with pytest.raises(RankFailure) as caught:
            pool.run(ends, str(tmp_path), timeout_s=60)
    finally:
        pool.stop()
    assert str(caught.value).count("died with exit code 8") == 3
    assert all("rank 3" in path.read_text() or "has broken" in path.read_text() for path in tmp_path.iterdir())
