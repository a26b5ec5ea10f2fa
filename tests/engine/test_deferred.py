"""Numbers do not depend on when bytes move, and nothing on its way is touched: what holds on streams, shown on a CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.kit.common import Case, Result, batch, gpt2, optimizer_for, train_engine
from tests.kit.deferred_wire import Hazard, Mode, Watch
from tests.kit.offloading import equal, pairwise, same, unequal, values
from tests.kit.transports import SMALL, Inflight, Meter, Roads, Storage

pytestmark = pytest.mark.gloo

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "dtype": ("no", "bf16"),
    "accumulation": (1, 3),
    "offload_optimizer": ("none", "cpu", "disk"),
    "offload_params": ("none", "cpu", "disk"),
    "model": ("gpt2", "bert"),
    "clip": (None, 0.5),
    "checkpointing": (False, True),
    "groups": (1, 2),
}
TAKE_TURNS = ("model", "clip", "groups")


def cases(world: int, full: bool) -> list[Case]:
    def allowed(values: dict[str, Any]) -> bool:
        if world == 1:
            return values["stage"] in (0, 3)
        in_memory = values["offload_optimizer"] == "none" or values["stage"] > 0
        return values["stage"] == 3 or (values["offload_params"] == "none" and in_memory)

    if not full:
        return [Case(**values, steps=2) for values in pairwise(DIMENSIONS, allowed)]
    rest = itertools.cycle(itertools.product(*(DIMENSIONS[name] for name in TAKE_TURNS)))
    most = [name for name in DIMENSIONS if name not in TAKE_TURNS]
    everything = (dict(zip(most, values)) for values in itertools.product(*(DIMENSIONS[name] for name in most)))
    chosen = [values for values in everything if allowed(values)]
    return [Case(**values, **dict(zip(TAKE_TURNS, next(rest))), steps=2) for values in chosen]


def train(rank: int, world: int, case: Case, folder: str, watch: Watch) -> Result:
    result, engine = train_engine(rank, world, replace(case, sizes=SMALL), folder, watch.roads, watch.watch)
    watch.check()
    engine.detach()
    return result


def compare(rank: int, world: int, chosen: list[Case], mode: Mode, collective: bool, folder: str) -> list[str]:
    """What a watched run finds, and where its numbers are not those of the run in memory over plain roads."""
    wrong: list[str] = []
    references: dict[Case, Result] = {}
    for case in chosen:
        in_memory = replace(case, offload_optimizer="none", offload_params="none")
        if in_memory not in references:
            plain = Watch(mode, collective)
            roads = replace(plain.roads, wire=plain.open_plain_wire)
            references[in_memory], engine = train_engine(rank, world, in_memory, roads=roads)
            engine.detach()
        watch = Watch(mode, collective)
        result = train(rank, world, case, folder, watch)
        found = watch.finish() + unequal(result, references[in_memory])
        wrong += [f"rank {rank}: {case}: {line}" for line in found[:4]]
    return wrong


def run(pool: Any, chosen: list[Case], mode: Mode, collective: bool, folder: Path, timeout_s: float = 200) -> None:
    found = pool.run(compare, chosen, mode, collective, str(folder), timeout_s=timeout_s)
    wrong = [line for lines in found for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize(("world", "collective", "mode"), [(1, False, Mode.LAST), (2, True, Mode.LAST)])
def test_numbers_do_not_depend_on_when_bytes_move(pools, tmp_path, world, collective, mode):
    run(pools[world], cases(world, full=False), mode, collective, tmp_path)


@pytest.mark.parametrize(
    "mode", [mode if mode is not Mode.FIRST else pytest.param(mode, marks=pytest.mark.wide) for mode in Mode]
)
def test_numbers_do_not_depend_on_when_messages_move(two, tmp_path, mode):
    chosen = cases(2, full=False)
    run(two, chosen[:: 2 if mode is Mode.LAST else 3], mode, False, tmp_path)


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("world", "collective"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_numbers_do_not_depend_on_when_bytes_move_in_full(pools, tmp_path, world, collective, mode):
    run(pools[world], cases(world, full=world < 3), mode, collective, tmp_path, timeout_s=3500)


# The instruments ----------------------------------------------------------------------------------------------------------


def seeded(rank: int, world: int) -> None:
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
        move = link.down(device, host)
        assert mode is Mode.FIRST or host.isnan().all()
        move.close()
        move = link.up(host, device)
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


def test_the_instruments_find_what_they_are_for(two):
    two.run(seeded)


# Replicas, and weights that are gathered as codes -------------------------------------------------------------------------


def replicated(rank: int, world: int, mode: Mode) -> list[str]:
    watch = Watch(mode)
    case = Case(stage=3, steps=3, replicas=2, accumulation=2)
    ours, engine = train_engine(rank, world, case, roads=watch.roads, made=watch.watch)
    wrong = watch.finish()
    engine.detach()
    theirs, engine = train_engine(rank, world, case)
    engine.detach()
    return wrong + unequal(ours, theirs)


@pytest.mark.parametrize("mode", list(Mode))
def test_replicas(pools, mode):
    assert pools[4].run(replicated, mode) == [[]] * 4


def coded(rank: int, world: int, mode: Mode, folder: str) -> list[str]:
    wrong: list[str] = []
    away = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    for case in (Case(stage=3, steps=2, wire="int8", **away), Case(stage=1, steps=2, wire="int8")):
        watch = Watch(mode)
        ours, engine = train_engine(rank, world, case, folder, roads=watch.roads, made=watch.watch)
        wrong += watch.finish()
        engine.detach()
        theirs, engine = train_engine(rank, world, case, folder)
        engine.detach()
        wrong += [] if ours.losses == theirs.losses else ["other losses"]
    return wrong


@pytest.mark.parametrize("mode", list(Mode))
def test_codes(two, tmp_path, mode):
    assert two.run(coded, mode, str(tmp_path)) == [[]] * 2


# Who looks in between ---------------------------------------------------------------------------------------------------


def looked_at(rank: int, world: int, folder: str, place: str, dtype: str) -> list[str]:
    """Gradients in the optimizer's groups are there, and whole, when a backward has ended and when a step has."""
    optimizer_tier, stage = place.split()
    wrong, seen = [], []
    for tier in ("none", optimizer_tier):
        watch = Watch(Mode.LAST)
        model = gpt2()
        optimizer = optimizer_for(model, 2)
        config = zero.ZeroConfig(stage=int(stage), offload_optimizer=tier, offload_dir=folder)
        engine = zero.shard(model, optimizer, config, mixed_precision=dtype, **watch.roads.given)
        out = []
        for step in range(2):
            for micro in range(2):
                with contextlib.nullcontext() if micro else engine.no_sync():
                    ids = batch(step, micro, rank)
                    model(input_ids=ids, labels=ids).loss.backward()
            masters = [p for group in optimizer.param_groups for p in group["params"]]
            out.append([p.grad if p.grad is None else p.grad.clone() for p in masters])
            with torch.no_grad():
                model(input_ids=ids)  # reads weights while gradients are there
            optimizer.step()
            out.append([p.grad if p.grad is None else p.grad.clone() for p in masters])
            optimizer.zero_grad()
        seen.append(out)
        engine.detach()
        wrong += watch.finish()
    for number, (ours, plain) in enumerate(zip(seen[1], seen[0])):
        # What came in a narrower type than its master is shown by who widens it: a scaler, clipping.
        pairs = [(a, b) for a, b in zip(ours, plain) if a is not None or dtype == "no"]
        if len(pairs) < 2 or not all(same(a, b) for a, b in pairs):
            wrong.append(f"look {number}: {sum(not same(a, b) for a, b in pairs)} of {len(pairs)} differ")
    return wrong


@pytest.mark.parametrize(
    ("world", "place", "dtype"), [(1, "cpu 3", "no"), (1, "disk 3", "bf16"), (2, "cpu 2", "bf16"), (2, "disk 1", "no")]
)
def test_gradients_are_shown_when_they_are_there(pools, tmp_path, world, place, dtype):
    assert pools[world].run(looked_at, str(tmp_path), place, dtype) == [[]] * world


class Scarce(Storage):
    """Device memory of which the allocation that `turns` names finds none."""

    turns: Callable[[], bool] = staticmethod(lambda: False)

    def allocate(self, kind: str, what: str, bytes_: int, make: Callable[[], Any]) -> Any:
        if self.turns():
            raise zero.OutOfMemoryError("none, says the test")
        return super().allocate(kind, what, bytes_, make)


def gives_up(rank: int, world: int, folder: str, params: str, dtype: str) -> list[str]:
    """An allocation fails for good, on all ranks: the same step, done again, is that of a run where nothing failed."""
    wrong, results = [], []
    for fails in (False, True):
        watch, count = Watch(Mode.LAST), [0]
        model = gpt2()
        optimizer = optimizer_for(model, 2)
        config = zero.ZeroConfig(stage=3, offload_optimizer=params, offload_params=params, offload_dir=folder)
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
                    engine.reset()
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*model.state_dict().values()])
        engine.detach()
        wrong += watch.finish()
    return wrong if equal(*results) else [*wrong, "weights differ"]


@pytest.mark.parametrize(
    ("world", "params", "dtype"),
    [
        (1, "cpu", "no"),
        (2, "none", "bf16"),
        pytest.param(2, "cpu", "bf16", marks=pytest.mark.wide),
        (2, "disk", "bf16"),
    ],
)
def test_a_step_that_found_no_memory_is_done_again(pools, tmp_path, world, params, dtype):
    assert pools[world].run(gives_up, str(tmp_path), params, dtype) == [[]] * world


def used(rank: int, world: int, folder: str, tiers: tuple[str, str], in_backward: bool) -> list[str]:
    """What else moves bytes: evaluation, whole parameters and gradients, saving and loading, leaving and coming back."""
    wrong, results = [], []
    for watched in (False, True):
        watch = Watch(Mode.LAST)
        model = gpt2()
        optimizer = optimizer_for(model, 2)
        config = zero.ZeroConfig(
            stage=3,
            offload_optimizer=tiers[0],
            offload_params=tiers[1],
            offload_dir=folder,
            step_in_backward=in_backward,
        )
        engine = zero.shard(
            model,
            optimizer,
            config,
            mixed_precision="bf16",
            **replace(watch.roads if watched else Roads(), sizes=SMALL).given,
        )
        watch.watch(engine)
        out: list[Any] = []
        for step in range(3):
            ids = batch(step, 0, rank)
            with torch.no_grad():
                out.append(model(input_ids=ids).logits)
            model(input_ids=ids, labels=ids).loss.backward()
            param = model.transformer.h[1].mlp.c_fc.weight
            if not in_backward:
                out += [zero.full_gradient(param), engine.clip_grad_norm_(0.3)]
            optimizer.step()
            out.append(zero.full_optimizer_state(param, "exp_avg"))
            with zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                param.mul_(1.01)
            optimizer.zero_grad()
            if step == 1:
                engine.save(f"{folder}/saved{watched}")
                engine.offload_states()
                engine.reload_states()
        engine.load(f"{folder}/saved{watched}")
        results.append([*out, *values(model, optimizer)])
        engine.detach()
        wrong += watch.finish()
    return wrong if equal(*results) else [*wrong, "results differ"]


@pytest.mark.parametrize(
    ("tiers", "in_backward"), [(("cpu", "cpu"), False), (("disk", "disk"), False), (("cpu", "none"), True)]
)
def test_whatever_moves_bytes_waits_for_them(two, tmp_path, tiers, in_backward):
    assert two.run(used, str(tmp_path), tiers, in_backward) == [[], []]
