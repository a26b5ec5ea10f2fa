"""`zero.unsharded`: all weights at once; forwards inside gather nothing, writes count, training continues as without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hf_zero as zero
from tests.kit.pool import RankPool
from tests.models import VOCAB, adamw, gpt2, ids

pytestmark = pytest.mark.gloo

CASES = [  # ranks, stage, precision, type of the model, tier, in the compute type
    pytest.param(1, 3, "bf16", torch.float32, "none", False),
    pytest.param(2, 0, "bf16", torch.float32, "none", False),
    pytest.param(2, 1, "no", torch.float32, "none", False),
    pytest.param(2, 2, "bf16", torch.float32, "cpu", True),
    pytest.param(2, 3, "no", torch.float32, "none", False),
    pytest.param(2, 3, "bf16", torch.float32, "cpu", False),
    pytest.param(2, 3, "bf16", torch.float32, "none", True),
    pytest.param(2, 3, "no", torch.bfloat16, "disk", False),
    pytest.param(3, 3, "no", torch.float32, "disk", False),
]
WEIGHT, BIAS = "transformer.h.1.mlp.c_fc.weight", "transformer.h.0.ln_1.bias"


def made(
    stage: int, precision: str, dtype: torch.dtype, tier: str, folder: str
) -> tuple[nn.Module, torch.optim.Optimizer, zero.Engine]:
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    optimizer = adamw(model)
    params = tier if stage == 3 else "none"
    config = zero.ZeroConfig(
        stage=stage, offload_params=params, offload_optimizer=tier, offload_dir=folder if tier == "disk" else None
    )
    return model, optimizer, zero.shard(model, optimizer, config, mixed_precision=precision)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    tokens = ids(rank, step)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def evaluated(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids(rank, 9)).logits


def on_device(engine: zero.Engine) -> int:
    return sum(row.measured for row in engine.report().tiers if row.tier == "device" and row.kind != "all")


def whole(
    rank: int, world: int, stage: int, precision: str, dtype: torch.dtype, tier: str, folder: str, compute: bool
) -> None:
    model, optimizer, engine = made(stage, precision, dtype, tier, folder)
    twin, twin_optimizer, _ = made(stage, precision, dtype, tier, folder)
    train(model, optimizer, rank, 0), train(twin, twin_optimizer, rank, 0)
    params = dict(model.named_parameters())
    expected = {name: zero.full_parameter(param) for name, param in params.items()}
    logits = evaluated(model, rank)
    held = on_device(engine)
    with zero.unsharded(model, in_compute_dtype=compute):
        for name, param in params.items():
            assert compute or param.dtype == dtype, name
            assert torch.equal(param, expected[name].to(param.dtype)), name
            assert param.stride() == torch.empty(param.shape).stride(), name
        before = engine.traffic.to_dict()
        for _ in range(2):
            assert torch.equal(evaluated(model, rank), logits)
        tokens = model.generate(ids(0, 0)[:, :3], max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
        if rank == 0:
            evaluated(model, rank)
        with zero.unsharded(model.transformer), zero.GatheredParameters(model):
            assert all(torch.equal(param, expected[name].to(param.dtype)) for name, param in params.items())
        assert engine.traffic.to_dict() == before, "nothing is sent inside"
        state = model.state_dict()
        assert (compute and rank) or all(torch.equal(state[name], expected[name].to(dtype)) for name in params)
    assert on_device(engine) == held
    assert tokens.shape[1] <= 5 + 3 * rank
    if stage == 3 and world > 1:
        assert params[BIAS].stride() == (0,), "released"
    assert torch.equal(evaluated(model, rank), logits)
    evaluated(twin, rank)
    for step in (1, 2):
        assert torch.equal(train(model, optimizer, rank, step), train(twin, twin_optimizer, rank, step))
    for param, other in zip(params.values(), twin.parameters()):
        assert torch.equal(zero.full_parameter(param), zero.full_parameter(other))


@pytest.mark.parametrize(("world", "stage", "precision", "dtype", "tier", "compute"), CASES)
def test_forwards_inside_gather_nothing_and_training_goes_on(
    pools: dict[int, RankPool],
    tmp_path: Path,
    world: int,
    stage: int,
    precision: str,
    dtype: torch.dtype,
    tier: str,
    compute: bool,
) -> None:
    pools[world].run(whole, stage, precision, dtype, tier, str(tmp_path), compute)


class _UserError(Exception):
    pass


def written(rank: int, world: int, stage: int, precision: str, dtype: torch.dtype, tier: str, folder: str) -> None:
    """Against the plain model that is edited alike."""
    model, optimizer, _ = made(stage, precision, dtype, tier, folder)
    train(model, optimizer, rank, 0)
    params = dict(model.named_parameters())
    plain = gpt2().to(dtype)
    masters = {name: zero.full_parameter(param) for name, param in params.items()}
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(masters[name])
    twins = dict(plain.named_parameters())

    def edit(these: dict[str, nn.Parameter], by: float) -> None:
        these[WEIGHT].data += by
        these[WEIGHT].data[3].zero_()
        with torch.no_grad():
            these[BIAS].fill_(by)
        these["transformer.ln_f.weight"].data = torch.full((32,), by, dtype=dtype)

    with zero.unsharded(model):
        edit(params, 0.5)
        edit(twins, 0.5)
        state = model.state_dict()
        assert all(torch.equal(state[name], twin) for name, twin in twins.items())
        tokens = ids(rank, 1)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            expected = plain(input_ids=tokens).logits
        with torch.no_grad():
            assert torch.equal(model(input_ids=tokens).logits, expected)
        if world > 1:
            with zero.GatheredParameters(params[BIAS], modifier_rank=1), torch.no_grad():
                if rank == 1:
                    params[BIAS].fill_(0.75)
            assert bool((params[BIAS] == 0.75).all())
            twins[BIAS].data.fill_(0.75)

    def break_off() -> None:
        edit(params, 1.5)
        raise _UserError

    with pytest.raises(_UserError), zero.unsharded(model):
        break_off()
    edit(twins, 1.5)
    for name, param in params.items():
        found = zero.full_parameter(param)
        assert torch.equal(found.to(dtype), twins[name]), name
        if name not in (WEIGHT, BIAS, "transformer.ln_f.weight"):
            assert torch.equal(found, masters[name]), "what was left alone keeps its digits"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = plain(input_ids=tokens).logits
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, expected)
    if world > 1:
        with pytest.raises(zero.RankMismatchError, match="with other values on rank 1"), zero.unsharded(model):
            params[WEIGHT].data.fill_(float(rank))
    train(model, optimizer, rank, 1)


@pytest.mark.parametrize(
    ("world", "stage", "precision", "dtype", "tier", "compute"), [c for c in CASES if not c.values[-1]]
)
def test_writes_inside_count(
    pools: dict[int, RankPool],
    tmp_path: Path,
    world: int,
    stage: int,
    precision: str,
    dtype: torch.dtype,
    tier: str,
    compute: bool,
) -> None:
    assert not compute, "edits in the compute type are of that type"
    pools[world].run(written, stage, precision, dtype, tier, str(tmp_path))


def refused(rank: int, world: int, stage: int, precision: str) -> None:
    model, optimizer, engine = made(stage, precision, torch.float32, "none", "")
    twin, twin_optimizer, _ = made(stage, precision, torch.float32, "none", "")
    state = model.state_dict()
    tokens = ids(rank, 0)
    with zero.unsharded(model):
        loss = model(input_ids=tokens, labels=tokens).loss
        for what in (
            loss.backward,
            optimizer.step,
            lambda: model.load_state_dict(state),
            lambda: zero.set_full_parameter(model.lm_head.weight, torch.zeros(VOCAB, 32)),
            engine.detach,
            engine.offload_states,
            lambda: engine.load("nowhere"),
            lambda: engine.bind(adamw(model)),
        ):
            with pytest.raises(zero.StateError, match="inside zero.unsharded"):
                what()
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()  # of a forward inside
    optimizer.step()
    optimizer.zero_grad()
    other = twin(input_ids=tokens, labels=tokens).loss
    other.backward()
    twin_optimizer.step()
    twin_optimizer.zero_grad()
    assert torch.equal(loss, other)
    for step in (1, 2):
        assert torch.equal(train(model, optimizer, rank, step), train(twin, twin_optimizer, rank, step))
    for (name, param), twins in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(zero.full_parameter(param), zero.full_parameter(twins), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(("stage", "precision"), [(1, "no"), (1, "bf16"), (3, "no"), (3, "bf16")])
def test_training_inside_is_refused_by_name_and_goes_on_after_it(two: RankPool, stage: int, precision: str) -> None:
    two.run(refused, stage, precision)


def too_large(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw(model)
    # A step has room; the whole model has not.
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, device_memory="230KiB"))
    before = train(model, optimizer, rank, 0)
    with (
        pytest.raises(zero.OutOfMemoryError, match=r"whole weights take .* more than is free on rank \d") as error,
        zero.unsharded(model),
    ):
        pass
    assert "device_memory" in str(error.value)
    assert all(param.stride() == (0,) * param.dim() for param in model.parameters())
    assert train(model, optimizer, rank, 0) < before
    engine.detach()
    with zero.unsharded(model):
        assert all(torch.isfinite(param).all() for param in model.parameters())
    with zero.Init():
        deferred = nn.Linear(4, 4)
    with pytest.raises(zero.StateError, match=r"born under zero\.Init"), zero.unsharded(deferred):
        pass


def test_missing_memory_is_named_on_every_rank(two: RankPool) -> None:
    two.run(too_large)
