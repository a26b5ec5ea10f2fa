"""Optimizers over whole matrices where ranks share the model out: one owner each, and the numbers are the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.common import EachParameter
from tests.kit.deferred_wire import Mode, Watch
from tests.runtime.test_models import plainly, token_loss, trained
from tests.runtime.test_whole_matrix import ALONE, Lars, Layerwise, Mixed, Shampoo, equals_plain, pair

pytestmark = pytest.mark.gloo


class Talks(Layerwise):
    """Shares its work out among the ranks by itself."""

    def update(self, p, group):
        torch.distributed.all_reduce(torch.zeros(1))
        p.sub_(group["lr"] * self.rate(p) * p.grad)


WHERE = [(2, 1), (2, 3), (3, 2), *(pytest.param(*place, marks=pytest.mark.slow) for place in [(2, 2), (3, 1), (3, 3)])]


@pytest.mark.parametrize(("world", "stage"), WHERE)
def test_equals_the_plain_optimizer(pools, tmp_path, world, stage):
    elsewhere = zero.ZeroConfig(stage=3 if stage < 3 else 1)
    pools[world].run(equals_plain, zero.ZeroConfig(stage=stage), list(ALONE), str(tmp_path), elsewhere)


# Between backward and step ---------------------------------------------------------------------------------------------


def around_the_step(rank: int, world: int, stage: int, tier: str = "none") -> None:
    """Accumulation, `no_sync`, clipping; as the plain loop."""
    (plain, reference), (model, opt) = pair("LARS"), pair("LARS")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage, offload_optimizer=tier))
    for step in range(3):
        with engine.no_sync():
            token_loss(model, rank, step).backward()
        token_loss(model, rank, step + 7).backward()
        for r in range(world):
            (token_loss(plain, r, step) / world).backward()
            (token_loss(plain, r, step + 7) / world).backward()
        mine = [p for group in opt.param_groups for p in group["params"]]
        if mine:
            with pytest.raises(zero.StateError, match=r"each rank has those that it owns.*clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(mine, 1.0)
        clip = engine.clip_grad_norm_ if step else lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        torch.testing.assert_close(clip(0.05), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        for each in (opt, reference):
            each.step()
            each.zero_grad()
    for key, p in plain.named_parameters():
        torch.testing.assert_close(zero.full_parameter(model.get_parameter(key)), p)
    weight = model.head.weight
    assert torch.equal(
        zero.full_optimizer_state(weight, "m"), zero.full_optimizer_state(model.get_parameter("embed.weight"), "m")
    ), "tied: one parameter"
    zero.set_full_optimizer_state(weight, "m", torch.ones(weight.shape))
    assert zero.full_optimizer_state(weight, "m").eq(1).all()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_clipping_and_accessors(two, stage):
    two.run(around_the_step, stage)


# Written, scaled, looked at -------------------------------------------------------------------------------------------


def debugged(rank, world, stage, tier="none"):
    (plain, reference), (model, opt) = pair("Shampoo"), pair("Shampoo")
    zero.shard(model, opt, zero.ZeroConfig(stage=stage, debug=True, offload_optimizer=tier))
    for step in range(4):
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
    for key, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(key)), p)


@pytest.mark.parametrize("stage", [1, 3])
def test_under_debug(pools, stage):
    pools[3].run(debugged, stage)


def written(rank, world, stage, tier="none"):
    (plain, reference), (model, opt) = pair("Adafactor"), pair("Adafactor")
    zero.shard(model, opt, zero.ZeroConfig(stage=stage, offload_optimizer=tier))
    for step in range(4):
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                with torch.no_grad():
                    model.embed.weight.mul_(0.5)
        with torch.no_grad():
            plain.embed.weight.mul_(0.5)
        token_loss(model, rank, step).backward()
        model.embed.weight.grad.mul_(3.0)
        for r in range(world):
            token_loss(plain, r, step).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.mul_(1.0 / world)
        plain.embed.weight.grad.mul_(3.0)
        for each in (opt, reference):
            each.step()
            each.zero_grad()
        with zero.unsharded(model):
            token_loss(model, 0, 3)
    for key, p in plain.named_parameters():
        torch.testing.assert_close(zero.full_parameter(model.get_parameter(key)), p)
    whole = model.state_dict()
    if rank == 0:
        assert all(
            torch.equal(whole[key], model.get_parameter(key)) for key, _ in plain.named_parameters() if stage < 3
        )


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_and_gradients_written_between_steps(pools, stage):
    pools[2].run(written, stage)


def scaled(rank, world, stage, tier="none"):
    torch.manual_seed(0)
    model = Mixed(tied=True)
    opt = Lars(model.parameters())
    zero.shard(model, opt, zero.ZeroConfig(stage=stage, offload_optimizer=tier), mixed_precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [zero.full_parameter(p).clone() for p in model.parameters()]
    loss = token_loss(model, rank, 0) * (float("inf") if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert scaler.get_scale() == 4.0
    for a, p in zip(before, model.parameters()):
        assert torch.equal(a, zero.full_parameter(p))
    scaler.scale(token_loss(model, rank, 1)).backward()
    scaler.step(opt)
    scaler.update()
    assert not torch.equal(before[0], zero.full_parameter(next(iter(model.parameters()))))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scaler_skips_on_every_rank(pools, stage):
    pools[2].run(scaled, stage)


# Other precisions, groups, births, numbers of ranks --------------------------------------------------------------------


class MuonAndAdam(EachParameter):
    """One optimizer whose groups differ, as people write it: orthogonal momentum for hidden matrices, Adam for the rest."""

    def __init__(self, params, lr=1e-2):
        params = list(params)
        matrices = [p for p in params if p.dim() == 2 and min(p.shape) > 1 and p.shape[0] != 97]
        rest = [p for p in params if not any(p is q for q in matrices)]
        super().__init__([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}], lr)

    def update(self, p, group):
        state = self.state[p]
        if group["use_muon"]:
            momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            x = momentum / (momentum.norm() + 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            p.sub_(group["lr"] * x)
        else:
            state["step"] = state.get("step", 0) + 1
            first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
            first, second = first / (1 - 0.9 ** state["step"]), second / (1 - 0.99 ** state["step"])
            p.sub_(group["lr"] * first / (second.sqrt() + 1e-8))


def life(rank: int, world: int, stage: int, tier: str = "none") -> None:
    """Frozen, unfrozen, a group added half way, in bfloat16 parameters with float32 masters; as one owner has it all."""

    def run(config: zero.ZeroConfig) -> list[Tensor]:
        torch.manual_seed(0)
        model = Mixed(tied=True).bfloat16()
        late = list(model.blocks[1].parameters())
        for p in late:
            p.requires_grad_(False)
        opt = MuonAndAdam([p for p in model.parameters() if p.requires_grad])
        engine = zero.shard(model, opt, config)
        out = []
        for step in range(6):
            if step == 2:
                for p in late:
                    p.requires_grad_(True)
                opt.add_param_group({"params": [p for p in late if p.dim() == 2], "use_muon": True})
                opt.add_param_group({"params": [p for p in late if p.dim() < 2], "use_muon": False})
            if step == 4:
                model.blocks[0].requires_grad_(False)
            token_loss(model, rank, step).backward()
            opt.step()
            opt.zero_grad()
            out += [zero.full_parameter(p).clone() for p in model.parameters()]
        engine.detach()
        return out

    offloaded = zero.ZeroConfig(stage=stage, offload_optimizer=tier)
    for mine, plain in zip(run(offloaded), run(zero.ZeroConfig(stage=0)), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_and_groups_in_bfloat16(two, stage):
    two.run(life, stage)


def saved(rank: int, world: int, folder: str) -> None:
    model, opt = pair("Shampoo")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=2))
    trained(model, opt, rank, 0, 1)
    engine.save(folder)
    torch.save(
        [zero.full_parameter(p) for p in model.parameters()]
        + [zero.full_optimizer_state(model.embed.weight, name) for name in ("left", "right")],
        f"{folder}.{rank}",
    )


def resumed(rank: int, world: int, folder: str) -> None:
    with zero.Init():
        model, opt = pair("Shampoo")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=3))
    engine.load(folder)
    expected = torch.load(f"{folder}.0")
    found = [zero.full_parameter(p) for p in model.parameters()]
    found += [zero.full_optimizer_state(model.embed.weight, name) for name in ("left", "right")]
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    trained(model, opt, rank, 2)


def test_resumed_on_other_numbers_of_ranks(pools, tmp_path):
    pools[2].run(saved, str(tmp_path / "ck"))
    zero.verify(tmp_path / "ck")
    for world in (1, 3):
        pools[world].run(resumed, str(tmp_path / "ck"))


def lonely(rank: int, world: int, stage: int) -> None:
    """One matrix: ranks that own nothing hold nothing of it, and nobody holds padding."""
    torch.manual_seed(0)
    model, plain = nn.Linear(64, 50, bias=False), nn.Linear(64, 50, bias=False)
    plain.load_state_dict(model.state_dict())
    opt, reference = Lars(model.parameters()), Lars(plain.parameters())
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    x = torch.randn(4, 64)
    for _ in range(2):
        for each, optimizer in ((model, opt), (plain, reference)):
            each(x).square().sum().backward()
            if each is plain and plain.weight.grad is not None:
                grad = plain.weight.grad
                plain.weight.grad = (grad + grad + grad) * (1.0 / 3)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(zero.full_parameter(model.weight), plain.weight)
    owned = [p.shape for p in opt.param_groups[0]["params"]]
    assert owned == ([] if rank else [plain.weight.shape])
    assert zero.local_parameter(model.weight).numel() == (0 if rank else 3200)
    rest, measured = engine.plan.memory.rest, engine.report().measured
    of_masters = sum(kinds["parameters"] for kinds in rest.values())
    assert of_masters == 3200 * 4 if stage < 3 or not rank else of_masters == 0, (rank, of_masters)
    assert measured["optimizer"] == (0 if rank else 3200 * 4), measured
    assert engine.plan.layout.imbalance() == tuple([float(world)] + [0.0] * (world - 1))
    assert any("one owner" in reason for reason in engine.plan.reasons)
    text = opt.state_dict()
    assert tuple(text["state"][0]["m"].shape) == (50, 64)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_own_nothing(pools, stage):
    pools[3].run(lonely, stage)


def refuses(rank: int, world: int) -> None:
    model, _ = pair("LARS")
    with pytest.raises(zero.UnsupportedOptimizerError, match=r"Talks cannot .*communicates by itself \(allreduce_\)"):
        zero.shard(model, Talks([p for p in model.parameters() if p.requires_grad]), zero.ZeroConfig(stage=2))
    zero.shard(model, None, zero.ZeroConfig(stage=2))


def test_what_communicates_by_itself_is_refused(two):
    two.run(refuses)


def deferred(rank: int, world: int, mode: Mode, tier: str = "none") -> None:
    """Bytes that move at the first or the last moment that the wire's contract permits: what was sent had not changed."""
    (plain, reference), (model, opt) = pair("LARS"), pair("LARS")
    watch = Watch(mode, one_memory=tier == "none")
    zero.shard(model, opt, zero.ZeroConfig(stage=3, offload_optimizer=tier), roads=watch.roads)
    for step in range(3):
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
    for key, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(key)), p)
    assert watch.finish() == []


@pytest.mark.parametrize("mode", list(Mode))
def test_bytes_under_way(pools, mode):
    pools[3].run(deferred, mode)


# Bound to another, and with parameters elsewhere -----------------------------------------------------------------------


def rebound(rank: int, world: int, stage: int) -> None:
    """What was refused leaves no trace; from slices to owners and back."""
    (plain, reference), (model, opt) = pair("LARS"), pair("LARS")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    with pytest.raises(zero.UnsupportedOptimizerError if rank else zero.RankMismatchError):
        engine.bind((torch.optim.LBFGS if rank else torch.optim.AdamW)(model.parameters()))
    for each, optimizer in ((model, opt), (plain, reference)):
        each.blocks[1].line.requires_grad_(True)
        optimizer.zero_grad()
    for step in range(2):
        trained(model, opt, rank, step)
        plainly(plain, reference, world, step)
    for build in (torch.optim.AdamW, Shampoo):
        opt, reference = build(model.parameters(), lr=1e-2), build(plain.parameters(), lr=1e-2)
        engine.bind(opt)
        for step in (3, 4):
            trained(model, opt, rank, step)
            plainly(plain, reference, world, step)
    for key, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(key)), p), key


@pytest.mark.parametrize("stage", [2, 3])
def test_bound_to_another_optimizer(two, stage):
    two.run(rebound, stage)


def elsewhere(rank: int, world: int, folder: str) -> None:
    for tier in ("cpu", "disk"):
        model, opt = pair("Adafactor")
        zero.shard(
            model, opt, zero.ZeroConfig(stage=3, offload_params=tier, offload_dir=folder), mixed_precision="bf16"
        )
        other, fresh = pair("Adafactor")
        zero.shard(other, fresh, zero.ZeroConfig(stage=3), mixed_precision="bf16")
        for step in range(3):
            trained(model, opt, rank, step)
            trained(other, fresh, rank, step)
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(zero.full_parameter(p), zero.full_parameter(q)), tier


def test_parameters_in_host_memory_and_on_disk(pools, tmp_path):
    pools[3].run(elsewhere, str(tmp_path))
