"""Bytes of offloading: those that move in a step, to the byte, and those that are held."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.common import Case, batch, gpt2, loss_of, nameless_files, optimizer_for
from tests.kit.pool import on_ranks
from tests.kit.transports import ROADS, SMALL, Inflight, P2PWire, Roads
from tests.models import WIDTH, Block, llama

pytestmark = pytest.mark.gloo


# Moved ----------------------------------------------------------------------------------------------------------------


def train(
    case: Case,
    rank: int,
    folder: str,
    steps: int,
    roads: Roads | None = None,
    **changes: Any,
) -> zero.Engine:
    """Counters are those of the last step."""
    model = gpt2(**changes)
    optimizer = optimizer_for(model, case.groups)
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, **case.roads(roads).given)
    for step in range(steps):
        engine.finish_step()
        engine.context.storage.meter.reset()
        engine.traffic.reset()
        for micro in range(case.accumulation):
            with nullcontext() if micro == case.accumulation - 1 else engine.no_sync():
                loss_of(model, rank, step, micro).backward()
        finish(engine, case)
    return engine


def finish(engine: zero.Engine, case: Case) -> None:
    if case.clip is not None:
        engine.clip_grad_norm_(case.clip)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.finish_step()


def expected(spans: list[Any], case: Case, world: int) -> dict[str, int]:
    """What one step moves between this rank's tiers, from the layout alone. Parameters are on the device, which is the host:
    nothing crosses a link."""
    moved = dict.fromkeys(("down", "up", "read", "write"), 0)
    reduces = case.accumulation if case.stage >= 2 or world == 1 else 1
    for span in spans:
        numel = span.slice_numel
        if case.offload_optimizer == "disk":
            # The gradient: written as it arrives, read by the step, for a norm, and for each that is added to it.
            moved["read"] += (3 + reduces + (case.clip is not None)) * 4 * numel
            moved["write"] += (3 + reduces) * 4 * numel
    return moved


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_bytes_moved_in_a_step(rank: int, world: int, tmp_path: Path) -> list[str]:
    cases = [
        Case(stage=stage, dtype=dtype, accumulation=accumulation, clip=clip, offload_optimizer=tier)
        for tier in ("cpu", "disk")
        for stage, dtype, accumulation, clip in (
            (1, "no", 1, None), (2, "bf16", 1, 0.5), (1, "bf16", 2, None), (2, "no", 2, 0.5),
        )
    ]  # fmt: skip
    wrong = []
    for case in cases:
        engine = train(replace(case, sizes=SMALL), rank, tmp_path, 2, n_embd=48)
        moved = {kind: int(count["bytes"]) for kind, count in engine.context.storage.meter.to_dict().items()}
        wanted = expected(list(engine.layout.spans), case, world)
        if moved != wanted:
            wrong.append(f"rank {rank}: {case}: {moved}, expected {wanted}")
    return wrong


class CountingWire(P2PWire):
    """Counts how often each span is gathered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gathers: Counter[int] = Counter()

    def gather(self, full: torch.Tensor, own: torch.Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        self.gathers[tag] += 1
        return super().gather(full, own, tag, cuts)


@on_ranks()
def test_bytes_of_parameters_moved(rank: int, world: int, tmp_path: Path) -> None:
    """Parameters that rest elsewhere come up with every gather, and on the disk are written once a step."""
    for dtype, optimizer, params in (
        ("no", "cpu", "cpu"), ("bf16", "cpu", "cpu"), ("bf16", "none", "cpu"), ("bf16", "cpu", "disk"),
        ("bf16", "disk", "disk"), ("bf16", "none", "disk"), ("no", "disk", "disk"), ("no", "disk", "cpu"),
    ):  # fmt: skip
        case = Case(stage=3, dtype=dtype, offload_optimizer=optimizer, offload_params=params, sizes=SMALL)
        engine = train(case, rank, tmp_path, 2, roads=Roads(wire=CountingWire))
        meter, gathers = engine.context.storage.meter, engine.wire.gathers
        meter.reset()
        gathers.clear()
        loss_of(engine.model, rank, 9).backward()
        finish(engine, case)
        wanted = dict.fromkeys(("down", "up", "read", "write"), 0)
        for span in engine.layout.spans:
            own = span.slice_numel * getattr(torch, span.spec.compute_dtype).itemsize
            one_type = span.spec.compute_dtype == span.spec.master_dtype
            assert 1 <= gathers[span.index] <= 2
            # Beside masters on the device nothing else is stored. Of one type with the master, it is one memory with it where
            # that is the faster place, too.
            rest = "cpu" if optimizer == "cpu" and one_type else "none" if optimizer == "none" else params
            if rest == "cpu":
                wanted["up"] += own * gathers[span.index]
            if optimizer == "disk":
                wanted["read"] += 4 * 4 * span.slice_numel
                wanted["write"] += 4 * 4 * span.slice_numel
            if rest == "disk":
                wanted["read"] += own * gathers[span.index]
                if not one_type:
                    wanted["write"] += own
        moved = {kind: int(count["bytes"]) for kind, count in meter.to_dict().items()}
        assert moved == wanted, (case, moved, wanted)


# Planned --------------------------------------------------------------------------------------------------------------

STEPS = 5


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.wide), 2])
@on_ranks(None)
def test_stepping_in_backward_stays_within_the_plan(rank: int, world: int, tmp_path: Path) -> None:
    """How far the thread is that steps, nobody knows: what is measured is planned, and three units' gradients more at most."""
    for dtype, optimizer, params in (("no", "cpu", "cpu"), ("bf16", "disk", "disk"), ("bf16", "cpu", "none")):
        case = Case("gpt2", 3, dtype, offload_optimizer=optimizer, offload_params=params, step_in_backward=True)
        torch.manual_seed(0)
        model = llama(hidden_size=64, num_hidden_layers=3, intermediate_size=128, vocab_size=193)
        adam = optimizer_for(model, 1)
        engine = zero.shard(model, adam, case.config(tmp_path), mixed_precision=dtype, **ROADS["small blocks"].given)
        engine.record()
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            finish(engine, case)
        rows = {(row.tier, row.kind): row for row in engine.report().tiers}
        unit = max(sum(4 * span.slice_numel for span in unit.spans) for unit in engine.layout.units)
        if row := rows.get(("host", "staging")):  # gradients that land in the host's own memory pass through none
            assert 0 <= row.predicted_peak - row.measured_peak <= 3 * unit, (case, row)
        assert row or optimizer != "disk"
        engine.detach()


# Held -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_inference_holds_no_gradients_and_no_optimizer_state(
    rank: int, world: int, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A model without an optimizer generates what the plain one does, and holds neither gradients nor optimizer state."""
    plain = gpt2().eval().to(dtype)
    ids, size = batch(0, 0, 0), dtype.itemsize
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=False)
    for params in ("none", "cpu", "disk"):
        model = gpt2().eval().to(dtype)
        engine = zero.shard(model, None, Case(stage=3, offload_params=params).config(tmp_path))
        assert zero.engine_of(model) is engine
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, synced_gpus=False), wanted)
        with torch.no_grad():
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        model(input_ids=ids)  # with a graph that nobody uses
        engine.quiesce()
        report = engine.report()
        slices = sum(size * span.slice_numel for span in engine.layout.spans)
        assert report.measured["gradients"] == 0
        assert report.measured["optimizer"] <= 4096 * len(list(engine.layout.spans)) * (params == "disk")  # padding
        if params == "disk":
            assert engine.context.storage.disk.nbytes == sum(
                -(-size * span.slice_numel // 4096) * 4096 for span in engine.layout.spans
            )
            assert not any(isinstance(span.master, torch.Tensor) for unit in engine.units for span in unit.spans)
        else:
            assert slices <= report.measured["parameters"] <= slices + 4096 * 32
        engine.detach()


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_an_engine_leaves_nothing_behind(rank: int, world: int, tmp_path: Path) -> None:
    """An engine that nobody has any more, or that was detached, keeps no memory, no thread and no file."""

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("hf_zero step")}

    for detach in (False, True):
        engine = train(Case(stage=3, offload_optimizer="disk", offload_params="disk"), rank, tmp_path, 2)
        alive = weakref.ref(engine.model), weakref.ref(engine.context.storage)
        assert nameless_files(tmp_path) == 1
        assert threads()
        if detach:
            engine.detach()
            assert nameless_files(tmp_path) == 0
            engine.model(input_ids=batch(0, 0, 0))  # a plain model again
        del engine
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        assert nameless_files(tmp_path) == 0
        assert os.listdir(tmp_path) == []
        deadline = time.monotonic() + 10
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads()


@on_ranks()
def test_a_backward_after_the_model_is_an_error_by_name(rank: int, world: int) -> None:
    """Its blocks keep an activation, whose graph is left."""
    model = torch.nn.Sequential(Block(), Block())
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    loss = model(torch.ones(2, WIDTH)).sum()
    del model
    gc.collect()
    with pytest.raises(zero.StateError, match="is gone"):
        loss.backward()
