"""A fixed handful of random programs in every run, and those that once went wrong, by name. Thousands: `make programs`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.pool import RankPool
from tests.kit.random_calls import KINDS, Case, Op, Setting
from tests.kit.random_models import FEATURES, Arch, Block
from tests.kit.random_programs import Runner, random_case

pytestmark = pytest.mark.gloo
NOT_YET: frozenset[str] = frozenset()
"""Kinds of calls and features of models that do not work yet."""
SEEDS = (22, 65, 89, 285, 311, 486, 771, 845, 904, 978, 1047, 1251, 1453)


@pytest.fixture(scope="module")
def runner(pools: dict[int, RankPool]) -> Runner:
    return Runner(60.0, pools)


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_plain_data_parallel(runner: Runner, seed: int) -> None:
    wrong = runner.check(random_case(seed, NOT_YET))
    assert not wrong, f"{wrong}\npython -m tests.kit.random_programs --seeds {seed}"


def test_every_kind_is_among_them() -> None:
    seen: set[str] = set().union(*(random_case(seed, NOT_YET).kinds for seed in SEEDS))
    assert not (set(KINDS) | set(FEATURES)) - NOT_YET - seen


def test_another_optimizer_is_found(runner: Runner) -> None:
    """The comparison is not blind."""
    case = Case(0, Setting(stage=1, ranks=1, optimizer="sgd"), Arch(), (Op("step", 1), Op("state_dict", 2)))
    other = replace(case, setting=replace(case.setting, optimizer="momentum"))
    assert not runner.check(case)
    assert "off by" in runner.check(case, expected=other)


def named(ops: tuple[str, ...], arch: Arch, setting: Setting) -> Case:
    return Case(0, setting, arch, tuple(Op(kind, number) for number, kind in enumerate(ops)))


FOUND = {
    "a recomputation after the first backwards comes to a unit by a way that nobody has seen": Case(
        133,
        Setting(stage=3, optimizer="momentum"),
        Arch((Block("nested"), Block("conv")), width=8, container="list", front="embed"),
        tuple(
            Op(kind, seed)
            for kind, seed in (
                ("two_losses", 16330),
                ("part_zero_grad", 972516),
                ("rebind", 976299),
                ("checkpoint_reentrant", 270075),
            )
        ),
    ),
    # A module under two names has its buffers under both, in state_dict() and in files.
    "save of a shared BatchNorm": named(
        ("step", "save_load", "step"), Arch((Block("conv"), Block("shared")), width=13), Setting(stage=2, ranks=1)
    ),
    "autograd.grad leaves gradients that bind refuses": Case(
        2017, Setting(stage=0), Arch(), (Op("grad_inputs", 302436), Op("rebind", 293591))
    ),
    "a digest makes a storage that cannot be resized": named(
        ("step", "away"),
        Arch((Block("mlp"),), width=8, container="list", front="embed"),
        Setting(stage=0, dtype="bf16"),
    ),
    "an empty shard in host memory loses its optimizer state": Case(
        2224,
        Setting(stage=3, offload_optimizer="cpu", offload_params="disk", optimizer="rmsprop"),
        Arch((Block("mlp", frozen=True), Block("mlp")), width=8, container="list", front="embed", root=("empty",)),
        (Op("eval_between", 225679), Op("step", 800459)),
    ),
    "a write to a frozen block is lost where spans are divided": Case(
        6,
        Setting(stage=1, dtype="bf16", optimizer="momentum"),
        Arch((Block("mlp", frozen=True),), width=8, container="list", heads=2, root=("position", "scale")),
        (Op("write_block", 247235), Op("step", 470244)),
    ),
    "second backward over a weight that another block reads": Case(
        32,
        Setting(stage=3, optimizer="momentum"),
        Arch((Block("mlp"), Block("reads")), width=8, container="list", front="embed"),
        tuple(Op(kind, 897551) for kind in ("step", "step", "step", "step", "step")) + (Op("retain_twice", 664421),),
    ),
    "second backward through one graph gives NaN": Case(
        206,
        Setting(stage=3, offload_optimizer="disk"),
        Arch((Block("mlp"), Block("sequential")), container="nested"),
        (Op("retain_twice", 387708),),
    ),
    "second loss of one forward gives NaN": Case(
        218,
        Setting(stage=3, ranks=3, dtype="bf16", offload_params="disk", groups=2),
        Arch((Block("weightnorm", "tuple"), Block("mlp", "dict")), container="nested"),
        (Op("two_losses", 686137),),
    ),
    "second loss of one forward meets released storage": Case(
        108,
        Setting(stage=3, ranks=3, dtype="bf16", offload_params="disk", optimizer="adamw", groups=2),
        Arch((Block("tied"), Block("shared", "dict"), Block("dropout")), width=11, out="tuple"),
        (Op("eval_between", 862866), Op("two_losses", 637816)),
    ),
    "other experts per rank abort the process": Case(
        433,
        Setting(stage=0, optimizer="adamw", groups=2, left_out=True),
        Arch((Block("experts", "dict"), Block("dropout")), container="sequential", front="both", heads=2, tied=True),
        (Op("rank_experts", 38867), Op("step", 670953)),
    ),
    "autograd.grad for parameters in bf16": Case(
        508,
        Setting(stage=1, ranks=1, dtype="bf16", offload_params="cpu"),
        Arch((Block("conv"),)),
        (Op("grad_params", 140542),),
    ),
    "a backward from inside the first unit is not noticed": Case(
        94,
        Setting(stage=2),
        Arch((Block("reads", "dict", True),), width=13, container="attributes", front="both", heads=2, root=("empty",)),
        (Op("empty_batch", 6379), Op("recorded", 675697)),
    ),
    "a forward begins with hooks of units that were cut anew": Case(
        186,
        Setting(stage=2, ranks=1, offload_params="disk", left_out=True),
        Arch(
            (Block("mlp", "tuple"), Block("mlp", "opaque", True), Block("mlp", "opaque"), Block("gru", "opaque")),
            width=6,
            container="attributes",
            front="both",
            out="data",
        ),
        (Op("two_losses", 792189), Op("part_zero_grad", 398966), Op("add_group", 83749), Op("step", 1), Op("step", 2)),
    ),
    "written through .data where a part's forward left it gathered": Case(
        62,
        Setting(stage=3, ranks=3, groups=2),
        Arch(
            (Block("mlp"), Block("zerodim"), Block("shared", "tuple")),
            width=6,
            container="nested",
            front="both",
            heads=2,
            tied=True,
            root=("empty",),
        ),
        (Op("rank_experts", 618518), Op("part_eval", 963650), Op("write_block", 522669), Op("step", 328072)),
    ),
    "ranks whose losses begin in other units hang": random_case(111),
    "a group that is added meets the hooks of the root": random_case(27),
    "storages that a digest has made fixed": random_case(22),
    "frozen spans are compared while they are released": random_case(47),
    "the norm of gradients without elements": random_case(74),
    "blocks in lists of lists have no hook that runs": Case(
        163,
        Setting(stage=1, optimizer="momentum"),
        Arch((Block("mlp"), Block("mlp")), width=8, container="nested", front_frozen=True),
        (Op("layer_drop", 447846), Op("recorded", 147297)),
    ),
    "recorded in a container that was handed in, after learning": random_case(120),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_once(runner: Runner, name: str) -> None:
    wrong = runner.check(FOUND[name])
    assert not wrong, wrong
