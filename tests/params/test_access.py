"""A repartition holds one unit's full matrices at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import hf_zero as zero
from hf_zero.comm.group_wire import PairWire
from hf_zero.comm.inflight import Inflight
from tests.kit.pool import RankPool
from tests.kit.transports import Roads
from tests.models import gpt2, ids

pytestmark = pytest.mark.gloo


def repartitioned(rank: int, world: int, stage: int) -> None:
    """A group that is added in training changes the layout of two units."""
    torch.manual_seed(0)
    model = gpt2(n_layer=4)
    late = [p for block in (0, 2) for p in model.transformer.h[block].parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if all(p is not q for q in late)], lr=1e-3)
    unsharded, measured = [], []

    class Watching(PairWire):
        """Records what is unsharded before each gather of a repartition."""

        is_watching = False

        def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
            if self.is_watching:
                measured.append(engine.report().measured["parameters"])
                whole = (p for p in model.parameters() if p.untyped_storage().nbytes() >= p.numel() * 4)
                unsharded.append(sum(p.numel() for p in whole))
            return super().gather(full, own, tag, cuts)

    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), **Roads(wire=Watching).given)
    tokens = ids(rank, 0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": late, "lr": 1e-2})
    engine.sharded.wire.is_watching = True
    engine.bind(optimizer)  # as the next forward would
    engine.sharded.wire.is_watching = False
    assert len(unsharded) >= 4, "two units, of at least two spans each"
    largest = max(unit.layout.numel for unit in engine.units)
    if stage == 3:
        assert max(unsharded) <= largest
        slices = sum(flat.span.slice_numel for unit in engine.units for flat in unit.flats)
        assert max(measured) <= 4 * (slices + largest)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_new_group_repartitions_unit_by_unit(two: RankPool, stage: int) -> None:
    two.run(repartitioned, stage)
