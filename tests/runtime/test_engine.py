"""What an engine promises around the step: a consistent start, truthful released parameters, whole state dicts, undo."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import resource
import warnings
import weakref

import psutil
import pytest
import torch
from torch import nn

import hf_zero as zero
from tests.kit.common import bert, gpt2
from tests.runtime.test_models import Stack, sgd, token_loss

pytestmark = pytest.mark.gloo


def structures(rank: int, world: int) -> None:
    """Each difference between ranks is named on every rank."""

    def attempt(match: str, build, config=None, optimizer=None, **options) -> None:
        model = build()
        opt = optimizer(model) if optimizer else None
        with pytest.raises(zero.RankMismatchError, match=match):
            zero.shard(model, opt, config or zero.ZeroConfig(stage=3), **options)

    attempt("shape", lambda: nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4, 4)))
    attempt("entries|parameter", lambda: Stack(depth=2 + rank))
    attempt("stage", Stack, zero.ZeroConfig(stage=2 + rank))
    attempt("reduce_dtype", Stack, zero.ZeroConfig(reduce_dtype=("float32", "bfloat16")[rank]))
    attempt("mixed_precision", Stack, mixed_precision=("no", "bf16")[rank])
    attempt("dtype", lambda: Stack().to((torch.float32, torch.float64)[rank]))
    attempt("trainable", lambda: Stack().requires_grad_(rank == 0))
    attempt("tied", lambda: Stack(tied=rank == 0))
    attempt("group", Stack, optimizer=lambda m: sgd(list(m.parameters())[rank:]))


def test_structure_mismatch_is_named(two):
    two.run(structures)


def values(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Stack()
    with torch.no_grad():
        model.embed.weight.fill_(1.0)  # equal everywhere
    first = model.blocks[0].norm.weight  # equal too: ones
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.shard(model, None, zero.ZeroConfig(stage=1))
    (message,) = [str(w.message) for w in caught if "differ between ranks" in str(w.message)]
    assert "'blocks.0.up.weight' first" in message
    torch.manual_seed(0)
    expected = Stack()
    with torch.no_grad():
        expected.embed.weight.fill_(1.0)
    for mine, theirs in zip(model.parameters(), expected.parameters()):
        assert torch.equal(mine, theirs)
    del first
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.shard(Stack(), None, zero.ZeroConfig(stage=3))


def test_values_follow_rank_0_with_a_warning(two):
    two.run(values)


def released(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = Stack(tied=True)
    shapes = {n: (p.shape, p.numel(), p.dtype, p.device) for n, p in model.named_parameters()}
    opt = sgd(list(model.parameters()))
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=3))
    objects = dict(model.named_parameters())
    for step in range(2):
        token_loss(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        assert {n: (p.shape, p.numel(), p.dtype, p.device) for n, p in model.named_parameters()} == shapes
        assert all(p.untyped_storage().nbytes() <= 4 * 64 for p in model.parameters())
        assert all(f.full.untyped_storage().nbytes() == 0 for u in engine.units for f in u.flats)
        assert all(objects[n] is p for n, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    # Their values are gathered for whoever reads them, and what is written to them counts.
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(0.5)
        assert model.blocks[0].up.weight.isfinite().all()
        assert (model.blocks[1].up.weight == 0.5).all()
    token_loss(model, rank, 2).backward()
    assert all(f.full.untyped_storage().nbytes() == 0 for u in engine.units for f in u.flats)
    with zero.GatheredParameters([model.blocks[1].up.weight]):
        assert (model.blocks[1].up.weight == 0.5).all()
    with pytest.raises(zero.LayoutError, match="cannot be moved or cast"):
        model.half()
    with pytest.raises(zero.LayoutError, match="cannot be moved or cast"):
        model.blocks[0].double()
    assert model.to("cpu") is model
    assert model.blocks[0].to("cpu", torch.float32) is model.blocks[0]
    with pytest.raises(zero.StateError, match="would share its memory"):
        nn.Parameter(model.head.weight)
    with pytest.raises(zero.ConfigError, match="sharded already"):
        zero.shard(model)
    opt.step()


def test_released_parameters_are_truthful(two):
    two.run(released)


def whole_after_step(rank: int, world: int, stage: int) -> None:
    """Stages 0 to 2: parameters are whole and current as soon as step() returns, without a forward."""
    torch.manual_seed(0)
    model = Stack()
    opt = sgd(list(model.parameters()))
    zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    before = [p.detach().clone() for p in model.parameters()]
    token_loss(model, rank, 0).backward()
    opt.step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(world)]
    torch.distributed.all_gather(everyone, mine)
    assert all(torch.equal(mine, theirs) for theirs in everyone)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()) if a.numel() > 8)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_whole_after_step(two, stage):
    two.run(whole_after_step, stage)


def state_dicts(rank: int, world: int, stage: int, dtype: str) -> None:
    plain = bert()
    model = bert()
    zero.shard(model, None, zero.ZeroConfig(stage=stage), mixed_precision=dtype)
    for part in ("", "bert.encoder.layer.0.", "cls."):
        whole = plain.get_submodule(part.rstrip(".")).state_dict()
        ours = model.get_submodule(part.rstrip(".")).state_dict()
        assert list(whole) == list(ours)
        for name, value in whole.items():
            assert ours[name].shape == value.shape
            assert ours[name].dtype == value.dtype
            if rank == 0:
                assert torch.equal(ours[name], value), name
    names = ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    tied = model.state_dict()
    assert tied[names[0]] is tied[names[1]]
    # Into a model with other values: by full values everywhere, and by rank 0's alone.
    changed = {name: value + 1 if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    model.load_state_dict(changed)
    again = model.state_dict()
    assert rank != 0 or all(torch.equal(again[name], changed[name]) for name in changed)
    only_first = {name: value if rank == 0 else value.to("meta") for name, value in plain.state_dict().items()}
    model.load_state_dict(only_first)
    again = model.state_dict()
    assert rank != 0 or all(torch.equal(again[name], value) for name, value in plain.state_dict().items())
    report = model.load_state_dict({"nonsense": torch.zeros(1)}, strict=False)
    assert report.unexpected_keys == ["nonsense"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**changed, "cls.predictions.bias": torch.zeros(3)})
    with pytest.raises(zero.StateError, match="assign"):
        model.load_state_dict(changed, assign=True)
    model.load_state_dict(plain.state_dict())
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_and_back(two, stage, dtype):
    two.run(state_dicts, stage, dtype)


def averages(rank: int, world: int, stage: int, dtype: str, inside: bool) -> None:
    """Moving averages by `state_dict()`, as timm's and YOLO's make them, on every rank."""
    torch.manual_seed(0)
    model = bert()
    average, expected, twin = (copy.deepcopy(model) for _ in range(3))
    optimizer = sgd(list(model.parameters()))
    zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision=dtype)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with zero.unsharded(model) if inside else contextlib.nullcontext(), torch.no_grad():
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values()):
            if mine.is_floating_point():
                mine.lerp_(theirs.detach(), 0.5)
        state = copy.deepcopy(model.state_dict())
        twin.load_state_dict(model.state_dict())
    whole = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    for name, value in expected.state_dict().items():
        assert name not in whole or torch.equal(state[name], whole[name])
        if value.is_floating_point():
            value.lerp_(state[name], 0.5)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(average.parameters(), expected.parameters()))
    assert all(torch.equal(param, whole[name]) for name, param in twin.named_parameters())
    model.load_state_dict(expected.state_dict())
    model.load_state_dict(state)
    assert all(torch.equal(zero.full_parameter(param), whole[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("inside", [False, True], ids=["", "in zero.unsharded"])
@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_moving_average_by_state_dict(two, stage, dtype, inside):
    two.run(averages, stage, dtype, inside)


def values_elsewhere(rank: int, world: int, stage: int, born: bool, room: bool) -> None:
    with zero.Init(enabled=born):
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    if not born:
        zero.shard(model, None, zero.ZeroConfig(stage=stage))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1 and not room:  # of 128 MiB that are free an eighth is not enough
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (128 << 20), limits[1]))
    try:
        state = model.state_dict()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    name = "1.bias"
    value = state[name]
    other = torch.ones(2048)
    if rank == 0:
        assert isinstance(value, torch.Tensor)
        assert not value.is_meta
        return
    assert (value.is_meta, value.dtype, value.shape) == (True, torch.float32, other.shape)
    assert torch.empty_like(value).shape == other.shape
    twin = copy.deepcopy(state)[name]
    assert twin.is_meta
    plain = pickle.loads(pickle.dumps(value))
    assert type(plain) is torch.Tensor
    assert plain.is_meta is not room
    computed = (
        lambda: other.lerp_(value.detach(), 0.5),
        lambda: other.copy_(twin),
        lambda: torch._foreach_lerp_([other, other], [value, value], 0.5),
        lambda: value.float() + other,
        lambda: value.sum().item(),
        lambda: bool((value > 0).all()),
        value.cpu,
        value.numpy,
        value.tolist,
    )
    for what in computed:
        if room:
            assert not getattr(what(), "is_meta", False)
            continue
        with pytest.raises(zero.StateError, match=r"every rank but 0 has its shape and type alone .*zero.unsharded"):
            what()
    if room:
        return
    assert (value.half() * 2).is_meta
    with pytest.raises(RuntimeError, match=r"zero\.unsharded"):
        nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).load_state_dict(state)
    assert torch.equal(other, torch.ones(2048))


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize(("stage", "born"), [(1, False), (3, False), (3, True)])
def test_values_that_are_elsewhere(two, stage, born, room):
    two.run(values_elsewhere, stage, born, room)


def undo(rank: int, world: int, stage: int) -> None:
    model = gpt2()
    hooks = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = zero.shard(model, None, zero.ZeroConfig(stage=stage))
    assert zero.engine_of(model) is engine
    assert zero.engine_of(nn.Sequential(model)) is engine
    assert type(model).__name__ == "GPT2LMHeadModel"
    engine.detach()
    assert zero.engine_of(model) is None
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight
    watch = weakref.ref(zero.shard(model, sgd(list(model.parameters())), zero.ZeroConfig(stage=stage)))
    del model, engine
    gc.collect()
    assert watch() is None  # freed with its model


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_detach_and_garbage(two, stage):
    two.run(undo, stage)


def formula(rank: int, world: int, stage: int) -> None:
    """Measured bytes are the report's prediction, to the byte, between backward and step and after it."""
    model = gpt2(n_embd=64)
    opt = torch.optim.AdamW(model.parameters())
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=stage))
    ids = torch.arange(8).view(1, 8)
    sizes = []
    for _ in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        held = engine.report()
        opt.step()
        opt.zero_grad()
        sizes.append((dict(held.measured), dict(engine.report().measured)))
    assert sizes[1] == sizes[-1]  # no growth
    steps = 4 * sum(len(unit.flats) for unit in engine.units)
    predicted, measured = engine.report().predicted, held.measured
    assert measured["parameters"] == predicted.parameters
    assert measured["gradients"] == predicted.gradients
    assert measured["optimizer"] - steps == predicted.optimizer
    assert sizes[-1][1]["gradients"] == 0
    # 16 Ψ / N and its kin: 4 for parameters, 4 for gradients, 8 for Adam, each divided where the stage divides it.
    psi = sum(p.numel() for p in model.parameters())
    ideal = {0: 16, 1: 4 + 12 / world, 2: 4 + 12 / world, 3: 16 / world}[stage] * psi
    assert sum(measured.values()) <= ideal * 1.05
    assert "MiB per rank" in str(engine.report())
    assert engine.report().to_dict()["stage"] == stage


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_those_predicted(two, stage):
    two.run(formula, stage)


def peak(rank: int, world: int) -> None:
    """Stage 3: what is gathered at any moment stays within two units, and ends at nothing."""
    model = gpt2(n_layer=6)
    opt = sgd(list(model.parameters()))
    engine = zero.shard(model, opt, zero.ZeroConfig(stage=3))
    held = []

    def sample(*_):
        held.append(sum(f.full.untyped_storage().nbytes() for u in engine.units for f in u.flats))

    for module in model.modules():
        module.register_forward_hook(sample)
        module.register_full_backward_hook(sample)
    for step in range(3):
        ids = torch.arange(8).view(1, 8) + step
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()
    sizes = sorted((u.gathered_bytes for u in engine.units), reverse=True)
    # The tied embedding is used first and last, and stays in between.
    tied = next(u.gathered_bytes for u in engine.units if u.name.endswith("wte"))
    assert max(held) <= sizes[0] + sizes[1] + tied
    sample()
    assert held[-1] == 0


def test_gathered_bytes_stay_within_two_units(two):
    two.run(peak)


def refused_on_one(rank: int, world: int) -> None:
    model = Stack()
    stranger = sgd([nn.Parameter(torch.zeros(2))] if rank else list(model.parameters()))
    error = zero.LayoutError if rank else zero.RankMismatchError
    with pytest.raises(error, match="the model does not have"):
        zero.shard(model, stranger)


def test_a_refusal_on_one_rank_is_one_on_all(two):
    two.run(refused_on_one)


def shared_activation(rank: int, world: int) -> None:
    """XLM's activation is one module for all models: what is done to a plain one is no collective."""
    act = nn.GELU()
    sharded, plain = (nn.Sequential(nn.Linear(4, 4), act) for _ in range(2))
    zero.shard(sharded, None, zero.ZeroConfig(stage=3))
    if rank == 0:
        plain.load_state_dict(plain.state_dict())
    state = sharded.state_dict()
    sharded.load_state_dict(state)


def test_modules_of_two_models(two):
    two.run(shared_activation)


def test_bad_models_are_refused():
    with pytest.raises(zero.LayoutError, match="meta device"):
        zero.shard(nn.Linear(2, 2, device="meta"))
    with pytest.raises(zero.LayoutError, match="no parameters"):
        zero.shard(nn.ReLU())
    with pytest.raises(zero.LayoutError, match="the model does not have"):
        zero.shard(nn.Linear(2, 2), sgd([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(zero.LayoutError, match="no shape yet"):
        zero.shard(nn.LazyLinear(3))
