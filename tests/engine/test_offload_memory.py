"""Bytes of offloading: those that move in a step, to the byte, and those that are held."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from hf_zero.core.layout import Span, itemsize
from hf_zero.core.precision import Precision
from hf_zero.plan.costs import STATES
from hf_zero.plan.machine import Machine
from hf_zero.plan.plan import Drafter, Plan, plan
from hf_zero.plan.solve import PlanInputs
from hf_zero.plan.work import ROADS
from hf_zero.tiers.tier import Tier, padded
from tests.kit.common import Case, batch, bert, gpt2, is_on_the_bar, loss_of, nameless_files, optimizer_for
from tests.kit.offloading import SMALL, SMALL_ROADS, pairwise
from tests.kit.pool import RankPool
from tests.kit.transports import Roads

pytestmark = pytest.mark.gloo


# Moved ----------------------------------------------------------------------------------------------------------------


def train(
    case: Case,
    rank: int,
    folder: str,
    steps: int,
    resident: list[int] | None = None,
    roads: Roads | None = None,
    **changes: Any,
) -> zero.Engine:
    """Counters are those of the last step. `resident` gets the process's memory before each."""
    model = gpt2(**changes)
    optimizer = optimizer_for(model, case.groups)
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, **case.roads(roads).given)
    for step in range(steps):
        if resident is not None:
            resident.append(status("VmRSS"))
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


def expected(spans: list[Span], case: Case, world: int) -> dict[str, int]:
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


def moved_in_a_step(rank: int, world: int, cases: list[Case], folder: str) -> list[str]:
    wrong = []
    for case in cases:
        engine = train(replace(case, sizes=SMALL), rank, folder, 2, n_embd=48)
        moved = {kind: int(count["bytes"]) for kind, count in engine.context.storage.meter.to_dict().items()}
        wanted = expected(list(engine.layout.spans), case, world)
        if moved != wanted:
            wrong.append(f"rank {rank}: {case}: {moved}, expected {wanted}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_moved_in_a_step(pools, tmp_path, world):
    cases = [
        Case(stage=stage, dtype=dtype, accumulation=accumulation, clip=clip, offload_optimizer=tier)
        for tier in ("cpu", "disk")
        for stage, dtype, accumulation, clip in (
            (1, "no", 1, None), (2, "bf16", 1, 0.5), (1, "bf16", 2, None), (2, "no", 2, 0.5),
        )
    ]  # fmt: skip
    wrong = [line for lines in pools[world].run(moved_in_a_step, cases, str(tmp_path)) for line in lines]
    assert not wrong, "\n".join(wrong)


class CountingWire(PairWire):
    """Counts how often each span is gathered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gathers: Counter[int] = Counter()

    def gather(self, full: torch.Tensor, own: torch.Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        self.gathers[tag] += 1
        return super().gather(full, own, tag, cuts)


def parameters_moved(rank: int, world: int, folder: str) -> None:
    """Parameters that rest elsewhere come up with every gather, and on the disk are written once a step."""
    for dtype, optimizer, params in (
        ("no", "cpu", "cpu"), ("bf16", "cpu", "cpu"), ("bf16", "none", "cpu"), ("bf16", "cpu", "disk"),
        ("bf16", "disk", "disk"), ("bf16", "none", "disk"), ("no", "disk", "disk"), ("no", "disk", "cpu"),
    ):  # fmt: skip
        case = Case(stage=3, dtype=dtype, offload_optimizer=optimizer, offload_params=params, sizes=SMALL)
        engine = train(case, rank, folder, 2, roads=Roads(wire=CountingWire))
        meter, gathers = engine.context.storage.meter, engine.wire.gathers
        meter.reset()
        gathers.clear()
        loss_of(engine.model, rank, 9).backward()
        finish(engine, case)
        wanted = dict.fromkeys(("down", "up", "read", "write"), 0)
        for span in engine.layout.spans:
            own = span.slice_numel * itemsize(span.spec.compute_dtype)
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


def test_bytes_of_parameters_moved(two, tmp_path):
    two.run(parameters_moved, str(tmp_path))


# Planned --------------------------------------------------------------------------------------------------------------

STEPS = 5
SCALAR_BYTES = 4
"""Of every segment: the optimizer counts its steps in a number of its own, which no plan has."""


def unpadded_bytes(engine: zero.Engine) -> int:
    """The CPU's wire leaves out the padding of a span that is one parameter, which the last rank alone has."""
    spans = [span for span in engine.layout.spans if span.trainable and len(span.slots) == 1]
    return 4 * sum(span.numel - span.used_numel for span in spans)


def clipping_bytes(case: Case) -> int:
    """A step that clips casts gradients of offloaded state block by block; whether one does, a plan cannot know."""
    return 0 if case.clip is None else 4 * SMALL.block_numel


def llama(**changes: Any) -> torch.nn.Module:
    """Head and embedding apart."""
    torch.manual_seed(0)
    options = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 193,
        "use_cache": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **changes}))


PLANNED: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": lambda: gpt2(n_embd=64, n_layer=3, vocab_size=193),
    "llama": llama,
    "bert": lambda: bert(hidden_size=64, num_hidden_layers=3, vocab_size=193),  # a layer and an embedding are frozen
    "12 blocks": lambda: gpt2(n_layer=12, vocab_size=193),
    "24 blocks": lambda: llama(num_hidden_layers=24, vocab_size=1930, hidden_size=32, intermediate_size=48),
}


def off_plan(rank: int, world: int, cases: list[Case], folder: str) -> list[str]:
    """Whatever is measured otherwise than planned: states at rest and traffic to the byte, peaks within the bar."""
    wrong = []
    for case in cases:
        model = PLANNED[case.model]()
        if case.checkpointing:
            model.gradient_checkpointing_enable()
        optimizer = optimizer_for(model, case.groups)
        roads = replace(case, sizes=SMALL).roads()
        engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, **roads.given)
        engine.record()
        for step in range(STEPS):
            for micro in range(case.accumulation):
                with nullcontext() if micro == case.accumulation - 1 else engine.no_sync():
                    loss_of(model, rank, step, micro).backward()
            resting = engine.report()
            finish(engine, case)
        last = engine.report()
        spans = [span for unit in engine.units for span in unit.trained]
        allowed = {"device": 0, "host": clipping_bytes(case), "disk": 0}
        for span in spans:
            allowed["device" if span.tier is Tier.DEVICE else "host"] += SCALAR_BYTES * len(span.segments)
        unit = max(unit.gathered_bytes for unit in engine.layout.units)
        # How many gradients wait for a disk at a time is not known beforehand: as many as are planned, or fewer.
        fewer = 3 * max(sum(4 * span.slice_numel for span in unit.spans) for unit in engine.layout.units)
        fewer = fewer if any(span.tier is Tier.DISK for span in spans) else 0
        wrong += [
            f"rank {rank}: {case}: rest {row.tier} {row.kind}: planned {row.predicted}, found {row.measured}"
            for row in resting.tiers
            if row.kind in STATES
            and not row.predicted <= row.measured <= row.predicted + allowed[row.tier] * (row.kind == "optimizer")
        ]
        wrong += [
            f"rank {rank}: {case}: peak {row.tier} {row.kind}: planned {row.predicted_peak}, found {row.measured_peak}"
            for row in last.tiers
            if not is_on_the_bar(row.kind, row.predicted_peak, row.measured_peak, unit, allowed[row.tier])
            and not (row.tier == "host" and 0 <= row.predicted_peak - row.measured_peak <= fewer)
        ]
        spared = unpadded_bytes(engine) * case.accumulation
        wrong += [
            f"rank {rank}: {case}: {road.road}: planned {road.predicted_bytes} bytes, found {road.measured_bytes}"
            for road in last.roads
            if road.road in ROADS
            and not 0 <= road.predicted_bytes - road.measured_bytes <= spared * (road.road == "reduce")
        ]
        engine.detach()
    return wrong


def planned_cases(world: int) -> list[Case]:
    """In which any two settings meet."""
    chosen = pairwise(
        {
            "model": ["gpt2", "llama", "bert"], "stage": [3, 2, 1] if world > 1 else [3, 1], "dtype": ["no", "bf16"],
            "accumulation": [1, 2], "offload_optimizer": ["none", "cpu", "disk"],
            "offload_params": ["none", "cpu", "disk"], "clip": [None, 0.01], "groups": [1, 2],
        },
        lambda c: c["offload_params"] == "none" or c["stage"] == 3,
    )  # fmt: skip
    cases = [Case(**changes) for changes in chosen]
    for model in ("12 blocks", "24 blocks"):
        for offload in ("none", "cpu", "disk"):
            cases.append(Case(model, 3, "bf16", offload_params=offload, offload_optimizer=offload))
    cases.append(Case("llama", 3, checkpointing=True, offload_params="cpu", offload_optimizer="cpu"))
    return [*cases, *(Case("gpt2", 0, dtype, accumulation) for dtype in ("no", "bf16") for accumulation in (1, 2))]


def beyond_plan(rank: int, world: int, folder: str) -> None:
    """How far the thread is that steps, nobody knows: what is measured is planned, and three units' gradients more at most."""
    for dtype, optimizer, params in (("no", "cpu", "cpu"), ("bf16", "disk", "disk"), ("bf16", "cpu", "none")):
        case = Case("llama", 3, dtype, offload_optimizer=optimizer, offload_params=params, step_in_backward=True)
        model = PLANNED[case.model]()
        adam = optimizer_for(model, 1)
        engine = zero.shard(model, adam, case.config(folder), mixed_precision=dtype, **SMALL_ROADS.given)
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


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_stepping_in_backward_stays_within_the_plan(pools, tmp_path, world):
    pools[world].run(beyond_plan, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_planned_is_measured(pools, tmp_path, world):
    wrong = [line for lines in pools[world].run(off_plan, planned_cases(world), str(tmp_path)) for line in lines]
    assert not wrong, "\n".join(wrong)


# Held -----------------------------------------------------------------------------------------------------------------


def inferred(rank: int, world: int, folder: str, dtype: torch.dtype) -> None:
    """A model without an optimizer generates what the plain one does, and holds neither gradients nor optimizer state."""
    plain = gpt2().eval().to(dtype)
    ids, size = batch(0, 0, 0), dtype.itemsize
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=False)
    for params in ("none", "cpu", "disk"):
        model = gpt2().eval().to(dtype)
        engine = zero.shard(model, None, Case(stage=3, offload_params=params).config(folder))
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
                padded(size * span.slice_numel) for span in engine.layout.spans
            )
            assert not any(isinstance(span.master, torch.Tensor) for unit in engine.units for span in unit.spans)
        else:
            assert slices <= report.measured["parameters"] <= slices + 4096 * 32
        engine.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_inference_holds_no_gradients_and_no_optimizer_state(pools, tmp_path, world, dtype):
    pools[world].run(inferred, str(tmp_path), dtype)


def left_behind(rank: int, world: int, folder: str) -> None:
    """An engine that nobody has any more, or that was detached, keeps no memory, no thread and no file."""

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("hf_zero step")}

    for detach in (False, True):
        engine = train(Case(stage=3, offload_optimizer="disk", offload_params="disk"), rank, folder, 2)
        alive = weakref.ref(engine.model), weakref.ref(engine.context.storage)
        assert nameless_files(folder) == 1
        assert threads()
        if detach:
            engine.detach()
            assert nameless_files(folder) == 0
            engine.model(input_ids=batch(0, 0, 0))  # a plain model again
        del engine
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        assert nameless_files(folder) == 0
        assert os.listdir(folder) == []
        deadline = time.monotonic() + 10
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not threads()


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_leaves_nothing_behind(pools, tmp_path, world):
    pools[world].run(left_behind, str(tmp_path))


class Keeps(torch.nn.Module):
    """A block that keeps an activation, with its graph, on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.tanh(self.linear(x))
        return self.seen


def kept_graph(rank: int, world: int, stage: int) -> None:
    """The garbage collector does not look into autograd's graph: nothing there may hold the engine."""
    for backward in (False, True):
        model = torch.nn.Sequential(Keeps(), Keeps())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
        for _ in range(6 if backward else 1):  # past the backwards in which saved tensors are looked at
            loss = model(torch.ones(2, 4)).sum()
            if backward:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        alive = weakref.ref(engine), weakref.ref(model)
        del engine, model, optimizer, loss
        gc.collect()
        assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_kept_activation_keeps_no_engine(pools, stage):
    pools[2].run(kept_graph, stage)


def backward_without_a_model(rank: int, world: int) -> str:
    model = torch.nn.Sequential(Keeps(), Keeps())
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    loss = model(torch.ones(2, 4)).sum()
    del model
    gc.collect()
    try:
        loss.backward()
    except zero.StateError as error:
        return str(error)
    return ""


def test_a_backward_after_the_model_is_an_error_by_name(pools):
    for said in pools[2].run(backward_without_a_model):
        assert "is gone" in said


# Limits ---------------------------------------------------------------------------------------------------------------

PINNED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
"""Freed memory goes back to the system at once, so that what is resident is what is held."""

STEADY = """
import sys
from tests.kit.common import Case
from tests.engine.test_offload_memory import status, train

case = Case(stage=0, dtype="bf16", accumulation=2, clip=0.1, groups=2, offload_optimizer="disk", offload_params="disk")
train(case, 0, sys.argv[1], 200, seen := [])
print(seen[60], seen[199])
"""


def status(key: str) -> int:
    """Bytes of this process, as the system counts them: `VmRSS`, `VmData`, …"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))


@pytest.mark.slow
def test_nothing_grows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STEADY, str(tmp_path)],
        env={**os.environ, **PINNED},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    early, late = map(int, done.stdout.split()[-2:])
    assert late - early < 1 << 20


def sizes(layers: int, width: int) -> dict[str, int]:
    return {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": 16}


def foreseen(config: zero.ZeroConfig, world: int, layers: int, width: int) -> Plan:
    """From shapes alone."""
    precision = Precision.of("no", None)
    with torch.device("meta"):
        drafter = Drafter(gpt2(**sizes(layers, width)), precision)
    layout = drafter.layout(drafter.specs(dict.fromkeys(drafter.names, 0)), world)
    return plan(PlanInputs(layout, Machine(), config, world, precision))


def limited(
    rank: int, world: int, folder: str, layers: int, width: int, limit: int | None, room: int
) -> tuple[int, str]:
    """Train two steps under this limit of the process's memory (or `room` above what it has when it is warm).

    Returns the parameters' number, and what happens to who asks for memory for all of this rank's states.
    """
    case = Case(stage=3, offload_optimizer="disk", offload_params="disk", step_in_backward=True)
    train(case, rank, folder, 2).detach()  # threads have their stacks now
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit or status("VmData") + room, before[1]))
    try:
        with zero.Init():
            model = gpt2(**sizes(layers, width))
        optimizer = optimizer_for(model, 1)
        engine = zero.shard(model, optimizer, case.config(folder))
        for step in range(2):
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bool(loss.isfinite())
        numel = engine.layout.numel
        assert world * engine.context.storage.disk.nbytes >= 12 * numel
        try:
            torch.zeros(16 * numel // world, dtype=torch.uint8)
        except RuntimeError as error:
            return numel, str(error)
        return numel, ""
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def trains_within(folder: str, layers: int, width: int, limit: int | None, room: int, timeout_s: float) -> int:
    config = Case(stage=3, offload_optimizer="disk", offload_params="disk", step_in_backward=True).config()
    said = foreseen(config, 2, layers, width).memory
    without = foreseen(Case(stage=3).config(), 2, layers, width).memory
    pool = RankPool(2, executed=True)
    try:
        answers = pool.run(limited, folder, layers, width, limit, room, timeout_s=timeout_s)
    finally:
        pool.stop()
    # Device and host are one memory here.
    assert said.at_peak(Tier.DEVICE) + said.at_peak(Tier.HOST) < room < without.at_rest(Tier.DEVICE)
    for numel, message in answers:
        assert 2 * without.at_rest(Tier.DEVICE) >= 16 * numel
        assert "allocate memory" in message
    return 16 * answers[0][0]


@pytest.fixture
def pinned(monkeypatch):
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_a_model_larger_than_memory_trains_from_disk(tmp_path, pinned):
    """States of 580 MiB, 290 of them each rank's, with room for two thirds of that: malloc keeps a part of it."""
    assert trains_within(str(tmp_path), 48, 256, None, 190 << 20, 250) > 575 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_states_of_8_gib_train_on_two_ranks_of_2_gib(tmp_path, pinned):
    assert trains_within(str(tmp_path), 44, 1024, 2 << 30, 1 << 30, 1700) > 8 << 30
