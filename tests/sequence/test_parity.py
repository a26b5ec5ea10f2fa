"""Ranks that divide sequences compute what one process computes with the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.sequence.models import LENGTH, MODELS, batch, llama, tokens, whole

pytestmark = pytest.mark.gloo
SHIFTS = {name: name not in ("bert", "roberta") for name in MODELS}


def start(model: nn.Module, size: int, stage: int = 3, **settings: Any) -> zero.Engine:
    config = zero.ZeroConfig(stage=stage, sp_size=size, stall_s=20, **settings)
    return zero.shard(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), config)


def made(build: Any, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    return build(**changes)  # type: ignore[no-any-return]


def error(model: nn.Module, loss: Tensor, wanted: Tensor, gradients: dict[str, Tensor]) -> float:
    """The largest relative error of the loss and of each gradient. Gradients that are zero but for rounding are small
    against all."""
    scale = torch.stack([each.norm() for each in gradients.values()]).norm()
    worst = [((loss - wanted) / wanted).abs()]
    for name, param in model.named_parameters():
        if name in gradients:
            found = zero.full_gradient(param)
            assert found is not None, name
            worst.append((found - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-4 * scale))
    return float(torch.stack(worst).max())


def parity(rank: int, world: int, size: int, names: Sequence[str] = tuple(MODELS)) -> dict[str, float]:
    """Models at stages 1 and 3; what a checkpointed block recomputes in backward, too."""
    found = {}
    for number, name in enumerate(names):
        build = MODELS[name]
        reference = made(build)
        loss, gradients = whole(reference, [batch(group) for group in range(world // size)], SHIFTS[name])
        for stage in (1, 3):
            model: Any = made(build)
            if (number + stage) % 2:
                model.gradient_checkpointing_enable()
            engine = start(model, size, stage)
            out = model(**engine.local_sequence(batch(rank // size)))
            out.loss.backward()
            assert out.logits.shape[1] == -(-LENGTH // size)
            found[f"{name} stage {stage}"] = error(model, out.loss.detach(), loss, gradients)
            engine.detach()
    return found


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
def test_one_process_with_whole_sequences(pools: dict[int, RankPool], world: int, size: int) -> None:
    for found in pools[world].run(parity, size):
        assert {name: value for name, value in found.items() if value > 1e-6} == {}


def test_ranks_that_share_key_value_heads(pools: dict[int, RankPool]) -> None:
    """Two ranks have one of the two heads."""
    for found in pools[4].run(parity, 4, ["mixtral"]):
        assert max(found.values()) <= 1e-6


def accumulated(rank: int, world: int) -> list[float]:
    """Batches of other lengths and numbers of rows in one step, one without labels; with `sp_size` 2 and 1."""
    found = []
    for size in (2, 1):
        shapes = [(2, LENGTH), (1, 7), (3, 5)]
        steps = [[batch(group, step, *shape) for group in range(world // size)] for step, shape in enumerate(shapes)]
        for each in steps[2][: 1 if size == 2 else 2]:
            each["labels"][:] = -100
        everything = [each for row in steps for each in row]
        loss, gradients = whole(made(llama), everything, True)
        total = sum(tokens(each["labels"], True) for each in everything)
        model = made(llama)
        engine = start(model, size)
        seen = torch.zeros(())
        for number, row in enumerate(steps):
            given: dict[str, Any] = {**row[rank // size]}
            if number == 1:
                local = engine.local_sequence({**given, "num_items_in_batch": total})
            else:
                local = engine.local_sequence(given, num_items_in_batch=total)
            out = model(**local)
            if number < len(steps) - 1:
                with engine.no_sync():
                    out.loss.backward()
            else:
                out.loss.backward()
            seen += out.loss.detach()
        found.append(error(model, seen, loss, gradients))
        engine.detach()
    return found


def test_accumulation(two: RankPool) -> None:
    for found in two.run(accumulated):
        assert max(found) < 1e-6


def twice_differentiated(rank: int, world: int) -> float:
    """A penalty on the gradient of embeddings, of which each rank has that of its tokens."""
    given = batch(0)
    found = []
    for size in (1, world):
        model: Any = made(llama, attn_implementation="eager")  # other implementations have no second derivative
        embeddings = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
        arguments: dict[str, Any] = {"inputs_embeds": embeddings, "labels": given["labels"]}
        if size > 1:
            engine = start(model, size, 1)
            arguments = engine.local_sequence(arguments)
        loss = model(**arguments).loss
        (gradient,) = torch.autograd.grad(loss, embeddings, create_graph=True)
        # Each rank's gradient is that of its part of the loss, times the ranks over which gradients are averaged.
        (loss + (gradient / size).square().sum() * size * 100).backward()
        if size == 1:
            wanted, gradients = loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        else:
            found.append(error(model, loss.detach(), wanted, gradients))
            engine.detach()
    return max(found)


def test_second_derivatives(two: RankPool) -> None:
    assert max(two.run(twice_differentiated)) < 1e-5


def copied(rank: int, world: int) -> list[float]:
    """Copies of a model, and models of its configuration, which are used once the engine has gone."""
    model: Any = made(llama)
    engine = start(model, world)
    config, copies = copy.deepcopy(model.config), [copy.deepcopy(model)]
    engine.detach()
    copies.append(made(lambda: type(model)(config)))
    return [float(each(**batch(0)).loss) for each in (model, *copies)]


def test_copies_outlive_the_engine(two: RankPool) -> None:
    for losses in two.run(copied):
        assert losses == [losses[0]] * 3


def exchanged(rank: int, world: int) -> tuple[int, int]:
    model = made(llama)
    engine = start(model, 2)
    model(**engine.local_sequence(batch(0))).loss.backward()  # compares divided and whole once
    engine.traffic.reset()
    model(**engine.local_sequence(batch(0, 1))).loss.backward()
    count = engine.traffic.kinds["sequence"]
    found = count.calls, count.bytes
    engine.detach()
    return found


def test_bytes_of_the_exchange(two: RankPool) -> None:
    """Queries and outputs of 4 heads, keys and values of 2, half of each, there and back in forward and in backward."""
    layers, local, width = 2, 2 * LENGTH // 2, 8
    assert two.run(exchanged) == [(2 * 2 * layers, 2 * layers * local * width * 4 * (4 + 4 + 2 + 2) // 2)] * 2
