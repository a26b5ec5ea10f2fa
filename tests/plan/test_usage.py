"""What is measured is what is there: bytes and traffic against the plan's formulas, waits against a slow rank."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero as zero
from hf_zero.plan.costs import STATES, TIERS
from hf_zero.plan.work import ROADS
from hf_zero.runtime import usage
from tests.kit.common import batch, gpt2, optimizer_for

pytestmark = pytest.mark.gloo


def build(**settings: Any) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    dtype = settings.pop("dtype", "no")
    model = gpt2(n_embd=64, n_layer=3, tie_word_embeddings=False)
    optimizer = optimizer_for(model, 2)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(**settings), mixed_precision=dtype)


def backward(model: Any, engine: zero.Engine, rank: int, step: int, micros: int = 1) -> None:
    for micro in range(micros):
        with contextlib.nullcontext() if micro == micros - 1 else engine.no_sync():
            ids = batch(step, micro, rank)
            model(input_ids=ids, labels=ids).loss.backward()


def train(rank: int, world: int, settings: dict[str, Any], micros: int) -> dict[str, Any]:
    """Bytes between the last backward and its step, the last step's traffic, peaks; and what the plan says of each."""
    model, optimizer, engine = build(**settings)
    recorder = engine.record()
    for step in range(4):
        backward(model, engine, rank, step, micros)
        now = usage.measure(engine)
        optimizer.step()
        engine.finish_step()
        optimizer.zero_grad()
    memory, traffic = usage.predicted(engine, micros)
    trained = [flat for unit in engine.units for flat in unit.trained]
    return {
        "now": now,
        "rest": {tier.value: dict(memory.rest[tier]) for tier in TIERS},
        "planned peak": {tier.value: dict(memory.peak[tier]) for tier in TIERS},
        "peak": recorder.peak,
        "bytes": recorder.last["bytes"],
        "planned bytes": {road: getattr(traffic, road) for road in ROADS},
        "highest": {tier.value: memory.at_peak(tier) for tier in TIERS},
        # torch counts steps in one number per parameter of the optimizer.
        "scalars": {
            tier.value: 4 * sum(_home(shard.tier) is tier for flat in trained for shard in flat.shards)
            for tier in TIERS
        },
        "passes": recorder.last["forwards"],
        "report": engine.report().to_dict(),
    }  # fmt: skip


def _home(tier: usage.Tier) -> usage.Tier:
    return usage.Tier.HOST if tier is usage.Tier.DISK else tier


NONE: dict[str, Any] = {}
CPU = {"offload_optimizer": "cpu"}
DISK = {"offload_optimizer": "disk"}
CASES = [
    (2, 1, NONE, 1), (2, 2, {"dtype": "bf16"}, 1), (2, 3, NONE, 1), (2, 3, {"dtype": "bf16"}, 2), (2, 0, NONE, 1),
    (2, 1, {**CPU, "dtype": "bf16"}, 1), (2, 2, DISK, 1), (2, 3, {**CPU, "offload_params": "cpu", "dtype": "bf16"}, 1),
    (2, 3, {**DISK, "offload_params": "disk"}, 1), (2, 3, {**CPU, "offload_params": "disk", "dtype": "bf16"}, 2),
    (1, 3, {**CPU, "offload_params": "cpu"}, 1), (1, 2, {**DISK, "dtype": "bf16"}, 1), (1, 1, {"dtype": "bf16"}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage", "settings", "micros"), CASES)
def test_measured_is_planned(pools, world: int, stage: int, settings: dict[str, Any], micros: int) -> None:
    for found in pools[world].run(train, {"stage": stage, **settings}, micros):
        for tier, kinds in found["rest"].items():
            for kind in STATES:
                extra = found["scalars"][tier] if kind == "optimizer" else 0
                assert found["now"][tier][kind] == kinds[kind] + extra, (tier, kind)
            assert found["now"][tier]["gathered"] == 0
        for road, told in found["planned bytes"].items():
            assert found["bytes"][road] == told, road
        assert found["passes"] == micros
        for tier, kinds in found["peak"].items():
            assert 0 <= kinds["all"] - found["highest"][tier] <= found["scalars"][tier], tier
        by_name = {(row["tier"], row["kind"]): row for row in found["report"]["tiers"]}
        for (tier, kind), row in by_name.items():
            assert row["measured_peak"] == found["peak"][tier].get(kind, 0)
            assert row["predicted_peak"] == (
                found["highest"][tier] if kind == "all" else found["planned peak"][tier][kind]
            )
        roads = {row["road"]: row for row in found["report"]["roads"]}
        assert all(roads[road]["measured_bytes"] == moved for road, moved in found["bytes"].items() if moved)


def gathered(rank: int, world: int) -> tuple[int, int, list[int]]:
    """The counters against a look at every storage, at each gather."""
    model, optimizer, engine = build(stage=3)
    recorder = engine.record()
    seen: list[tuple[int, int]] = []

    def look(*_: Any) -> None:
        seen.append((recorder._highs.gathered, usage.measure(engine)["device"]["gathered"]))

    for module in model.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    for step in range(3):
        backward(model, engine, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return sum(counted != there for counted, there in seen), len(seen), [there for _, there in seen]


def test_counters_are_what_is_there(two) -> None:
    for wrong, looks, bytes_ in two.run(gathered):
        assert looks > 100
        assert len(set(bytes_)) > 2
        assert wrong == 0


def handed_on(rank: int, world: int) -> dict[str, tuple[int | None, int | None]]:
    """T5's blocks hand on what the first has made of positions: no block is needed again for its gradient."""
    torch.manual_seed(0)
    options = {"vocab_size": 97, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**options, decoder_start_token_id=0, use_cache=False)
    )
    engine = zero.shard(model, optimizer_for(model, 1), zero.ZeroConfig(stage=3))
    engine.record()
    for step in range(3):
        backward(model, engine, rank, step)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return {road.road: (road.predicted_bytes, road.measured_bytes) for road in engine.report().roads}


def test_what_is_handed_on_is_no_use(two) -> None:
    for roads in two.run(handed_on):
        planned, moved = roads["gather"]
        assert planned == moved
        assert planned


def slow_rank(rank: int, world: int) -> dict[str, float]:
    model, optimizer, engine = build(stage=2)
    recorder = engine.record()
    for step in range(3):
        if rank == 1 and step == 2:
            time.sleep(0.4)
        backward(model, engine, rank, step)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    waits: dict[str, float] = recorder.last["wait_s"]
    return {
        "waited": sum(waits[kind] for kind in ("gather", "reduce", "scalar", "agree")),
        "seconds": recorder.last["seconds"],
    }


def test_waiting_for_a_slow_rank_is_counted(two) -> None:
    fast, slow = two.run(slow_rank)
    assert fast["waited"] > 0.3
    assert fast["seconds"] > 0.4
    assert slow["waited"] < fast["waited"] - 0.2


def disk_waits(rank: int, world: int) -> dict[str, Any]:
    model, optimizer, engine = build(stage=3, offload_optimizer="disk", offload_params="disk")
    recorder = engine.record()
    for step in range(3):
        backward(model, engine, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.last


def test_the_thread_that_steps_waits_for_itself(pools) -> None:
    """Reads of parameters hold training up; reads of records hold up the thread, for which training waits."""
    (last,) = pools[1].run(disk_waits)
    assert last["wait_s"]["read"] > 0
    assert last["thread_wait_s"]["read"] > 0
    assert last["wait_s"]["optimizer"] > 0
    assert last["process"]["disk file"] > 0
    assert sum(last["wait_s"].values()) <= last["seconds"]


def same_numbers(rank: int, world: int) -> list[bool]:
    runs = []
    for records in (False, True):
        model, optimizer, engine = build(stage=3, offload_optimizer="cpu", dtype="bf16")
        recorder = engine.record() if records else None
        for step in range(3):
            backward(model, engine, rank, step, 2)
            optimizer.step()
            optimizer.zero_grad()
        if recorder is not None:
            recorder.close()
        verbs = {"gather", "release", "hold", "reduce", "finish_reduce", "drop_grads"}
        left = [unit for unit in engine.units if verbs & set(vars(unit))]
        runs.append(
            (
                model.state_dict(),
                not left and engine.recorder is None and not vars(engine.offload.storage.meter).get("waited"),
            )
        )
        engine.detach()
    (plain, _), (recorded, clean) = runs
    return [clean, *(torch.equal(plain[name], recorded[name]) for name in plain if plain[name].device.type != "meta")]


def test_recording_changes_nothing(two) -> None:
    for answers in two.run(same_numbers):
        assert all(answers)


def files(rank: int, world: int, folder: str) -> None:
    for start in range(2):
        model, optimizer, engine = build(stage=1)
        recorder = engine.record(folder, first_step=3 * start)
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    model(input_ids=batch(9, 0, rank))
            backward(model, engine, rank, step, 2)
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()
        engine.detach()


def test_files(two, tmp_path: Path) -> None:
    half = '{"kind": "step", "st'
    (tmp_path / "zero_steps.jsonl").write_text(half)
    two.run(files, str(tmp_path))
    for name, torn in (("zero_steps.jsonl", 1), ("zero_steps.rank1.jsonl", 0)):
        lines = (tmp_path / name).read_text().splitlines()
        assert lines[:torn] == [half][:torn]
        records = [json.loads(line) for line in lines[torn:]]
        assert [record["kind"] for record in records] == ["facts", "step", "step", "step"] * 2
        assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
        assert [record["evaluations"] for record in records if record["kind"] == "step"] == [0, 1, 0] * 2
        assert records[0]["predicted"]["backward_per_step"] == 2
        assert records[0]["rank"] == torn ^ 1
        assert all(record["forwards"] == 2 for record in records if record["kind"] == "step")
        assert str(tmp_path) not in json.dumps(records)
