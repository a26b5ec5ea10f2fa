"""Which optimizers are element-wise; what whole matrices take, as planned. Numbers: programs/whole_matrices.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import hf_zero as zero
from hf_zero.diagnostics.usage import stored_bytes
from hf_zero.optimizers.kinds import Kind, kind_of
from tests.kit.transports import Tier
from tests.models import Mixed
from tests.optimizers import (
    Blockwise,
    Careful,
    Centralizes,
    Decays,
    Doubled,
    Eager,
    Global,
    Keeps,
    Lars,
    Layerwise,
    Projects,
    Replaces,
    Shampoo,
    Untried,
    Wide,
    hf_adafactor,
    two_rules,
)

pytestmark = pytest.mark.gloo

WHOLE = (
    lambda params: torch.optim.Adafactor(params, lr=1e-2), hf_adafactor, Layerwise, Global, Blockwise, Replaces, Untried,
    lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2), two_rules, Projects, Decays, Wide,
    lambda params: Layerwise(params, lr=0.0),  # as a scheduler's warm-up leaves it
)  # fmt: skip


def needs_matrices(optimizer: torch.optim.Optimizer, params: set[Tensor], sharded: bool = False) -> bool:
    return kind_of(optimizer, params, sharded=sharded, offloaded=False) is Kind.MATRICES


class Rows(torch.optim.Optimizer):
    """As Alice: multiplies with a matrix of as many rows and columns as the parameter has rows."""

    def __init__(self, params, see: Callable[[int], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.see = see

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                grad = param.grad.reshape(len(param), -1)
                self.see(len(grad))
                param.sub_((grad @ grad.T @ grad).view_as(param), alpha=0.01)


def test_a_trial_of_a_rule_over_rows_has_few_of_them():
    seen, model = [], nn.Linear(8, 8)
    assert needs_matrices(Rows(model.parameters(), seen.append), set(model.parameters()))
    assert 0 < max(seen) < 1000


def test_what_is_element_wise():
    def needs(build, sharded: bool = False) -> bool:
        model = Mixed()
        return needs_matrices(build(list(model.parameters())), set(model.parameters()), sharded=sharded)

    element_wise = (torch.optim.AdamW, torch.optim.SGD, Eager, torch.optim.RAdam, lambda p: Careful(p, lr=1e-2))
    assert not any(needs(build, sharded=True) for build in element_wise)
    assert all(needs(build) for build in WHOLE)
    kernels = list(nn.Conv2d(3, 3, 2).parameters())
    for build, found in ((Centralizes, True), (lambda params: Careful(params, lr=1e-2), False)):
        assert needs_matrices(build(kernels), set(kernels)) is found
    assert needs(Doubled), "a checkpoint has one value or one per element of what is cut"
    two = TwoTensor(torch.ones(2), torch.ones(2))
    for held, in_group in (
        (object(), False),
        ({"m": torch.ones(2)}, False),
        ({}, True),
        (torch.ones(3), True),
        (two, False),
    ):
        with pytest.raises(zero.UnsupportedOptimizerError, match=r"Keeps cannot .*'odd'.*cannot be saved"):
            needs(lambda params: Keeps(params, held, in_group))  # noqa: B023
    assert not any(needs(lambda params: Keeps(params, held, True)) for held in (1, 0.5, None, torch.tensor(1)))  # noqa: B023
    assert needs(Projects, sharded=True), "each parameter has one owner there"


# What it takes -----------------------------------------------------------------------------------------------------------


def lonely(rank: int, world: int, stage: int) -> None:
    """One matrix: ranks that own nothing hold nothing of it, and nobody holds padding."""
    torch.manual_seed(0)
    model = nn.Linear(64, 50, bias=False)
    optimizer = Lars(model.parameters())
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    for _ in range(2):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    owned = [p.shape for p in optimizer.param_groups[0]["params"] if p.numel()]
    assert owned == ([] if rank else [(50, 64)])
    assert zero.local_parameter(model.weight).numel() == (0 if rank else 3200)
    rest, measured = engine.plan.memory.stored, engine.report().measured
    of_masters = sum(kinds["parameters"] for kinds in rest.values())
    assert of_masters == 3200 * 4 if stage < 3 or not rank else of_masters == 0, (rank, of_masters)
    assert measured["optimizer"] == (0 if rank else 3200 * 4), measured
    assert engine.plan.layout.imbalance() == tuple([float(world)] + [0.0] * (world - 1))
    assert any("one owner" in reason for reason in engine.plan.reasons)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_own_nothing(pools, stage):
    pools[3].run(lonely, stage)


class Blocks(nn.Module):
    """Blocks of matrices of unequal sizes, so that ranks own unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, width), nn.Tanh(), nn.Linear(width, 96)) for width in (64, 160, 96, 224)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def wide(rank: int, name: str, config: zero.ZeroConfig, batches: range) -> tuple[zero.Engine, list[Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    opts = [SPLIT[name]([p for p in model.parameters() if p.dim() == 2])]
    opts.append(torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2))
    engine = zero.shard(model, opts, config)
    for step in batches:
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return engine, [zero.full_parameter(p) for p in model.parameters()]


SPLIT = {
    "Muon": lambda params: torch.optim.Muon(params, lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Shampoo": Shampoo,
}


def planned(rank: int, world: int, tier: str, stage: int) -> None:
    """State at rest is as planned to the byte, but for counts of steps; the highest of what comes and goes is no more."""
    for name in SPLIT:
        config = zero.ZeroConfig(stage=stage, offload_optimizer=tier)
        engine, _ = wide(rank, name, config, range(2))
        engine.finish_step()
        plan, found = engine.plan.memory, stored_bytes(engine)
        for where in Tier:
            single = 4 * 16 if where is Tier.HOST or where.value == "device" else 0
            expected = plan.stored[where]["optimizer"]
            assert expected <= found[where.value]["optimizer"] <= expected + single, (name, where, found, plan.stored)
        staging = engine.context.storage.ledger.host
        assert staging.peak["staging"] <= plan.peak[Tier.HOST]["staging"], (name, staging.peak, plan.peak[Tier.HOST])
        assert (tier == "disk") is (staging.peak["staging"] > 0)


@pytest.mark.parametrize("tier", [*(pytest.param(each, marks=pytest.mark.wide) for each in ("none", "cpu")), "disk"])
def test_state_rests_as_planned(pools, tier):
    pools[2].run(planned, tier, 2)
    pools[1].run(planned, tier, 1)


def weighed(rank: int, world: int, folder: str) -> None:
    """`auto` within a budget that is too small for all of it: the same tiers on every rank, and the same numbers."""
    for name in SPLIT:
        all_, plain = wide(rank, name, zero.ZeroConfig(stage=3), range(3))
        least, _ = wide(rank, name, zero.ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu"), range(0))
        peaks = [engine.exchange(engine.plan.memory.at_peak(Tier.DEVICE)) for engine in (all_, least)]
        budget = (max(peaks[0]) + max(peaks[1])) // 2
        config = zero.ZeroConfig(
            stage=3,
            offload_optimizer="auto",
            offload_params="auto",
            offload_dir=folder,
            device_memory=budget,
            host_memory="64MiB",
        )
        engine, found = wide(rank, name, config, range(3))
        tiers = [(p.parameters.value, p.home.value) for p in engine.plan.placements]
        assert all(other == tiers for other in engine.exchange(tiers))
        assert {home for _, home in tiers} != {"device"}, tiers
        assert engine.plan.memory.at_peak(Tier.DEVICE) <= budget
        assert all(torch.equal(p, q) for p, q in zip(found, plain, strict=True)), name


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_auto_weighs_whole_parameters(pools, tmp_path, world):
    pools[world].run(weighed, str(tmp_path))
