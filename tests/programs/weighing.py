"""Ranks with different numbers of samples, samples and ranks of different weight: the gradient is that of one batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_zero as zero
from tests.models import generator, sgd
from tests.oracle import Run, program

ROWS = (((5, 0, 2), (1, 3, 0)), ((1, 4, 0), (0, 1, 0)))
"""By step, micro-batch and rank; a rank may have none in a micro-batch, or in a whole step."""
FACTORS = (1.0, 0.25, 3.0)
"""Weights of the ranks."""


def classifier() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))


def samples(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes, and a weight for each sample."""
    count, seeded = ROWS[step][micro][rank], generator(step, micro, rank)
    x, y = torch.randint(0, 11, (count, 4), generator=seeded), torch.randint(0, 5, (count,), generator=seeded)
    return x, y, torch.rand(count, generator=seeded) + 0.1


def weighted_mean(model: Any, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """NaN without samples, as torch's own means."""
    return (cross_entropy(model(x).float(), y, reduction="none") * weights).sum() / weights.sum()


def _together(run: Run, step: int, micros: int) -> None:
    """All ranks' samples in one batch on every rank."""
    parts = [
        (x, y, weights * FACTORS[rank])
        for rank in range(run.world)
        for x, y, weights in (samples(step, micro, rank) for micro in range(micros))
    ]
    weighted_mean(run.model, *(torch.cat(column) for column in zip(*parts))).backward()


def _weighed(run: Run, step: int, micros: int) -> None:
    engine, factor = run.engine_of(run.model), FACTORS[run.rank]
    batches = [samples(step, micro, run.rank) for micro in range(micros)]
    total = None
    if micros > 1:
        total = engine.total_weight(sum(float(weights.sum()) for _, _, weights in batches) * factor)
    for micro, (x, y, weights) in enumerate(batches):
        with engine.no_sync() if micro + 1 < micros else contextlib.nullcontext():
            loss = weighted_mean(run.model, x, y, weights)
            engine.weigh(loss, weights.sum() * factor, total).backward()


def _train(run: Run, micros: int, **config: Any) -> None:
    model = run.build(classifier)
    model = run.shard(model, sgd(model, lr=0.5), **config)
    for step in range(len(ROWS)):
        (_together if run.is_plain else _weighed)(run, step, micros)
        if not config:
            run.clip_grad_norm_(model, 1e3)
        run.update()


@program(reference="average", more={"ranks": (1, 2, 3)})
def weighed(run: Run) -> None:
    _train(run, 1)


@program(reference="average", more={"ranks": (1, 2, 3)})
def weighed_micro_batches(run: Run) -> None:
    _train(run, 2)


@program(reference="average", only={"ranks": (2, 3), "stage": (2, 3), "tier": ("cpu", "disk")})
def weighed_and_updated_in_backward(run: Run) -> None:
    _train(run, 2, step_in_backward=True)


@program(reference="average")
def refused_weights(run: Run) -> None:
    """The same error on every rank, and nothing is left behind. What is weighed costs one message."""
    run.mlp()
    engine, loss, nan = run.engine_of(run.model), run.loss(0), float("nan")
    cases: list[tuple[str, Tensor, Any, float | None]] = [
        ("rank 1: expected a weight that is a finite number", loss, (1, -2)[run.rank], None),
        ("rank 0: expected a weight that is a finite number", loss, (nan, 1)[run.rank], None),
        ("found 'many'", loss, (1, "many")[run.rank], None),
        ("rank 1: expected a loss of one floating-point number", loss.repeat(1 + run.rank).squeeze(), 1, None),
        ("the weights of all ranks are 0", loss, 0, None),
        ("from 0 to the total", loss, 3, 2.0),
        ("expected a loss of one floating-point number", loss.repeat(2), 1, 2.0),
    ]
    for words, *arguments in cases:
        run.refuses(zero.ConfigError, words, lambda arguments=arguments: engine.weigh(*arguments))
    run.refuses(zero.ConfigError, "all ranks are 0", lambda: engine.total_weight(0))
    if engine is not None:
        before = engine.traffic["scalar"].calls
        loss = engine.weigh(loss, 3)
        assert engine.traffic["scalar"].calls == before + 1
    loss.backward()
    run.update()
