"""Several optimizers over one model, each over parameters of its own: what each does is what it does in a plain loop."""

from __future__ import annotations

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


def equals_plain(rank: int, world: int, stage: int, names: list[str], folder: str) -> None:
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
        engine = zero.shard(ours.model, ours.opts, zero.ZeroConfig(stage=stage))
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
        zero.shard(again.model, again.opts, zero.ZeroConfig(stage=3 if stage < 3 else 1)).load(where)
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
    pools[world].run(equals_plain, stage, list(LISTS), str(tmp_path), timeout_s=200)
