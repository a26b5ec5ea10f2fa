"""Where an engine starts: ranks that differ, models and optimizers that are refused, values that follow rank 0."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.pool import on_ranks
from tests.models import LanguageModel, gpt2
from tests.programs.architectures import Stack

pytestmark = pytest.mark.gloo


@on_ranks()
def test_structure_mismatch_is_named(rank: int, world: int) -> None:
    """Each difference between ranks is named on every rank."""

    def attempt(match: str, build: Any, config: Any = None, optimizer: Any = None, **options: Any) -> None:
        model = build()
        opt = optimizer(model) if optimizer else None
        with pytest.raises(zero.RankMismatchError, match=match):
            zero.shard(model, opt, config or zero.ZeroConfig(stage=3), **options)

    attempt("shape", lambda: nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4, 4)))
    attempt("entries|parameter", lambda: LanguageModel(depth=2 + rank))
    for longer in range(2):
        found = rf"only rank {longer} has parameter '2\.weight'"
        attempt(found, lambda longer=longer: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + (rank == longer)))))
    attempt("stage", Stack, zero.ZeroConfig(stage=2 + rank))
    attempt("reduce_dtype", Stack, zero.ZeroConfig(reduce_dtype=("float32", "bfloat16")[rank]))
    attempt("mixed_precision", Stack, mixed_precision=("no", "bf16")[rank])
    attempt("dtype", lambda: Stack().to((torch.float32, torch.float64)[rank]))
    attempt("trainable", lambda: Stack().requires_grad_(rank == 0))
    attempt("tied", lambda: Stack(tied=rank == 0))
    attempt("optimizer none", Stack, optimizer=lambda m: torch.optim.SGD(list(m.parameters())[rank:], lr=0.1))


@on_ranks(3)
def test_values_follow_rank_0_with_a_warning(rank: int, world: int) -> None:
    torch.manual_seed(rank % 2)  # of three ranks, one in the middle differs
    model = Stack()
    with torch.no_grad():
        model.embed.weight.fill_(1.0)  # equal everywhere
    first = model.blocks[0].norm.weight  # equal too: ones
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.shard(model, None, zero.ZeroConfig(stage=1))
    (message,) = [str(w.message) for w in caught if "differ between ranks" in str(w.message)]
    assert "'blocks.0.up.weight' first" in message
    torch.manual_seed(0)
    expected = Stack()
    with torch.no_grad():
        expected.embed.weight.fill_(1.0)
    for mine, theirs in zip(model.parameters(), expected.parameters()):
        assert torch.equal(mine, theirs)
    del first
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.shard(Stack(), None, zero.ZeroConfig(stage=3))


@on_ranks()
def test_modules_of_two_models(rank: int, world: int) -> None:
    """XLM's activation is one module of all models: calls of a plain model's are no collectives."""
    act = nn.GELU()
    sharded, plain = (nn.Sequential(nn.Linear(4, 4), act) for _ in range(2))
    zero.shard(sharded, None, zero.ZeroConfig(stage=3))
    if rank == 0:
        plain.load_state_dict(plain.state_dict())
    state = sharded.state_dict()
    sharded.load_state_dict(state)


def test_bad_models_are_refused() -> None:
    with pytest.raises(zero.LayoutError, match="meta device"):
        zero.shard(nn.Linear(2, 2, device="meta"))
    with pytest.raises(zero.LayoutError, match="no parameters"):
        zero.shard(nn.ReLU())
    with pytest.raises(zero.LayoutError, match="is not one of the sharded model's"):
        zero.shard(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    with pytest.raises(zero.LayoutError, match="no shape yet"):
        zero.shard(nn.LazyLinear(3))


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks()
def test_detach_and_garbage(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = gpt2()
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = zero.shard(model, None, zero.ZeroConfig(stage=stage))
    assert zero.engine_of(model) is engine
    assert zero.engine_of(nn.Sequential(model)) is engine
    assert type(model).__name__ == "GPT2LMHeadModel"
    engine.detach()
    assert zero.engine_of(model) is None
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight
