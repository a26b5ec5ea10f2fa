"""No weight is still being sent where user code may write to it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.rows import each_value
from tests.kit.transports import Inflight, PairWire
from tests.programs.sequences import Adapted, partly_frozen

pytestmark = pytest.mark.gloo


class Slow(PairWire):
    """Peers have taken what this rank sends of a gather only when it has been waited for."""

    sources: list[tuple[int, int]]

    def gather(self, full: Tensor, own: Tensor, tag: int, cuts: Sequence[int] = ()) -> Inflight:
        move, extent = super().gather(full, own, tag, cuts), (own.data_ptr(), own.data_ptr() + own.nbytes)
        self.sources.append(extent)

        def taken() -> None:
            move.close()
            self.sources.remove(extent)

        return Inflight((), (SimpleNamespace(wait=taken),), move.wait)


def written_early(rank: int, world: int, settings: dict[str, Any], dtype: str) -> int:
    """Looks, wherever a program may write to a weight, whether peers are still being sent that memory."""
    torch.manual_seed(0)
    model = Adapted()
    optimizer = partly_frozen(model, set())
    Slow.sources = []
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**settings), mixed_precision=dtype, open_wire=Slow)
    seen = 0

    def look(module: nn.Module, *_: object) -> None:
        nonlocal seen
        for param in module.parameters(recurse=settings["stage"] < 3):
            seen += 1
            begin, end = param.data_ptr(), param.data_ptr() + param.nbytes
            assert all(end <= first or last <= begin for first, last in Slow.sources)

    for module in model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for step in range(3):
        loss = model(torch.full((2, 16), 1.0 + step)).square().mean()
        assert not Slow.sources, "a program may write to the optimizer's tensors now"
        loss.backward()
        assert not Slow.sources
        optimizer.step()
        look(model)
        optimizer.zero_grad()
    engine.detach()
    return seen


@pytest.mark.parametrize(
    ("settings", "dtype"),
    each_value(
        [{"stage": 1}, {"stage": 2}, {"stage": 3, "offload_params": "cpu", "offload_optimizer": "cpu"}, {"stage": 3}],
        ["no", "bf16"],
    ),
)
def test_what_a_program_may_write_is_no_longer_sent(two, settings, dtype):
    """Else a peer that is late would get what was written to it in the meantime (SAM, noise, `p.data.mul_`)."""
    assert all(seen > 20 for seen in two.run(written_early, settings, dtype))
