"""Bytes of offloading: those that move in a step, to the byte, and those that are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.engine import engine_of
from hf_zero.layout import Span, itemsize
from hf_zero.tiers import Tier, padded
from tests.common import Case, batch, gpt2, optimizer_for
from tests.offloading import SLAB_NUMEL, mixed, small_blocks, split

pytestmark = pytest.mark.gloo


# Moved ----------------------------------------------------------------------------------------------------------------


def train(case: Case, rank: int, folder: str, steps: int, **changes: Any) -> zero.Engine:
    """Counters are those of the last step."""
    model = gpt2(**changes)
    optimizer = optimizer_for(model, case.groups)
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype)
    for step in range(steps):
        engine.finish_step()
        engine._storage.meter.reset()
        engine.traffic.reset()
        for micro in range(case.accumulation):
            engine._schedule.sync = micro == case.accumulation - 1
            ids = batch(step, micro, rank)
            model(input_ids=ids, labels=ids).loss.backward()
        if case.clip is not None:
            engine.clip_grad_norm_(case.clip)
        optimizer.step()
        optimizer.zero_grad()
    engine.finish_step()
    return engine


def records(numel: int) -> int:
    """Bytes of Adam's records of a shard: master and two states, each padded in each record."""
    whole, rest = divmod(numel, min(SLAB_NUMEL, numel))
    return 3 * (whole * padded(4 * min(SLAB_NUMEL, numel)) + padded(4 * rest))


def expected(spans: list[Span], case: Case, world: int) -> dict[str, int]:
    """What one step moves between this rank's tiers, from the layout alone. Parameters rest on the device."""
    moved = dict.fromkeys(("down", "up", "read", "write"), 0)
    reduces = case.accumulation if case.stage >= 2 or world == 1 else 1
    for span in spans:
        compute = itemsize(span.spec.compute_dtype)
        # Alone, gradients go down as they come; else as reduced, in float32.
        grad = compute if world == 1 else 4
        tier = {"cpu": Tier.HOST, "disk": Tier.DISK}.get(case.offload_optimizer)
        for place, numel in split(span) if tier is None else ((tier, span.slice_numel),):
            if place is Tier.DEVICE:
                continue
            moved["down"] += reduces * grad * numel
            moved["up"] += compute * numel
            if place is Tier.DISK:
                moved["read"] += records(numel)
                moved["write"] += records(numel)
    return moved


def moved_in_a_step(rank: int, world: int, cases: list[Case], folder: str) -> list[str]:
    wrong = []
    for case in cases:
        with mixed(case), small_blocks():
            engine = train(case, rank, folder, 2, n_embd=48)
            moved = {kind: int(count["bytes"]) for kind, count in engine._storage.meter.to_dict().items()}
        wanted = expected(list(engine.layout.spans), case, world)
        if moved != wanted:
            wrong.append(f"rank {rank}: {case}: {moved}, expected {wanted}")
        numel = sum(span.slice_numel for span in engine.layout.spans)
        link = moved["down"] + moved["up"]
        if case.dtype == "no" and case.offload_optimizer == "cpu" and case.accumulation == 1 and link != 8 * numel:
            wrong.append(f"rank {rank}: {case}: {link} bytes over the link for {numel} elements, expected 8 of each")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_moved_in_a_step(pools, tmp_path, world):
    cases = [
        Case(stage=stage, dtype=dtype, accumulation=accumulation, clip=clip, offload_optimizer=tier)
        for tier in ("cpu", "disk", "mixed")
        for stage, dtype, accumulation, clip in ((1, "no", 1, None), (2, "bf16", 1, 0.5), (1, "bf16", 2, None), (2, "no", 2, 0.5))
    ]  # fmt: skip
    wrong = [line for lines in pools[world].run(moved_in_a_step, cases, str(tmp_path)) for line in lines]
    assert not wrong, "\n".join(wrong)


def link_bytes(rank: int, world: int, folder: str) -> tuple[float, float]:
    """(bytes over the link per parameter that autocast casts, the part of such parameters)."""
    case = Case(stage=2, dtype="bf16", clip=0.5, offload_optimizer="cpu")
    engine = train(case, rank, folder, 2, n_embd=256)
    meter = engine._storage.meter
    spans = list(engine.layout.spans)
    narrow = sum(span.slice_numel for span in spans if span.spec.compute_dtype == "bfloat16")
    wide = sum(span.slice_numel for span in spans) - narrow
    return (meter["down"].bytes + meter["up"].bytes - 8 * wide) / narrow, narrow / (narrow + wide)


def test_bf16_takes_six_bytes_per_parameter(two, tmp_path):
    for per_parameter, part in two.run(link_bytes, str(tmp_path)):
        assert per_parameter == 6.0
        assert part > 0.95


def parameters_moved(rank: int, world: int, folder: str) -> None:
    """Parameters that rest elsewhere come up with every gather, and on the disk are written once a step."""
    for dtype, optimizer, params in (
        ("no", "cpu", "cpu"), ("bf16", "cpu", "cpu"), ("bf16", "none", "cpu"), ("bf16", "cpu", "disk"), ("bf16", "disk", "disk"),
        ("no", "disk", "disk"),
    ):  # fmt: skip
        case = Case(stage=3, dtype=dtype, offload_optimizer=optimizer, offload_params=params)
        with small_blocks():
            engine = train(case, rank, folder, 3)
        spans, meter = list(engine.layout.spans), engine._storage.meter
        slices = sum(span.slice_numel * itemsize(span.spec.compute_dtype) for span in spans)
        # On two ranks each sends its slice once per gather.
        gathered = engine.traffic.to_dict()["gather"]["bytes"]
        assert slices < gathered < 2 * slices
        assert meter["up"].bytes == gathered, (case, meter["up"].bytes, gathered)
        down = {"none": slices, "cpu": 4, "disk": 4}[optimizer]
        grads = sum(4 * span.slice_numel for span in spans)
        assert meter["down"].bytes == (grads if optimizer != "none" else down), case
        stored = sum(records(span.slice_numel) for span in spans) if optimizer == "disk" else 0
        # One memory with the master, or a region of its own: that is written as the step makes it.
        apart = [s for s in spans if s.spec.compute_dtype != s.spec.master_dtype or optimizer != "disk"]
        own = sum(s.slice_numel * itemsize(s.spec.compute_dtype) for s in apart) if params == "disk" else 0
        if optimizer == "cpu":  # of one type with their master they rest with it, in host memory
            apart = [s for s in apart if s.spec.compute_dtype != s.spec.master_dtype]
            own = sum(s.slice_numel * itemsize(s.spec.compute_dtype) for s in apart) if params == "disk" else 0
        assert meter["write"].bytes == stored + own, (case, meter["write"].bytes, stored, own)
        if params == "disk":
            on_disk = spans if optimizer == "disk" else apart
            ratio = gathered / slices
            read = sum(s.slice_numel * itemsize(s.spec.compute_dtype) for s in on_disk)
            assert stored + read < meter["read"].bytes <= stored + 2 * read, (case, ratio)


def test_bytes_of_parameters_moved(two, tmp_path):
    two.run(parameters_moved, str(tmp_path))


# Held -----------------------------------------------------------------------------------------------------------------


def inferred(rank: int, world: int, folder: str) -> None:
    """A model without an optimizer generates what the plain one does, and holds neither gradients nor optimizer state."""
    plain = gpt2().eval()
    ids = batch(0, 0, 0)
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=False)
    for params in ("none", "cpu", "disk"):
        model = gpt2().eval()
        engine = zero.shard(model, None, Case(stage=3, offload_params=params).config(folder))
        assert engine_of(model) is engine
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, synced_gpus=False), wanted)
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        model(input_ids=ids)  # with a graph that nobody uses
        report = engine.report()
        slices = sum(4 * span.slice_numel for span in engine.layout.spans)
        engine.quiesce()
        assert report.measured["gradients"] == report.measured["optimizer"] == 0
        if params == "disk":
            assert engine._storage.disk.nbytes == sum(padded(4 * span.slice_numel) for span in engine.layout.spans)
            assert not any(
                isinstance(shard.values, torch.Tensor) for u in engine.units for f in u.flats for shard in f.shards
            )
        else:
            assert sum(s.master.untyped_storage().nbytes() for u in engine.units for f in u.flats for s in f.shards) >= slices
        engine.detach()


@pytest.mark.parametrize("world", [1, 2])
def test_inference_holds_no_gradients_and_no_optimizer_state(pools, tmp_path, world):
    pools[world].run(inferred, str(tmp_path))
