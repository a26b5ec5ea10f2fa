"""Views of weights that outlive their unit at stage 3: they keep their values, and no program ends in a crash."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.kit.rows import each_value

pytestmark = pytest.mark.gloo
WIDTH, STEPS = 16, 7
"""More steps than those in which an engine looks at every saved tensor."""


@dataclass
class Output:
    weight: Tensor
    extra: Any = None


class Pair(NamedTuple):
    weight: Tensor
    other: Tensor


Give = Callable[[Tensor], Any]
GIVES: dict[str, tuple[Give, Callable[[Any], Tensor]]] = {
    "itself": (lambda w: w, lambda out: out),
    "view": (lambda w: w.view(-1), lambda out: out.view(WIDTH, WIDTH)),
    "detach": (lambda w: w.detach(), lambda out: out),
    "data": (lambda w: w.data, lambda out: out),
    "rows": (lambda w: w[0], lambda out: out.expand(WIDTH, WIDTH)),
    "transposed": (lambda w: w.T, lambda out: out.T),
    "expand": (lambda w: w.expand(2, WIDTH, WIDTH), lambda out: out[1]),
    "tuple": (lambda w: (w.t(), 3), lambda out: out[0].t()),
    "dict": (lambda w: {"a": {"b": [w[:]]}}, lambda out: out["a"]["b"][0]),
    "dataclass": (lambda w: Output(w.detach()), lambda out: out.weight),
    "named tuple": (lambda w: Pair(w[:], w.detach()), lambda out: out.weight + out.other),
    "object": (lambda w: Output(w.data, [w[1]]), lambda out: out.weight + out.extra[0]),
    "lambda": (lambda w: functools.partial(torch.Tensor.clone, w.detach()), lambda out: out()),
    "numpy": (lambda w: w.detach().numpy(), torch.from_numpy),
}


class Weight(nn.Module):
    """Its forward gives its parameter away."""

    def __init__(self, give: Give) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.give = give

    def forward(self) -> Any:
        return self.give(self.weight)


class Giver(nn.Module):
    """Blocks, each with a module whose output is a view of its weight, used after other units were used."""

    def __init__(self, give: Give, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.weights = nn.ModuleList([nn.Sequential(Weight(give)) for _ in range(3)])
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.give, self.take = give, take

    def forward(self, x: Tensor) -> Tensor:
        given = [weight[0]() for weight in self.weights]
        for block, each in zip(self.blocks, given):
            x = block(x) + torch.tanh(x @ self.take(each))
        return x


class Stash(nn.Module):
    """A block that keeps a view of its weight, and reads it after the unit was used."""

    def __init__(self, keep: Callable[[Stash], Any], at: Callable[[int], bool] = lambda step: True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.keep, self.at = keep, at
        self.seen: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.at(self.calls):
            self.seen = self.keep(self)
        self.calls += 1
        seen = self.seen[0] if isinstance(self.seen, tuple) else self.seen
        product = x @ seen if isinstance(self.seen, tuple) else 0
        return torch.tanh(self.linear(x)) + product


class Stashes(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stash(*args) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        # In the forward, once all units are released.
        kept = [block.seen[0] if isinstance(block.seen, tuple) else block.seen for block in self.blocks]
        total = sum(each.detach().square().sum() for each in kept if each is not None)
        return x * (1 + 1e-3 * total)


KEEPS: dict[str, Callable[[Stash], Any]] = {
    "detach": lambda block: block.linear.weight.detach(),
    "data": lambda block: block.linear.weight.data,
    "row": lambda block: block.linear.weight[0],
    "transposed": lambda block: block.linear.weight.T,
    "used": lambda block: (block.linear.weight.T,),
    "used detached": lambda block: (block.linear.weight.detach().T,),
    "bias": lambda block: block.linear.bias.detach()[None],
}
WHEN: dict[str, Callable[[int], bool]] = {
    "always": lambda step: True,
    "once": lambda step: step == 0,
    "every other step": lambda step: step % 2 == 1,
    "late": lambda step: step == 5,
}


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def copied(value: Any) -> Any:
    """What a plain model keeps in place of a view: later steps do not change it, as at stage 3."""
    if isinstance(value, tuple):
        return tuple(each.clone() for each in value)
    return value.clone()


def same_training(
    rank: int,
    world: int,
    make: Callable[[bool], nn.Module],
    config: dict[str, Any],
    mixed: str = "no",
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    steps: int = STEPS,
) -> nn.Module:
    """Every rank's loss, and in the end all weights, are those of a whole model with the gradients of all ranks."""
    torch.manual_seed(0)
    model = make(False)
    torch.manual_seed(0)
    plains = [make(True) for _ in range(world)]  # one a rank: they keep views of their own
    options = {"lr": 0.05}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(**config), mixed_precision=mixed)
    del engine
    for plain in plains[1:]:
        plain.load_state_dict(plains[0].state_dict())
    tolerance = 2e-5 if mixed == "no" else 3e-2
    for step in range(steps):
        losses = []
        for peer, plain in enumerate(plains):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "bf16"):
                loss = forward(plain, inputs(peer, step)).float().square().mean()
            losses.append(loss.detach())
            loss.backward()
        with torch.no_grad():
            for params in zip(*(plain.parameters() for plain in plains)):
                grads = [param.grad for param in params if param.grad is not None]
                for param in params:
                    if grads:
                        param -= options["lr"] * sum(grads) / world
            for plain in plains:
                plain.zero_grad()
        loss = forward(model, inputs(rank, step)).float().square().mean()
        torch.testing.assert_close(loss.detach(), losses[rank], rtol=tolerance, atol=tolerance)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    if rank == 0:
        for name, value in plains[0].state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    return model


def gives(rank: int, world: int, case: str, config: dict[str, Any], mixed: str = "no") -> None:
    same_training(rank, world, lambda _: Giver(*GIVES[case]), config, mixed)


def keeps(rank: int, world: int, case: str, when: str, config: dict[str, Any], mixed: str = "no") -> None:
    keep = KEEPS[case]

    def make(is_plain: bool) -> nn.Module:
        return Stashes((lambda block: copied(keep(block))) if is_plain else keep, WHEN[when])

    same_training(rank, world, make, config, mixed)


@pytest.mark.parametrize("case", GIVES)
def test_a_forward_gives_a_view_away(two: RankPool, case: str) -> None:
    two.run(gives, case, {"stage": 3})


@pytest.mark.parametrize(("case", "when"), each_value(KEEPS, WHEN))
def test_a_module_keeps_a_view(two: RankPool, case: str, when: str) -> None:
    two.run(keeps, case, when, {"stage": 3})


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"stage": 3}, "bf16"),
    "host": ({"stage": 3, "offload_params": "cpu", "offload_optimizer": "cpu"}, "no"),
    "disk": ({"stage": 3, "offload_params": "disk", "offload_optimizer": "disk"}, "bf16"),
    "kept gathered": ({"stage": 3, "device_memory": "1GiB"}, "no"),
    "codes": ({"stage": 3, "wire": "int8"}, "bf16"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_views_in_other_types_and_tiers(two: RankPool, other: str) -> None:
    config, mixed = OTHERS[other]
    for case in ("transposed", "numpy" if mixed == "no" else "dataclass"):
        if other != "codes":
            two.run(gives, case, config, mixed)
    for case in ("detach", "used"):
        two.run(outlives, case, config, mixed)


def outlives(rank: int, world: int, case: str, config: dict[str, Any], mixed: str) -> None:
    """Views keep what they showed when they were taken, over backwards, steps and further forwards."""
    torch.manual_seed(0)
    model = Stashes(KEEPS[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(**config), mixed_precision=mixed)
    kept: list[tuple[Tensor, Tensor]] = []

    def look(block: Any, *_: Any) -> None:
        view = block.seen[0] if isinstance(block.seen, tuple) else block.seen
        kept.append((view, view.detach().clone()))

    for block in model.blocks:
        block.register_forward_hook(look)
    for step in range(STEPS):
        model(inputs(rank, step)).square().mean().backward()
        for view, values in kept:
            assert torch.equal(view.detach(), values)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.eval()(inputs(rank, step))
                model.train()
            with torch.inference_mode():
                model(inputs(rank, step))
        for view, values in kept:
            assert torch.equal(view.detach(), values)
    assert len({float(values.sum()) for _, values in kept}) > STEPS, "weights have changed meanwhile"


def checkpointed(model: Any, x: Tensor, *, use_reentrant: bool) -> Tensor:
    x = x.clone().requires_grad_()
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    total = sum(
        (each.seen[0] if isinstance(each.seen, tuple) else each.seen).detach().square().sum() for each in model.blocks
    )
    return x * (1 + 1e-3 * total)


def checkpoints(rank: int, world: int, case: str, use_reentrant: bool) -> None:
    keep = KEEPS[case]

    def make(is_plain: bool) -> nn.Module:
        return Stashes((lambda block: copied(keep(block))) if is_plain else keep)

    same_training(rank, world, make, {"stage": 3}, forward=lambda m, x: checkpointed(m, x, use_reentrant=use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("case", ["detach", "data", "used"])
def test_views_kept_in_checkpointed_blocks(two: RankPool, case: str, use_reentrant: bool) -> None:
    two.run(checkpoints, case, use_reentrant)


def in_hooks(rank: int, world: int) -> None:
    """Views taken while a backward runs, and by a custom Function's backward, read after it."""
    taken: list[tuple[Tensor, Tensor]] = []

    def take(view: Tensor) -> None:
        taken.append((view, view.detach().clone()))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight.t())
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, transposed = ctx.saved_tensors
            take(transposed[1:])
            return grad @ transposed.t(), grad.t() @ x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = Product.apply(x, self.linear.weight)
            x.register_hook(lambda grad: take(self.linear.weight.detach()[0]))
            return torch.tanh(x + self.linear.bias)

    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    for step in range(STEPS):
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(inputs(rank, step))
        assert len(taken) == 6 * (step + 1)
        for view, values in taken:
            assert torch.equal(view, values)


def test_views_taken_in_a_backward(two: RankPool) -> None:
    two.run(in_hooks)


def ordinary(rank: int, world: int) -> None:
    """Training whose user code keeps no view gathers into the same memory for ever, with and without hooks."""
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    spans = [span for unit in engine.units for span in unit.spans]
    before = [span.full.untyped_storage()._cdata for span in spans]
    for step in range(STEPS):
        for micro in range(5):
            x = inputs(rank, 10 * step + micro).requires_grad_()
            model(x).square().mean().backward()
            checkpoint(model[0], x, use_reentrant=False).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs(rank, step))
    assert [span.full.untyped_storage()._cdata for span in spans] == before


def test_without_views_memory_is_reused(two: RankPool) -> None:
    two.run(ordinary)


def functional(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Giver(*GIVES["transposed"])
    expected = model(inputs(0, 0)).detach()
    zero.shard(model, None, zero.ZeroConfig(stage=3))
    with torch.no_grad():
        for _ in range(2):
            found = torch.func.functional_call(model, {}, (inputs(0, 0),))
            torch.testing.assert_close(found, expected)
            batched = torch.vmap(model)(inputs(0, 0)[None])
            torch.testing.assert_close(batched[0], expected)


def test_views_under_functional_calls(two: RankPool) -> None:
    two.run(functional)


def between_passes(rank: int, world: int) -> None:
    """A view taken between passes is refused at the next forward, or keeps its values; it never crashes."""
    model = Stashes(KEEPS["detach"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    views = [param.detach() for param in model.parameters()]
    values = [view.clone() for view in views]
    with pytest.raises(zero.StateError, match="is still held that was taken between passes"):
        model(inputs(rank, 0))
    assert all(torch.equal(*pair) for pair in zip(views, values))
    del views
    model(inputs(rank, 0)).sum().backward()
    optimizer.step()


def test_views_taken_between_passes(two: RankPool) -> None:
    two.run(between_passes)


def alone(rank: int, world: int) -> None:
    """On one rank weights on disk are gathered and released as at stage 3."""
    outlives(rank, world, "used", {"offload_params": "disk", "offload_optimizer": "disk"}, "no")


def test_views_on_one_rank(pools: dict[int, RankPool]) -> None:
    pools[1].run(alone)
