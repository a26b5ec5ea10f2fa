"""Whole values of parameters in low precision, and spans that are partitioned again unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from hf_zero.runtime.transports import Roads
from tests.kit.common import MODELS, Case, differences, gpt2, loss_of, optimizer_for
from tests.kit.common import Result as Trained
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo


def sharded(stage: int, precision: str = "no", dtype: torch.dtype = torch.float32, groups: int = 2):
    model = gpt2().to(dtype)
    optimizer = optimizer_for(model, groups)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=precision)


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    loss = loss_of(model, rank, step)
    loss.backward()
    return loss.detach()


def precise(rank: int, world: int) -> None:
    """Low precision parameters: accessors give the float32 master, and untouched elements keep their digits."""
    model, optimizer, _ = sharded(3, dtype=torch.bfloat16)
    backward(model, rank)
    optimizer.step()
    weight = model.transformer.h[0].mlp.c_fc.weight
    master = zero.full_parameter(weight)
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        assert weight.dtype == torch.bfloat16
        weight[0] = 2.0
    after = zero.full_parameter(weight)
    assert torch.equal(after[0], torch.full((128,), 2.0))
    assert torch.equal(after[1:], master[1:])
    with zero.unsharded(model):
        assert weight.dtype == torch.bfloat16
        weight.data[1] = 3.0
    after = zero.full_parameter(weight)
    assert torch.equal(after[1], torch.full((128,), 3.0))
    assert torch.equal(after[2:], master[2:])
    model.transformer.h[1].requires_grad_(False)
    frozen = bert_frozen()
    zero.shard(frozen, None, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.StateError, match="is frozen"):
        zero.full_gradient(frozen.bert.encoder.layer[0].output.dense.weight)


def bert_frozen() -> nn.Module:
    return MODELS["bert"]()


def test_low_precision_and_frozen_parameters(two: RankPool) -> None:
    two.run(precise)


def recut(rank: int, world: int, stage: int) -> None:
    """A group added in training: the same training as with a plain model, one unit whole at a time, of those that it cuts."""
    case = Case(stage=stage, steps=4)
    model = gpt2(n_layer=4)
    late = [p for block in (0, 2) for p in model.transformer.h[block].parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = torch.optim.AdamW(rest, lr=1e-3)
    wholes, measured = [], []

    class Looking(PairWire):
        """Looks at what is whole before each gather of a cut."""

        cutting = False

        def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
            if self.cutting:
                measured.append(engine.report().measured["parameters"])
                at_rest = (p for p in model.parameters() if p.untyped_storage().nbytes() >= p.numel() * 4)
                wholes.append(sum(p.numel() for p in at_rest))
            return super().gather(full, own, tag, cuts)

    engine = zero.shard(
        model, optimizer, zero.ZeroConfig(stage=stage), roads=Roads(wire=Looking) if world > 1 else None
    )
    losses = []
    for step in range(case.steps):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 1e-2})
            engine.sharded.wire.cutting = True
            engine.bind(optimizer)  # as the next forward would
            engine.sharded.wire.cutting = False
        losses.append(backward(model, rank, step).item())
        optimizer.step()
        optimizer.zero_grad()
    assert len(wholes) >= 4 or world == 1, "two units, of at least two spans each"
    largest = max(unit.layout.numel for unit in engine.units)
    if stage == 3 and world > 1:
        assert max(wholes) <= largest
        slices = sum(flat.span.slice_numel for unit in engine.units for flat in unit.flats)
        assert max(measured) <= 4 * (slices + largest)
    plain = gpt2(n_layer=4)
    slow = [p for block in (0, 2) for p in plain.transformer.h[block].parameters() if p.dim() > 1]
    reference = torch.optim.AdamW([p for p in plain.parameters() if all(p is not q for q in slow)], lr=1e-3)
    expected = []
    for step in range(case.steps):
        if step == 2:
            reference.add_param_group({"params": slow, "lr": 1e-2})
        total: dict[nn.Parameter, Tensor] = {}
        for peer in range(world):
            loss = backward(plain, peer, step)
            if peer == rank:
                expected.append(loss.item())
            for p in plain.parameters():
                total[p] = p.grad if p not in total else total[p] + p.grad
                p.grad = None
        for p in plain.parameters():
            p.grad = total[p] * (1.0 / world)
        reference.step()
        plain.zero_grad()
    assert losses == expected
    ours = Trained(losses, [], model.state_dict(), optimizer.state_dict()["state"], 1.0)
    theirs = Trained(expected, [], plain.state_dict(), reference.state_dict()["state"], 1.0)
    assert rank != 0 or differences(ours, theirs) == (0.0, 0.0)


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_new_group_recuts_unit_by_unit(pools: dict[int, RankPool], world: int, stage: int) -> None:
    pools[world].run(recut, stage)
