"""`zero.Init`: models are created with the plain constructor's values, in slices, and become ordinary sharded models."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.families import SMALL, qwen3_moe, resnet, vit
from tests.kit.pool import RankPool, on_ranks
from tests.models import VOCAB, bert, ids, llama, t5
from tests.models import gpt2 as unseeded_gpt2

pytestmark = pytest.mark.gloo


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return unseeded_gpt2()


def is_deferred(param: Tensor) -> bool:
    return "(deferred" in repr(param)


def tied_bf16() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Odd(nn.Module):
    """Its constructor copies, casts, reads children's values, writes through `.data`, keeps views, replaces parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.empty(5, 7).t())  # not row-major: random numbers fall in memory order
        self.column = nn.Parameter(torch.arange(14.0).view(7, 2)[:, 1])  # its elements have gaps between them
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.index = nn.Parameter(torch.arange(5), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("table", torch.randn(3))
        self.first = nn.Linear(7, 7)
        self.recurrent = nn.LSTM(7, 6)
        self.attention = nn.MultiheadAttention(8, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)  # deep copies of a layer
        self.embed = nn.Embedding(10, 6, padding_idx=0)
        nn.init.normal_(self.turned)
        self.copied = copy.deepcopy(nn.ParameterList([self.turned]))
        nn.init.normal_(self.copied[0])  # in memory order, too
        with torch.no_grad():
            self.first.weight.data.mul_(self.embed.weight.mean())
            view = self.first.bias[1:3]
            nn.init.orthogonal_(self.attention.in_proj_weight)
            nn.init.sparse_(self.first.weight, 0.5)
            view.fill_(3.0)  # through a view that outlived the access
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.same_values = nn.Parameter(self.first.weight)
        self.from_values = nn.Parameter(self.first.weight * 2)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.first.weight = nn.Parameter(torch.ones(3, 7))
        self.half()
        self.first.to(torch.float64)
        with contextlib.suppress(TypeError):
            self.first.bias.normal_("no number")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2, "llama": llama, "tied_bf16": tied_bf16, "bert": bert, "t5": t5, "qwen3_moe": qwen3_moe, "vit": vit,
    "resnet": resnet, "odd": Odd,
}  # fmt: skip


def whole(param: nn.Parameter) -> Tensor:
    return zero.full_parameter(param)


def build(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, zero.Init]:
    torch.manual_seed(7)
    with zero.Init(**options) as init:
        model = make()
    return model, init


def exact(rank: int, world: int, name: str) -> None:
    torch.manual_seed(7)
    plain = MODELS[name]()
    state = torch.get_rng_state()
    model, init = build(MODELS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(plain)
    ours = list(model.named_parameters(remove_duplicate=False))
    theirs = list(plain.named_parameters(remove_duplicate=False))
    assert [n for n, _ in ours] == [n for n, _ in theirs]
    firsts = {id(q): p for (_, p), (_, q) in reversed(list(zip(ours, theirs)))}
    for (key, p), (_, q) in zip(ours, theirs):
        assert (p.shape, p.dtype, p.device, p.requires_grad) == (q.shape, q.dtype, q.device, q.requires_grad), key
        assert firsts[id(q)] is p, f"{key} is not tied as in the plain model"
        assert is_deferred(p), key
        assert zero.local_parameter(p).numel() <= -(-p.numel() // world), key
        assert p.untyped_storage().nbytes() == p.element_size(), key  # a placeholder
        assert torch.equal(whole(p), q), key
    for (key, b), (other, c) in zip(model.named_buffers(), plain.named_buffers()):
        assert key == other
        assert torch.equal(b, c), key
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in plain.modules())
    assert init.peak_numel <= largest


@pytest.mark.parametrize("name", MODELS)
def test_created_with_the_plain_values(pools: dict[int, RankPool], name: str) -> None:
    for world in (1, 2) if name not in ("gpt2", "odd") else (1, 2, 3):
        pools[world].run(exact, name)


@on_ranks()
def test_until_it_is_sharded(rank: int, world: int) -> None:
    model, _ = build(gpt2)
    tokens = ids(rank, 0)
    with pytest.raises(zero.StateError, match=r"zero\.Init.*accelerator\.prepare"):
        model(input_ids=tokens)
    with pytest.raises(zero.StateError, match=r"deepcopy\(\) of a parameter"):
        copy.deepcopy(model)
    with pytest.raises(zero.StateError, match="cannot be pickled"):
        pickle.dumps(model)
    with torch.no_grad(), pytest.raises(RuntimeError):
        model.transformer.wte.weight.normal_()
    # Casts and moves work on slices.
    before = whole(model.lm_head.weight)
    model.to("cpu").bfloat16()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(whole(model.lm_head.weight), before.bfloat16())
    assert all(zero.local_parameter(p).numel() <= -(-p.numel() // world) for p in model.parameters())
    # load_state_dict takes values on every rank.
    other = gpt2().bfloat16()
    torch.nn.init.normal_(other.lm_head.weight)
    model.load_state_dict(other.state_dict())
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(whole(p), q)
    missing = model.load_state_dict({"lm_head.weight": other.lm_head.weight}, strict=False).missing_keys
    assert "transformer.ln_f.weight" in missing
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"lm_head.weight": torch.zeros(3, 3)}, strict=False)
    with torch.no_grad(), pytest.raises(zero.StateError, match=r"zero_\(\) of a parameter of shape"):
        model.transformer.ln_f.weight.zero_()
    assert is_deferred(model.lm_head.weight)
    # Sharding inside is as sharding outside.
    with zero.Init():
        inside = gpt2().bfloat16()
        zero.shard(inside, None, zero.ZeroConfig(stage=2))
        loss = inside(input_ids=tokens, labels=tokens).loss
    assert torch.equal(inside(input_ids=tokens, labels=tokens).loss, loss)


@on_ranks()
def test_sharded_in_parts(rank: int, world: int) -> None:
    """Two engines inside one deferred module: its values are theirs."""
    model, _ = build(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    expected = [whole(p) for p in model.parameters()]
    zero.shard(model[0], None, zero.ZeroConfig(stage=3))
    zero.shard(model[1], None, zero.ZeroConfig(stage=3))
    assert all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), expected))


@on_ranks()
def test_different_seeds_become_rank_0s(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    with zero.Init():
        layer = nn.Linear(5, 3)
    assert torch.equal(torch.get_rng_state(), before), "dropout must go on differing between the ranks"
    torch.manual_seed(0)
    plain = nn.Linear(5, 3)
    assert torch.equal(whole(layer.weight), plain.weight)
    assert torch.equal(whole(layer.bias), plain.bias)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks(None)
def test_contexts_leave_nothing_behind(rank: int, world: int) -> None:
    """Nested, repeated and failed contexts leave nothing behind."""
    hooks = nn.modules.module._global_parameter_registration_hooks, nn.modules.module._global_module_registration_hooks
    before = {key for each in hooks for key in each}  # engines of other tests in this process, freed at any time
    with zero.Init() as outer:
        with zero.Init() as inner, zero.Init(enabled=False):
            assert inner is outer
            one = nn.Linear(4, 4)
        two = nn.Sequential(nn.Linear(4, 4), one)
    assert {key for each in hooks for key in each} <= before
    assert all(is_deferred(p) for p in two.parameters())
    assert not is_deferred(nn.Linear(2, 2).weight)

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ready = nn.Linear(4, 4)
            raise ValueError("halfway")

    made: list[nn.Linear] = []

    def fail() -> None:
        with zero.Init():
            made.append(nn.Linear(4, 4))
            nn.init.constant_(made[0].weight, 5.0)
            Fails()

    with pytest.raises(ValueError, match="halfway"):
        fail()
    assert {key for each in hooks for key in each} <= before
    assert torch.equal(whole(made[0].weight), torch.full((4, 4), 5.0))
    # Entering again: deferred models can be read, written, copied and run inside.
    with zero.Init():
        output = two(torch.ones(2, 4))
        two[0].weight.data.fill_(1.0)
        twin = copy.deepcopy(two)
        reading = one.weight.sum().item()
        assert is_deferred(twin[0].weight)
    assert output.shape == (2, 4)
    assert not output.isnan().any()
    assert reading == pytest.approx(whole(one.weight).sum().item())
    assert torch.equal(whole(twin[0].weight), torch.ones(4, 4))
    assert torch.equal(whole(twin[1].bias), whole(one.bias))
    params = [weakref.ref(p) for p in two.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.shard(twin)
        zero.shard(two)
    assert [weakref.ref(p) for p in two.parameters()] == params
    assert not any("__deepcopy__" in p.__dict__ for p in two.parameters())
    assert torch.equal(two(torch.ones(2, 4)), twin(torch.ones(2, 4)))
    with zero.Init():
        dropped = nn.Linear(4, 4)
    gone = weakref.ref(dropped.weight)
    del dropped
    gc.collect()
    assert gone() is None


class HalfMade(nn.Module):
    """Its `__getattr__` cannot answer before it is complete, as that of PEFT's wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.kind = "inner"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = self.__dict__["_modules"][self.__dict__["kind"]]
            if name in found:
                return found[name]
            raise


@on_ranks()
def test_modules_are_not_asked_while_they_are_made(rank: int, world: int) -> None:
    torch.manual_seed(7)
    plain = nn.Sequential(HalfMade(), HalfMade())
    model, _ = build(lambda: nn.Sequential(HalfMade(), HalfMade()))
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(whole(p), q)
    zero.shard(model)
    assert not is_deferred(nn.Linear(2, 2).weight)


def test_own_elements_of_an_open_parameter_that_is_not_row_major() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 7).t())

    with zero.Init():
        model = Turned()
        zero.set_local_parameter(model.weight, torch.arange(35.0))
        assert torch.equal(zero.local_parameter(model.weight), torch.arange(35.0))
    assert torch.equal(zero.full_parameter(model.weight), torch.arange(35.0).view(7, 5))


@on_ranks(3)
def test_memory_afterwards_is_that_of_the_slices(rank: int, world: int) -> None:
    """What whole parameters took between slices that stay goes back to the system."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with zero.Init():  # whatever is loaded and made with the first one
        nn.init.orthogonal_(nn.Linear(8, 8).weight)
    before = resident_bytes()
    with zero.Init():
        model = nn.Sequential(*(nn.Linear(768, width, bias=False) for width in (768, 768, 2048) * 10))
        for layer in model:
            nn.init.normal_(layer.weight)
            layer.weight = nn.Parameter(layer.weight.data)  # the memory of both, which nothing else needs
    model_bytes = sum(p.nbytes for p in model.parameters())
    assert resident_bytes() - before < model_bytes / world + (8 << 20)


@on_ranks()
def test_resize_token_embeddings(rank: int, world: int) -> None:
    model, _ = build(gpt2)
    torch.manual_seed(7)
    plain = gpt2()
    with pytest.raises(zero.StateError, match=r"inside `with zero\.Init\(\):` \(enter it again"):
        model.resize_token_embeddings(VOCAB + 7)
    torch.manual_seed(3)
    plain.resize_token_embeddings(VOCAB + 7)
    torch.manual_seed(3)
    with zero.Init():
        model.resize_token_embeddings(VOCAB + 7)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.vocab_size == VOCAB + 7
    assert model.transformer.wte.num_embeddings == VOCAB + 7
    for p, q in zip(model.parameters(), plain.parameters()):
        assert is_deferred(p)
        assert torch.equal(whole(p), q)
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    assert torch.isfinite(model(input_ids=ids(0, 0), labels=ids(0, 0)).loss)
    with pytest.raises(zero.ConfigError, match="Resize before the model is"):
        model.resize_token_embeddings(VOCAB)
    engine.detach()
    model.resize_token_embeddings(VOCAB)
    assert model.lm_head.weight.shape[0] == VOCAB
