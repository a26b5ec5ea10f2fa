"""Layout arithmetic for any world size: every element has exactly one owner."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.core.layout import ALIGN_NUMEL, Layout, ParamSpec, Visit, itemsize
from hf_zero.core.precision import dtype_name

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=12)


def spec(name: str, shape: tuple[int, ...], **changes) -> ParamSpec:
    return ParamSpec((name,), shape, "float32", "float32", "float32", **changes)


@settings(max_examples=200, deadline=None)
@given(
    shapes=SHAPES,
    shards=st.sampled_from([1, 2, 3, 4, 7, 64, 1024]),
    frozen=st.integers(0, 5),
    optimizers=st.integers(1, 3),
)
def test_every_element_has_one_owner(shapes, shards, frozen, optimizers):
    specs = [
        spec(f"p{i}", shape, trainable=i % (frozen + 1) == 0, optimizer=i % optimizers)
        for i, shape in enumerate(shapes)
    ]
    half = len(specs) // 2
    layout = Layout.build([("a", specs[:half]), ("b", specs[half:])], shards)
    assert sorted(slot.spec.name for span in layout.spans for slot in span.slots) == sorted(s.name for s in specs)
    assert [span.index for span in layout.spans] == list(range(len(list(layout.spans))))
    for span in layout.spans:
        assert span.slice_numel % ALIGN_NUMEL == 0
        assert span.numel == span.slice_numel * shards
        assert len({slot.spec.key for slot in span.slots}) == 1
        owned = {slot.spec.name: [] for slot in span.slots}
        for rank in range(shards):
            for part in span.overlaps(rank):
                assert 0 < part.numel <= span.slice_numel
                assert part.stop <= span.slice_numel
                # The same element, counted from the span's start and from the parameter's.
                assert rank * span.slice_numel + part.start == part.source.offset + part.source_start
                owned[part.source.spec.name].append((part.source_start, part.source_start + part.numel))
        for slot in span.slots:
            runs = owned[slot.spec.name]
            assert runs == sorted(runs)
            assert [run[0] for run in runs[1:]] == [run[1] for run in runs[:-1]]
            assert sum(stop - start for start, stop in runs) == slot.spec.numel
            parts = [(rank, span.part_of(slot, rank)) for rank in range(shards)]
            assert [*span.owners(slot)] == [each for each in parts if each[1] is not None]


def test_odd_sizes_come_last():
    """A scale of one element does not shift the matrices after it to addresses that kernels are slow with."""
    names = ["scale", "first", "bias", "second", "norm", "third"]
    specs = [spec(name, shape) for name, shape in zip(names, [(), (8, 32), (10,), (64, 3), (33,), (32,)])]
    (span,) = Layout.build([("u", specs)], 2).spans
    assert [slot.spec.name for slot in span.slots] == ["first", "second", "third", "scale", "bias", "norm"]
    assert [slot.offset % ALIGN_NUMEL for slot in span.slots[:3]] == [0, 0, 0]
    owned = [spec(name, shape, step_cost=1) for name, shape in zip(names, [(), (8, 32), (10,), (64, 3), (33,), (32,)])]
    (span,) = Layout.build([("u", owned)], 2).spans
    for rank in range(2):
        mine = [slot.spec.numel % ALIGN_NUMEL for slot in span.slots if span.owner(slot) == rank]
        assert [odd > 0 for odd in mine] == sorted(odd > 0 for odd in mine)


def test_padding_is_less_than_one_alignment_per_rank():
    layout = Layout.build([("u", [spec("w", (1000, 1000))])], 1024)
    span = next(layout.spans)
    assert span.numel - span.used_numel < ALIGN_NUMEL * 1024


def test_spans_split_by_type_optimizer_and_training():
    specs = [
        spec("w", (4, 4), optimizer=0),
        spec("b", (4,), optimizer=1),
        spec("frozen", (4, 4), trainable=False, optimizer=-1),
        ParamSpec(("half",), (4, 4), "bfloat16", "bfloat16", "float32", optimizer=0),
        spec("w2", (4, 4), optimizer=0),
        spec("coded", (4, 4), gathered_in="int8"),
    ]
    (unit,) = Layout.build([("u", specs)], 2).units
    assert [[slot.spec.name for slot in span.slots] for span in unit.spans] == [
        ["w", "w2"],
        ["b"],
        ["frozen"],
        ["half"],
        ["coded"],
    ]
    assert unit.numel == 84


def test_bytes_of_every_type():
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        assert itemsize(dtype_name(dtype)) == dtype.itemsize, dtype


def test_what_backward_gathers_again():
    """Not what no gradient reaches, nor what the forward ends with; the last used comes first."""
    frozen = spec("a", (4,), trainable=False, optimizer=-1)
    units = [("a", [frozen]), *((name, [spec(name, (4,))]) for name in "bcd")]
    assert Layout.build(units, 2).gathered_twice() == [2, 1]
    shared = Layout.build(units, 2, [Visit(1), Visit(2), Visit(0), Visit(3), Visit(1)])
    assert shared.gathered_twice() == [3, 0, 2]
    assert [use.first for use in shared.uses()] == [5, 1, 3, 7]


def test_plans_for_1024_ranks_without_a_process_group():
    blocks = [(f"h.{i}", [spec(f"h.{i}.w", (4096, 4096)), spec(f"h.{i}.b", (4096,))]) for i in range(32)]
    layout = Layout.build(blocks, 1024)
    assert layout.numel == 32 * (4096 * 4096 + 4096)
    assert sum(span.slice_numel for span in layout.spans) * 1024 < layout.numel * 1.01


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, shards=st.sampled_from([1, 2, 3, 7, 64]), every=st.integers(1, 3))
def test_parameters_with_one_owner(shapes, shards, every):
    specs = [spec(f"p{i}", shape, step_cost=(i + 1) * (i % every == 0)) for i, shape in enumerate(shapes)]
    half = len(specs) // 2
    layout = Layout.build([("a", specs[:half]), ("b", specs[half:])], shards)
    assert sorted(slot.spec.name for span in layout.spans for slot in span.slots) == sorted(s.name for s in specs)
    loads = [0] * shards
    for span in layout.spans:
        is_whole = span.spec.step_cost > 0
        assert bool(span.cuts) is (is_whole and shards > 1)
        if not span.cuts:
            continue
        assert span.numel == span.used_numel == span.cuts[-1], "no padding"
        for slot in span.slots:
            owners = [rank for rank, _ in span.owners(slot)]
            assert owners == [span.owner(slot)] * bool(slot.spec.numel)
            loads[span.owner(slot)] += slot.spec.step_cost if slot.spec.numel else 0
        for rank in range(shards):
            low, high = span.bounds(rank)
            assert [part.numel for part in span.overlaps(rank)] == [
                slot.spec.numel for slot in span.slots if span.owner(slot) == rank and slot.spec.numel
            ]
            seen = next(s for s in layout.for_rank(rank).spans if s.index == span.index)
            assert seen.slice_numel == high - low == sum(part.numel for part in span.overlaps(rank))
    costs = [slot.spec.step_cost for span in layout.spans for slot in span.slots if span.cuts and slot.spec.numel]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0), "each goes to the rank with least to do"


def test_the_imbalance_of_owners():
    specs = [spec(f"w{i}", (10, 10), step_cost=100) for i in range(4)] + [spec("sliced", (64,))]
    units = [("a", specs[:2]), ("b", specs[2:])]
    assert Layout.build(units, 2).imbalance() == (1.0, 1.0)
    assert Layout.build(units, 3).imbalance() == (1.5, 0.75, 0.75)
    assert Layout.build(units, 1).imbalance() == ()
    assert Layout.build([("a", specs[4:])], 2).imbalance() == ()
