"""A fixed handful of random programs, and those that once failed. Thousands more: `make programs`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.pool import RankPool
from tests.random.check import Checker
from tests.random.draw import KINDS, draw
from tests.random.models import BUILD, Arch
from tests.random.user import Case
from tests.settings import Setting

pytestmark = pytest.mark.gloo
SEEDS = (30, 38, 89, 267, 285, 298, 486, 904)


@pytest.fixture(scope="module")
def checker(pools: dict[int, RankPool]) -> Checker:
    return Checker(pools, limit_s=60.0)


def check(checker: Checker, case: Case) -> None:
    if failure := checker.check(case):
        pytest.fail(str(failure), pytrace=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_seed(checker: Checker, seed: int) -> None:
    check(checker, draw(seed))


def test_programs_hold_every_kind() -> None:
    """Every call, and every piece of a model; programs that once failed count."""
    seen: set[str] = set().union(*(case.kinds for case in [*FOUND.values(), *map(draw, SEEDS)]))
    assert not {*KINDS, *BUILD} - seen


def test_another_optimizer_is_noticed(checker: Checker) -> None:
    """The comparison is not blind."""
    case = Case(setting=Setting(stage=1, ranks=1), optimizer="sgd", calls="step:1 state_dict:2")
    assert checker.check(case) is None
    failure = checker.check(case, replace(case, optimizer="momentum"))
    assert failure is not None
    assert failure.sort == "Mismatch"
    assert "off by" in str(failure)


def test_a_hang_is_named(pools: dict[int, RankPool]) -> None:
    """The failure says where each rank was, and the next program runs."""
    failure = Checker(pools, limit_s=2.0).check(Case(setting=Setting(stage=3), calls="crossed:1 " * 1000))
    assert failure is not None
    assert failure.sort == "Hang"
    assert "rank 1 was at: engine, call" in failure.text
    assert Checker(pools, limit_s=60.0).check(Case()) is None


def replicated(seed: int, ranks: int, stage: int) -> Case:
    case = draw(seed, ranks=(ranks,), stages=(stage,))
    return replace(case, setting=replace(case.setting, replicas=2, kept=False))


def drawn(seed: int) -> Case:
    case = draw(seed)
    return replace(case, setting=replace(case.setting, kept=False))


def case(seed: int, blocks: str, calls: str, setting: Setting, **options: object) -> Case:
    """Return a program; `options` are fields of `Case` or of `Arch`."""
    fields = {name: options.pop(name) for name in ("optimizer", "groups", "left_out") if name in options}
    return Case(seed, setting, **fields, arch=Arch(blocks, **options), calls=calls)


FOUND = {
    "a loss inside the first block, behind a frozen layer, on one rank": case(
        357, "zerodim:opaque mlp:dict", "rank_losses:617706 write_data:916949 closure:253655",
        Setting(stage=1, precision="bf16"), optimizer="radam", left_out=True, width=13, container="attributes",
        front="conv", front_frozen=True, root="scale",
    ),
    "the same at stage 3, where other ranks gather units meanwhile": case(
        690, "reads:data mlp:data:frozen", "deepcopy:979509 rank_losses:838104 step:18374",
        Setting(ranks=3, stage=3, tier="cpu", replicas=3), width=11, container="sequential", front="conv",
        front_frozen=True, heads=2, root="empty", out="tuple",
    ),
    "a recomputation after the first backwards reaches a unit by a path not seen before": case(
        133, "nested conv", "two_losses:16330 part_zero_grad:972516 rebind:976299 checkpoint_reentrant:270075",
        Setting(stage=3),
    ),
    "save of a shared BatchNorm, whose buffers have two names": case(
        0, "conv shared", "step:0 save_load:1 step:2", Setting(stage=2, ranks=1), width=13
    ),
    "autograd.grad leaves gradients that bind refuses": case(
        2017, "mlp mlp", "grad_inputs:302436 rebind:293591", Setting(stage=0)
    ),
    "a digest makes a storage that cannot be resized": case(
        0, "mlp", "step:0 away:1", Setting(stage=0, precision="bf16")
    ),
    "an empty shard in host memory loses its optimizer state": case(
        2224, "mlp:tensor:frozen mlp", "eval_between:225679 step:800459", Setting(stage=3, tier="cpu/disk"),
        optimizer="rmsprop", root="empty",
    ),
    "a write to a frozen block is lost where spans are divided": case(
        6, "mlp:tensor:frozen", "write_block:247235 step:470244", Setting(stage=1, precision="bf16"),
        heads=2, root="position scale",
    ),
    "short optimizer states of two ranks are compared under debug": case(
        920238, "nested nested", "two_optimizers:818500", Setting(precision="bf16", debug=True)
    ),
    "second backward over a weight that another block reads": case(
        32, "mlp reads", "step:897551 " * 5 + "retain_twice:664421", Setting(stage=3)
    ),
    "second backward through one graph gives NaN": case(
        206, "mlp sequential", "retain_twice:387708", Setting(stage=3, tier="disk"), container="nested"
    ),
    "second loss of one forward gives NaN": case(
        218, "weightnorm:tuple mlp:dict", "two_losses:686137",
        Setting(stage=3, ranks=3, precision="bf16", tier="none/disk"), groups=2, container="nested",
    ),
    "second loss of one forward meets released storage": case(
        108, "tied shared:dict dropout", "eval_between:862866 two_losses:637816",
        Setting(stage=3, ranks=3, precision="bf16", tier="none/disk"), optimizer="adamw", groups=2, width=11, out="tuple",
    ),
    "other experts per rank abort the process": case(
        433, "experts:dict dropout", "rank_experts:38867 step:670953", Setting(stage=0), optimizer="adamw", groups=2,
        left_out=True, container="sequential", front="both", heads=2, tied=True,
    ),
    "autograd.grad for parameters in bf16": case(
        508, "conv", "grad_params:140542", Setting(stage=1, ranks=1, precision="bf16", tier="none/cpu")
    ),
    "a backward from inside the first unit is not noticed": case(
        94, "reads:dict:frozen", "empty_batch:6379 recorded:675697", Setting(stage=2), width=13, container="attributes",
        front="both", heads=2, root="empty",
    ),
    "a forward begins with hooks of units that were built again": case(
        186, "mlp:tuple mlp:opaque:frozen mlp:opaque gru:opaque",
        "two_losses:792189 part_zero_grad:398966 add_group:83749 step:1 step:2",
        Setting(stage=2, ranks=1, tier="none/disk"), left_out=True, width=6, container="attributes", front="both",
        out="data",
    ),
    "written through .data where a part's forward left it gathered": case(
        62, "mlp zerodim shared:tuple", "rank_experts:618518 part_eval:963650 write_block:522669 step:328072",
        Setting(stage=3, ranks=3), groups=2, width=6, container="nested", front="both", heads=2, tied=True, root="empty",
    ),
    "blocks in lists of lists have no hook that runs": case(
        163, "mlp mlp", "layer_drop:447846 recorded:147297", Setting(stage=1), container="nested", front_frozen=True
    ),
    "ranks whose losses begin in other units hang": drawn(111),
    "a group that is added meets the hooks of the root": drawn(27),
    "storages that a digest has made fixed": drawn(22),
    "frozen spans are compared while they are released": drawn(47),
    "the norm of gradients without elements": drawn(74),
    "recorded in a container that was passed in, after learning": drawn(120),
    "ranks take other paths, in replicas": case(
        0, "mlp experts dropout", "rank_branches:7 rank_experts:7 clip_norm:7 rank_forwards:7 rank_losses:7 step:7",
        Setting(ranks=4, replicas=2),
    ),
    "seed 22 in replicas of one rank": replicated(22, 2, 3),
    "seed 65 in replicas of two ranks": replicated(65, 4, 3),
    "seed 311 in replicas of two ranks": replicated(311, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found_once(checker: Checker, name: str) -> None:
    check(checker, FOUND[name])
