"""Which parameters move together: bounded in bytes, and never the whole model because one parameter is used everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_zero import ConfigError
from hf_zero.core.units import Group, Limits, find_groups, find_visits

WIDTH = 16
SQUARE = WIDTH * WIDTH * 4  # bytes of one matrix


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))


class Block(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None, scaled: bool = False) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), Mlp(), nn.LayerNorm(WIDTH)
        if scaled:
            self.scale = nn.Parameter(torch.ones(WIDTH))
        if shared is not None:
            self.shared = shared


class Stack(nn.Module):
    def __init__(self, depth: int = 3, *, shares: bool = False, scaled: bool = False, root: bool = False) -> None:
        super().__init__()
        bank = nn.Parameter(torch.ones(WIDTH)) if shares else None
        self.blocks = nn.ModuleList(Block(bank, scaled) for _ in range(depth))
        if root:
            self.temperature = nn.Parameter(torch.ones(()))


class Attributes(nn.Module):
    """Blocks in no list, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.first, self.second, self.third = Mlp(), Mlp(), Mlp()


def chain(count: int, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def covered(model: nn.Module, groups: list[Group]) -> None:
    params = [param for group in groups for param in group.params]
    assert len(params) == len(set(params))
    assert set(params) == set(model.parameters())
    visited: list[int] = []

    def walk(visits: tuple) -> None:
        for visit in visits:
            visited.append(visit.unit)
            walk(visit.inner)

    walk(find_visits(model, groups))
    assert sorted(set(visited)) == list(range(len(groups)))
    assert len(visited) == sum(len(group.hosts) for group in groups)


@pytest.mark.parametrize("count", [1, 7, 40, 400])
def test_runs_of_leaf_modules_are_bounded_in_bytes(count: int) -> None:
    """Not in number: twice as long a model has twice as many units."""
    model, limits = chain(count), Limits(unit_bytes=8 * SQUARE, run_bytes=3 * SQUARE)
    groups = find_groups(model, limits)
    covered(model, groups)
    assert max(group.nbytes for group in groups) <= max(SQUARE, min(3 * SQUARE, count * SQUARE // 8))
    if count >= 24:
        assert len(groups) == -(-count // 3)


def test_a_small_model_is_cut_into_few_units() -> None:
    assert len(find_groups(chain(40))) == 8


@pytest.mark.parametrize("scaled", [False, True])
def test_a_block_above_the_limit_is_cut_inside(scaled: bool) -> None:
    model = Stack(scaled=scaled)
    whole = find_groups(model, Limits(unit_bytes=13 * SQUARE))
    covered(model, whole)
    assert [group.name for group in whole] == ["blocks.0", "blocks.1", "blocks.2"]
    cut = find_groups(model, Limits(unit_bytes=8 * SQUARE))
    covered(model, cut)
    assert [group.name for group in cut[:3]] == ["blocks.0", "blocks.0.attention", "blocks.0.mlp"]
    assert len(cut) == 9
    assert cut[0].nbytes <= 3 * WIDTH * 4  # the norm, and what the block has itself
    finer = find_groups(model, Limits(unit_bytes=4 * SQUARE))
    covered(model, finer)
    assert [group.name for group in finer[:4]] == [
        "blocks.0", "blocks.0.attention", "blocks.0.mlp.up", "blocks.0.mlp.down",
    ]  # fmt: skip
    finest = find_groups(model, Limits(unit_bytes=SQUARE))  # of what is in a list each rank may run another part
    covered(model, finest)
    assert [group.nbytes for group in finest if group.name == "blocks.0.attention"] == [4 * SQUARE]


def test_a_shared_parameter_is_a_unit_of_its_own() -> None:
    model = Stack(shares=True)
    groups = find_groups(model)
    covered(model, groups)
    bank = next(group for group in groups if len(group.hosts) == 3)
    assert set(bank.params) == {model.blocks[0].shared}
    assert bank.hosts == list(model.blocks)
    assert len(groups) == 4
    cut = find_groups(model, Limits(unit_bytes=8 * SQUARE))
    covered(model, cut)
    assert len(cut) == 10


def test_a_shared_bias_does_not_join_a_chain() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
    for linear in model:
        linear.bias = model[0].bias
    groups = find_groups(model)
    covered(model, groups)
    assert len(groups) == 9
    assert sorted(len(group.hosts) for group in groups) == [2] * 8 + [16]


def test_what_hardly_differs_from_what_is_shared_stays_together() -> None:
    """A tied head with a bias: one unit, as nothing is saved by two."""
    embed, head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "blocks": nn.ModuleList(Block() for _ in range(2)), "head": head})
    groups = find_groups(model)
    covered(model, groups)
    assert [group.name for group in groups] == ["embed", "blocks.0", "blocks.1"]
    assert set(groups[0].params) == {embed.weight, head.bias}


@pytest.mark.parametrize("model", [Stack(root=True), Attributes()], ids=["list", "attributes"])
def test_a_parameter_of_the_root_does_not_join_the_model(model: nn.Module) -> None:
    groups = find_groups(model)
    covered(model, groups)
    total = sum(group.nbytes for group in groups)
    assert max(group.nbytes for group in groups) < total / 2
    own = next(group for group in groups if model in group.hosts)
    assert set(own.params) == {model.temperature}


def test_a_module_that_reads_its_children_hosts_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x)[0])

    model = Net()
    groups = find_groups(model, Limits(unit_bytes=SQUARE, run_bytes=SQUARE))
    covered(model, groups)
    hosted = next(group for group in groups if model.attention in group.hosts)
    assert set(hosted.params) == set(model.attention.parameters())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))


def test_a_named_list_has_the_module_that_is_called_as_its_host() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture())
    groups = find_groups(model, units=["*.experts.1"])
    covered(model, groups)
    (named,) = (group for group in groups if group.is_named)
    assert (named.name, named.hosts) == ("1.experts.1", [model[1]])


def test_names_inside_of_named_modules_and_names_of_none() -> None:
    model = Stack()
    groups = find_groups(model, units=["*.heads.0", "Attention"])
    covered(model, groups)
    named = {group.name: set(group.params) for group in groups if group.is_named}
    assert named == {f"blocks.{at}.attention": {*block.attention.parameters()} for at, block in enumerate(model.blocks)}
    with pytest.raises(ConfigError, match=r"'blocks\.0\.mlps'. The closest are 'blocks\.\*\.mlp', "):
        find_groups(model, units=["blocks.0.mlps"])


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)


def test_what_transformers_does_not_split_is_a_block_only_where_there_are_several() -> None:
    model = nn.Sequential(Embeddings(), Stack(2))
    model._no_split_modules = ["Embeddings", "Block"]  # type: ignore[assignment]
    groups = find_groups(model)
    covered(model, groups)
    assert [group.name for group in groups] == ["0.words", "1.blocks.0", "1.blocks.1"]


def test_embeddings_whose_backward_needs_no_weights() -> None:
    model = nn.Sequential(nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH, max_norm=1.0))
    groups = find_groups(model, Limits(run_bytes=SQUARE))
    assert [visit.is_embedding for visit in find_visits(model, groups)] == [True, False], "one writes its weights"


def test_a_module_that_runs_a_child_for_some_samples_alone_hosts_it() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 64, [8, 32]))
    groups = find_groups(model, Limits(unit_bytes=SQUARE, run_bytes=SQUARE))
    covered(model, groups)
    assert [group.hosts for group in groups] == [[model[0]], [model[1]]], "ranks have other samples"
