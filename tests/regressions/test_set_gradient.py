"""Gradients that user code gives to parameters that had none: the next step uses them, as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.regressions.test_loss_scaler import Spectral

pytestmark = pytest.mark.gloo


class Branches(nn.Module):
    """One unit whose second branch takes part when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6, bias=False)
        self.never = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def built(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branches()
    if kind == "whole":
        return model, Spectral(model.parameters(), lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def given(rank: int, world: int, stage: int, tier: str, kind: str, local: bool, folder: str) -> None:
    model, opt = built(kind)
    plain, reference = built(kind)
    config = zero.ZeroConfig(stage=stage, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None)
    engine = zero.shard(model, opt, config)
    value = torch.linspace(-1, 1, 36).view(6, 6)
    for step in range(3):
        model(torch.ones(2, 6) * (step + 1)).square().mean().backward()
        plain(torch.ones(2, 6) * (step + 1)).square().mean().backward()
        for name, param in model.named_parameters():
            other = plain.get_parameter(name).grad
            assert (zero.full_gradient(param) is None) == (other is None), name
            assert other is not None or zero.local_gradient(param) is None, name
        if step != 1:
            param = model.unused.weight
            if local:
                low, own = 0, zero.local_parameter(param).numel()
                counts: list[Any] = engine.exchange(own)
                # Rows go to ranks in order; with one owner, all or nothing.
                low = sum(counts[:rank]) if engine.plan.layout.shards > 1 else 0
                zero.set_local_gradient(param, value.view(-1)[low : low + own])
            else:
                zero.set_full_gradient(param, value)
            plain.unused.weight.grad = value.clone()
            found = zero.full_gradient(param)
            assert found is not None
            torch.testing.assert_close(found, value)
            assert param.grad is not None
        assert model.never.weight.grad is None
        assert zero.full_gradient(model.never.weight) is None
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        torch.testing.assert_close(engine.clip_grad_norm_(float("inf")), expected)
        shown = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(shown, expected)
        opt.step()
        reference.step()
        opt.zero_grad()
        reference.zero_grad()
        for name, param in model.named_parameters():
            torch.testing.assert_close(zero.full_parameter(param), plain.get_parameter(name).data, msg=f"{step} {name}")
    engine.detach()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", ["adam", "whole"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_was_given_is_used(two, stage, kind, local, tmp_path):
    two.run(given, stage, "none", kind, local, str(tmp_path), timeout_s=30)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("kind", ["adam", "whole"])
def test_a_gradient_that_was_given_is_used_offloaded(two, kind, tier, tmp_path):
    two.run(given, 2, tier, kind, False, str(tmp_path), timeout_s=30)


def given_first(rank: int, world: int, stage: int, kind: str, clears: bool) -> None:
    """Without any backward, or after its gradients were cleared: only the parameter that was given one is stepped."""
    model, opt = built(kind)
    plain, reference = built(kind)
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    value = torch.linspace(-1, 1, 36).view(6, 6)
    if clears:
        model(torch.ones(2, 6)).square().mean().backward()
        for param in model.parameters():
            param.grad = None
    zero.set_full_gradient(model.never.weight, value)
    plain.never.weight.grad = value.clone()
    assert [p.grad is not None for p in model.parameters()] == [p.grad is not None for p in plain.parameters()]
    assert zero.full_gradient(model.used.weight) is None
    opt.step()
    reference.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(zero.full_parameter(param), plain.get_parameter(name).data, msg=name)
    engine.detach()


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("kind", ["adam", "whole"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_given_without_others(two, stage, kind, clears):
    two.run(given_first, stage, kind, clears, timeout_s=30)
