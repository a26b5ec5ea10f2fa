"""Stage 3 and its released parameters: unseen uses, files, and how much is gathered and reduced for unusual forwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool, on_ranks
from tests.models import VOCAB, WIDTH, Body, LanguageModel, ids, inputs, sgd, token_loss

pytestmark = pytest.mark.gloo


# A use of a weight that autograd does not see -------------------------------------------------------------------------


class Hidden(torch.autograd.Function):
    """Keeps a weight without `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunctionSubclass():  # as an operator written in C++ would read it
            return grad @ ctx.weight, None


KEPT: list[Tensor] = []


class Secretive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = Hidden.apply(x * self.scale, self.inner.weight)
        KEPT.append(made)
        return made + x


@on_ranks(timeout_s=60)
def test_an_unseen_use_of_a_unit_raises_and_training_continues(rank: int, world: int) -> None:
    """Step 6 takes another path back, which reads the memory of a released weight: an error. The next steps are right."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Secretive() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    for step in range(9):
        KEPT.clear()
        out = model(inputs(rank, step, 2, WIDTH))
        if step == 6:
            with pytest.raises(RuntimeError, match="data is not allocated"):
                KEPT[1].mean().backward()
        else:
            out.mean().backward()
        if step != 6:
            optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert rank != 0 or all(bool(value.isfinite().all()) for value in state.values())


# Files ----------------------------------------------------------------------------------------------------------------


@on_ranks(timeout_s=60)
def test_released_parameters_are_not_saved(rank: int, world: int) -> None:
    model = LanguageModel()
    zero.shard(model, sgd(model), zero.ZeroConfig(stage=3))
    weight = model.heads[0].weight
    for refused in (
        lambda: torch.save(weight, io.BytesIO()),
        lambda: torch.save(dict(model.named_parameters()), io.BytesIO()),
    ):
        with pytest.raises(zero.StateError, match="was pickled, and its values are sharded"):
            refused()
    assert torch.equal(copy.deepcopy(weight), zero.full_parameter(weight)), "a copy gathers the values on every rank"
    with zero.GatheredParameters(weight):
        assert bool(copy.deepcopy(weight).isfinite().all())
        torch.save(weight, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


# How much is gathered and reduced -------------------------------------------------------------------------------------


def measured(rank: int, world: int, build: Callable[[], nn.Module], stage: int, forwards: int) -> tuple[int, int, int]:
    """Return the reduces of one backward through `forwards` forwards, and the peak of gathered bytes: found, predicted."""
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    for step in range(4):
        if step == 2:
            engine.record()  # the engine has learned the order of its units
        losses = [token_loss(model(batch), batch) for batch in (ids(rank, step + 10 * n) for n in range(forwards))]
        before = engine.traffic["reduce"].calls
        sum(losses).backward()
        reduces = engine.traffic["reduce"].calls - before
        optimizer.step()
        optimizer.zero_grad()
    rows = {(row.tier, row.kind): row for row in engine.report().tiers}
    row = rows.get(("device", "gathered"))
    return reduces, *((row.measured_peak or 0, row.predicted_peak) if row else (0, 0))


def test_a_unit_is_reduced_once_per_backward(two: RankPool) -> None:
    counts = {two.run(measured, LanguageModel, 2, forwards)[0][0] for forwards in (1, 2, 3)}
    assert len(counts) == 1
    assert counts != {0}


def frozen_embedding(tied: bool) -> nn.Module:
    model = LanguageModel(tied=tied)
    model.body.embed.requires_grad_(False)
    model.heads.requires_grad_(False)
    return model


def frozen_tied() -> nn.Module:
    return frozen_embedding(tied=True)


def frozen_apart() -> nn.Module:
    return frozen_embedding(tied=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_tied_embedding_does_not_end_a_backward(two: RankPool, stage: int) -> None:
    """The embedding makes no graph. The head has its weight, and backward leaves the head first."""
    expected = two.run(measured, frozen_apart, stage, 1)[0][0]
    for reduces, found, predicted in two.run(measured, frozen_tied, stage, 1):
        assert reduces == expected > 0
        assert found <= predicted


class Describes(nn.Module):
    """Reads the embedding's weight for its type and shape alone, as Hugging Face models do."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.body, self.reads = Body(), reads
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        is_wide = not self.reads or self.body.embed.weight.size(0) == VOCAB
        hidden = self.body(tokens)
        hidden = hidden.to(self.body.embed.weight.dtype if self.reads else torch.float32)
        return F.linear(hidden, self.head.weight) if is_wide else self.head(hidden)


def describes() -> nn.Module:
    return Describes(reads=True)


def describes_nothing() -> nn.Module:
    return Describes(reads=False)


def test_a_read_of_a_type_gathers_nothing(two: RankPool) -> None:
    assert two.run(measured, describes, 3, 1) == two.run(measured, describes_nothing, 3, 1)


# Released parameters are truthful -------------------------------------------------------------------------------------


@on_ranks()
def test_released_parameters_are_truthful(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = LanguageModel(tied=True)
    optimizer = sgd(model)
    params = dict(model.named_parameters())
    shapes = {name: (p.shape, p.numel(), p.dtype, p.device) for name, p in params.items()}
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))

    def train(step: int) -> None:
        batch = ids(rank, step)
        token_loss(model(batch), batch).backward()

    def are_released() -> bool:
        with torch._C.DisableTorchFunctionSubclass():  # else asking for the storage gathers the values
            return all(p.untyped_storage().nbytes() == 0 for p in model.parameters())

    for step in range(2):
        train(step)
        optimizer.step()
        optimizer.zero_grad()
        assert {n: (p.shape, p.numel(), p.dtype, p.device) for n, p in model.named_parameters()} == shapes
        assert all(params[name] is p for name, p in model.named_parameters())
        assert are_released()
    assert model.heads[0].weight is model.body.embed.weight
    # Values are gathered when user code reads them, and what it writes counts.
    block = model.body.blocks[1]
    with torch.no_grad():
        block.up.weight.fill_(0.5)
        assert model.body.blocks[0].up.weight.isfinite().all()
        assert (block.up.weight == 0.5).all()
    train(2)
    assert are_released()
    with zero.GatheredParameters([block.up.weight]):
        assert (block.up.weight == 0.5).all()
    with pytest.raises(RuntimeError, match="Creating a Parameter from an instance of type ShardedParameter"):
        nn.Parameter(model.heads[0].weight)
    with model.no_sync():
        train(3)
        with pytest.raises(zero.StateError, match=r"inside model\.no_sync"):
            optimizer.step()
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
