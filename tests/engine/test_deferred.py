"""Numbers do not depend on when bytes move, and nothing on its way is touched: what holds on streams, shown on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.common import batch, gpt2, optimizer_for
from tests.kit.deferred_wire import LATE, Hazard, Mode, Watch
from tests.kit.pool import RankPool, on_ranks
from tests.kit.transports import Inflight, Meter, Storage
from tests.programs import PROGRAMS
from tests.settings import Setting, covering, product
from tests.test_programs import check

pytestmark = pytest.mark.gloo

NAMES = (
    "loops.gpt2_clipped_and_accumulated",
    "loops.bert_with_a_frozen_layer",
    "branches.rare_parts_of_micro_batches",
    "paths.checkpoints",
    "options.steps_in_backward",
    "groups.clipped_groups",
    "groups.gradient_of_a_group_kept_over_a_step",
    "steps.whole_values",
    "access.gathered_edits",
    "services.away_between_backward_and_step",
    "writes.averaged_weights_for_a_checkpoint",
    "writes.every_kind_of_write",
    "forward_writes.written_in_a_forward",
    "optimizers.sam",
    "coded.learns_by_int8",
    "whole_matrices.accumulated_and_clipped",
)
"""Loops; and who looks in between: gradients, whole values, evaluations, checkpoints, states that leave and come back."""


def rows(name: str, world: int, roads: str) -> list[Setting]:
    """Every pair of values that the program trains with."""
    known = PROGRAMS[name]
    every = product({**known.factors, "ranks": (world,)}, known.accept)
    return [replace(row, roads=roads) for row in covering([row for row in every if known.refusal(row) is None], name)]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_do_not_depend_on_when_messages_move(pools: dict[int, RankPool], name: str) -> None:
    """The rows that hold the most pairs."""
    check(pools, name, rows(name, 2, "late")[:2])


@pytest.mark.parametrize("roads", ["late", pytest.param("early collectives", marks=pytest.mark.wide)])
def test_gathers_and_reduces_have_one_order(pools: dict[int, RankPool], roads: str) -> None:
    """Where a backward comes to other uses on each rank."""
    check(pools, "paths.loss_depth_by_rank", [Setting(stage=3, roads=roads)])


@pytest.mark.parametrize("name", ["loops.gpt2_clipped_and_accumulated", "options.steps_in_backward"])
def test_numbers_do_not_depend_on_when_copies_move(pools: dict[int, RankPool], name: str) -> None:
    """Between a host and a device with memory of its own: of gradients, and of parameters from host memory and disk."""
    rows = [
        Setting(stage=3, tier="cpu/disk", precision="bf16"),
        Setting(stage=2, tier="cpu"),
        Setting(stage=3, tier="disk"),
    ]
    check(pools, name, [replace(row, roads=roads) for row in rows for roads in ("late copies", "early copies")])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "world", "roads"),
    [
        (name, world, roads)
        for name in NAMES
        for world in PROGRAMS[name].factors["ranks"]
        for roads in LATE
        # gloo's own collectives refuse slices of several lengths, which NCCL's take.
        if not (name.startswith("whole_matrices") and "collectives" in roads)
    ],
)
def test_numbers_do_not_depend_on_when_bytes_move(
    pools: dict[int, RankPool], name: str, world: int, roads: str
) -> None:
    check(pools, name, rows(name, world, roads))


# The instruments ----------------------------------------------------------------------------------------------------------


@on_ranks()
def test_the_instruments_find_what_they_are_for(rank: int, world: int) -> None:
    """Each of the mistakes that the instruments are for, made on purpose."""
    numel = 6

    def begun(watch: Watch, *tags: int) -> tuple[torch.Tensor, torch.Tensor, list[Inflight]]:
        wire = watch.roads.wire(torch.device("cpu"))
        full, own = torch.zeros(len(tags) * world * numel), torch.full((len(tags) * numel,), float(rank))
        parts = zip(full.split(world * numel), own.split(numel), tags)
        return full, own, [wire.gather(*part) for part in parts]

    for mode, collective in itertools.product(Mode, (False, True)):
        watch = Watch(mode, collective)
        full, own, (move,) = begun(watch, 0)
        arrived = torch.arange(float(world)).repeat_interleave(numel)
        assert full.isnan().all() if mode is Mode.LAST else torch.equal(full, arrived)
        move.close()
        assert torch.equal(full, arrived)
        assert watch.finish() == []

        full, own, (move,) = begun(watch, 1)
        own.add_(1)
        with pytest.raises(Hazard, match="its source was written"):
            move.close()
        full, own, (move,) = begun(watch, 2)
        full[0] = 1
        with pytest.raises(Hazard, match="its destination was written"):
            move.close()
        full, own, (move,) = begun(watch, 3)
        full.untyped_storage().resize_(0)
        with pytest.raises(Hazard, match="the memory it writes was given back"):
            watch.check()
        watch.drop()

        watch = Watch(mode, collective)
        wire = watch.roads.wire(torch.device("cpu"))
        mean = torch.zeros(numel)
        source = torch.full((world * numel,), float(rank))
        move = wire.reduce(source, mean, 5)
        with pytest.raises(Hazard, match="writes what the reduce of span 5 may still be reading"):
            wire.gather(source, torch.zeros(numel), 6)
        with pytest.raises(Hazard, match="reads what the reduce of span 5 has not brought yet"):
            wire.gather(torch.zeros(world * numel), mean, 7)
        move.wait()
        assert torch.equal(mean, torch.full_like(mean, (world - 1) / 2))
        if not collective:  # peers may still be reading
            assert [line for line in watch.finish() if "nobody closed the reduce" in line]
        move.close()

        watch = Watch(mode, collective)
        link = watch.roads.link(torch.device("cpu"), Meter())
        host, device = torch.zeros(numel), torch.ones(numel)
        move = link.copy_to_host(device, host)
        assert mode is Mode.FIRST or host.isnan().all()
        move.close()
        move = link.copy_to_device(host, device)
        move.wait()
        assert torch.equal(device, host)
        host.zero_()
        with pytest.raises(Hazard, match="its source was written"):
            move.close()

    watch = Watch(Mode.LAST)
    _, _, moves = begun(watch, *((8, 9) if rank == 0 else (9, 8)))
    for move in moves:
        move.close()
    assert [line for line in watch.finish() if "collective 0: rank 1 issued [('gather', 9)" in line]
    with pytest.raises(Hazard, match="by rank"):
        begun(Watch(Mode.FIRST), 10 + rank)


class Scarce(Storage):
    """Device memory of which the allocation that `turns` names finds none."""

    turns: Callable[[], bool] = staticmethod(lambda: False)

    def allocate(self, kind: str, what: str, bytes_: int, make: Callable[[], Any]) -> Any:
        if self.turns():
            raise zero.OutOfMemoryError("none, says the test")
        return super().allocate(kind, what, bytes_, make)


@pytest.mark.parametrize(
    ("world", "params", "dtype"),
    [
        (1, "cpu", "no"),
        (2, "none", "bf16"),
        pytest.param(2, "cpu", "bf16", marks=pytest.mark.wide),
        (2, "disk", "bf16"),
    ],
)
@on_ranks(None)
def test_a_step_that_found_no_memory_is_done_again(
    rank: int, world: int, tmp_path: Path, params: str, dtype: str
) -> list[str]:
    """An allocation fails for good, on all ranks: the same step, done again, is that of a run where nothing failed."""
    wrong, results = [], []
    for fails in (False, True):
        watch, count = Watch(Mode.LAST), [0]
        model = gpt2()
        optimizer = optimizer_for(model, 2)
        config = zero.ZeroConfig(stage=3, offload_optimizer=params, offload_params=params, offload_dir=tmp_path)
        engine = zero.shard(
            model, optimizer, config, mixed_precision=dtype, **replace(watch.roads, storage=Scarce).given
        )
        watch.watch(engine)

        def turns(count: list[int] = count) -> bool:
            count[0] -= 1
            return count[0] == 0

        engine.context.storage.turns = turns  # type: ignore[attr-defined]
        for step in range(8):
            ids = batch(step, 0, rank)
            for at in (1 + step, 0):
                count[0] = at if fails else 0
                try:
                    model(input_ids=ids, labels=ids).loss.backward()
                    break
                except zero.OutOfMemoryError:
                    count[0] = 0
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*model.state_dict().values()])
        engine.detach()
        wrong += watch.finish()
    return wrong if all(map(torch.equal, *results)) else [*wrong, "weights differ"]
