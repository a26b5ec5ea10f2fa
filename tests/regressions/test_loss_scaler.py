"""Loss scalers that the engine was not told of: every rank skips the same steps, and scales are those of DDP."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from tests.kit.rows import each_value
from tests.optimizers import EachParameter

pytestmark = pytest.mark.gloo

INF = float("inf")
NAN = float("nan")


class Net(nn.Module):
    """Blocks that are units at stage 3; with `half`, PyTorch's own example of autocast inside `forward`."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half_inside = half
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16) if self.half_inside else nullcontext():
            for block in self.blocks:
                x = block(x)
            return self.head(x)


class Spectral(EachParameter):
    """Looks at whole matrices."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad / (p.grad.norm() + 1e-3), alpha=-group["lr"])


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    if kind == "two":
        return [torch.optim.AdamW(params[:2], lr=1e-2), torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9)]
    if kind == "fused":
        return [torch.optim.AdamW(params, lr=1e-2, fused=True)]
    if kind == "whole":
        return [Spectral(params)]
    return [torch.optim.AdamW(params, lr=1e-2)]


CULPRITS = {1: ("blocks.0.0.weight", 0, INF), 3: ("head.bias", 1, NAN), 4: ("blocks.1.0.bias", 1, INF)}
"""By step: the parameter of which one element overflows, on which rank."""


class Loop:
    def __init__(self, model: Any, opts: list[torch.optim.Optimizer], rank: int) -> None:
        self.model, self.opts, self.rank = model, opts, rank
        self.inner = getattr(model, "module", model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def step(self, step: int, explicit: bool, clip: Any, accumulate: int) -> list[float]:
        name, who, value = CULPRITS.get(step, ("", -1, 0.0))

        def broken(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[-1] = value
            return grad

        handle = self.inner.get_parameter(name).register_hook(broken) if who == self.rank else None
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with nullcontext() if last else self.model.no_sync():
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + self.rank))
                self.scaler.scale(self.model(x).float().square().mean() / accumulate).backward()
        if handle is not None:
            handle.remove()
        norms = []
        for opt in self.opts:
            if explicit:
                self.scaler.unscale_(opt)
        if explicit and clip is not None:
            norms.append(float(clip(self.model)))
        for opt in self.opts:
            self.scaler.step(opt)
        self.scaler.update()
        for opt in self.opts:
            opt.zero_grad()
        return [self.scaler.get_scale(), *norms]


def same(rank: int, world: int, case: dict[str, Any], folder: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = Net(case.get("half", False))
    plain = copy.deepcopy(model)
    explicit, clip, micros = case.get("explicit", False), case.get("clip"), case.get("accumulate", 1)
    theirs = Loop(DistributedDataParallel(plain), optimizers(plain, case.get("kind", "one")), rank)
    opts = optimizers(model, case.get("kind", "one"))
    config = zero.ZeroConfig(
        stage=case["stage"],
        offload_optimizer=case.get("tier", "none"),
        offload_params=case.get("params", "none"),
        offload_dir=folder if "disk" in case.values() else None,
    )
    bf16 = case.get("bf16", False)
    engine = zero.shard(model, opts, config, mixed_precision="bf16" if bf16 else "no")
    ours = Loop(model, opts, rank)

    def by_torch(m: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(m.parameters(), 0.1)

    def by_engine(m: nn.Module) -> Tensor:
        return engine.clip_grad_norm_(0.1)

    mine = {"torch": by_torch, "engine": by_engine}.get(str(clip))
    told = []
    for step in range(6):
        before = [zero.full_parameter(p) for p in model.parameters()]
        former = [p.detach().clone() for p in plain.parameters()]
        here = ours.step(step, explicit, mine, micros)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            there = theirs.step(step, explicit, by_torch if clip else None, micros)
        told.append(here)
        assert here[0] == there[0], (step, here, there)
        assert here[1:] == pytest.approx(there[1:], rel=5e-2 if bf16 else 1e-3, nan_ok=True), (step, here, there)
        moved = [not torch.equal(zero.full_parameter(p), old) for p, old in zip(model.parameters(), before)]
        assert moved == [not torch.equal(q, old) for q, old in zip(plain.parameters(), former)], step
        assert all(moved) or step in CULPRITS, step
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(
            zero.full_parameter(p), q.data, rtol=0, atol=3e-2 if bf16 else 1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    engine.detach()
    return told


WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "half inside forward": {"half": True, "explicit": True, "clip": "torch"},
    "unscaled and clipped": {"explicit": True, "clip": "engine"},
    "accumulated": {"accumulate": 3, "explicit": True},
    "two optimizers": {"kind": "two"},
    "two unscaled": {"kind": "two", "explicit": True, "half": True},
    "fused": {"kind": "fused"},
    "fused, unscaled": {"kind": "fused", "explicit": True},
    "whole matrices": {"kind": "whole"},
    "whole matrices, bf16": {"kind": "whole", "bf16": True, "explicit": True},
    "bf16": {"bf16": True},
    "bf16 clipped": {"bf16": True, "explicit": True, "clip": "torch"},
}
OFFLOADED = ("float32", "two unscaled", "fused", "whole matrices", "whole matrices, bf16", "bf16")


@pytest.mark.parametrize(("way", "stage"), each_value(WAYS, [0, 1, 2, 3]))
def test_steps_and_scales_are_those_of_ddp(two, stage, way, tmp_path):
    first, second = two.run(same, {**WAYS[way], "stage": stage}, str(tmp_path), timeout_s=30)
    assert str(first) == str(second)


@pytest.mark.parametrize(("way", "tier", "stage"), each_value(OFFLOADED, ["cpu", "disk"], [1, 3]))
def test_steps_and_scales_offloaded(two, stage, way, tier, tmp_path):
    case = {**WAYS[way], "stage": stage, "tier": tier, "params": tier if stage == 3 else "none"}
    first, second = two.run(same, case, str(tmp_path), timeout_s=30)
    assert str(first) == str(second)


def groups_on_one_rank(rank: int, world: int, kind: str, tier: str, folder: str) -> list[float]:
    """bf16 gradients in host memory are narrower than their masters; the groups show them all the same."""
    torch.manual_seed(0)
    model = Net(False)
    (opt,) = optimizers(model, kind)
    config = zero.ZeroConfig(stage=2, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None)
    engine = zero.shard(model, opt, config, mixed_precision="bf16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model(x).float().square().mean().backward()
    held = [p for group in opt.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(held, 1e-3)
    left = engine.clip_grad_norm_(INF)
    assert float(left) == pytest.approx(1e-3, rel=1e-2)
    opt.zero_grad()
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.unscale_(opt)
    unscaled = engine.clip_grad_norm_(INF)
    torch.testing.assert_close(unscaled, norm, rtol=1e-2, atol=0)
    scaler.step(opt)
    scaler.update()
    engine.detach()
    return [float(norm), *(float(p.double().sum()) for p in model.parameters())]


@pytest.mark.parametrize("kind", ["one", "whole"])
def test_the_groups_of_one_rank_show_every_gradient(pools, kind, tmp_path):
    found = [pools[1].run(groups_on_one_rank, kind, tier, str(tmp_path))[0] for tier in ("none", "cpu", "disk")]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3, abs=1e-5)


def own_checks(rank: int, world: int, stage: int, tier: str, folder: str) -> list[list[bool]]:
    """A loop that skips by norms of its own: an infinity in one slice is one for all ranks."""
    told = []
    for value in (INF, NAN, 1.0):
        for where in ("blocks.0.0.weight", "head.bias"):
            torch.manual_seed(0)
            model = Net(False)
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
            config = zero.ZeroConfig(
                stage=stage, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None
            )
            engine = zero.shard(model, opt, config)

            def broken(grad: Tensor, value: float = value) -> Tensor:
                grad = grad.clone()
                grad.view(-1)[0] *= value
                return grad

            if rank == 1:
                model.get_parameter(where).register_hook(broken)
            model(torch.ones(2, 8)).square().mean().backward()
            groups = [p for group in opt.param_groups for p in group["params"]]
            found = [
                torch.isfinite(nn.utils.get_total_norm([p.grad for p in some if p.grad is not None], kind))
                for some in (list(model.parameters()), groups)
                for kind in (2.0, 1.0, INF)
            ]
            found += [torch.isfinite(engine.clip_grad_norm_(INF, kind)) for kind in (2.0, 1.0, INF)]
            found.append(torch.stack([torch.isfinite(p.grad).all() for p in model.parameters()]).all())
            assert {bool(each) for each in found} == {value == 1.0}, (value, where, found)
            told.append([bool(each) for each in found])
            engine.detach()
    return told


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "disk")])
def test_norms_are_finite_on_all_ranks_or_on_none(two, stage, tier, tmp_path):
    first, second = two.run(own_checks, stage, tier, str(tmp_path))
    assert first == second
