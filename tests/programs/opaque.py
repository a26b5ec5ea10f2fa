"""Parameters that are no floats: frozen bytes of quantized weights; tensors made of others are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from tests.models import adamw, mlp, sgd
from tests.oracle import Refused, Run, program
from tests.programs.usual import is_sharded


class Packed(nn.Parameter):
    """As bitsandbytes' 4-bit weights: bytes in another shape, and what they mean as an attribute."""

    def __new__(cls, data: Tensor, scale: Tensor) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.scale = scale
        return self


class QuantizedLinear(nn.Module):
    """Two 4-bit numbers in a byte, or one 8-bit number, and an adapter that is trained."""

    def __init__(self, bits: int, width: int = 16) -> None:
        super().__init__()
        self.bits = bits
        values = torch.randint(0, 256, (width * width * bits // 8, 1), dtype=torch.uint8)
        self.weight: Any
        if bits == 4:
            self.weight = Packed(values, torch.rand(width, 1) / 16)
        else:
            self.weight = nn.Parameter(values.view(width, width).to(torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.rand(width, 1) / 256)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bits == 4:
            low, high = self.weight & 15, self.weight >> 4
            values = torch.cat([low, high], 1).view(x.shape[-1], -1).float() - 8
            scale = self.weight.scale
        else:
            values, scale = self.weight.float(), self.scale
        return torch.relu(F.linear(x, values * scale) + self.up(self.down(x)))


def quantized() -> nn.Module:
    blocks = (nn.Sequential(QuantizedLinear(bits), nn.LayerNorm(16)) for bits in (4, 8, 4))
    return nn.Sequential(*blocks, nn.Linear(16, 5))


def _see_bytes(run: Run, model: Any, what: str) -> None:
    run.see(type(model[0][0].weight).__name__, f"class {what}")
    for block in model[:3]:
        run.see(block[0].weight, f"bytes {what}")


@program(reference="average")
def frozen_bytes(run: Run) -> None:
    """Trained, saved, loaded into another model, detached."""
    model = run.trained_model(quantized, adamw)
    run.loop(steps=3)
    if is_sharded(run.setting) and not run.is_plain:
        for block in model[:3]:
            mine = zero.local_parameter(block[0].weight)
            assert mine.dtype == block[0].weight.dtype
            assert 0 < len(mine) < block[0].weight.numel(), "bytes are not sharded"
    with run.unsharded(model):
        _see_bytes(run, model, "in training")
    with torch.no_grad():
        run.see(run.loss(9), "evaluation")
    engine = run.engine_of(model)
    other = run.build(quantized, seed=1)
    run.shard(other, None)
    if engine is not None:
        engine.save(run.folder / "saved")
        zero.verify(run.folder / "saved")
        run.engine_of(other).load(run.folder / "saved", load_optimizer=False)
    else:
        other.load_state_dict(model.state_dict())
    for mine, theirs in zip(other[:3], model[:3]):  # an attribute is no part of a checkpoint
        mine[0].weight.__dict__.update(theirs[0].weight.__dict__)
    with torch.no_grad():
        run.see(other(run.inputs(9)), "evaluation of the loaded model")
    with run.unsharded(other):
        _see_bytes(run, other, "loaded")
    if engine is not None:
        run.engine_of(other).detach()
    _see_bytes(run, other, "detached")


@program(refused=(Refused(zero.LayoutError, r"'1\.weight' is a TwoTensor, a tensor made of others"),))
def tensors_made_of_others(run: Run) -> None:
    """The model is as it was."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))
    values = model[1].weight.detach()
    model[1].weight = nn.Parameter(TwoTensor(values.clone(), values.clone()), requires_grad=False)
    try:
        run.shard(model, None)
    finally:
        if not torch.isfinite(model(torch.ones(1, 16))).all():
            raise AssertionError("the refused model does not run")


@program(refused=(Refused(zero.LayoutError, r"'0\.weight' has the layout torch\.sparse_coo"),))
def sparse_parameters(run: Run) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(torch.eye(16).to_sparse())
    run.shard(model, sgd(model))
