"""Stand-ins followed through other code: their segments and replays give what the code gives with values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_zero.huggingface.trace import Trace

Code = Callable[[Tensor, Tensor], Tensor]

MOVES: dict[str, Code] = {
    "identity": lambda a, b: a,
    "view": lambda a, b: a.reshape(4, 12)[1:3],
    "select": lambda a, b: a[1, 2:5],
    "chunk": lambda a, b: a.chunk(2, dim=1)[1].contiguous(),
    "chunk of chunk": lambda a, b: a.chunk(2, dim=1)[1].contiguous().chunk(2)[0].squeeze(0).clone(),
    "cat": lambda a, b: torch.cat([b, a, b], dim=1),
    "cat negative": lambda a, b: torch.cat([a, b], dim=-1),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    "merge and split": lambda a, b: torch.cat([torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]])], dim=1)[1].clone(),
    "rows swapped": lambda a, b: a.view(2, 3, 2, 4).transpose(1, 2).reshape(12, 4),
    "permuted copy": lambda a, b: a.transpose(0, 1).clone(),  # keeps the permuted strides
    "to cpu": lambda a, b: a.cpu(),
    "empty": lambda a, b: a[:, :0],
}
COMPUTED: dict[str, Code] = {
    "arithmetic": lambda a, b: a + 2 * b,
    "cast": lambda a, b: a.bfloat16(),
    "many short pieces": lambda a, b: a.repeat(8, 1, 1).transpose(1, 2).contiguous(),
    "broadcast": lambda a, b: a[:, :1].expand(2, 6, 4) * 1,
    "in place": lambda a, b: torch.cat([a, b]).mul_(3)[1:],
    "lookup": lambda a, b: torch.nn.functional.embedding(torch.tensor([1, 0]).to(a.device), a[0]),
    "zeros": lambda a, b: torch.cat([a, torch.zeros(2, 6, 4, device=a.device)], dim=2),
    "copied into": lambda a, b: torch.empty_like(a).copy_(b),
}


def values() -> dict[str, Tensor]:
    return {"a": torch.randn(2, 6, 4), "b": torch.randn(2, 6, 4)}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_placed(name: str) -> None:
    trace, real = Trace(), values()
    with trace:
        result = MOVES[name](
            trace.stand_in("a", (2, 6, 4), torch.float32), trace.stand_in("b", (2, 6, 4), torch.float32)
        )
    expected = MOVES[name](real["a"], real["b"])
    segments = trace.pieces(result)
    assert segments is not None
    parts = [real[part.source].reshape(-1)[part.there] for part in segments]
    assert torch.equal(torch.cat([torch.empty(0), *parts]), expected.reshape(-1))
    assert [part.start for part in segments] == [sum(p.numel for p in segments[:i]) for i in range(len(segments))]


@pytest.mark.parametrize("name", COMPUTED)
def test_the_rest_is_played(name: str) -> None:
    trace, real = Trace(), values()
    with trace:
        result = COMPUTED[name](
            trace.stand_in("a", (2, 6, 4), torch.float32), trace.stand_in("b", (2, 6, 4), torch.float32)
        )
    assert trace.pieces(result) is None
    expected = COMPUTED[name](real["a"], real["b"])
    (replay,) = trace.conversions({"out": result})
    used = {name: real[name] for name in replay.sources}
    assert torch.equal(replay.convert(used)["out"], expected)


def test_replays_are_grouped_by_source() -> None:
    """Results that share a source are worked out together, others apart, each from its own sources alone."""
    trace, real = Trace(), values()
    with trace:
        a, b = (trace.stand_in(name, (2, 6, 4), torch.float32) for name in real)
        fused = a.transpose(1, 2) * 2
        results = {"first": fused[0] + 1, "second": fused[1] + 1, "other": b + 1}
    groups = {replay.targets: replay for replay in trace.conversions(results)}
    assert {frozenset(targets): replay.sources for targets, replay in groups.items()} == {
        frozenset({"first", "second"}): ("a",),
        frozenset({"other"}): ("b",),
    }
    played = {}
    for replay in groups.values():
        played.update(replay.convert({name: real[name] for name in replay.sources}))
    assert torch.equal(played["second"], real["a"].transpose(1, 2)[1] * 2 + 1)
    assert torch.equal(played["other"], real["b"] + 1)


def test_sources_of_another_type_are_cast_first() -> None:
    trace = Trace()
    with trace:
        result = trace.stand_in("a", (2, 6, 4), torch.bfloat16) * 3
    value = torch.randn(2, 6, 4)
    (replay,) = trace.conversions({"out": result})
    assert torch.equal(replay.convert({"a": value})["out"], value.bfloat16() * 3)
