"""Evaluation in another type (`bf16_full_eval`) together with `zero.unsharded` and `zero.GatheredParameters`: masters keep
every digit, edits count."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero

pytestmark = pytest.mark.gloo
BF16 = torch.bfloat16
MASTERS = [
    (stage, mixed, {}) for stage in (0, 1, 2, 3) for mixed in ("no", "bf16")
] + [
    (2, "bf16", {"offload_optimizer": "cpu"}),
    (3, "bf16", {"offload_optimizer": "disk", "offload_params": "cpu"}),
    (3, "no", {"offload_optimizer": "cpu", "offload_params": "disk"}),
]  # fmt: skip


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def start(stage: int, mixed: str, settings: dict[str, Any]) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, **settings), mixed_precision=mixed)
    for step in range(2):
        train(model, optimizer, step)
    return model, optimizer, engine


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {name: zero.full_parameter(param).clone() for name, param in model.named_parameters()}


def same(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in masters(model).items())


def evaluate(model: nn.Module) -> Tensor:
    """As after `model.to(bfloat16)`."""
    assert {param.dtype for param in model.parameters()} == {BF16}
    with torch.no_grad():
        output = model(torch.ones(2, 6, dtype=BF16))
    assert output.dtype == BF16
    return output


def nestings(rank: int, world: int, stage: int, mixed: str, settings: dict[str, Any]) -> None:
    model, optimizer, engine = start(stage, mixed, settings)
    before = masters(model)
    plain = mlp()
    plain.load_state_dict(before)
    with torch.no_grad(), torch.autocast("cpu", BF16, enabled=mixed == "bf16"):
        expected = plain.to(BF16)(torch.ones(2, 6, dtype=BF16))
    for in_compute_dtype in (False, True):
        with zero.unsharded(model, in_compute_dtype=in_compute_dtype):
            shown = {name: param.detach().clone() for name, param in model.named_parameters()}
            with engine.shown_in(BF16):
                assert torch.equal(evaluate(model), expected)
                state = model.state_dict()
                assert rank != 0 or all(torch.equal(value, before[name]) for name, value in state.items())
                with engine.shown_in(BF16):
                    evaluate(model)
                with engine.shown_in(torch.float32):
                    assert {param.dtype for param in model.parameters()} == {torch.float32}
                assert torch.equal(evaluate(model), expected)
                assert same(model, before)
            for name, param in model.named_parameters():
                assert param.dtype == shown[name].dtype
                assert torch.equal(param, shown[name]), name
            assert same(model, before)
        assert same(model, before), in_compute_dtype
        with engine.shown_in(BF16):
            with zero.unsharded(model, in_compute_dtype=in_compute_dtype):
                assert torch.equal(evaluate(model), expected)
                state = model.state_dict()
                assert rank != 0 or all(torch.equal(value, before[name]) for name, value in state.items())
            assert torch.equal(evaluate(model), expected)
        assert same(model, before), in_compute_dtype
    with engine.shown_in(BF16):
        with zero.GatheredParameters(model):
            for name, param in model.named_parameters():
                assert torch.equal(param, before[name]), name
        assert torch.equal(evaluate(model), expected)
    assert same(model, before)
    with zero.GatheredParameters(model[0].weight):
        with engine.shown_in(BF16):
            evaluate(model)
        assert torch.equal(model[0].weight, before["0.weight"])
    assert same(model, before)
    # Training goes on as if nothing had been evaluated.
    other, theirs, _ = start(stage, mixed, settings)
    for step in range(2, 4):
        train(model, optimizer, step)
        train(other, theirs, step)
    assert same(model, masters(other))


@pytest.mark.parametrize(("stage", "mixed", "settings"), MASTERS, ids=str)
def test_masters_keep_every_digit(two, tmp_path, stage, mixed, settings):
    two.run(nestings, stage, mixed, {**settings, "offload_dir": str(tmp_path)})


def edits(rank: int, world: int, stage: int, mixed: str, settings: dict[str, Any]) -> None:
    model, optimizer, engine = start(stage, mixed, settings)
    weight = model[0].weight
    expected = masters(model)

    @contextlib.contextmanager
    def gathered() -> Any:
        with zero.GatheredParameters(weight, modifier_rank=1):
            yield

    contexts = {
        "evaluation": (lambda: engine.shown_in(BF16),),
        "unsharded, evaluation": (lambda: zero.unsharded(model), lambda: engine.shown_in(BF16)),
        "evaluation, unsharded": (lambda: engine.shown_in(BF16), lambda: zero.unsharded(model)),
        "gathered, evaluation": (gathered, lambda: engine.shown_in(BF16)),
        "evaluation, gathered": (lambda: engine.shown_in(BF16), gathered),
        "unsharded, evaluation, gathered": (lambda: zero.unsharded(model), lambda: engine.shown_in(BF16), gathered),
    }
    for number, (name, entered) in enumerate(contexts.items()):
        for how in ("in place", "replaced"):
            value = float(number + 2 + 100 * (how == "replaced"))
            with contextlib.ExitStack() as stack:
                for enter in entered:
                    stack.enter_context(enter())
                    if enter is not gathered:
                        with torch.no_grad():
                            model(torch.ones(2, 6, dtype=next(model.parameters()).dtype))
                if gathered not in entered or rank == 1:
                    with torch.no_grad():
                        if how == "in place":
                            weight[number, 1:3] = value
                        else:
                            new = weight.detach().clone()
                            new[number, 1:3] = value
                            weight.data = new
                if gathered not in entered:
                    expected["0.weight"][number, 1:3] = value
                    assert same(model, expected), (name, how)
            expected["0.weight"][number, 1:3] = value
            assert same(model, expected), (name, how)
            train(model, optimizer, number)
            expected = masters(model)


@pytest.mark.parametrize(("stage", "mixed", "settings"), MASTERS, ids=str)
def test_edits_in_evaluation_count(two, tmp_path, stage, mixed, settings):
    two.run(edits, stage, mixed, {**settings, "offload_dir": str(tmp_path)})


def fail_inside(entered: Any) -> None:
    with contextlib.ExitStack() as stack:
        for context in entered:
            stack.enter_context(context)
        raise ValueError("no batch")


def exceptions(rank: int, world: int, stage: int, mixed: str) -> None:
    model, optimizer, engine = start(stage, mixed, {})
    before = masters(model)
    dtypes = [param.dtype for param in model.parameters()]
    for entered in (
        (zero.unsharded(model), engine.shown_in(BF16)),
        (engine.shown_in(BF16), zero.unsharded(model)),
        (zero.GatheredParameters(model, modifier_rank=0), engine.shown_in(BF16)),
        (engine.shown_in(BF16), zero.GatheredParameters(model, modifier_rank=0)),
    ):
        with pytest.raises(ValueError, match="no batch"):
            fail_inside(entered)
        assert [param.dtype for param in model.parameters()] == dtypes
        assert same(model, before)
    train(model, optimizer, 2)
    other, theirs, _ = start(stage, mixed, {})
    train(other, theirs, 2)
    assert same(model, masters(other))


@pytest.mark.parametrize(("stage", "mixed"), [(0, "bf16"), (1, "no"), (2, "bf16"), (3, "bf16")])
def test_exceptions_in_evaluation(two, stage, mixed):
    two.run(exceptions, stage, mixed)
