"""Optimizers over whole matrices whose state rests in host memory or on disk: the numbers of one plain process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.runtime.usage import at_rest
from hf_zero.tiers.tier import Tier
from tests.kit.deferred_wire import Mode
from tests.runtime.test_models import Stack, plainly, token_loss, trained
from tests.runtime.test_whole_matrix import ALONE, Layerwise, Shampoo, equals_plain, pair, same
from tests.runtime.test_whole_owners import around_the_step, debugged, deferred, life, scaled, written

pytestmark = pytest.mark.gloo

NAMES = list(ALONE)
WHERE = [(2, 1, "cpu", NAMES[::2]), (3, 3, "disk", NAMES[1::2])]
EVERYWHERE = [
    (world, stage, tier, NAMES) for tier in ("cpu", "disk") for world, stage in ((1, 3), (2, 1), (2, 2), (3, 3))
]


@pytest.mark.parametrize(
    ("world", "stage", "tier", "names"),
    [*WHERE, *(pytest.param(*place, marks=pytest.mark.slow) for place in EVERYWHERE)],
)
def test_equals_the_plain_optimizer(pools, tmp_path, world, stage, tier, names):
    params = tier if stage == 3 else "none"
    config = zero.ZeroConfig(stage=stage, offload_optimizer=tier, offload_params=params, offload_dir=str(tmp_path))
    pools[world].run(equals_plain, config, names, str(tmp_path))


TIERS = ["cpu", pytest.param("disk", marks=pytest.mark.slow)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_clipping_and_accessors(two, stage, tier):
    two.run(around_the_step, stage, tier)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_frozen_parameters_and_groups_in_bfloat16(two, tier):
    two.run(life, 3 if tier == "cpu" else 1, tier)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_written_scaled_and_under_debug(pools, tier):
    pools[2].run(written, 3, tier)
    pools[2].run(scaled, 1, tier)
    pools[3].run(debugged, 3, tier)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("mode", list(Mode))
def test_bytes_under_way(pools, mode, tier):
    pools[3].run(deferred, mode, tier)


def saved(rank: int, world: int, config: zero.ZeroConfig, folder: str) -> None:
    model, opt = pair("Shampoo")
    engine = zero.shard(model, opt, config)
    trained(model, opt, rank, 0, 1)
    engine.save(folder)


def resumed(rank: int, world: int, config: zero.ZeroConfig, folder: str) -> None:
    """The state of a run on two ranks; steps on from there as one that was never elsewhere."""
    plain, reference = pair("Shampoo")
    plainly(plain, reference, 2, 0, 1)
    with zero.Init():
        model, opt = pair("Shampoo")
    zero.shard(model, opt, config).load(folder)
    same(model, opt, plain, reference, "Shampoo", rank)
    trained(model, opt, rank, 2)
    plainly(plain, reference, world, 2)
    same(model, opt, plain, reference, "Shampoo", rank)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_resumed_on_other_numbers_of_ranks_and_in_other_tiers(pools, tmp_path, tier):
    where, folder = str(tmp_path), str(tmp_path / "ck")
    other = "disk" if tier == "cpu" else "none"
    pools[2].run(saved, zero.ZeroConfig(stage=2, offload_optimizer=tier, offload_dir=where), folder)
    zero.verify(folder)
    pools[3].run(resumed, zero.ZeroConfig(stage=3, offload_optimizer=other, offload_dir=where), folder)
    pools[1].run(resumed, zero.ZeroConfig(stage=1, offload_optimizer=tier, offload_dir=where), folder)


def stepped_in_backward(rank: int, world: int, tier: str) -> None:
    (plain, reference), (model, opt) = pair("layerwise"), pair("layerwise")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=3, offload_optimizer=tier, step_in_backward=True))
    for step in range(3):
        with engine.no_sync():
            token_loss(model, rank, step).backward()
        trained(model, opt, rank, step + 7)
        for r in range(world):
            (token_loss(plain, r, step) / world).backward()
            (token_loss(plain, r, step + 7) / world).backward()
        reference.step()
        reference.zero_grad()
    for key, p in plain.named_parameters():
        torch.testing.assert_close(zero.full_parameter(model.get_parameter(key)), p)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_stepped_in_backward(two, tier):
    two.run(stepped_in_backward, tier)


def narrow(rank: int, world: int, tier: str) -> None:
    """bfloat16 on one rank: gradients rest in the type they come in; as in memory, with and without clipping."""
    runs = []
    for where in ("none", tier):
        model, opt = pair("LARS")
        model.bfloat16()
        engine = zero.shard(model, opt, zero.ZeroConfig(stage=2, offload_optimizer=where))
        for step in range(3):
            token_loss(model, rank, step).backward()
            if step == 1:
                engine.clip_grad_norm_(0.05)
            opt.step()
            opt.zero_grad()
        runs.append([zero.full_parameter(p) for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_low_precision_on_one_rank(pools, tier):
    pools[1].run(narrow, tier)


def in_replicas(rank: int, world: int, config: zero.ZeroConfig, folder: str) -> None:
    """2 x 2 ranks: each replica has an owner of every parameter; a checkpoint is written once."""
    (plain, reference), (model, opt) = pair("Shampoo"), pair("Shampoo")
    engine = zero.shard(model, opt, config)
    for step in range(2):
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
    engine.save(folder)
    zero.verify(folder)
    trained(model, opt, rank, 9)
    engine.load(folder)
    trained(model, opt, rank, 2)
    plainly(plain, reference, world, 2)
    for key, p in plain.named_parameters():
        torch.testing.assert_close(zero.full_parameter(model.get_parameter(key)), p, rtol=1e-4, atol=1e-5)
    state = opt.state_dict()["state"]
    for index, entries in reference.state_dict()["state"].items():
        for key, value in entries.items() if rank == 0 else ():
            torch.testing.assert_close(state[index][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_in_replicas(pools, tmp_path, tier):
    config = zero.ZeroConfig(stage=2 if tier == "none" else 3, replicas=2, offload_optimizer=tier)
    pools[4].run(in_replicas, config, str(tmp_path / "ck"))


class Counts(Layerwise):
    """Counts its steps for all parameters together, in `where`, and steps by one over that. By layers, or by elements."""

    def __init__(self, params, where: str, by_layer: bool, idles: bool = True):
        super().__init__(params)
        self.k, self.where, self.by_layer, self.idles = 0, where, by_layer, idles
        for group in self.param_groups:
            group["k"] = torch.zeros(()) if where == "tensor" else 0

    @torch.no_grad()
    def step(self, closure=None):
        if not self.idles and all(p.grad is None for group in self.param_groups for p in group["params"]):
            return
        self.k += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    rate = self.rate(p) if self.by_layer else 1.0
                    p.sub_(group["lr"] * rate * p.grad / (self.k if self.where == "own" else group["k"]))


def counting(rank: int, world: int) -> None:
    for where in ("own", "group", "tensor"):
        for by_layer in (False, True):
            runs = []
            for settings in ({}, {"offload_optimizer": "cpu"}, {"offload_optimizer": "cpu", "step_in_backward": True}):
                torch.manual_seed(0)
                model = Stack()
                opt = Counts(model.parameters(), where, by_layer)
                zero.shard(model, opt, zero.ZeroConfig(stage=2, **settings))
                trained(model, opt, rank, 0, 1, 2)
                runs.append([zero.full_parameter(p) for p in model.parameters()])
                assert (opt.k, float(opt.param_groups[0]["k"])) == (3, 3.0)
            for other in runs[1:]:
                assert all(torch.equal(p, q) for p, q in zip(runs[0], other, strict=True)), (where, by_layer)
    model = Stack()
    opt = Counts(model.parameters(), "own", False, idles=False)
    with pytest.raises(zero.UnsupportedOptimizerError, match="it changes 'k' only in steps in which a parameter has"):
        zero.shard(model, opt, zero.ZeroConfig(stage=2, offload_optimizer="cpu"))
    zero.shard(model, opt, zero.ZeroConfig(stage=2))


def test_what_an_optimizer_counts_for_all_parameters_together(pools):
    """Every stretch of an offloaded step finds what was there before the step: before, it found one step too many."""
    pools[1].run(counting)


# What it takes -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
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
    model = Wide()
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
        plan, found = engine.plan.memory, at_rest(engine.sharded)
        for where in Tier:
            single = 4 * 16 if where is Tier.HOST or where.value == "device" else 0
            expected = plan.rest[where]["optimizer"]
            assert expected <= found[where.value]["optimizer"] <= expected + single, (name, where, found, plan.rest)
        staging = engine.offload.storage.ledger.host
        assert staging.peak["staging"] <= plan.peak[Tier.HOST]["staging"], (name, staging.peak, plan.peak[Tier.HOST])
        assert (tier == "disk") is (staging.peak["staging"] > 0)


@pytest.mark.parametrize("tier", ["none", "cpu", "disk"])
def test_state_rests_as_planned(pools, tier):
    pools[2].run(planned, tier, 2)
    pools[1].run(planned, tier, 1)


def weighed(rank: int, world: int, folder: str) -> None:
    """`auto` within a budget that is too small for all of it: the same tiers on every rank, and the same numbers."""
    for name in SPLIT:
        all_, plain = wide(rank, name, zero.ZeroConfig(stage=3), range(3))
        least, _ = wide(rank, name, zero.ZeroConfig(stage=3, offload_optimizer="cpu", offload_params="cpu"), range(0))
        peaks = [engine.exchange(engine.plan.memory.at_most(Tier.DEVICE)) for engine in (all_, least)]
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
        tiers = [(p.parameters.value, [tier.value for tier, _ in p.optimizer]) for p in engine.plan.placements]
        assert all(other == tiers for other in engine.exchange(tiers))
        assert len({tier for _, of in tiers for tier in of}) > 1, tiers
        assert all(
            len(shards) == 1 for flat in engine.sharded.trained if flat.wholes is not None for shards in [flat.shards]
        )
        assert engine.plan.memory.at_most(Tier.DEVICE) <= budget
        assert all(torch.equal(p, q) for p, q in zip(found, plain, strict=True)), name


@pytest.mark.parametrize("world", [1, 3])
def test_auto_weighs_whole_parameters(pools, tmp_path, world):
    pools[world].run(weighed, str(tmp_path))
