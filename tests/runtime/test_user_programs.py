"""Programs as people write them equal plain data parallel training at every stage, or are refused by name on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from tests.kit.user_programs import PROGRAMS, Run

pytestmark = pytest.mark.gloo
REFUSED = {
    "state_by_parameter": (zero.StateError, "optimizer.state was asked for parameter '0.weight'"),
    "stepped_in_backward": (zero.StateError, "optimizer.step\\(\\) was called inside a backward"),
    "func_grad": (zero.StateError, "inside torch.func.grad"),
    "jvp": (zero.StateError, "inside torch.func.jvp"),
    "jit_script_sub": (zero.ConfigError, "is a RecursiveScriptModule of torch.jit"),
}
REFUSED_ON_SEVERAL_RANKS = {
    "noise_by_rank": (zero.RankMismatchError, "parameter '0.weight' is not on rank"),
    "assigned_by_rank": (zero.RankMismatchError, "parameter '2.weight' is not on rank"),
    "reset_by_rank": (zero.RankMismatchError, "parameter '2.weight' is not on rank"),
    "slices_reduced_by_hand": (zero.StateError, "is this rank's slice"),
}
REFUSED_WHERE_OFFLOADED = {
    "lookahead": (zero.UnsupportedOptimizerError, "it steps by another optimizer \\(its 'base'\\)"),
}
REFUSED_WHERE_KEPT = {"groups_change_memory": (zero.StateError, "were written through `.data` since the last step")}
"""On several ranks, at stages 1 and 2."""
REFUSED_WHERE_RELEASED = {
    "keeps_views": (zero.StateError, "is still held that was taken between passes"),
    "view_over_an_unfreeze": (zero.StateError, "is still held that was taken between passes"),
    "unfrozen_between_forwards": (zero.StateError, "whose parameters were put into other units since that forward"),
}
"""Parameters that are released have no memory that a view could stay in."""


def same(ours: Tensor, theirs: Tensor) -> bool:
    real = [torch.view_as_real(each) if each.is_complex() else each.float() for each in (ours, theirs)]
    return ours.shape == theirs.shape and torch.allclose(*real, rtol=1e-4, atol=1e-5)


def trained(name: str, settings: dict[str, Any] | None) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    run = Run(settings)
    try:
        PROGRAMS[name](run)
        return {key: value.clone() for key, value in run.model.state_dict().items()}, run.seen
    finally:
        if run.engine is not None:
            run.engine.detach()


def compare(rank: int, world: int, name: str, every: list[dict[str, Any]]) -> list[str]:
    """What differs from the reference."""
    wrong, reference = [], None
    for settings in every:
        refused = (
            REFUSED
            | (REFUSED_ON_SEVERAL_RANKS if world > 1 else {})
            | (REFUSED_WHERE_RELEASED if settings["stage"] == 3 else REFUSED_WHERE_KEPT if world > 1 else {})
            | (REFUSED_WHERE_OFFLOADED if "offload_optimizer" in settings else {})
        )
        if name in refused:
            kind, words = refused[name]
            with pytest.raises(kind, match=words):
                trained(name, settings)
            continue
        expected, seen = reference = reference or trained(name, None)
        found, ours = trained(name, settings)
        wrong += [f"{settings}: saw {ours}, expected {seen}"] if ours != seen else []
        if rank == 0:  # the others have shapes
            wrong += [f"{settings}: {key}" for key, value in expected.items() if not same(found[key], value)]
    return wrong


OFFLOADED = {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_equals_data_parallel_or_is_refused(two, name):
    assert two.run(compare, name, [{"stage": 2}, {"stage": 3}, OFFLOADED]) == [[], []]


@pytest.mark.parametrize("name", ["jacobian_at_once", "padded_evaluations", "sparse_matrices", "vmap_forward"])
def test_debug_looks_at_what_can_be_looked_at(two, name):
    assert two.run(compare, name, [{"stage": 3, "debug": True}]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_on_other_ranks(pools, name):
    for world, settings in ((1, OFFLOADED), (2, {"stage": 1}), (3, {"stage": 3})):
        assert pools[world].run(compare, name, [settings]) == [[]] * world, settings
