"""The core without observers trains ordinary models in ordinary loops: the same numbers as plain data parallel training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_zero import ConfigError, LayoutError, StateError, ZeroConfig
from hf_zero.engine import shard
from tests.kit.pool import RankPool
from tests.kit.rows import each_value

WIDTH, WORDS = 32, 50


# Models of transformers, against DDP ----------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    config = AutoConfig.for_model("gpt2", n_layer=3, n_embd=WIDTH, n_head=4, vocab_size=WORDS, n_positions=32)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return AutoModelForCausalLM.from_config(config)


def bert() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model("bert", vocab_size=WORDS, **sizes, **dropout)
    return AutoModelForSequenceClassification.from_config(config)


def t5() -> nn.Module:
    sizes = {"num_layers": 2, "d_model": WIDTH, "d_kv": 8, "num_heads": 4, "d_ff": 2 * WIDTH}
    config = AutoConfig.for_model("t5", vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return AutoModelForSeq2SeqLM.from_config(config)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


MODELS = {make.__name__: make for make in (gpt2, bert, t5, mlp)}


def loss_of(model: nn.Module, name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return model(torch.randn(3, WIDTH, generator=generator)).pow(2).mean()
    ids = torch.randint(1, WORDS, (2, 8), generator=generator)
    labels = torch.tensor([0, 1]) if name == "bert" else ids
    return model(input_ids=ids, labels=labels).loss


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def against_ddp(rank: int, world: int, name: str, stage: int, precision: str, accumulate: int) -> tuple[float, float]:
    """The largest differences of losses and norms, and of weights."""
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = two_groups(model), two_groups(plain)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    engine = shard(model, optimizer, ZeroConfig(stage=stage), mixed_precision=precision)
    apart = 0.0
    for step in range(3):
        for micro in range(accumulate):
            seed, last = 100 * step + 10 * micro + rank, micro == accumulate - 1
            with nullcontext() if last else engine.no_sync():
                mine = loss_of(model, name, seed) / accumulate
                mine.backward()
            with nullcontext() if last else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    theirs = loss_of(ddp, name, seed) / accumulate
                theirs.backward()
            apart = max(apart, abs(mine.item() - theirs.item()))
        if accumulate > 1:
            norm = engine.clip_grad_norm_(0.5)
            apart = max(apart, abs(norm.item() - nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()))
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    engine.detach()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return apart, max((one - other).detach().abs().max().item() for one, other in pairs)


@pytest.mark.parametrize(("stage", "precision", "name"), each_value([0, 1, 2, 3], ["no", "bf16"], MODELS))
def test_equals_ddp(two: RankPool, name: str, stage: int, precision: str) -> None:
    for apart, weights in two.run(against_ddp, name, stage, precision, 1):
        assert (apart, weights) == (0.0, 0.0)
    for apart, weights in two.run(against_ddp, name, stage, precision, 2):
        assert apart <= (1e-6 if precision == "no" else 1e-2)
        assert weights <= (1e-6 if precision == "no" else 1e-2)


# Loops, against averaged gradients ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model with two heads, which runs its blocks as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.first, self.second = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if how == "tied":
            self.first.weight = self.embedding.weight
        if how == "frozen":
            for frozen in (self.embedding, self.blocks[0], self.blocks[2]):
                frozen.requires_grad_(False)

    def run(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        for block in self.blocks[start:stop]:
            hidden = block(hidden)
        return hidden

    def forward(self, ids: Tensor, skip: int = -1) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(ids)
        for at, block in enumerate(self.blocks):
            if at == skip:
                continue
            if self.how == "checkpoint":
                hidden = checkpoint(block, hidden, use_reentrant=False)
            elif self.how == "reentrant":
                hidden = checkpoint(block, hidden, use_reentrant=True)
            elif self.how == "segments":
                hidden = checkpoint(self.run, hidden, at, at + 2, use_reentrant=False) if at % 2 == 0 else hidden
            elif self.how == "twice":
                hidden = block(block(hidden))
            else:
                hidden = block(hidden)
        hidden = self.norm(hidden) * self.scale
        return self.first(hidden), self.second(hidden)


Sync = Callable[[], AbstractContextManager[None]]


def ids_of(rank: int, step: int, micro: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (3, 7), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def mean_of(logits: Tensor) -> Tensor:
    return logits.pow(2).mean()


def one_head(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    mean_of(net(ids_of(rank, step))[0]).backward()


def heads_in_turn(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    mean_of(net(ids_of(rank, step))[step % 2]).backward()


def another_head_on_each_rank(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    mean_of(net(ids_of(rank, step))[(step + rank) % 2]).backward()


def another_block_left_out_on_each_rank(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    mean_of(net(ids_of(rank, step), skip=(step + rank) % 2 + 1)[0]).backward()


def two_forwards_one_backward(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    first, second = net(ids_of(rank, step))[0], net(ids_of(rank, step, 1))[1]
    (mean_of(first) + mean_of(second)).backward()


def two_backwards_of_one_forward(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    first, second = net(ids_of(rank, step))
    mean_of(first).backward(retain_graph=True)
    mean_of(second).backward()


def forwards_then_backwards(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    first, second = net(ids_of(rank, step))[0], net(ids_of(rank, step, 1))[1]
    mean_of(first).backward()
    mean_of(second).backward()


def accumulation(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    with no_sync():
        mean_of(net(ids_of(rank, step))[0]).backward()
    mean_of(net(ids_of(rank, step, 1))[1]).backward()


def no_sync_at_all(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    with no_sync():
        for micro in range(2):
            mean_of(net(ids_of(rank, step, micro))[0]).backward()


def evaluation_between(net: nn.Module, rank: int, step: int, no_sync: Sync) -> None:
    loss = mean_of(net(ids_of(rank, step))[0])
    with torch.no_grad():
        net(ids_of(rank, step, 1))
    loss.backward()
    with torch.no_grad():
        net(ids_of(rank, step, 2))


LOOPS = {
    each.__name__: each
    for each in (
        one_head,
        heads_in_turn,
        another_head_on_each_rank,
        another_block_left_out_on_each_rank,
        two_forwards_one_backward,
        two_backwards_of_one_forward,
        forwards_then_backwards,
        accumulation,
        no_sync_at_all,
        evaluation_between,
    )
}
HOWS = ("plain", "tied", "frozen", "checkpoint", "reentrant", "segments", "twice")


def average_gradients(model: nn.Module, world: int) -> None:
    """What DDP does after a backward, without its limits; a parameter without a gradient on every rank keeps none."""
    for param in model.parameters():
        if not param.requires_grad:
            continue
        present = torch.tensor(int(param.grad is not None))
        dist.all_reduce(present)
        if present:
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            parts = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine.contiguous())
            param.grad = sum(parts[1:], start=parts[0]) / world


def against_averages(rank: int, world: int, loop: str, how: str, config: dict[str, Any]) -> float:
    """The largest difference of weights after four steps."""
    torch.manual_seed(0)
    model = Net(how)
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = two_groups(model), two_groups(plain)
    engine = shard(model, optimizer, ZeroConfig(**config))
    for step in range(4):
        LOOPS[loop](model, rank, step, engine.no_sync)
        LOOPS[loop](plain, rank, step, nullcontext)
        average_gradients(plain, world)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    engine.detach()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((one - other).detach().abs().max().item() for one, other in pairs)


SAME_UNITS = "another_block_left_out_on_each_rank", 3
"""At stage 3 the ranks gather the same units."""


@pytest.mark.parametrize(
    ("loop", "stage"), [each for each in each_value(LOOPS, (3, 2, 1)) if each.values != SAME_UNITS]
)
def test_loops_equal_averages(two: RankPool, loop: str, stage: int) -> None:
    assert max(two.run(against_averages, loop, "plain", {"stage": stage})) <= 2e-7


@pytest.mark.parametrize(("how", "stage"), each_value(HOWS[1:], [3, 1]))
def test_models_equal_averages(two: RankPool, how: str, stage: int) -> None:
    assert max(two.run(against_averages, "heads_in_turn", how, {"stage": stage})) == 0.0


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("loop", ["heads_in_turn", "another_head_on_each_rank"])
def test_three_ranks_and_replicas(pools: dict[int, RankPool], loop: str, stage: int) -> None:
    assert max(pools[3].run(against_averages, loop, "plain", {"stage": stage})) <= 2e-7
    assert max(pools[4].run(against_averages, loop, "tied", {"stage": stage, "replicas": 2})) <= 1e-6


# Errors ---------------------------------------------------------------------------------------------------------------


def after_a_backward_that_raised(rank: int, world: int, stage: int) -> list[str]:
    torch.manual_seed(0)
    model = Net("plain")
    optimizer = two_groups(model)
    shard(model, optimizer, ZeroConfig(stage=stage))
    one_head(model, rank, 0, nullcontext)
    loss = mean_of(model(ids_of(rank, 1))[0])
    model.blocks[1].up.register_full_backward_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    logits, _ = model(ids_of(rank, 2))
    found = []
    try:
        mean_of(logits).backward()
    except ZeroDivisionError as error:
        found.append(type(error).__name__)
    try:
        optimizer.step()
    except StateError as error:
        found.append(str(error))
    del loss
    model.blocks[1].up._backward_hooks.clear()  # type: ignore[union-attr]
    optimizer.zero_grad()
    one_head(model, rank, 3, nullcontext)
    optimizer.step()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_that_raised_is_not_stepped(two: RankPool, stage: int) -> None:
    for found in two.run(after_a_backward_that_raised, stage):
        assert found[0] == "ZeroDivisionError"
        assert "zero_grad" in found[1]


def refused(rank: int, world: int) -> None:
    model = mlp()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(LayoutError, match="does not have"):
        shard(model, other, ZeroConfig(stage=3))
    shard(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(stage=3))
    with pytest.raises(ConfigError, match="sharded already"):
        shard(model, None, ZeroConfig(stage=3))
    with pytest.raises(StateError, match="sharded over the ranks"):
        model[0].weight.sum()  # type: ignore[index,operator]


def test_what_the_core_refuses(two: RankPool) -> None:
    two.run(refused)


class LoneHeads(nn.Module):
    """Heads of one parameter each, whose elements no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 25, bias=False) for _ in range(2))

    def forward(self, x: Tensor, heads: list[int]) -> Tensor:
        x = self.body(x)
        return sum((self.heads[head](x).square().mean() for head in heads), x.mean())


def heads_of_some_ranks(rank: int, world: int, stage: int) -> tuple[float, float]:
    """Differences of norms and weights, where a head has a gradient on some ranks only."""
    torch.manual_seed(0)
    model = LoneHeads()
    plain = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain))
    engine = shard(model, optimizer, ZeroConfig(stage=stage))
    norms = 0.0
    for step in range(6):
        for each in range(world):
            generator = torch.Generator().manual_seed(10 * step + each)
            heads = [head for head in range(2) if (each + step + head) % world == 0]
            for micro in range(2):
                x = torch.randn(5, 7, generator=generator)
                (plain(x, heads) / world).backward()
                if each == rank:
                    with engine.no_sync() if micro == 0 else nullcontext():
                        model(x, heads).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        norms = max(norms, abs(engine.clip_grad_norm_(0.1).item() - expected.item()))
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    engine.detach()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return norms, max((a - b).detach().abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lone_parameters_of_some_ranks(pools: dict[int, RankPool], world: int, stage: int) -> None:
    for norms, weights in pools[world].run(heads_of_some_ranks, stage):
        assert norms < 1e-5
        assert weights < 1e-6
