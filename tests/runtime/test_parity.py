"""Every stage x world size x precision x accumulation x clipping equals plain data parallel."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hf_zero.comm.group_wire import CollectiveWire
from hf_zero.runtime.transports import Roads
from hf_zero.tiers.tier import Tier
from tests.kit.common import Case, differences, train_engine, train_reference

pytestmark = pytest.mark.gloo
STEPS = 7
"""Past the backwards in which an engine looks at saved tensors, and two changes of the loss scale."""


CLIPPED_STEPS = 4
"""Of a run that clips: past the first change of the loss scale; with two micro-batches also past those backwards."""


def settings(full: bool) -> list[tuple[int, float | None, int]]:
    """Accumulation, clipping, stage: all of them; or every stage under either, with and without the other."""
    everything = itertools.product((1, 3), (None, 0.5), (0, 1, 2, 3))
    return [
        (micros, clip, stage)
        for micros, clip, stage in everything
        if full or clip is None or (micros == 3) == (stage in (0, 3))
    ]


def compare(rank: int, world: int, model: str, dtype: str, full: bool) -> list[str]:
    """Stages, accumulations and clippings of one (world, model, precision); what is off, by rank 0."""
    wrong = []
    for accumulation, clip, stage in settings(full):
        steps = STEPS if full or clip is None else CLIPPED_STEPS
        case = Case(model, stage, dtype, accumulation, clip, steps)
        ours, engine = train_engine(rank, world, case)
        engine.detach()
        if rank != 0:
            continue
        reference = train_reference(world, case)
        largest, rms = differences(ours, reference)
        losses = max(abs(a - b) for a, b in zip(ours.losses, reference.losses))
        norms = max((abs(a - b) / b for a, b in zip(ours.norms, reference.norms)), default=0.0)
        # Sums are taken in rank order on both sides, so without clipping nothing may differ; stage 0 leaves the order to
        # the all-reduce. Clipping multiplies by a coefficient that two correct norms may round differently; Adam turns one
        # such bit into up to 2 lr where a gradient is next to zero, so there the mean counts.
        if clip is None and (stage > 0 or world <= 2):
            good = largest == 0.0 and losses == 0.0
        else:
            good = (
                rms < (2e-5 if dtype == "no" else 1e-4)
                and largest < 1e-2
                and losses < 2e-3
                and norms < (1e-5 if dtype == "no" else 2e-3)
            )
        if not good or ours.scale != reference.scale:
            wrong.append(
                f"{case}: parameters and state {largest:.2e} (rms {rms:.2e}), losses {losses:.2e}, norms {norms:.2e}, "
                f"scale {ours.scale} against {reference.scale}"
            )
    return wrong


COMBINATIONS = list(itertools.product((1, 2, 3, 4), ("gpt2", "bert"), ("no", "bf16", "fp16")))
# Three and four ranks on two cores take longest. Of three, each precision once; of four, each model once; all others with
# the long tests: every model meets every precision on one rank and on two.
LONG = {
    *((3, *pair) for pair in (("bert", "no"), ("gpt2", "bf16"), ("bert", "fp16"))),
    *((4, *pair) for pair in (("gpt2", "bf16"), ("gpt2", "fp16"), ("bert", "no"), ("bert", "fp16"))),
}


@pytest.mark.parametrize(
    ("world", "model", "dtype", "full"),
    [
        *(pytest.param(*each, False, id="-".join(map(str, each))) for each in COMBINATIONS if each not in LONG),
        *(pytest.param(*each, True, marks=pytest.mark.slow) for each in COMBINATIONS),
    ],
)
def test_equals_data_parallel(pools, world, model, dtype, full):
    wrong = pools[world].run(compare, model, dtype, full, timeout_s=240)[0]
    assert not wrong, "\n".join(wrong)


def grouped(rank: int, world: int) -> list[float]:
    out = []
    for stage in (1, 2, 3):
        case = Case(stage=stage, groups=2, steps=STEPS)
        ours, _ = train_engine(rank, world, case)
        if rank == 0:
            out.append(differences(ours, train_reference(world, case))[0])
    return out


def test_two_parameter_groups_are_bit_equal(two):
    assert two.run(grouped)[0] == [0.0, 0.0, 0.0]


def narrow(rank: int, world: int) -> float:
    case = Case(stage=3, dtype="bf16", reduce_dtype="bfloat16", steps=STEPS)
    ours, _ = train_engine(rank, world, case)
    return differences(ours, train_reference(world, case))[0] if rank == 0 else 0.0


def test_reduce_dtype_bfloat16_is_close(two):
    difference = two.run(narrow)[0]
    assert 0.0 < difference < 2e-2


def collective(rank: int, world: int) -> list[tuple[int, str, float, float]]:
    """The wire that CUDA uses, here over gloo's own collectives: same buffers, same waits, the backend's order of sums."""
    out = []
    for stage, dtype in itertools.product((0, 1, 2, 3), ("no", "bf16")):
        case = Case(stage=stage, dtype=dtype, accumulation=2, clip=0.5, groups=2, steps=CLIPPED_STEPS)
        ours, _ = train_engine(rank, world, case, roads=Roads(wire=CollectiveWire))
        if rank == 0:
            out.append((stage, dtype, *differences(ours, train_reference(world, case))))
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_collective_wire(pools, world):
    for stage, dtype, largest, rms in pools[world].run(collective)[0]:
        assert rms < (2e-5 if dtype == "no" else 1e-4), (stage, dtype, rms)
        assert largest < 1e-2, (stage, dtype, largest)


_OFFLOADED = {"offload_optimizer": "cpu", "offload_params": "cpu"}
DEFERRED = [
    *(Case(stage=stage, dtype=dtype, accumulation=3) for stage in (2, 3) for dtype in ("no", "bf16", "fp16")),
    Case("bert", stage=3, accumulation=3, checkpointing=True, groups=2),  # some of it frozen
    *(Case(stage=2, dtype=dtype, accumulation=3, offload_optimizer="cpu") for dtype in ("no", "bf16")),
    *(Case(stage=3, dtype=dtype, accumulation=3, **_OFFLOADED) for dtype in ("no", "bf16")),
    Case(stage=3, dtype="bf16", accumulation=2, offload_optimizer="mixed", offload_params="disk"),
    Case(stage=3, dtype="bf16", accumulation=2, step_in_backward=True, **_OFFLOADED),
    Case(stage=3, accumulation=2, debug=True),
    Case(stage=3, dtype="bf16", accumulation=2, replicas=2),
]


def deferred(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for case in (replace(each, defer=True, steps=CLIPPED_STEPS) for each in DEFERRED):
        ours, engine = train_engine(rank, world, case, folder)
        engine.detach()
        if rank != 0:
            continue
        reference = train_reference(world, case)
        largest, _ = differences(ours, reference)
        if largest or ours.losses != reference.losses or ours.scale != reference.scale:
            wrong.append(f"{case}: {largest:.2e}")
    return wrong


def test_deferred_gradients_are_those_of_no_sync_in_data_parallel(two, tmp_path):
    """`no_sync(defer=True)`: added up on each rank, averaged once."""
    assert two.run(deferred, str(tmp_path), timeout_s=240)[0] == []


_PLENTY = 1 << 30
KEPT = [
    (Case(stage=3, accumulation=2), 300_000),
    (Case(stage=3, dtype="bf16", accumulation=2, debug=True), _PLENTY),
    (Case("bert", stage=3, dtype="fp16", checkpointing=True, groups=2), _PLENTY),
    (Case(stage=3, accumulation=2, defer=True, clip=0.5), _PLENTY),
    (Case(stage=3, dtype="bf16", offload_optimizer="cpu", offload_params="disk"), _PLENTY),
    (Case(stage=3, step_in_backward=True, offload_optimizer="cpu", offload_params="cpu"), _PLENTY),
]


def kept(rank: int, world: int, folder: str) -> list[str]:
    """With so much room beside what the plan takes; what is off."""
    wrong = []
    for case, room in ((replace(each, steps=CLIPPED_STEPS), room) for each, room in KEPT):
        plain, engine = train_engine(rank, world, case, folder)
        memory = engine.plan.memory.at_most(Tier.DEVICE) + room
        engine.detach()
        ours, engine = train_engine(rank, world, replace(case, device_memory=memory), folder)
        count = len(engine.schedule.backward.kept)
        engine.detach()
        if count == 0 or (rank == 0 and differences(ours, plain)[0]) or ours.losses != plain.losses:
            wrong.append(f"{case}: with {count} kept units")
    return wrong


def test_kept_units_change_no_bit(two, tmp_path):
    assert two.run(kept, str(tmp_path), timeout_s=240) == [[], []]
