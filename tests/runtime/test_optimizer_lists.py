"""Several optimizers over one model, each over parameters of its own: what each does is what it does in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.runtime.test_models import Stack, token_loss
from tests.runtime.test_whole_matrix import Layerwise, Mixed

pytestmark = pytest.mark.gloo

Optimizers = list[torch.optim.Optimizer]


def muon(matrices, rest) -> Optimizers:
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2)]


def adams(matrices, rest) -> Optimizers:
    return [torch.optim.AdamW(rest, lr=1e-2), torch.optim.AdamW([{"params": matrices[:2]}, {"params": matrices[2:]}])]


def three(matrices, rest) -> Optimizers:
    return [torch.optim.SGD(matrices[:1], lr=1e-2, momentum=0.9), Layerwise(matrices[1:]), torch.optim.RMSprop(rest)]


LISTS = {"Muon and AdamW": muon, "two AdamWs": adams, "three": three}


def built(name: str) -> tuple[nn.Module, Optimizers]:
    """One parameter is frozen, one is in no optimizer."""
    torch.manual_seed(0)
    model = Mixed(tied=True)
    model.blocks[1].line.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad and p is not model.blocks[0].one]
    return model, LISTS[name]([p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2])


class Loop:
    """The same calls on a sharded model, and on a plain one that sees all ranks' batches."""

    def __init__(self, model: nn.Module, opts: Optimizers, ranks: list[int], world: int) -> None:
        self.model, self.opts, self.ranks, self.world = model, opts, ranks, world
        self.schedulers = [torch.optim.lr_scheduler.StepLR(opt, 2, 0.5 + 0.1 * i) for i, opt in enumerate(opts)]

    def backward(self, step: int) -> Tensor:
        loss = torch.zeros(())
        if len(self.ranks) == 1:
            loss = token_loss(self.model, self.ranks[0], step)
            loss.backward()
            return loss
        before = {p: p.grad for p in self.model.parameters()}
        sums: dict[Tensor, Tensor] = {}
        for p in before:
            p.grad = None
        for rank in self.ranks:
            token_loss(self.model, rank, step).backward()
            for p in before:
                if p.grad is not None:
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
                    p.grad = None
        for p, earlier in before.items():
            mean = sums[p] * (1.0 / self.world) if p in sums else None
            p.grad = mean if earlier is None else earlier if mean is None else earlier + mean
        return loss

    def run(self, first: int) -> None:
        a, *others = self.opts
        b = others[-1]
        everyone = [a, *others]
        for opt in everyone:  # as it stands in every recipe
            opt.zero_grad()
        self.backward(first)
        for opt in everyone:
            opt.step()
        for opt in everyone:
            opt.zero_grad()
        self.backward(first + 1)  # the other way round
        for opt in reversed(everyone):
            opt.step()
            opt.zero_grad()
        self.backward(first + 2)  # one alone; the gradients of the others add up
        a.step()
        a.zero_grad()
        self.backward(first + 3)
        for opt in everyone:
            opt.step()
        self.model.zero_grad()
        self.backward(first + 4)  # one alone, the others' gradients are forgotten
        b.step()
        for opt in everyone:
            opt.zero_grad()
        a.step(lambda: self.backward(first + 5))  # in a closure, and once more by itself
        for opt in others:
            opt.step()
        a.step()
        b.zero_grad(set_to_none=False)
        a.zero_grad()
        self.backward(first + 6)
        for opt in everyone:
            opt.step()
            opt.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()


def loops(name: str, rank: int, world: int) -> tuple[Loop, Loop]:
    return Loop(*built(name), [rank], world), Loop(*built(name), list(range(world)), world)


def same(ours: Loop, plain: Loop, rank: int) -> None:
    for key, p in plain.model.named_parameters():
        mine = ours.model.get_parameter(key)
        assert torch.equal(zero.full_parameter(mine) if zero.engine_of(ours.model) else mine, p), key
    for mine, theirs in zip(ours.opts, plain.opts, strict=True):
        found, wanted = mine.state_dict(), theirs.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert list(found["state"]) == list(wanted["state"])
        for index, entries in wanted["state"].items():
            for key, value in entries.items():
                mine_ = torch.as_tensor(found["state"][index][key])
                assert rank > 0 or not mine_.is_meta
                assert mine_.is_meta or torch.equal(mine_, torch.as_tensor(value)), (index, key)


def equals_plain(rank: int, world: int, config: zero.ZeroConfig, names: list[str], folder: str) -> None:
    for name in names:
        ours, plain = loops(name, rank, world)
        if name == "two AdamWs":  # warm
            for loop in (ours, plain):
                loop.ranks = [0]
                loop.backward(0)
                for opt in loop.opts:
                    opt.step()
                    opt.zero_grad()
            ours.ranks, plain.ranks = [rank], list(range(world))
        groups = [opt.param_groups[0] for opt in ours.opts]
        engine = zero.shard(ours.model, ours.opts, config)
        assert engine.optimizers == tuple(ours.opts)
        for first in (0, 10):
            ours.run(first)
            plain.run(first)
            same(ours, plain, rank)
        assert all(opt.param_groups[0] is group for opt, group in zip(ours.opts, groups))
        # States by torch's own pair of methods, and by a checkpoint; at another stage too.
        for opt in ours.opts:
            opt.load_state_dict(opt.state_dict())
        where = f"{folder}/{name}"
        engine.save(where)
        ours.run(20)
        engine.load(where)
        for mine, theirs in zip(ours.schedulers, plain.schedulers):
            mine.load_state_dict(theirs.state_dict())
        again = Loop(*built(name), [rank], world)
        zero.shard(again.model, again.opts, zero.ZeroConfig(stage=3 if config.stage < 3 else 1)).load(where)
        for mine, theirs in zip(again.schedulers, plain.schedulers):
            mine.load_state_dict(theirs.state_dict())
        for loop in (ours, again, plain):
            loop.run(30)
        same(ours, plain, rank)
        same(again, plain, rank)
        engine.detach()
        ours.ranks = plain.ranks
        for loop in (ours, plain):
            loop.run(40)
        same(ours, plain, rank)


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 3), pytest.param(2, 2, marks=pytest.mark.slow), (1, 2)])
def test_equals_a_plain_loop(pools, tmp_path, world, stage):
    pools[world].run(equals_plain, zero.ZeroConfig(stage=stage), list(LISTS), str(tmp_path), timeout_s=200)


OFFLOADED = {"host": {"offload_optimizer": "cpu"}, "disk": {"offload_optimizer": "disk", "offload_params": "disk"}}


@pytest.mark.parametrize("where", list(OFFLOADED))
def test_offloaded_equals_a_plain_loop(two, tmp_path, where):
    folder = {"offload_dir": str(tmp_path)} if where == "disk" else {}
    config = zero.ZeroConfig(stage=3, **OFFLOADED[where], **folder)
    two.run(equals_plain, config, ["two AdamWs", "Muon and AdamW"], str(tmp_path / "saved"), timeout_s=200)


def saved(rank: int, world: int, stage: int, folder: str) -> tuple[Any, Any]:
    ours, _ = loops("Muon and AdamW", rank, world)
    engine = zero.shard(ours.model, ours.opts, zero.ZeroConfig(stage=stage))
    ours.run(0)
    engine.save(folder)
    values = {key: zero.full_parameter(p) for key, p in ours.model.named_parameters()}
    states = [opt.state_dict()["state"] for opt in ours.opts]
    return (values, states) if rank == 0 else (None, None)


def resumed(rank: int, world: int, stage: int, folder: str, values: Any, states: Any) -> None:
    ours, _ = loops("Muon and AdamW", rank, world)
    zero.shard(ours.model, ours.opts, zero.ZeroConfig(stage=stage)).load(folder)
    for key, p in ours.model.named_parameters():
        assert torch.equal(zero.full_parameter(p), values[key]), key
    for opt, wanted in zip(ours.opts, states, strict=True):
        found = opt.state_dict()["state"]
        assert list(found) == list(wanted)
        for index, key in ((i, key) for i, entries in wanted.items() for key in entries if rank == 0):
            assert torch.equal(found[index][key], wanted[index][key]), (index, key)
    ours.run(10)
    one, _ = loops("two AdamWs", rank, world)  # another list
    with pytest.raises(zero.CheckpointError, match="optimizers in another order"):
        zero.shard(one.model, one.opts, zero.ZeroConfig(stage=stage)).load(folder)


def test_resumed_on_another_number_of_ranks(pools, tmp_path):
    folder = str(tmp_path / "ckpt")
    (values, states), _ = pools[2].run(saved, 3, folder)
    zero.verify(folder)
    pools[3].run(resumed, 1, folder, values, states)


# Between backward and step ---------------------------------------------------------------------------------------------


def clipped(rank: int, world: int, stage: int) -> None:
    """`no_sync`, clipping of all and of one optimizer's, accessors."""
    ours, plain = loops("Muon and AdamW", rank, world)
    engine = zero.shard(ours.model, ours.opts, zero.ZeroConfig(stage=stage))
    for step in range(4):
        with engine.no_sync():
            ours.backward(step)
        ours.backward(step + 7)
        plain.backward(step)
        plain.backward(step + 7)
        if step % 2:  # of one of them, by the model's parameters
            part = [[p for p in loop.model.parameters() if p.dim() == 2 and p.requires_grad] for loop in (ours, plain)]
            norm = engine.clip_grad_norm_(0.05, parameters=part[0])
        else:
            part = [list(loop.model.parameters()) for loop in (ours, plain)]
            norm = torch.nn.utils.clip_grad_norm_(part[0], 0.05)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(part[1], 0.05))
        rest = [[p for group in loop.opts[1].param_groups for p in group["params"]] for loop in (ours, plain)]
        norms = [torch.nn.utils.clip_grad_norm_(params, 0.01) for params in rest]  # the groups' own
        torch.testing.assert_close(*norms)
        for loop in (ours, plain):
            for opt in loop.opts if step != 2 else loop.opts[1:]:
                opt.step()
            loop.model.zero_grad()
    for key, p in plain.model.named_parameters():
        torch.testing.assert_close(zero.full_parameter(ours.model.get_parameter(key)), p)
    weight, gate = ours.model.blocks[0].line.weight, ours.model.blocks[0].line.bias
    wanted = plain.opts[0].state[plain.model.blocks[0].line.weight]["momentum_buffer"]
    torch.testing.assert_close(zero.full_optimizer_state(weight, "momentum_buffer"), wanted)
    wanted = plain.opts[1].state[plain.model.blocks[0].line.bias]["exp_avg"]
    torch.testing.assert_close(zero.full_optimizer_state(gate, "exp_avg"), wanted)
    assert zero.full_optimizer_state(gate, "momentum_buffer") is None
    zero.set_full_optimizer_state(gate, "exp_avg", torch.ones(8))
    assert zero.full_optimizer_state(gate, "exp_avg").eq(1).all()
    assert engine.report().measured["optimizer"] > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_clipping_and_accessors(two, stage):
    two.run(clipped, stage)


def overflow(rank: int, world: int, stage: int) -> list[list[bool]]:
    """As torch's scaler has it: each optimizer leaves its own step out, on every rank."""
    model, opts = built("two AdamWs")
    zero.shard(model, opts, zero.ZeroConfig(stage=stage), mixed_precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    moved = []
    some = model.blocks[0].line.bias, model.blocks[0].line.weight  # of the first, of the second
    for step, bad in enumerate([None, 0, 1, None]):
        before = [zero.full_parameter(p) for p in some]
        loss = token_loss(model, rank, step)
        factor = float("inf") if bad is not None and rank == 1 else 1.0
        hook = some[bad or 0].register_hook(lambda grad, factor=factor: grad * factor)
        scaler.scale(loss).backward()
        hook.remove()
        for opt in opts:
            scaler.unscale_(opt)
        for opt in opts:
            scaler.step(opt)
        scaler.update()
        for opt in opts:
            opt.zero_grad()
        moved.append([not torch.equal(zero.full_parameter(p), old) for p, old in zip(some, before)])
    return moved


def debugged(rank: int, world: int, stage: int) -> None:
    """What debug compares, it compares of the optimizer that steps; a step of all of them is one step of the record."""
    ours, plain = loops("Muon and AdamW", rank, world)
    engine = zero.shard(ours.model, ours.opts, zero.ZeroConfig(stage=stage, debug=True))
    recorder = engine.record()
    for step in range(4):
        for loop in (ours, plain):
            loop.backward(step)
            for opt in loop.opts[step % 2 :]:
                opt.step()
            loop.model.zero_grad()
    assert recorder.recorded == 4
    recorder.close()
    same(ours, plain, rank)
    ours.backward(9)
    with torch.no_grad():
        ours.opts[1].param_groups[0]["params"][0].grad.fill_(float("nan"))
    ours.opts[0].step()  # its gradients are finite
    with pytest.raises(zero.NumericsError, match="No weight was changed"):
        ours.opts[1].step()


@pytest.mark.parametrize("stage", [1, 3])
def test_under_debug(two, stage):
    two.run(debugged, stage)


# Together and later ----------------------------------------------------------------------------------------------------


def bound_later(rank: int, world: int, stage: int) -> None:
    ours, plain = loops("three", rank, world)
    first, second, third = ours.opts
    engine = zero.shard(ours.model, first, zero.ZeroConfig(stage=stage))
    ours.backward(0)
    first.step()
    plain.backward(0)
    plain.opts[0].step()
    ours.model.zero_grad()
    plain.model.zero_grad()
    engine.bind(second)
    engine.bind(third)
    assert engine.optimizers == (first, second, third)
    for loop in (ours, plain):
        loop.run(10)
    same(ours, plain, rank)
    # A group that one of them gets later: the others stay as they are.
    for loop in (ours, plain):
        loop.opts[0].add_param_group({"params": [loop.model.blocks[0].one], "lr": 0.5})
        loop.run(20)
    same(ours, plain, rank)
    # One takes the place of one: its parameters' former optimizer is not theirs any more.
    for loop in (ours, plain):
        params = [
            p for p in loop.model.parameters() if p.requires_grad and p.dim() != 2 and p is not loop.model.blocks[0].one
        ]
        loop.opts[2] = torch.optim.AdamW(params, lr=3e-2)
    engine.bind(ours.opts[2])
    assert engine.optimizers == tuple(ours.opts)
    for call in (third.step, third.zero_grad, third.state_dict):
        with pytest.raises(zero.StateError, match="another optimizer was bound in its place"):
            call()
    for loop in (ours, plain):
        loop.run(30)
    same(ours, plain, rank)
    engine.bind([ours.opts[2], first])  # these and no others
    assert engine.optimizers == (ours.opts[2], first)
    kept = ours.model.blocks[2].line.weight  # of the one that is not bound any more
    before = zero.full_parameter(kept)
    for loop in (ours, plain):
        loop.model.zero_grad()
        loop.backward(40)
        for opt in (loop.opts[2], loop.opts[0]):
            opt.step()
    assert torch.equal(zero.full_parameter(kept), before)
    for key, p in plain.model.named_parameters():
        assert torch.equal(zero.full_parameter(ours.model.get_parameter(key)), p), key


@pytest.mark.parametrize("stage", [1, 3])
def test_bound_one_after_another(two, stage):
    two.run(bound_later, stage)


def refused(rank: int, world: int) -> None:
    model = Stack()
    params = list(model.parameters())
    both = [torch.optim.SGD(params, lr=1e-2), torch.optim.AdamW(params[-1:])]
    with pytest.raises(
        zero.LayoutError, match=r"'head.weight' is in two optimizers, number 0 \(SGD\) and number 1 \(AdamW\)"
    ):
        zero.shard(model, both)
    apart = [torch.optim.SGD(params[:-1], lr=1e-2), torch.optim.AdamW(params[-1:])]
    config = zero.ZeroConfig(stage=2, offload_optimizer="cpu", step_in_backward=True)
    with pytest.raises(zero.ConfigError, match="which of 2 optimizers steps"):
        zero.shard(model, apart, config)
    with pytest.raises(zero.RankMismatchError, match="ranks differ"):
        zero.shard(model, apart[::-1] if rank else apart)
    engine = zero.shard(model, apart)
    with pytest.raises(zero.LayoutError, match="is in two optimizers"):
        engine.bind([*apart, torch.optim.SGD([params[0]], lr=1e-2)])
    token_loss(model, rank, 0).backward()
    for opt in apart:  # none of it has left a trace
        opt.step()
        opt.zero_grad()
    apart[1].param_groups[0]["lr"] += rank
    with pytest.raises(zero.RankMismatchError, match="'lr' of the optimizer's group 0 of optimizer 1"):
        token_loss(model, rank, 0).backward()


def test_refused_by_name(two):
    two.run(refused)


# Broken off ------------------------------------------------------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """Raises where it is told to: before its arithmetic, or in the middle of it."""

    at = ""

    @torch.no_grad()
    def step(self, closure=None):
        if self.at == "before":
            raise ValueError("not now")
        for index, p in enumerate(p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if index and self.at == "within":
                raise ValueError("half done")
            p.sub_(self.param_groups[0]["lr"] * p.grad)


def breaking(model: nn.Module) -> Optimizers:
    params = list(model.parameters())
    return [torch.optim.AdamW(params[:3], lr=1e-2), Breaks(params[3:], lr=1e-2)]


def broken(rank: int, world: int, stage: int, folder: str) -> None:
    torch.manual_seed(0)
    model, other = Stack(), Stack()
    other.load_state_dict(model.state_dict())
    ours, plain = Loop(model, breaking(model), [rank], world), Loop(other, breaking(other), list(range(world)), world)
    engine = zero.shard(model, ours.opts, zero.ZeroConfig(stage=stage))
    for loop in (ours, plain):
        loop.backward(0)
        loop.opts[0].step()
        loop.opts[1].at = "before"
        with pytest.raises(ValueError, match="not now"):
            loop.opts[1].step()
        loop.opts[1].at = ""
        loop.opts[1].step()  # between the two nothing was lost
        loop.model.zero_grad()
    same(ours, plain, rank)
    # A backward that raises: what each optimizer had is gone for both, until each was cleared.
    hook = model.blocks[0].register_forward_hook(lambda _, args, out: Raises.apply(out))
    with pytest.raises(RuntimeError, match="in the middle"):
        ours.backward(1)
    hook.remove()
    for opt in ours.opts:
        with pytest.raises(zero.StateError, match=r"its gradients are gone.*zero_grad"):
            opt.step()
    ours.opts[0].zero_grad()
    ours.opts[1].zero_grad()
    for loop in (ours, plain):
        loop.run(20)
    same(ours, plain, rank)
    engine.save(folder)
    ours.backward(3)
    ours.opts[0].step()
    ours.opts[1].at = "within"
    with pytest.raises(ValueError, match="half done"):
        ours.opts[1].step()
    for opt in ours.opts:  # both: the weights are not of one step
        with pytest.raises(zero.StateError, match="broke off half done"):
            opt.step()
    ours.opts[1].at = ""
    engine.load(folder)
    for loop in (ours, plain):
        loop.run(30)
    same(ours, plain, rank)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_or_a_backward_that_raises(two, tmp_path, stage):
    two.run(broken, stage, str(tmp_path / "ckpt"))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scaler_skips_each_by_itself(two, stage):
    first, second = two.run(overflow, stage)
    assert first == second == [[True, True], [False, True], [True, False], [True, True]]
