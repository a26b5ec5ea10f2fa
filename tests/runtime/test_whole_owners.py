"""Optimizers over whole matrices where ranks share the model out: one owner each, and the numbers are the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.runtime.test_models import token_loss
from tests.runtime.test_ownership import plainly, trained
from tests.runtime.test_whole_matrix import OPTIMIZERS, Layerwise, Mixed

pytestmark = pytest.mark.gloo


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018 for matrices, plain descent for the rest: two statistics of other shapes than the parameter's."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() == 2:
                    state = self.state[p]
                    if not state:
                        state["left"] = torch.eye(p.shape[0]) * 1e-2
                        state["right"] = torch.eye(p.shape[1]) * 1e-2
                    state["left"].add_(p.grad @ p.grad.T)
                    state["right"].add_(p.grad.T @ p.grad)
                    update = inverse_root(state["left"]) @ p.grad @ inverse_root(state["right"])
                p.sub_(group["lr"] * update)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lars(Layerwise):
    """You et al. 2017: the rate of each layer from its norms, with momentum."""

    def rate(self, p: Tensor) -> Tensor:
        return 1e-1 * p.norm() / (p.grad.norm() + 1e-3 * p.norm() + 1e-8)


class Forces(Layerwise):
    """As single-device Muons do: a parameter without a gradient is given one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.mul_(1 - group["lr"] * 0.1).sub_(group["lr"] * self.rate(p) * p.grad)


class Talks(Layerwise):
    """Shares its work out among the ranks by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    torch.distributed.all_reduce(torch.zeros(1))
                    p.sub_(group["lr"] * self.rate(p) * p.grad)


ALONE = {
    **{
        name: OPTIMIZERS[name]
        for name in ("Adafactor", "transformers' Adafactor", "Muon", "layerwise", "blockwise", "replaces", "two rules")
    },
    "Shampoo": Shampoo,
    "LARS": Lars,
    "forces": Forces,
}


def pair(name: str, bf16: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed(tied=True)
    model.blocks[1].line.requires_grad_(False)
    if name == "Muon":  # the rest of the model is another optimizer's business
        for p in model.parameters():
            p.requires_grad_(p.requires_grad and p.dim() == 2)
    return model, ALONE[name](list(model.parameters()))


def same(model: nn.Module, opt, plain: nn.Module, reference, name: str, rank: int) -> None:
    for key, p in plain.named_parameters():
        assert torch.equal(zero.full_parameter(model.get_parameter(key)), p), (name, key)
    ours, theirs = opt.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"]), name
    for index, entries in theirs["state"].items():
        assert set(ours["state"][index]) == set(entries)
        for key, value in entries.items():
            mine = ours["state"][index][key]
            if not isinstance(value, Tensor):
                assert mine == value, (name, key)
                continue
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape), (name, key)
            if rank == 0 or not value.dim():
                assert torch.equal(mine, value), (name, key)


def equals_plain(rank: int, world: int, stage: int, names: list[str], folder: str) -> None:
    for name in names:
        (plain, reference), (model, opt) = pair(name), pair(name)
        groups = list(opt.param_groups)
        for step in range(2):  # warm
            plainly(plain, reference, world, step)
            plainly(model, opt, world, step)
        config = zero.ZeroConfig(stage=stage)
        engine = zero.shard(model, opt, config)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
        expected = torch.optim.lr_scheduler.StepLR(reference, 1, 0.9)
        for step in (2, 3):
            trained(model, opt, rank, step)
            plainly(plain, reference, world, step)
            scheduler.step()
            expected.step()
        same(model, opt, plain, reference, name, rank)
        owned = sum(p.numel() for group in opt.param_groups for p in group["params"])
        everyones = engine.exchange(owned)
        assert sum(everyones) == sum(p.numel() for p in plain.parameters() if p.requires_grad), "one owner each"
        # Its state, by torch's own pair of methods, by a checkpoint, and back in a plain optimizer.
        opt.load_state_dict(opt.state_dict())
        assert all(mine is theirs for mine, theirs in zip(groups, opt.param_groups))
        where = f"{folder}/{name}"
        engine.save(where)
        trained(model, opt, rank, 9)
        engine.load(where)
        trained(model, opt, rank, 4)
        plainly(plain, reference, world, 4)
        same(model, opt, plain, reference, name, rank)
        other, fresh = pair(name)
        again = zero.shard(other, fresh, zero.ZeroConfig(stage=3 if stage < 3 else 1))
        again.load(where)
        trained(other, fresh, rank, 4)
        for key, p in plain.named_parameters():
            assert torch.equal(zero.full_parameter(other.get_parameter(key)), p), (name, key)
        with pytest.raises(zero.ConfigError, match="offload_states"):
            again.offload_states()
        engine.detach()
        plainly(model, opt, world, 5)
        plainly(plain, reference, world, 5)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters())), name


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_equals_the_plain_optimizer(pools, tmp_path, world, stage):
    pools[world].run(equals_plain, stage, list(ALONE), str(tmp_path))


# Between backward and step ---------------------------------------------------------------------------------------------


def around_the_step(rank: int, world: int, stage: int) -> None:
    """Accumulation, `no_sync`, clipping; as the plain loop."""
    (plain, reference), (model, opt) = pair("LARS"), pair("LARS")
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
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
