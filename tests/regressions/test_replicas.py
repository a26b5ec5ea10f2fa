"""Replicas: refused values, bytes within a replica and across, checkpoints, accessors, debug mode, ranks that never come."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import RankFailure, RankPool, on_ranks
from tests.models import LanguageModel, adamw, ids, mlp, token_loss

pytestmark = pytest.mark.gloo


# Values that are refused, before a parameter has changed, and on every rank ---------------------------------------------


@pytest.mark.parametrize(("world", "replicas"), [(3, 2), (2, 4), (1, 2)])
@on_ranks(None)
def test_ranks_that_replicas_do_not_divide(rank: int, world: int, replicas: int) -> None:
    """No parameter has changed."""
    model = mlp()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(zero.ConfigError, match=f"replicas={replicas} does not divide {world} rank"):
        zero.shard(model, None, zero.ZeroConfig(stage=2, replicas=replicas))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", None])
def test_not_a_number_of_replicas(replicas: Any) -> None:
    with pytest.raises(zero.ConfigError, match="replicas"):
        zero.ZeroConfig(replicas=replicas)


def test_stage_0_has_no_replicas() -> None:
    with pytest.raises(zero.ConfigError, match="replicas=2 needs stage 1, 2 or 3"):
        zero.ZeroConfig(stage=0, replicas=2)


@on_ranks()
def test_other_replicas_on_some_ranks(rank: int, world: int) -> None:
    with pytest.raises(zero.RankMismatchError, match="replicas"):
        zero.shard(mlp(), None, zero.ZeroConfig(stage=2, replicas=1 + rank % 2))


def test_training_argument(tmp_path: Path) -> None:
    given = zero.ZeroTrainingArguments(output_dir=str(tmp_path), zero_replicas=2, use_cpu=True)
    assert given.parallelism_config.config.replicas == 2


# Bytes ------------------------------------------------------------------------------------------------------------------


def sharded(stage: int, replicas: int, **config: Any) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    torch.manual_seed(0)
    model = LanguageModel(tied=True)
    optimizer = adamw(model)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, replicas=replicas, **config))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> None:
    for step in steps:
        tokens = ids(rank, step)
        token_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_replicas_stay_equal_where_gradients_are_rounded(rank: int, world: int, stage: int) -> None:
    """Each rank sums one part across replicas in float32, and sends it as bfloat16: it must use what it has sent."""
    model, optimizer, engine = sharded(stage, 2, reduce_dtype="bfloat16")
    train(model, optimizer, rank, 0, 1)
    weights = torch.cat([param.detach().clone().flatten() for param in model.parameters()])  # this replica's
    assert len({*engine.exchange(hashlib.sha256(weights.numpy().tobytes()).hexdigest())}) == 1


def sent(rank: int, world: int, stage: int, replicas: int) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return calls and bytes of one step by kind, and measured memory."""
    model, optimizer, engine = sharded(stage, replicas)
    for step in range(4):
        engine.traffic.reset()
        tokens = ids(rank, step)
        token_loss(model(tokens), tokens).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    counts = {kind: (count["calls"], count["bytes"]) for kind, count in engine.traffic.to_dict().items()}
    measured = dict(engine.report().measured)
    engine.detach()
    return counts, measured


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_within_a_replica_and_across(pools: dict[int, RankPool], stage: int) -> None:
    alone, found = pools[2].run(sent, stage, 1), pools[4].run(sent, stage, 2)
    for rank, (counts, measured) in enumerate(found):
        expected, memory = alone[rank % 2]
        assert measured == memory, "as on the two ranks of a replica"
        assert {kind: counts[kind] for kind in ("gather", "reduce")} == {k: expected[k] for k in ("gather", "reduce")}
        # A reduce-scatter and an all-gather of a slice between two ranks: half of it each.
        assert counts["across"][0] == 2 * counts["reduce"][0]
        assert counts["across"][1] == memory["parameters"] if stage == 3 else counts["across"][1] > 0
        assert counts["scalar"] == (1, 8), "the norm is that of the two slices of a replica"
        assert counts["other"] == (0, 0)


def test_one_rank_per_replica_sends_what_plain_data_parallel_does(two: RankPool) -> None:
    (plain, memory), (found, measured) = two.run(sent, 0, 1)[0], two.run(sent, 2, 2)[0]
    assert found["gather"] == found["reduce"] == (0, 0)
    assert found["across"] == plain["reduce"]
    assert measured["optimizer"] == memory["optimizer"], "state of all parameters on each rank"


# Debug mode -------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_debug_compares_replicas(rank: int, world: int) -> None:
    """A slice of one rank changes: the other replica has another copy from then on."""
    model, optimizer, _ = sharded(3, 2, debug=True)
    train(model, optimizer, rank, 0, 1)
    if rank == 3:
        optimizer.param_groups[0]["params"][3].data.view(-1)[5] += 1.0
    with pytest.raises(zero.RankMismatchError, match="(?s)ranks differ in step.*ranks 2-3"):  # what has gathered it
        train(model, optimizer, rank, 2)


# Ranks that never come --------------------------------------------------------------------------------------------------


def stalls(rank: int, world: int, stage: int, absent: tuple[int, ...]) -> str:
    """In the third step, ranks of `absent` exchange something in the middle of their backward, and the others do not."""
    model, optimizer, engine = sharded(stage, 2, stall_s=1.0)
    try:
        for step in range(3):
            if step == 2 and rank in absent:
                model.body.blocks[0].register_full_backward_pre_hook(lambda *_: engine.exchange(None))
            train(model, optimizer, rank, step)
    except zero.StallError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "absent", "words"),
    [(2, (2, 3), " from the other replicas (ranks 0, 2)"), (3, (3,), " within replica 1 (ranks 2, 3)")],
)
def test_a_stall_is_named_with_its_group_on_every_rank(stage: int, absent: tuple[int, ...], words: str) -> None:
    pool = RankPool(4)  # its groups are of no use afterwards
    try:
        texts = pool.run(stalls, stage, absent, timeout_s=90)
    finally:
        pool.stop()
    for text in texts:
        assert words in text, texts


def ends(rank: int, world: int, folder: str) -> None:
    """One rank's process ends; each of the others ends with its error."""
    model, optimizer, _ = sharded(3, 2, stall_s=1.0)
    for step in range(3):
        if step == 2 and rank == 3:
            os._exit(7)
        try:
            train(model, optimizer, rank, step)
        except zero.StallError as error:
            Path(folder, f"rank{rank}").write_text(str(error))
            os._exit(8)


def test_a_rank_that_ends_ends_all(tmp_path: Path) -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RankFailure) as caught:
            pool.run(ends, str(tmp_path), timeout_s=60)
    finally:
        pool.stop()
    assert str(caught.value).count("died with exit code 8") == 3
    assert all("rank 3" in path.read_text() or "has broken" in path.read_text() for path in tmp_path.iterdir())
