"""What rests elsewhere than on the device makes no difference: every number is that of the run in memory, to the bit."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from hf_zero.tiers.tier import SIZES, Tier, padded
from tests.kit.common import MODELS, Case, Result, batch, loss_of, optimizer_for, train_engine
from tests.kit.offloading import SMALL, pairwise, same, unequal, values

pytestmark = pytest.mark.gloo

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "offload_optimizer": ("none", "cpu", "disk", "mixed"),
    "offload_params": ("none", "cpu", "disk"),
    "stage": (0, 1, 2, 3),
    "dtype": ("no", "bf16", "fp16"),
    "model": ("gpt2", "bert"),
    "accumulation": (1, 3),
    "clip": (None, 0.5),
    "groups": (1, 2),
    "checkpointing": (False, True),
    "sizes": (SMALL, SIZES),
}

PLACED = {"none": {Tier.DEVICE}, "cpu": {Tier.HOST}, "disk": {Tier.DISK}, "mixed": set(Tier)}


def cases(world: int, dimensions: dict[str, tuple[Any, ...]], full: bool) -> list[Case]:
    stages = (0, 3) if world == 1 else (1, 2, 3)

    def allowed(values: dict[str, Any]) -> bool:
        return (
            values["stage"] in stages
            and (values["offload_optimizer"], values["offload_params"]) != ("none", "none")
            and (world == 1 or values["stage"] == 3 or values["offload_params"] == "none")
        )

    if full:
        chosen = [c for c in (dict(zip(dimensions, v)) for v in itertools.product(*dimensions.values())) if allowed(c)]
    else:
        chosen = pairwise(dimensions, allowed)
    return [Case(**c, steps=3) for c in chosen]


def misplaced(engine: zero.Engine, case: Case) -> list[str]:
    """Parity says little of states that never left the device."""
    tiers = {shard.tier for unit in engine.units for flat in unit.trained for shard in flat.shards}
    rest = {flat.rest for unit in engine.units for flat in unit.flats}
    optimizer, params = PLACED[case.offload_optimizer], PLACED[case.offload_params]
    wrong = [] if tiers == optimizer else [f"{case}: states rest in {tiers}"]
    if engine.offload.storage.sizes != case.sizes:
        wrong.append(f"{case}: found {engine.offload.storage.sizes}")
    # What has its master's type rests with it, so not everything need be where it was asked for.
    return wrong if params <= rest or case.dtype == "no" else [*wrong, f"{case}: parameters rest in {rest}"]


@functools.cache  # by each rank of a pool, which has one number of ranks: all of them run it or none
def run_in_memory(rank: int, world: int, case: Case) -> Result:
    return train_engine(rank, world, case)[0]


def compare(rank: int, world: int, chosen: list[Case], folder: str) -> list[str]:
    """On every rank: what differs from the run in memory."""
    wrong: list[str] = []
    for case in chosen:
        in_memory = replace(case, offload_optimizer="none", offload_params="none", step_in_backward=False, sizes=SIZES)
        expected = run_in_memory(rank, world, in_memory)
        ours, engine = train_engine(rank, world, case, folder)
        wrong += misplaced(engine, case)
        engine.detach()
        different = unequal(ours, expected)
        if different:
            wrong.append(f"rank {rank}: {case}: {len(different)} differ, among them {different[:3]}")
    return wrong


def run(pool: Any, chosen: list[Case], folder: Path, timeout_s: float) -> None:
    wrong = [line for lines in pool.run(compare, chosen, str(folder), timeout_s=timeout_s) for line in lines]
    assert not wrong, "\n".join(wrong)


def in_small_blocks(rank: int, world: int, folder: str) -> None:
    """What tests of small sizes rest on: they reach everything that works in blocks, and the plan."""
    case = Case(dtype="bf16", stage=3, steps=2, offload_optimizer="disk", sizes=SMALL)
    _, engine = train_engine(rank, world, case, folder)
    shards = [shard for unit in engine.units for flat in unit.trained for shard in flat.shards]
    long = [shard for shard in shards if shard.numel > SMALL.slab_numel]
    assert {shard.slabs.step for shard in long} == {SMALL.slab_numel}
    assert max(len(shard.slabs) for shard in shards) > 2
    assert any(shard.numel % SMALL.slab_numel for shard in long)
    slab = 4 * padded(4 * SMALL.slab_numel)  # master, gradient and two states
    casts = 4 * SMALL.block_numel  # gradients come in bfloat16, so do parameters go up
    assert engine.offload.stepper.memory_bytes == SMALL.slabs * slab + casts + 2 * SMALL.block_numel
    assert engine.plan.memory.rest[Tier.HOST]["staging"] >= SMALL.slabs * slab + casts
    assert engine.plan.memory.rest[Tier.HOST]["staging"] < SIZES.block_numel
    engine.detach()


def test_small_sizes_are_in_force(pools, tmp_path):
    pools[1].run(in_small_blocks, str(tmp_path))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_the_run_in_memory(pools, tmp_path, world):
    run(pools[world], cases(world, DIMENSIONS, full=False), tmp_path, timeout_s=200)


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_in_backward_equals_the_run_in_memory(pools, tmp_path, world):
    dimensions = {**DIMENSIONS, "dtype": ("no", "bf16"), "clip": (None,)}
    chosen = [replace(case, step_in_backward=True) for case in cases(world, dimensions, full=False)]
    run(pools[world], chosen, tmp_path, timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_the_run_in_memory_in_full(pools, tmp_path, world, dtype):
    dimensions = {**DIMENSIONS, "dtype": (dtype,)}
    run(pools[world], cases(world, dimensions, full=True), tmp_path, timeout_s=3500)


# What else a training loop does ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD without state": (torch.optim.SGD, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "AdamW with a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-3}),  # has a state that is a product over all steps
}
Loop = Callable[[int, int, Case, str, str], list[Any]]


def build(case: Case, folder: str, cls: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, zero.Engine]:
    model = MODELS[case.model]()
    optimizer = optimizer_for(model, case.groups, cls, **options)
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, roads=case.roads())
    return model, optimizer, engine


def backward(model: Any, rank: int, step: int, micro: int = 0) -> float:
    loss = loss_of(model, rank, step, micro)
    loss.backward()
    return loss.item()


def optimizers(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """The learning rate and betas change between steps."""
    cls, options = OPTIMIZERS[which]
    model, optimizer, _ = build(case, folder, cls, **{k: copy.copy(v) for k, v in options.items()})
    if "tensor" in which or "lr" not in options:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 10 * options["lr"], total_steps=6, cycle_momentum="momentum" in options or "betas" in options
        )
    out: list[Any] = []
    for step in range(4):
        out.append(backward(model, rank, step))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        out.append(optimizer.param_groups[0]["lr"])
    return [*out, *values(model, optimizer)]


def overflow(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """A step in which one rank's gradient is infinite: no rank makes it, the first one included."""
    cls = torch.optim.AdamW
    model, optimizer, engine = build(case, folder, cls, lr=1e-3, fused=which == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    out: list[Any] = []
    for step in range(5):
        loss = loss_of(model, rank, step)
        scale = float("inf") if step in (0, 3) and rank == world - 1 else 1.0
        scaler.scale(loss * scale).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            out.append(engine.clip_grad_norm_(0.1).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        out += [loss.item(), scaler.get_scale()]
    return [*map(str, out), *values(model, optimizer)]  # a NaN is not equal to itself


def evaluated(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """A look at the weights right behind each step, and in the middle of one."""
    model, optimizer, engine = build(case, folder)
    out: list[Any] = []
    for step in range(3):
        out.append(backward(model, rank, step))
        with torch.no_grad():
            out.append(model(input_ids=batch(9, 0, 0)).logits)
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        if step == 1:
            out += [value.clone() for value in model.state_dict().values()]
        model.eval()
        with torch.no_grad():
            out.append(model(input_ids=batch(9, 0, 0)).logits)
        model.train()
        optimizer.zero_grad()
    return [*out, *values(model, optimizer)]


def kept(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """Gradients are not forgotten between steps: clipped ones are added to, and stepped with again."""
    model, optimizer, engine = build(case, folder)
    out: list[Any] = []
    for step in range(4):
        out.append(backward(model, rank, step))
        if step != 1:
            out += [engine.clip_grad_norm_(0.2), engine.clip_grad_norm_(0.1)]
        optimizer.step()
        if step == 2:
            optimizer.step()
    return [*out, engine.clip_grad_norm_(float("inf")), *values(model, optimizer)]


def clipped(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """By value, by other norms, and of some parameters only, also after the whole was clipped."""
    model, optimizer, engine = build(case, folder)
    some = [p for name, p in model.named_parameters() if ".0." in name or "1" in name]
    out: list[Any] = []
    for step in range(4):
        out.append(backward(model, rank, step))
        if step == 0:
            engine.clip_grad_value_(1e-3)
        elif step == 1:
            engine.clip_grad_value_(1e-3, some)
        out += [engine.clip_grad_norm_(0.5, norm) for norm in (2.0, float("inf"), 3.0)][: 1 + 2 * (step == 2)]
        out += [engine.clip_grad_norm_(0.1, parameters=some)]
        optimizer.step()
        optimizer.zero_grad()
    return [*out, *values(model, optimizer)]


def accessed(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """Whole values, read and written between and behind steps."""
    model, optimizer, engine = build(case, folder)
    some = [p for p in model.parameters() if p.requires_grad][1::3]
    out: list[Any] = []
    for step in range(4):
        out.append(backward(model, rank, step))
        if step == 1:
            engine.clip_grad_norm_(0.1)
        for number, p in enumerate(some):
            grad = zero.full_gradient(p)
            out += [grad, zero.local_gradient(p)]
            if number % 2 and step != 2:
                zero.set_full_gradient(p, grad * 0.5)
        optimizer.step()
        for number, p in enumerate(some):
            out += [zero.full_optimizer_state(p, name) for name in ("exp_avg", "exp_avg_sq", "step")]
            out += [zero.local_optimizer_state(p, "exp_avg"), zero.local_parameter(p)]
            if number % 2 == step % 2:
                zero.set_full_optimizer_state(p, "exp_avg_sq", torch.full_like(out[-1].new_empty(p.shape), 0.25))
                zero.set_full_parameter(p, zero.full_parameter(p) * 1.125)
        with zero.GatheredParameters(some, modifier_rank=world - 1), torch.no_grad():
            out.append(some[0].clone())
            if rank == world - 1:
                some[-1].add_(0.01)
        optimizer.zero_grad()
        out.append(zero.full_gradient(some[0]))
    return [*out, *values(model, optimizer)]


def closures(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """The optimizer calls for the gradients itself."""
    model, optimizer, _ = build(case, folder)
    out: list[Any] = []
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            return backward(model, rank, step)

        out.append(optimizer.step(closure) if step else optimizer.step(closure=closure))
    return [*out, *values(model, optimizer)]


def regrouped(rank: int, world: int, case: Case, folder: str, which: str) -> list[Any]:
    """A parameter is thawed and joins a group of its own in the middle of training; then the state is loaded into another."""
    model = MODELS[case.model]()
    *most, last = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(most, lr=1e-3)
    engine = zero.shard(model, optimizer, case.config(folder), mixed_precision=case.dtype, roads=case.roads())
    out: list[Any] = []
    for step in range(3):
        out.append(backward(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": [last], "lr": 1e-2})
    out += values(model, optimizer)
    state = optimizer.state_dict()
    whole: list[Any] = [None]
    whole[0] = engine.exchange(state)[0]
    other = torch.optim.AdamW([{"params": most}, {"params": [last]}], lr=5e-3)
    engine.bind(other)
    other.load_state_dict(whole[0])
    out.append(backward(model, rank, 3))
    other.step()
    engine.detach()
    return [*out, *(p.detach() for p in model.parameters())]


LOOPS: list[tuple[str, str, tuple[str, ...]]] = [
    ("optimizers", "no", tuple(OPTIMIZERS)),
    ("optimizers", "bf16", ("SGD", "AdamW fused", "AdamW with a tensor")),
    ("overflow", "fp16", ("fused", "plain")),
    *(
        (name, dtype, ("",))
        for name in ("evaluated", "kept", "clipped", "accessed", "regrouped", "closures")
        for dtype in ("no", "bf16")
    ),
]  # fmt: skip
TIERS = (("cpu", "none"), ("disk", "none"), ("mixed", "none"), ("cpu", "disk"), ("disk", "disk"), ("none", "cpu"))


def compare_loops(
    rank: int, world: int, name: str, dtype: str, variants: tuple[str, ...], folder: str, alternate: bool = False
) -> list[str]:
    """`alternate`: each variant in every second place, its neighbours in the others, as the other precision of a loop."""
    loop: Loop = globals()[name]
    stages = itertools.cycle((2, 3) if world > 1 else (0, 3))
    wrong = []
    for number, which in enumerate(variants, start=dtype == "bf16"):
        references = {}
        for tiers in TIERS[number % 2 :: 2] if alternate else TIERS:
            stage = 3 if tiers[1] != "none" else next(stages)
            if stage not in references:
                references[stage] = loop(rank, world, Case("gpt2", stage, dtype, groups=2), folder, which)
            case = Case(
                "gpt2", stage, dtype, groups=2, offload_optimizer=tiers[0], offload_params=tiers[1], sizes=SMALL
            )
            ours = loop(rank, world, case, folder, which)
            reference = references[stage]
            places = [i for i, (mine, theirs) in enumerate(zip(ours, reference)) if not same(mine, theirs)]
            if places or len(ours) != len(reference):
                wrong.append(f"rank {rank}: {name} {which} {case}: {len(places)} of {len(reference)}: {places[:6]}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "dtype", "variants"), LOOPS)
def test_loops_equal_those_in_memory(pools, tmp_path, world, name, dtype, variants):
    # Steps over offloaded state are each rank's own: every loop in every tier is run on one rank, in each precision.
    answers = pools[world].run(compare_loops, name, dtype, variants, str(tmp_path), world > 1, timeout_s=200)
    wrong = [line for lines in answers for line in lines]
    assert not wrong, "\n".join(wrong)


class ByKeyword(torch.optim.SGD):
    """Its closure has no position."""

    def step(self, *, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def by_keyword(rank: int, world: int) -> None:
    losses = []
    for tier in ("none", "cpu"):
        model = MODELS["gpt2"]()
        optimizer = ByKeyword(model.parameters(), lr=1e-2)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=1, offload_optimizer=tier))
        losses.append([])
        for step in range(3):
            losses[-1].append(optimizer.step(closure=functools.partial(backward, model, rank, step)))
            optimizer.zero_grad()
        engine.detach()
    assert losses[0] == losses[1]


def test_a_closure_that_is_given_by_keyword_stays_one(pools):
    """Before, an offloaded step was given it as its first argument: a TypeError."""
    pools[1].run(by_keyword)


@pytest.mark.slow  # the pairs that two ranks leave out above
@pytest.mark.parametrize(("name", "dtype", "variants"), LOOPS)
def test_every_loop_in_every_tier_on_two_ranks(two, tmp_path, name, dtype, variants):
    answers = two.run(compare_loops, name, dtype, variants, str(tmp_path), timeout_s=200)
    assert not any(answers), answers
