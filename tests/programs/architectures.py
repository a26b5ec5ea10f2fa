"""Model structures that engines get wrong: shared, frozen and odd parameters, in-place writes, modules used several times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import models
from tests.models import VOCAB, WIDTH, Block, ids, inputs, sgd, token_loss
from tests.oracle import Run, program
from tests.programs.usual import Build, Optimize, trained_on

Loss = Callable[[nn.Module, int, int], Tensor]
"""(model, rank, step) -> the loss."""
ARCHITECTURES: dict[str, tuple[Build, Loss]] = {}


class Stack(nn.Module):
    """Embedding, blocks, head."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def on_tokens(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = ids(rank, step)
    return token_loss(model(tokens), tokens)


def on_features(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step, 4, 3, WIDTH)).square().mean()


def sgd_without_state(model: nn.Module) -> torch.optim.Optimizer:
    """State of a bfloat16 parameter is float32 here, bfloat16 in plain torch."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def architecture(name: str, build: Build, loss: Loss = on_tokens, optimizer: Optimize = sgd) -> None:
    ARCHITECTURES[name] = build, loss

    def run_it(run: Run, step: int) -> Tensor:
        return loss(run.model, run.rank, step)

    run_it.__name__ = name
    trained_on(build, optimizer, **({"more": {"ranks": (2, 3)}} if name in THREE_RANKS else {}))(run_it)


THREE_RANKS = ("odd_shapes", "experts_by_rank", "shared_by_all_blocks")


class OddShapes(Stack):
    """0-dim, smaller than the world, empty, of the root, a buffer, a parameter without a use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("calls", torch.ones((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (self.calls * self.scale * self.one) + self.empty.sum()


class ReadLast(Stack):
    """The root reads its own parameter after a small module has run, as CLIP's reads its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(super().body(x)) * self.scale.exp()


class LastBlockOnly(Stack):
    """The first trained block needs no gradient of its inputs; the norm behind it does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)
        self.norm.requires_grad_(True)

    def body(self, x: Tensor) -> Tensor:
        return self.norm(super().body(x))


class Choice(nn.Module):
    """One of three branches: a block whose inner path differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.choice = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branches[self.choice](x)


class Mixture(Stack):
    block = Choice


def chosen_by_rank(model: nn.Module, rank: int, step: int) -> Tensor:
    for block in model.blocks:
        block.choice = (rank + step) % 3
    return on_tokens(model, rank, step)


class RareWords(nn.Module):
    """torch's adaptive softmax runs a cluster of words only where the batch has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [2, 11], div_value=2.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.softmax(self.body(self.embed(tokens)).flatten(0, 1), tokens.flatten()).loss


def rare_on_one_rank(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(ids(rank, step) if rank == 0 else ids(rank, step) % 2)


class Twice(Stack):
    """The same module more than once in a forward, as ALBERT."""

    def body(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](self.blocks[2](self.blocks[1](x)))


class Wild(Block):
    """Writes to its input; its output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        out = super().forward(torch.relu_(x))
        return out.view(-1, WIDTH)[: out.numel() // WIDTH].view_as(out)


class InPlace(Stack):
    """Also writes to the outputs of blocks."""

    block = Wild

    def body(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
            x.add_(0.5)
            x[0].mul_(2.0)
        return x


class GoesAround(Stack):
    """Calls what is inside blocks, then two blocks, then once more a part of a block that has run."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return self.blocks[0].norm(self.blocks[2](self.blocks[0](x)))


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__(tied=True)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].norm.bias.requires_grad_(False)


class FrozenBottom(Stack):
    """Nothing needs a gradient before an adapter in the middle, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(True)


class Recomputed(Stack):
    """All blocks in one checkpoint."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        return checkpoint(super().body, x, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):
    reentrant = True


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weight of its child without a call of the child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.attend(x, x, x)[0])


class Images(nn.Module):
    """Batch norm without running statistics, behind a convolution, before an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU(True)
                )
                for _ in range(3)
            )
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


def on_images(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step, 4, 4, 6, 6)).square().mean()


class SharedBlock(Block):
    """With a parameter of all blocks, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.bank = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.bank * x


class Shared(Stack):
    """One bank in all blocks, one bias in all of their first layers, a parameter of the root."""

    block = SharedBlock

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        for block in self.blocks:
            block.bank, block.up.bias = self.blocks[0].bank, self.blocks[0].up.bias

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) / self.temperature


class Chain(nn.Module):
    """No blocks, one bias in all layers, a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        for layer in self.layers:
            layer.bias = self.layers[0].bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.temperature


class Gated(models.Gated):
    """Parameters of shape (), (1,), (1, 1) and (0,) beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


class Gates(nn.Module):
    """Parameters of shape () alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + torch.tanh(self.second * x)


class Hollow(nn.Module):
    """An empty parameter of another type than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(x) + self.nothing.sum().float()


class GatedStack(Stack):
    block = Gated


class GatesStack(Stack):
    block = Gates


class HollowStack(Stack):
    block = Hollow


architecture("odd_shapes", OddShapes)
architecture("read_last", ReadLast)
architecture("last_block_only", LastBlockOnly)
architecture("experts_by_rank", Mixture, chosen_by_rank)
architecture("rare_words_on_one_rank", RareWords, rare_on_one_rank)
architecture("module_called_several_times", Twice)
architecture("in_place", InPlace)
architecture("goes_around_the_blocks", GoesAround)
architecture("frozen_and_tied", Frozen)
architecture("frozen_bottom", FrozenBottom)
architecture("checkpoint_of_several_blocks", Recomputed)
architecture("reentrant_checkpoint_of_several_blocks", RecomputedReentrant)
architecture("attention_without_blocks", Attention, on_features)
architecture("convolutions", Images, on_images)
architecture("shared_by_all_blocks", Shared)
architecture("shared_by_a_chain", Chain, on_features)
architecture("small_parameters", GatedStack)
architecture("blocks_of_single_numbers", GatesStack)
architecture("empty_parameters_of_another_type", HollowStack, optimizer=sgd_without_state)


class Ragged(nn.Module):
    """Heads of one parameter each, of 175 elements: no multiple of 32 times the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(7, 25, bias=False) for _ in range(2))

    def forward(self, x: Tensor, heads: list[int]) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return sum((self.heads[head](x).square().mean() for head in heads), x.mean())


@program(reference="average", only={"stage": (0, 1, 2)}, more={"ranks": (2, 3)})
def lone_parameters_of_some_ranks(run: Run) -> None:
    """In two micro-batches, and clipped."""
    model = run.trained_model(Ragged)
    for step in range(4):
        heads = [head for head in range(2) if (run.rank + step + head) % run.world == 0]
        with run.no_sync(model):
            model(run.inputs(2 * step, 5, 7), heads).backward()
        model(run.inputs(2 * step + 1, 5, 7), heads).backward()
        run.clip_grad_norm_(model, 0.1)
        run.update()
