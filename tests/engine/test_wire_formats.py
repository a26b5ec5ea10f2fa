"""Gradients that travel as codes: sums are those of decoded values, fewer bytes are sent. Training: tests/programs/coded.py."""

from __future__ import annotations

import math

import pytest
import torch

import hf_zero as zero
from hf_zero.comm.codec import CODECS
from hf_zero.comm.hybrid import in_replicas
from tests.kit.common import gpt2, optimizer_for, take_steps
from tests.kit.pool import on_ranks
from tests.kit.transports import CollectiveWire, P2PWire, Sockets, Wire

pytestmark = pytest.mark.gloo
CPU = torch.device("cpu")


# The wire ---------------------------------------------------------------------------------------------------------------


def through(name: str, values: torch.Tensor) -> torch.Tensor:
    """As they come out on the other side."""
    codec = CODECS[name]
    sent, out = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, sent, values.numel())
    codec.decode(sent, out)
    return out


def average(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total * (1.0 / len(values))


def reduced(rank: int, world: int, name: str, numel: int, missing: int, bad: float | None) -> bool:
    """On every kind of wire, this rank's slice of a mean, to the bit; with a source that lacks the padding at its end."""
    sources = [torch.randn(world * numel, generator=torch.Generator().manual_seed(7 + r)) for r in range(world)]
    if bad is not None:
        sources[1][numel + 3] = bad
    for source in sources:
        source[source.numel() - missing :] = 0.0
    good = True
    for kind in (P2PWire, Sockets, CollectiveWire):
        wire = kind(CPU)
        wire.start(30.0)
        wire.codec = CODECS[name]
        source, out = sources[rank].clone(), torch.full((numel,), 7.0)
        wire.reduce(source[: source.numel() - missing] if wire.ragged else source, out, 5).close()
        expected = average([through(name, s[rank * numel : (rank + 1) * numel]) for s in sources])
        good = (
            good and torch.equal(out.isfinite(), expected.isfinite()) and bool(out.eq(expected)[out.isfinite()].all())
        )
        good = good and (bad is None or rank != 1 or not bool(out[:256].isfinite().any()))
        # The averages of two replicas are the same bits in both.
        if world == 4:
            mean = torch.full((2 * numel,), 7.0)
            hybrid: Wire = in_replicas(wire, 2)
            hybrid.open_groups()
            hybrid.reduce(source, mean, 6).close()
            everyone: list[torch.Tensor] = hybrid.exchange(mean)
            good = good and torch.equal(everyone[rank].nan_to_num(9.0), everyone[rank ^ 2].nan_to_num(9.0))
            close = average([s[rank % 2 * 2 * numel :][: 2 * numel] for s in sources])
            gap = (mean - close).abs()[mean.isfinite()].max()
            good = good and float(gap) < {"int8": 0.05, "fp8": 0.3}[name]
    return good


@pytest.mark.parametrize(("name", "bad"), [("int8", None), ("int8", math.inf), ("fp8", math.nan)])
@pytest.mark.parametrize("world", [2, 4])
def test_a_reduce_sums_what_is_decoded(pools, world, name, bad):
    assert all(pools[world].run(reduced, name, 1040, 0 if bad else 700, bad))


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks()
def test_float16_reduces_do_not_overflow_by_summing(rank: int, world: int, stage: int) -> None:
    """Gradients whose mean float16 holds and whose sum it does not, on the backend's own collectives."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, reduce_dtype="float16"), open_wire=CollectiveWire)
    (model(torch.ones(1, 4)) * 50_000.0).sum().backward()
    grad = zero.full_gradient(model[1].bias)
    assert torch.equal(grad, torch.full((4,), 50_000.0).half().float()), grad


# Bytes ------------------------------------------------------------------------------------------------------------------


def sent(rank: int, world: int, name: str, replicas: int) -> tuple[list[int], list[int], dict[str, int]]:
    """Slices' lengths: of all spans, of those that are gathered as codes; bytes of a step."""
    model = gpt2(n_embd=64)
    optimizer = optimizer_for(model, 1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2, wire=name, replicas=replicas))
    for step in range(2):
        engine.traffic.reset()
        take_steps(model, optimizer, rank, step)
    spans = [span.slice_numel for span in engine.layout.spans]
    matrices = [span.slice_numel for span in engine.layout.spans if all(len(s.spec.shape) > 1 for s in span.slots)]
    counted = {kind: count["bytes"] for kind, count in engine.traffic.to_dict().items()}
    engine.detach()
    return spans, matrices, counted


def test_bytes(pools):
    for world, replicas in ((2, 1), (4, 2)):
        codec = CODECS["int8"]
        *_, exact = pools[world].run(sent, "none", replicas)[0]
        spans, matrices, coded = pools[world].run(sent, "int8", replicas)[0]
        assert coded["reduce"] == sum(min(4 * numel, codec.nbytes(numel)) for numel in spans)
        assert 3.5 * coded["reduce"] <= exact["reduce"]
        if replicas == 2:
            assert coded["across"] == sum(2 * min(2 * numel, codec.nbytes(numel // 2)) for numel in spans)
            assert 3.5 * coded["across"] <= exact["across"]
        assert coded["gather"] == 4 * (sum(spans) - sum(matrices)) + sum(map(codec.nbytes, matrices))
        assert 3.5 * coded["gather"] <= exact["gather"]


# What cannot be -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"wire": "int7"}, {"wire": None}, {"wire": "int8", "stage": 0}, {"wire": "fp8", "debug": True}]
)
def test_refused_by_name(settings):
    with pytest.raises(zero.ConfigError, match="wire"):
        zero.ZeroConfig(**settings)
