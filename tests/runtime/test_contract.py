"""A program that is right under plain data parallel gives its numbers at every stage, however it looks at its model.

A program is a model and a function that runs one rank's forwards and backwards of one step on it. The reference plays all
ranks in one process: gradients are averaged over the ranks, a parameter that no rank gave one has none.
"""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_zero as zero
from hf_zero.runtime.values.unit import State

pytestmark = pytest.mark.gloo

WIDTH = 16
VOCAB = 23


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        self.seen = hidden
        return x + self.down(hidden)


class Body(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Model(nn.Module):
    """A language model whose parts can be used in other ways than its forward does."""

    def __init__(self, *, tied: bool = False, root: bool = False, fused: bool = False, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB, bias=not tied) for _ in range(heads))
        if tied:
            self.heads[0].weight = self.body.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0)) if root else None
        self.fused = fused

    def forward(self, ids: Tensor, head: int = 0) -> Tensor:
        hidden = self.body(ids)
        one = self.heads[head]
        logits = F.linear(hidden, one.weight, one.bias) if self.fused else one(hidden)
        return logits if self.scale is None else logits * self.scale


def ids_of(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCAB, (2, 5), generator=generator)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten())


Run = Callable[[Any, int, int], Tensor | list[Tensor]]


@dataclass(frozen=True)
class Program:
    build: Callable[[], nn.Module]
    run: Run
    """(model, rank, step) -> the loss, or losses whose backward it has called."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 4
    dtype: str = "no"
    tolerance: float = 2e-5

    def losses(self, model: Any, rank: int, step: int) -> list[Tensor]:
        found = self.run(model, rank, step)
        if isinstance(found, list):
            return found
        found.backward()
        return [found]


def plain(model: Any, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    return token_loss(model(ids), ids)


def two_forwards(model: Any, rank: int, step: int) -> Tensor:
    one, two = ids_of(rank, step), ids_of(rank, step, 1)
    return token_loss(model(one), one) + token_loss(model(two), two).square()


def forgotten_forward(model: Any, rank: int, step: int) -> Tensor:
    model(ids_of(rank, step, 1))
    if step == 1:
        kept = model(ids_of(rank, step, 2))  # its graph is alive during the backward
        del kept
    return plain(model, rank, step)


def two_backwards(model: Any, rank: int, step: int) -> list[Tensor]:
    one, two = ids_of(rank, step), ids_of(rank, step, 1)
    first, second = token_loss(model(one), one), token_loss(model(two), two)
    first.backward()
    second.backward()
    return [first, second]


def retained(model: Any, rank: int, step: int) -> list[Tensor]:
    ids = ids_of(rank, step)
    loss = token_loss(model(ids), ids)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward(retain_graph=True)
    loss.square().backward()
    return [loss]


def penalty(model: Any, rank: int, step: int) -> Tensor:
    """A gradient penalty with respect to what goes into the blocks."""
    ids = ids_of(rank, step)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(step * 7 + rank)).requires_grad_()
    hidden = x
    for block in model.body.blocks:
        hidden = block(hidden)
    loss = token_loss(model.heads[0](hidden), ids)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 0.1 * grad.square().sum()


def root_penalty(model: Any, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    loss = token_loss(model(ids), ids)
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    return loss + 0.01 * sum(g.square().sum() for g in grads if g is not None)


def grad_function(model: Any, rank: int, step: int) -> list[Tensor]:
    """Gradients by `autograd.grad`, of parameters and of an input; then a backward."""
    ids = ids_of(rank, step)
    loss = token_loss(model(ids), ids)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    total = sum(g.float().square().sum() for g in grads if g is not None)
    loss.backward()
    return [loss, total]


def recorded(model: Any, rank: int, step: int) -> Tensor:
    """The loss is on tensors recorded inside blocks; nobody uses the output."""
    model(ids_of(rank, step))
    return model.body.blocks[1].seen.square().mean()


def recorded_at_the_start(model: Any, rank: int, step: int) -> Tensor:
    """Behind a frozen embedding: the first block has no input that needs a gradient. Other steps leave it out."""
    model.body.embed.requires_grad_(False)
    ids = ids_of(rank, step)
    if step % 2:
        model(ids)
        return model.body.blocks[0].seen.square().mean()
    return token_loss(model.heads[0](model.body.norm(model.body.blocks[1](model.body.embed(ids)))), ids)


def frozen_front() -> nn.Module:
    model = Model()
    model.body.embed.requires_grad_(False)
    return model


def recorded_too(model: Any, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    return token_loss(model(ids), ids) + sum(block.seen.square().mean() for block in model.body.blocks)


def hidden_only(model: Any, rank: int, step: int) -> Tensor:
    """Ranks run the same forward and take the loss from different depths."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda m, a, out: outputs.append(out)) for block in model.body.blocks]
    ids = ids_of(rank, step)
    logits = model(ids)
    for hook in hooks:
        hook.remove()
    return token_loss(logits, ids) if (rank + step) % 2 else outputs[(rank + step) % 3].square().mean()


def alternating(model: Any, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    return token_loss(model(ids, head=step % 2), ids)


def other_heads(model: Any, rank: int, step: int) -> Tensor:
    ids = ids_of(rank, step)
    return token_loss(model(ids, head=(rank + step) % 2), ids)


def losses_on_other_heads(model: Any, rank: int, step: int) -> Tensor:
    """All heads run on every rank. The one that a rank's loss leaves out shares its input with the one that it takes."""
    ids = ids_of(rank, step)
    hidden = torch.relu(model.body(ids))
    return token_loss([head(hidden) for head in model.heads][(rank + step) % 2], ids)


class Ways(nn.Module):
    """Every rank runs the same forward; which ways back there are depends on `who`.

    Args:
        frozen: the first part of it has no gradient anywhere.
    """

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks, self.left, self.right = (nn.ModuleList(Block() for _ in range(3)) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.aux = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(3))
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def forward(self, ids: Tensor, way: str, who: int) -> Tensor:
        return getattr(self, way)(self.embed(ids), who)

    def towers(self, x: Tensor, who: int) -> Tensor:
        """A loss on the first tower alone, or on the one that reads it."""
        y = x
        for block in self.blocks:
            x = block(x)
        for block in self.left:
            y = block(y + 0.1 * x)
        return self.head(x if who % 2 else y)

    def branches(self, x: Tensor, who: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        one = two = x
        for left in self.left:
            one = left(one)
        for right in self.right:
            two = right(two)
        return self.head(one.detach() + two if who % 3 == 0 else one + two.detach() if who % 3 == 1 else one + two)

    def auxiliary(self, x: Tensor, who: int) -> Tensor:
        found = []
        for block, head in zip(self.blocks, self.aux):
            x = block(x)
            found.append(head(x))
        return sum((each for at, each in enumerate(found) if (at + who) % 3), torch.zeros(()))

    def cut(self, x: Tensor, who: int) -> Tensor:
        """Nothing goes back beyond another block on each rank."""
        for at, block in enumerate(self.blocks):
            x = block(x)
            x = x.detach() if at == who % 2 else x
        return self.head(x)

    def again(self, x: Tensor, who: int) -> Tensor:
        """All blocks a second time, the other way round; from these nothing goes back on some ranks."""
        for block in self.blocks:
            x = block(x)
        y = x
        for block in reversed(self.blocks):
            y = block(y if who % 2 else y.detach())
        return self.head(x + y)

    def twice(self, x: Tensor, who: int) -> Tensor:
        one, two, three = self.blocks
        first = one(x)
        x = two(x + (first if who % 4 in (0, 3) else first.detach()))
        second = one(x)
        return self.head(three(x + (second if who % 4 in (0, 3) else second.detach())))

    def apart(self, x: Tensor, who: int) -> Tensor:
        """A second graph begins at a leaf."""
        for block in self.blocks:
            x = block(x)
        leaf = x.detach().requires_grad_()
        for block in self.left:
            leaf = block(leaf)
        return self.head(x if who % 2 else leaf)


WAYS = ("towers", "branches", "auxiliary", "cut", "again", "twice", "apart")


def another_way_back(model: Any, rank: int, step: int, way: str) -> Tensor:
    ids = ids_of(rank, step)
    return token_loss(model(ids, way, rank + step), ids)


def skipping(model: Any, rank: int, step: int) -> Tensor:
    """Layer drop: other blocks on every rank."""
    ids = ids_of(rank, step)
    x = model.body.embed(ids)
    for index, block in enumerate(model.body.blocks):
        if (index + rank + step) % 3:
            x = block(x)
    return token_loss(model.heads[0](model.body.norm(x)), ids)


def uneven_forwards(model: Any, rank: int, step: int) -> Tensor:
    total = torch.zeros(())
    for micro in range(1 + (rank + step) % 3):
        ids = ids_of(rank, step, micro)
        total = total + token_loss(model(ids), ids)
    return total


def read_in_loss(model: Any, rank: int, step: int) -> Tensor:
    """A loss function outside of forward takes the head's weight."""
    ids = ids_of(rank, step)
    hidden = model.body(ids)
    return token_loss(F.linear(hidden, model.heads[0].weight, model.heads[0].bias), ids)


def around_blocks(model: Any, rank: int, step: int) -> Tensor:
    """The blocks' modules are called, the blocks are not."""
    ids = ids_of(rank, step)
    x = model.body.embed(ids)
    for block in model.body.blocks:
        x = x + block.down(torch.tanh(block.up(block.norm(x))))
    return token_loss(model.heads[0](model.body.norm(x)), ids)


def checkpointed(model: Any, rank: int, step: int, use_reentrant: bool) -> Tensor:
    ids = ids_of(rank, step)
    x = model.body.embed(ids)
    for block in model.body.blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return token_loss(model.heads[0](model.body.norm(x)), ids)


class Box:
    """A container that nobody knows."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, box: Box) -> Box:
        return Box(self.block(box.value))


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Boxing() for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(WIDTH, VOCAB)])

    def forward(self, ids: Tensor) -> Tensor:
        box = Box(self.embed(ids))
        for layer in self.layers:
            box = layer(box)
        return self.heads[0](box.value)


class Scaled(nn.Module):
    """Its own weight is read by another module, in the middle of its forward; that one runs later too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x) + 0.1 * F.linear(x, self.layers[(index + 1) % 3].up.weight[:WIDTH])
        return self.head(x) + F.linear(x, self.embed.weight)


class Forces(nn.Module):
    """Takes a gradient inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            x = self.embed(ids)
            if not x.requires_grad:
                x.requires_grad_()
            y = x
            for layer in self.layers:
                y = layer(y)
            (force,) = torch.autograd.grad(y.square().sum(), x, create_graph=self.training)
        return self.head(y + 0.1 * force)


PROGRAMS = {
    "forces": Program(Forces, plain, steps=7),
    "plain": Program(Model, plain),
    "tied": Program(lambda: Model(tied=True), plain),
    "fused head": Program(lambda: Model(fused=True), plain, steps=7),
    "fused tied head": Program(lambda: Model(fused=True, tied=True), plain),
    "fused head, root parameter": Program(lambda: Model(fused=True, root=True), two_forwards),
    "read in the middle": Program(Scaled, plain),
    "read in the loss": Program(Model, read_in_loss),
    "read in the loss, tied": Program(lambda: Model(tied=True), read_in_loss),
    "root parameter, two forwards": Program(lambda: Model(root=True), two_forwards),
    "two forwards": Program(Model, two_forwards),
    "forgotten forward": Program(lambda: Model(root=True), forgotten_forward),
    "two backwards": Program(lambda: Model(root=True), two_backwards),
    "retained graph": Program(lambda: Model(tied=True, root=True), retained),
    "penalty": Program(Model, penalty, steps=7),
    "root penalty": Program(Model, root_penalty, steps=7),
    "autograd.grad": Program(Model, grad_function),
    "autograd.grad, bf16": Program(Model, grad_function, dtype="bf16", tolerance=2e-2),
    "bf16": Program(lambda: Model(tied=True, root=True, fused=True), two_forwards, dtype="bf16", tolerance=2e-2),
    "retained graph, bf16": Program(lambda: Model(root=True), retained, dtype="bf16", tolerance=2e-2),
    "recorded": Program(Model, recorded, steps=7),
    "recorded at the start": Program(frozen_front, recorded_at_the_start, steps=7),
    "recorded too": Program(Model, recorded_too),
    "from the middle": Program(Model, hidden_only),
    "alternating heads": Program(lambda: Model(heads=2), alternating),
    "other heads": Program(lambda: Model(heads=2), other_heads, stages=(0, 1, 2)),
    "losses on other heads": Program(lambda: Model(heads=2), losses_on_other_heads, steps=7),
    "unused head": Program(lambda: Model(heads=3), plain),
    "layer drop": Program(Model, skipping, stages=(0, 1, 2)),
    "uneven forwards": Program(Model, uneven_forwards, stages=(0, 1, 2)),
    "around blocks": Program(Model, around_blocks),
    "reentrant": Program(Model, functools.partial(checkpointed, use_reentrant=True)),
    "not reentrant": Program(Model, functools.partial(checkpointed, use_reentrant=False)),
    "boxes": Program(Boxes, plain, steps=7),
}
for way in WAYS:
    for built, settings in (("", {}), (", frozen", {"frozen": True})):
        PROGRAMS[f"{way}{built}"] = Program(
            functools.partial(Ways, **settings), functools.partial(another_way_back, way=way), steps=7
        )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


@functools.cache  # the same for every stage and tier
def reference(name: str, world: int) -> tuple[list[list[float]], dict[str, Tensor], dict[int, Any]]:
    program = PROGRAMS[name]
    model = program.build()
    optimizer = optimizer_of(model)
    params = list(model.parameters())
    losses = []
    for step in range(program.steps):
        found: list[list[Tensor | None]] = []
        for rank in range(world):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=program.dtype == "bf16"):
                values = program.losses(model, rank, step)
            found.append([p.grad for p in params])
            for p in params:
                p.grad = None
            if rank == 0:
                losses.append([value.item() for value in values])
        for p, grads in zip(params, zip(*found)):
            if any(grad is not None for grad in grads):
                p.grad = sum(torch.zeros_like(p) if grad is None else grad for grad in grads) / world
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def compare(name: str, stage: int, rank: int, world: int, **settings: Any) -> None:
    program = PROGRAMS[name]
    model = program.build()
    optimizer = optimizer_of(model)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage, **settings), mixed_precision=program.dtype)
    losses = []
    for step in range(program.steps):
        values = program.losses(model, rank, step)
        losses.append([value.item() for value in values])
        del values
        optimizer.step()
        optimizer.zero_grad()
    weights, state = model.state_dict(), optimizer.state_dict()["state"]
    if rank != 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected_losses, expected, expected_state = reference(name, world)
    torch.testing.assert_close(losses, expected_losses, rtol=program.tolerance, atol=program.tolerance)
    for key, value in expected.items():
        _close(weights[key], value, program.tolerance, key)
    assert state.keys() == expected_state.keys(), f"optimizer state of {sorted(state)}, not {sorted(expected_state)}"
    for index, entries in expected_state.items():
        for key, value in entries.items():
            _close(state[index][key], value, program.tolerance, f"{index} {key}")


def _close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def worker(rank: int, world: int, stage: int, name: str) -> None:
    compare(name, stage, rank, world)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_as_plain_data_parallel(two, name: str, stage: int):
    if stage not in PROGRAMS[name].stages:
        pytest.skip("ranks that run other modules in a forward: not at stage 3")
    two.run(worker, stage, name, timeout_s=60)


def everything(rank: int, world: int, stage: int, settings: dict[str, str], chosen: slice) -> None:
    for name, program in [*PROGRAMS.items()][chosen]:
        if stage in program.stages or world == 1:
            try:
                compare(name, stage, rank, world, **settings)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


EVERY, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)


@pytest.mark.parametrize(
    ("world", "stage", "settings", "chosen"),
    [
        (1, 2, {}, EVERY),
        (1, 3, {"offload_optimizer": "cpu", "offload_params": "cpu"}, EVERY),
        (2, 1, {"offload_optimizer": "cpu"}, EVERY),
        (2, 3, {"offload_optimizer": "cpu", "offload_params": "disk"}, EVERY),
        (3, 2, {}, EVEN),
        (3, 3, {"offload_optimizer": "disk"}, ODD),
        pytest.param(3, 2, {}, ODD, marks=pytest.mark.slow),
        pytest.param(3, 3, {"offload_optimizer": "disk"}, EVEN, marks=pytest.mark.slow),
    ],
)
def test_on_other_ranks_and_tiers(
    pools, tmp_path, world: int, stage: int, settings: dict[str, str], chosen: slice
) -> None:
    disk = {"offload_dir": str(tmp_path)} if "disk" in settings.values() else {}
    pools[world].run(everything, stage, {**settings, **disk}, chosen, timeout_s=150)


# Two models in one loss ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Blocks that a rank may leave out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, without: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != without:
                x = block(x)
        return x


def adversaries(models: list[nn.Module], rank: int, step: int, together: bool) -> Tensor:
    """A generator and its critic; ranks leave different blocks out of both."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    maker, critic = models
    without = (rank + step) % 4 if together else 4
    made = maker(x, without)
    return critic(made, 3 - without if together else 4).square().mean() + made.mean()


def two_engines(rank: int, world: int, stage: int, together: bool) -> None:
    def optimizers(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]

    ours, plain_models = [Branches(1), Branches(2)], [Branches(1), Branches(2)]
    steppers, references = optimizers(ours), optimizers(plain_models)
    for model, optimizer in zip(ours, steppers):
        zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    params = [p for model in plain_models for p in model.parameters()]
    for step in range(4):
        adversaries(ours, rank, step, together).backward()
        found = []
        for other in range(world):
            adversaries(plain_models, other, step, together).backward()
            found.append([p.grad for p in params])
            for p in params:
                p.grad = None
        for p, grads in zip(params, zip(*found)):
            if any(grad is not None for grad in grads):
                p.grad = sum(torch.zeros_like(p) if grad is None else grad for grad in grads) / world
        for optimizer in (*steppers, *references):
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(ours, plain_models):
        state = mine.state_dict()
        for name, value in theirs.state_dict().items():
            if rank == 0:
                _close(state[name], value, 2e-5, name)


@pytest.mark.parametrize(("stage", "together"), [(1, True), (2, True), (3, False)])
def test_two_engines_in_one_loss(pools, stage: int, together: bool):
    pools[2].run(two_engines, stage, together, timeout_s=60)


def reduces(rank: int, world: int, forwards: int) -> int:
    model = Model()
    optimizer = optimizer_of(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    losses = [token_loss(model(ids), ids) for ids in (ids_of(rank, 0, micro) for micro in range(forwards))]
    before = engine.traffic["reduce"].calls
    sum(losses).backward()
    spans = sum(1 for unit in engine.units for _ in unit.trained)
    return engine.traffic["reduce"].calls - before - spans


def test_a_unit_is_reduced_once_per_backward(two):
    for forwards in (1, 2, 3):
        assert two.run(reduces, forwards) == [0, 0]


def reduces_frozen(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    """A frozen embedding makes no graph: where its weight is the head's too, backward is not over when it leaves the head."""
    model = Model(tied=True)
    model.body.embed.requires_grad_(False)
    optimizer = optimizer_of(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
    engine.record()
    for step in range(2):
        before = engine.traffic["reduce"].calls
        ids = ids_of(rank, step)
        token_loss(model(ids), ids).backward()
        sent = engine.traffic["reduce"].calls - before
        optimizer.step()
        optimizer.zero_grad()
    rows = {(row.tier, row.kind): (row.predicted_peak, row.measured_peak or 0) for row in engine.report().tiers}
    planned, found = rows.get(("device", "gathered"), (0, 0))  # none at stage 2
    return sent - sum(len(unit.trained) for unit in engine.units), planned, found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_tied_embedding_does_not_end_a_backward(two, stage: int):
    for too_many, planned, found in two.run(reduces_frozen, stage):
        assert too_many == 0
        assert found <= planned


class Describes(nn.Module):
    """Reads other modules' weights: one for its type and shape alone, one for its values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        wide = self.body.embed.weight.dtype == torch.float32 and self.body.embed.weight.size(0) == VOCAB
        hidden = self.body(ids).to(self.body.embed.weight.dtype)
        return F.linear(hidden, self.head.weight) if wide else self.head(hidden)


def described(rank: int, world: int) -> tuple[set[str], list[str]]:
    """Units that are gathered when the last block has run; units that others have read."""
    model = Describes()
    engine = zero.shard(model, optimizer_of(model), zero.ZeroConfig(stage=3))
    found: set[str] = set()
    model.body.norm.register_forward_hook(
        lambda *_: found.update(unit.name for unit in engine.units if unit.state is State.GATHERED)
    )
    for step in range(2):
        found.clear()
        ids = ids_of(rank, step)
        token_loss(model(ids), ids).backward()
    return found, [unit.name for unit in engine.units if unit.always_asks]


def test_who_asks_for_a_type_alone_keeps_nothing_gathered(two):
    for gathered, read in two.run(described):
        assert "body.embed" not in gathered
        assert read == ["head"]


# A way into a unit that nobody sees --------------------------------------------------------------------------------


class Hidden(torch.autograd.Function):
    """Keeps a weight where autograd is not told of it."""

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


def blind(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Secretive() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    for step in range(9):
        KEPT.clear()
        out = model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step + 10 * rank)))
        if step < 6:
            out.mean().backward()
        elif step == 6:
            with pytest.raises(zero.StateError, match="unit '1' are NaN"):
                KEPT[1].mean().backward()
        else:
            KEPT[1].mean().backward()
        if step != 6:
            optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert rank != 0 or all(bool(value.isfinite().all()) for value in state.values())


def test_a_unit_used_unseen_is_named_on_every_rank(two):
    two.run(blind, timeout_s=60)


# What is released is not written to a file ----------------------------------------------------------------------------


def placeholders(rank: int, world: int) -> None:
    model = Model()
    zero.shard(model, optimizer_of(model), zero.ZeroConfig(stage=3))
    weight = model.heads[0].weight
    for refused in (
        lambda: torch.save(weight, io.BytesIO()),
        lambda: torch.save(dict(model.named_parameters()), io.BytesIO()),
        lambda: copy.deepcopy(weight),
    ):
        with pytest.raises(zero.StateError, match="is released"):
            refused()
    with zero.GatheredParameters(weight):
        assert bool(copy.deepcopy(weight).isfinite().all())
        torch.save(weight, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())


def test_no_file_of_placeholders(two):
    two.run(placeholders, timeout_s=60)
