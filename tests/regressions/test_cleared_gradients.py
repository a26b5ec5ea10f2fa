"""Gradients that user code clears in other ways than by the optimizer's own `zero_grad`: as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.regressions.test_loss_scaler import Spectral

pytestmark = pytest.mark.gloo

Optimizers = list[torch.optim.Optimizer]


class Branches(nn.Module):
    """Steps use one branch or the other: a zero gradient decays weights, and no gradient leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.trunk(x)
        return self.left(x) if step % 3 else self.right(x)


def built(kind: str) -> tuple[Any, Optimizers]:
    torch.manual_seed(0)
    model = Branches()
    params = list(model.parameters())
    if kind == "two":
        return model, [
            torch.optim.AdamW(params[:3], lr=0.1, weight_decay=0.5),
            torch.optim.SGD(params[3:], lr=0.1, momentum=0.9),
        ]
    if kind == "whole":
        return model, [Spectral(params, lr=0.1)]
    return model, [torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)]


def each(opts: Optimizers, clear: Callable[[Any], None]) -> None:
    for opt in opts:
        for group in opt.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    clear(param)


def to_none(param: Any) -> None:
    param.grad = None


def to_zero(param: Any) -> None:
    param.grad.zero_()


def of_class(model: nn.Module, opts: Optimizers) -> None:
    for opt in opts:
        torch.optim.Optimizer.zero_grad(opt)


def of_class_to_zero(model: nn.Module, opts: Optimizers) -> None:
    for opt in opts:
        torch.optim.Optimizer.zero_grad(opt, set_to_none=False)


def of_modules(model: nn.Module, opts: Optimizers) -> None:
    for child in model.children():
        child.zero_grad()


def of_modules_to_zero(model: nn.Module, opts: Optimizers) -> None:
    for child in model.children():
        child.zero_grad(set_to_none=False)


def of_parameters(model: nn.Module, opts: Optimizers) -> None:
    for param in model.parameters():
        param.grad = None


def of_parameters_to_zero(model: nn.Module, opts: Optimizers) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def of_parameters_anew(model: nn.Module, opts: Optimizers) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = torch.zeros_like(param.grad)


def at_once(model: nn.Module, opts: Optimizers) -> None:
    torch._foreach_zero_([param.grad for param in model.parameters() if param.grad is not None])


WAYS: dict[str, Callable[[nn.Module, Optimizers], None]] = {
    "optimizer": lambda model, opts: [opt.zero_grad() for opt in opts] and None,
    "optimizer to zero": lambda model, opts: [opt.zero_grad(set_to_none=False) for opt in opts] and None,
    "class": of_class,
    "class to zero": of_class_to_zero,
    "groups": lambda model, opts: each(opts, to_none),
    "groups to zero": lambda model, opts: each(opts, to_zero),
    "class, of the first": lambda model, opts: of_class(model, opts[:1]),
    "groups, of the last": lambda model, opts: each(opts[-1:], to_none),
    "model": lambda model, opts: model.zero_grad(),
    "model to zero": lambda model, opts: model.zero_grad(set_to_none=False),
    "module class": lambda model, opts: nn.Module.zero_grad(model),
    "modules": of_modules,
    "modules to zero": of_modules_to_zero,
    "parameters": of_parameters,
    "parameters to zero": of_parameters_to_zero,
    "parameters anew": of_parameters_anew,
    "at once": at_once,
}


def shown(model: nn.Module) -> list[bool]:
    return [param.grad is not None for param in model.parameters()]


def norm(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])


def trained(rank: int, world: int, stage: int, tier: str, kind: str, ways: list[str], folder: str) -> None:
    for way in ways:
        model, opts = built(kind)
        plain, reference = built(kind)
        config = zero.ZeroConfig(stage=stage, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None)
        engine = zero.shard(model, opts, config)
        clear = WAYS[way]
        for step in range(5):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            where = f"{way}, step {step}"
            for each_model, each_opts in ((model, opts), (plain, reference)):
                each_model(x, step).square().mean().backward()
                if step != 2:
                    for opt in each_opts:
                        opt.step()
                clear(each_model, each_opts)
            assert shown(model) == shown(plain), (where, shown(model), shown(plain))
            torch.testing.assert_close(norm(model), norm(plain), msg=where)
            torch.testing.assert_close(engine.clip_grad_norm_(float("inf")), norm(plain), msg=where)
            for name, param in model.named_parameters():
                found, expected = zero.full_gradient(param), plain.get_parameter(name).grad
                assert (found is None) == (expected is None), (where, name)
                torch.testing.assert_close(zero.full_parameter(param), plain.get_parameter(name).data, msg=where)
        model(x, 0).square().mean().backward()
        engine.detach()
        assert shown(model) == [False] * len(shown(model)), way
        model.cpu()
        model(x, 1).square().mean().backward()
        plain.zero_grad()
        plain(x, 1).square().mean().backward()
        torch.testing.assert_close(norm(model), norm(plain), msg=way)


@pytest.mark.parametrize("kind", ["one", "two", "whole"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cleared_as_in_plain_pytorch(two, stage, kind, tmp_path):
    two.run(trained, stage, "none", kind, [*WAYS], str(tmp_path), timeout_s=60)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["one", "two", "whole"])
def test_cleared_as_in_plain_pytorch_offloaded(two, kind, tier, tmp_path):
    two.run(trained, 2, tier, kind, [*WAYS], str(tmp_path), timeout_s=60)


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_cleared_as_in_plain_pytorch_on_one_rank(pools, tier, tmp_path):
    pools[1].run(trained, 2, tier, "one", [*WAYS], str(tmp_path), timeout_s=60)


def toggled(rank: int, world: int, stage: int) -> None:
    """Two optimizers in manual optimization, as Lightning runs them: toggled, and cleared by the class's own method."""
    model, opts = built("two")
    plain, reference = built("two")
    engine = zero.shard(model, opts, zero.ZeroConfig(stage=stage))
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for each_model, each_opts in ((model, opts), (plain, reference)):
            for mine, other in (each_opts, each_opts[::-1]):
                held = [p for group in other.param_groups for p in group["params"]]
                for param in held:
                    param.requires_grad = False
                torch.optim.Optimizer.zero_grad(mine)
                each_model(x, step).square().mean().backward()
                mine.step()
                torch.optim.Optimizer.zero_grad(mine)
                for param in held:
                    param.requires_grad = True
        assert shown(model) == shown(plain) == [False] * len(shown(model)), step
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                zero.full_parameter(param), plain.get_parameter(name).data, msg=f"{name}, {step}"
            )
    engine.detach()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_optimizers_that_are_toggled(two, stage):
    two.run(toggled, stage, timeout_s=30)


def kept(rank: int, world: int, stage: int) -> str:
    """A gradient that user code kept says what happened to it."""
    model, opts = built("one")
    engine = zero.shard(model, opts, zero.ZeroConfig(stage=stage))
    model(torch.ones(2, 6), 1).square().mean().backward()
    grad = model.trunk[0].weight.grad
    torch.optim.Optimizer.zero_grad(opts[0])
    with pytest.raises(zero.StateError) as error:
        grad.norm()
    engine.detach()
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_was_kept_over_the_clearing(two, stage):
    for said in two.run(kept, stage, timeout_s=30):
        assert "cleared since" in said
        assert "clone()" in said
