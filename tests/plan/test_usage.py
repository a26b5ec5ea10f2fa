"""What is measured is what is there: bytes and traffic against the plan's formulas, waits against a slow rank."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.core.units import LIMITS, Limits
from hf_zero.diagnostics import usage
from hf_zero.plan.costs import STATES, TIERS
from hf_zero.plan.traffic import CHANNELS, LINKS
from tests.kit.common import VOCAB, batch, gpt2, is_on_the_bar, loss_of, optimizer_for
from tests.kit.families import mixtral, vit
from tests.kit.transports import Roads
from tests.models import llama, t5

pytestmark = pytest.mark.gloo


def build(**settings: Any) -> tuple[Any, torch.optim.Optimizer, zero.Engine]:
    dtype, limits = settings.pop("dtype", "no"), settings.pop("limits", LIMITS)
    model = gpt2(n_embd=64, n_layer=settings.pop("layers", 3), tie_word_embeddings=False)
    optimizer = optimizer_for(model, 2)
    config, roads = zero.ZeroConfig(**settings), Roads(limits=limits)
    return model, optimizer, zero.shard(model, optimizer, config, mixed_precision=dtype, **roads.given)


def backward(model: Any, engine: zero.Engine, rank: int, step: int, micros: int = 1, *, defer: bool = False) -> None:
    for micro in range(micros):
        with contextlib.nullcontext() if micro == micros - 1 else engine.no_sync(defer=defer):
            loss_of(model, rank, step, micro).backward()


def train(rank: int, world: int, settings: dict[str, Any], micros: int) -> dict[str, Any]:
    """Bytes between the last backward and its step, the last step's traffic, peaks; and what the plan says of each."""
    defer, share = settings.pop("defer", False), settings.pop("kept", None)
    if share is not None:
        settings["keep_gathered"] = room(settings, share)
    model, optimizer, engine = build(**settings)
    recorder = engine.record()
    meter = engine.context.storage.meter
    for step in range(4):
        before, moved_before = _across(engine), {channel: meter[channel].bytes for channel in LINKS}
        backward(model, engine, rank, step, micros, defer=defer)
        now = usage.measure(engine)
        optimizer.step()
        engine.finish_step()
        optimizer.zero_grad()
    planned = usage.predicted(engine, micros)
    memory, traffic = planned.memory, planned.traffic
    if share is not None:
        assert engine.plan.kept
    trained = [span for unit in engine.units for span in unit.trained]
    return {
        "now": now,
        "stored": {tier.value: dict(memory.stored[tier]) for tier in TIERS},
        "planned peak": {tier.value: dict(memory.peak[tier]) for tier in TIERS},
        "peak": recorder.peak,
        # The thread that steps may be behind the recorder: what it moves is counted when it is done.
        "bytes": {**recorder.last["bytes"], **{channel: meter[channel].bytes - moved_before[channel] for channel in LINKS}},
        "planned bytes": {channel: traffic[channel] for channel in CHANNELS},
        "across": (_across(engine) - before, traffic["across"]),
        "highest": {tier.value: memory.at_peak(tier) for tier in TIERS},
        "unit": max(unit.gathered_bytes for unit in engine.layout.units),
        # torch counts steps in one number per parameter of the optimizer.
        "scalars": {
            tier.value: 4 * sum(_home(span.tier) is tier for span in trained for _ in span.segments)
            for tier in TIERS
        },
        "passes": recorder.last["forwards"],
        "report": engine.report().to_dict(),
    }  # fmt: skip


def room(settings: dict[str, Any], share: float) -> int:
    """`keep_gathered` for a share of the units that could be kept."""
    engine = build(**settings)[2]
    inputs, placements = engine.plan.inputs, engine.plan.placements
    engine.detach()
    order = inputs.candidates(placements)
    return sum(inputs.layout.units[at].gathered_bytes for at in order[: round(share * len(order))])


def _across(engine: zero.Engine) -> int:
    return int(engine.traffic.to_dict().get("across", {"bytes": 0})["bytes"])


def _home(tier: usage.Tier) -> usage.Tier:
    return usage.Tier.HOST if tier is usage.Tier.DISK else tier


NONE: dict[str, Any] = {}
CPU = {"offload_optimizer": "cpu"}
DISK = {"offload_optimizer": "disk"}
DEFER = {"defer": True}
CUT = {"limits": Limits(unit_bytes=150_000)}  # attention | MLP
CASES = [
    (2, 2, {"wire": "int8"}, 2), (4, 3, {"replicas": 2, "wire": "int8"}, 1), (2, 3, {"replicas": 2, "wire": "fp8"}, 2),
    (2, 1, {"wire": "int8", "dtype": "bf16"}, 1), (2, 3, {"wire": "int8", **CPU, "offload_params": "cpu"}, 1),
    (4, 3, {"replicas": 2}, 1), (2, 2, {"replicas": 2, "dtype": "bf16"}, 1),
    (2, 1, NONE, 1), (2, 2, {"dtype": "bf16"}, 1), (2, 3, NONE, 1), (2, 3, {"dtype": "bf16"}, 2), (2, 0, NONE, 1),
    (2, 1, {**CPU, "dtype": "bf16"}, 1), (2, 2, DISK, 1), (2, 3, {**CPU, "offload_params": "cpu", "dtype": "bf16"}, 1),
    (2, 3, {**DISK, "offload_params": "disk"}, 1), (2, 3, {**CPU, "offload_params": "disk", "dtype": "bf16"}, 2),
    (1, 3, {**CPU, "offload_params": "cpu"}, 1), (1, 2, {**DISK, "dtype": "bf16"}, 1), (1, 1, {"dtype": "bf16"}, 2),
    (2, 3, DEFER, 3), (2, 2, {**DEFER, "dtype": "bf16"}, 2), (4, 3, {**DEFER, "replicas": 2}, 2),
    (2, 3, {**DEFER, **CPU, "offload_params": "cpu", "dtype": "bf16"}, 2), (2, 2, {**DEFER, **DISK}, 2),
    *((2, 3, {"kept": share, "layers": 8}, 1) for share in (0.4, 1.0)), (4, 3, {"kept": 0.5, "replicas": 2}, 1),
    (2, 3, {**CUT, "kept": 0.5, "dtype": "bf16"}, 2), (2, 3, {"kept": 0.5, "wire": "int8"}, 1),
    (2, 3, {**CPU, "offload_params": "cpu", "kept": 0.5, "dtype": "bf16", "layers": 6}, 1),
    (1, 3, {**CPU, "offload_params": "disk", "kept": 0.5, "layers": 6}, 1), (2, 3, {**DEFER, "kept": 1.0}, 2),
    (2, 3, CUT, 1), (2, 3, {**CUT, **CPU, "offload_params": "disk", "dtype": "bf16"}, 2), (2, 2, CUT, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "stage", "settings", "micros"),
    [case if number % 3 == 0 else pytest.param(*case, marks=pytest.mark.wide) for number, case in enumerate(CASES)],
)
def test_measured_is_planned(pools, world: int, stage: int, settings: dict[str, Any], micros: int) -> None:
    for found in pools[world].run(train, {"stage": stage, **settings}, micros):
        for tier, kinds in found["stored"].items():
            for kind in STATES:
                extra = found["scalars"][tier] if kind == "optimizer" else 0
                assert found["now"][tier][kind] == kinds[kind] + extra, (tier, kind)
            assert found["now"][tier]["gathered"] == 0
        for channel, told in found["planned bytes"].items():
            assert found["bytes"][channel] == told, channel
        assert found["across"][0] == found["across"][1]
        assert found["passes"] == micros
        for tier, kinds in found["peak"].items():
            told = {**found["planned peak"][tier], "all": found["highest"][tier]}
            for kind, measured in kinds.items():
                if tier == "host" and "disk" in settings.values() and measured <= told[kind]:
                    continue  # a slab is at most as long as a run of parameters of one group, which no layout knows
                assert is_on_the_bar(kind, told[kind], measured, found["unit"], found["scalars"][tier]), (
                    tier,
                    kind,
                    told,
                )
        by_name = {(row["tier"], row["kind"]): row for row in found["report"]["tiers"]}
        for (tier, kind), row in by_name.items():
            assert row["measured_peak"] == found["peak"][tier].get(kind, 0)
            assert row["predicted_peak"] == (
                found["highest"][tier] if kind == "all" else found["planned peak"][tier][kind]
            )
        roads = {row["road"]: row for row in found["report"]["roads"]}
        sent = {channel: moved for channel, moved in found["bytes"].items() if moved and channel not in LINKS}
        assert all(roads[channel]["measured_bytes"] == moved for channel, moved in sent.items())


def bytes_alive() -> int:
    """Of the storages of all tensors in this process."""
    storages = {}
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():  # to look at a sharded parameter gathers nothing
        for each in found:
            # A stand-in has no storage; a parameter of an earlier test may have no engine any more.
            with contextlib.suppress(RuntimeError, NotImplementedError, zero.StateError):
                for tensor in (each, each.grad if each.is_leaf else None):
                    if tensor is not None and tensor.device.type == "cpu":
                        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def watched(rank: int, world: int, settings: dict[str, Any]) -> dict[str, list[int]]:
    """Bytes in memory that no count has, wherever something may be gathered, on its way, or at rest; and a unit's."""
    gc.collect()
    before = bytes_alive()
    model, optimizer, engine = build(**settings)
    ledger = engine.context.storage.ledger
    looks: dict[str, list[int]] = {"forward": [], "backward": [], "end": [], "gathered": []}

    def look(when: str) -> None:
        table = usage.measure(engine)
        counted = sum(sum(table[tier].values()) for tier in ("device", "host"))
        looks[when].append(bytes_alive() - before - counted)
        looks["gathered"].append(ledger.device.now["gathered"])

    for module in (module for _, module in model.named_modules() if type(module).__name__ == "GPT2Block"):
        module.register_forward_hook(lambda *_: look("forward"))
        module.register_full_backward_hook(lambda *_: look("backward"))
    ids = torch.ones(1, 2, dtype=torch.long)  # so that activations are small
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        look("end")
        optimizer.step()
        engine.finish_step()
        optimizer.zero_grad()
        look("end")
    looks["unit"] = [max(unit.gathered_bytes for unit in engine.layout.units)]
    return looks


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, {"stage": 3}, marks=pytest.mark.wide),
        (2, {"stage": 2, "dtype": "bf16"}),
        (1, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
    ],
)
def test_what_is_counted_is_what_is_there(pools, world: int, settings: dict[str, Any]) -> None:
    for looks in pools[world].run(watched, settings):
        (unit,), small = looks["unit"], 48 << 10  # activations of two tokens, buffers, losses
        assert small < unit / 2
        assert len(set(looks["gathered"])) > 2 or settings["stage"] == 2 or world == 1
        assert len(looks["forward"]) == len(looks["backward"]) == 9
        assert all(-small <= beside <= small for when in ("forward", "end") for beside in looks[when]), looks
        # Backward is about to hand this block's gradients over; those of the one before may be on their way already.
        assert all(-small <= beside <= 2 * unit + small for beside in looks["backward"]), looks


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(n_embd=64, n_layer=3), peft.LoraConfig(r=8, target_modules=["c_attn"]))


T5 = {"num_layers": 3, "num_decoder_layers": 3, "d_ff": 64, "vocab_size": VOCAB}
MODELS: dict[str, Callable[[], Any]] = {
    "t5": lambda: t5(**T5),
    "vit": lambda: vit(num_hidden_layers=4, intermediate_size=64, patch_size=4),
    "moe": lambda: mixtral(num_hidden_layers=3, use_cache=False),
    "llama": lambda: llama(num_hidden_layers=3, vocab_size=VOCAB),
    "lora": lora,
}


def peaks(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[tuple[str, str, int, int, int]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    dtype = settings.pop("dtype", "no")
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings), mixed_precision=dtype)
    recorder = engine.record()
    for step in range(4):
        ids = batch(step, 0, rank)
        inputs = {"input_ids": ids, "labels": ids}
        if name == "vit":
            inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
        model(**inputs).loss.backward()
        optimizer.step()
        engine.finish_step()
        optimizer.zero_grad()
    plan = usage.predicted(engine)
    memory, traffic = plan.memory, plan.traffic
    unit = max(unit.gathered_bytes for unit in engine.layout.units)
    if name == "t5":  # its blocks hand on what the first has made of positions: none is gathered again for its gradient
        assert recorder.last["bytes"]["gather"] == traffic["gather"] > 0
    rows = []
    for tier in TIERS:
        planned = {**memory.peak[tier], "all": memory.at_peak(tier)}
        rows += [(tier.value, k, planned[k], v, unit) for k, v in recorder.peak[tier.value].items()]
    engine.detach()
    return rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 3},
        {"stage": 3, "dtype": "bf16"},
        {"stage": 3, "dtype": "bf16", "offload_params": "cpu"},
        {"stage": 3, "dtype": "bf16", "offload_optimizer": "cpu", "offload_params": "cpu"},
    ],
)
def test_peaks_of_other_models(two, name: str, settings: dict[str, Any]) -> None:
    for rows in two.run(peaks, name, settings):
        for tier, kind, told, found, unit in rows:
            assert is_on_the_bar(kind, told, found, unit, 4096), (tier, kind, told, found, unit)


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


def disk_waits(rank: int, world: int) -> tuple[dict[str, Any], float]:
    model, optimizer, engine = build(stage=3, offload_optimizer="disk", offload_params="disk")
    recorder = engine.record()
    for step in range(3):
        backward(model, engine, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.last, engine.context.storage.meter.stepper_wait_s["read"]


def test_the_thread_that_steps_waits_for_itself(pools) -> None:
    """Reads of parameters hold training up; reads of records hold up the thread, for which training waits."""
    ((last, stepper_wait_s),) = pools[1].run(disk_waits)
    assert last["wait_s"]["read"] > 0
    assert stepper_wait_s > 0
    assert last["wait_s"]["optimizer"] > 0
    assert last["process"]["disk file"] > 0
    assert sum(last["wait_s"].values()) <= last["seconds"]
