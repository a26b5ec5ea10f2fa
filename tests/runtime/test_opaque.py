"""Parameters that are no floats: frozen bytes of quantised weights, sharded as they are; tensors made of others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.kit.common import autocast
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


class Packed(nn.Parameter):
    """As bitsandbytes' 4-bit weights: bytes in another shape, and what they mean as an attribute."""

    def __new__(cls, data: Tensor, scale: Tensor) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale = scale
        return self


class QuantisedLinear(nn.Module):
    """Two 4-bit numbers in a byte, or one 8-bit number, and an adapter that is trained."""

    def __init__(self, bits: int, features: int = 24) -> None:
        super().__init__()
        self.bits = bits
        values = torch.randint(0, 256, (features * features * bits // 8, 1), dtype=torch.uint8)
        self.weight: Any
        if bits == 4:
            self.weight = Packed(values, torch.rand(features, 1) / 16)
        else:
            self.weight = nn.Parameter(values.view(features, features).to(torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.rand(features, 1) / 256)
        self.down, self.up = nn.Linear(features, 4, bias=False), nn.Linear(4, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 4:
            low, high = self.weight & 15, self.weight >> 4
            values = torch.cat([low, high], 1).view(x.shape[-1], -1).float() - 8
            scale = self.weight.scale
        else:
            values, scale = self.weight.float(), self.scale
        return torch.relu(F.linear(x, values * scale) + self.up(self.down(x)))


def quantised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(QuantisedLinear(bits), nn.LayerNorm(24)) for bits in (4, 8, 4)), nn.Linear(24, 5)
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(10 * step + rank))
    return F.cross_entropy(model(x).float(), torch.arange(6) % 5)


def trained(rank: int, world: int, stage: int, precision: str, tier: str, folder: str) -> None:
    plain, model = quantised(), quantised()
    reference, optimizer = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (plain, model)
    )
    config = zero.ZeroConfig(stage=stage, offload_params=tier, offload_dir=folder if tier == "disk" else None)
    engine = zero.shard(model, optimizer, config, mixed_precision=precision)
    assert isinstance(model[0][0].weight, Packed)
    spans = [span for unit in engine.layout.units for span in unit.spans if span.spec.dtype in ("uint8", "int8")]
    assert sum(span.used_numel for span in spans) == 2 * 288 + 576
    assert {span.shards for span in spans} == {world}
    assert all(span.spec.compute_dtype == span.spec.master_dtype == span.spec.dtype for span in spans)
    for step in range(3):
        losses = []
        for peer in range(world):
            with autocast(precision):
                losses.append(loss_of(plain, peer, step))
            (losses[-1] / world).backward()
        reference.step()
        reference.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loss, losses[rank], rtol=0, atol=1e-5)
    twins = dict(plain.named_parameters())
    state = model.state_dict()
    for name, param in model.named_parameters():
        whole = zero.full_parameter(param)
        assert whole.dtype == twins[name].dtype
        if not param.is_floating_point():
            assert torch.equal(whole, twins[name]), name
            assert rank != 0 or torch.equal(state[name], twins[name]), name
    with zero.unsharded(model):
        assert torch.equal(model[2][0].weight, twins["2.0.weight"])
    engine.save(f"{folder}/ckpt")
    zero.verify(f"{folder}/ckpt")
    before = loss_of(model, rank, 9)
    other = quantised()
    for param in other.parameters():
        param.data.zero_()
    restored = zero.shard(other, None, config, mixed_precision=precision)
    restored.load(f"{folder}/ckpt", load_optimizer=False)
    assert torch.equal(loss_of(other, rank, 9), before)
    engine.detach()
    assert isinstance(model[0][0].weight, Packed)
    assert torch.equal(model[0][0].weight, twins["0.0.weight"])


@pytest.mark.parametrize(
    ("stage", "precision", "tier"),
    [(1, "bf16", "none"), (3, "no", "none"), (3, "bf16", "cpu"), (3, "no", "disk")],
)
def test_frozen_bytes_are_sharded_as_they_are(
    two: RankPool, tmp_path: Path, stage: int, precision: str, tier: str
) -> None:
    two.run(trained, stage, precision, tier, str(tmp_path))


def refused(rank: int, world: int, stage: int) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    values = model[1].weight.detach()
    model[1].weight = nn.Parameter(TwoTensor(values.clone(), values.clone()), requires_grad=False)
    with pytest.raises(zero.LayoutError, match=r"'1\.weight' is a TwoTensor, a tensor made of others"):
        zero.shard(model, None, zero.ZeroConfig(stage=stage))
    assert torch.isfinite(model(torch.ones(1, 4))).all(), "as it was"


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_made_of_others_are_refused(two: RankPool, stage: int) -> None:
    two.run(refused, stage)
