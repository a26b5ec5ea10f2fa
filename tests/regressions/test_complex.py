"""Complex parameters train, clip, save and load as under DDP."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from tests.kit.rows import each_value
from tests.regressions.test_loss_scaler import Spectral

pytestmark = pytest.mark.gloo


class Spectrum(nn.Module):
    """A layer in the frequency domain, between real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, 5, dtype=dtype) / 3)
        self.shift = nn.Parameter(torch.randn(5, dtype=dtype))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        spectrum = torch.fft.rfft(x.float()).to(self.filter.dtype) @ self.filter + self.shift
        return self.last(torch.fft.irfft(spectrum, n=8).to(x.dtype))


def optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "whole":
        return Spectral(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank: int, world: int, case: dict[str, Any], folder: str) -> None:
    torch.manual_seed(0)
    model = Spectrum(case.get("dtype", torch.complex64))
    plain = copy.deepcopy(model)
    kind, bf16 = case.get("kind", "adam"), case.get("bf16", False)
    opt, reference = optimizer(model, kind), optimizer(plain, kind)
    theirs: Any = DistributedDataParallel(plain) if world > 1 else plain
    tier = case.get("tier", "none")
    config = zero.ZeroConfig(
        stage=case["stage"], offload_optimizer=tier, offload_dir=folder if tier == "disk" else None
    )
    engine = zero.shard(model, opt, config, mixed_precision="bf16" if bf16 else "no")
    rel = 3e-2 if bf16 else 1e-4
    for step in range(4):
        model(batch(rank, step)).float().square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            theirs(batch(rank, step)).float().square().mean().backward()
        expected = [p.grad for p in plain.parameters() if p.grad is not None]
        for order in (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0):
            norm = nn.utils.get_total_norm(expected, order)
            mine = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], order)
            torch.testing.assert_close(mine, norm, rtol=rel if order >= 0 else 0.5, atol=1e-5, msg=f"{step} {order}")
            if order > 0:
                ours = engine.clip_grad_norm_(math.inf, order)
                torch.testing.assert_close(ours, norm, rtol=rel, atol=1e-5, check_dtype=False, msg=f"{step} {order}")
        if step == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            engine.clip_grad_norm_(0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        if step == 2 and kind != "whole":  # of the groups; changes nothing any more
            held = [p for group in opt.param_groups for p in group["params"]]
            torch.testing.assert_close(
                nn.utils.clip_grad_norm_(held, 1.0).float(), torch.tensor(0.1), rtol=1e-2, atol=1e-4
            )
        for each in (opt, reference):
            each.step()
            each.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            zero.full_parameter(param), plain.get_parameter(name).data, rtol=0, atol=3e-2 if bf16 else 1e-4, msg=name
        )
    saved = {name: zero.full_parameter(param).clone() for name, param in model.named_parameters()}
    if case.get("dtype") == torch.complex128:
        with pytest.raises(zero.CheckpointError, match=r"complex128.*torch\.save"):
            engine.save(folder + "/saved")
        return engine.detach()
    engine.save(folder + "/saved")
    for param in model.parameters():
        zero.set_full_parameter(param, torch.zeros_like(zero.full_parameter(param)))
    engine.load(folder + "/saved")
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), saved[name]), name
    model(batch(rank, 9)).float().square().mean().backward()
    opt.step()
    engine.detach()
    assert model.filter.dtype == plain.filter.dtype


CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"kind": "sgd"},
    "whole": {"kind": "whole"},
    "bf16": {"bf16": True},
    "double": {"dtype": torch.complex128},
}


@pytest.mark.parametrize(("case", "stage"), each_value(CASES, [3, 1, 2, 0]))
def test_complex_parameters(two, stage, case, tmp_path):
    two.run(trained, {**CASES[case], "stage": stage}, str(tmp_path), timeout_s=30)


@pytest.mark.parametrize(("case", "tier"), each_value(["adam", "whole", "bf16"], ["cpu", "disk"]))
def test_complex_parameters_offloaded(two, case, tier, tmp_path):
    two.run(trained, {**CASES[case], "stage": 2, "tier": tier}, str(tmp_path), timeout_s=30)


@pytest.mark.parametrize("case", ["adam", "bf16"])
def test_complex_parameters_on_one_rank(pools, case, tmp_path):
    pools[1].run(trained, {**CASES[case], "stage": 2, "tier": "cpu"}, str(tmp_path), timeout_s=30)
