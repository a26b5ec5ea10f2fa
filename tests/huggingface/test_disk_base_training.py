"""Bases that stay in their files, trained with LoRA: to the bit as plain PEFT, within little memory."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_zero as zero
from tests.huggingface.conftest import llama
from tests.huggingface.test_disk_bases import IDS, deferred, load, stored_on_disk
from tests.kit.health import memory
from tests.kit.jobs.harness import Tokens, arguments, fresh
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo
STEPS = 3


def adapted(base: nn.Module, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"init_lora_weights": "gaussian", **options}
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, **options))


def born_lora(path: Path) -> Any:
    return adapted(deferred(path))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mixed_precision: str = "no") -> list[float]:
    """Every rank takes the same batch, so that the average of the gradients is each of them."""
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine_for(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path, mixed_precision: str = "no"
) -> zero.Engine:
    config = zero.ZeroConfig(stage=3, offload_params="disk", offload_dir=str(folder / "tier"))
    return zero.shard(model, optimizer, config, mixed_precision=mixed_precision)


def adapter_of(model: Any) -> dict[str, Tensor]:
    return get_peft_model_state_dict(model, model.state_dict())


def frozen_bytes(model: nn.Module, but: tuple[str, ...] = ()) -> int:
    return sum(
        param.numel() * param.element_size()
        for name, param in model.named_parameters()
        if not param.requires_grad and not any(part in name for part in but)
    )


def storage_of(engine: zero.Engine) -> Any:
    return engine.context.storage


def in_files(engine: zero.Engine) -> bool:
    """Return whether the base is read from the model's own files: the engine's file is too small for it."""
    return stored_on_disk(engine) < frozen_bytes(engine.model) // 2


def measured(rank: int, world: int, small: Path, large: Path, folder: Path) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    model = born_lora(small)  # threads, pools and caches of whoever is used below
    optimizer = optimizer_of(model)
    engine_for(model, optimizer, folder)
    train(model, optimizer)

    before, data = memory("VmRSS"), memory("VmData")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + (128 << 20), limits[1]))
    try:
        model = born_lora(large)
        optimizer = optimizer_of(model)
        engine = engine_for(model, optimizer, folder)
        storage_of(engine).meter.reset()
        losses = train(model, optimizer)
        grown = memory("VmHWM") - before
        with pytest.raises((RuntimeError, MemoryError)):
            torch.ones(frozen_bytes(model) // 4)  # there is no room for the base
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    meter = storage_of(engine).meter
    engine.save(folder / f"saved{world}")
    plain = adapted(load(large))
    expected = train(plain, optimizer_of(plain))
    saved = load_file(folder / f"saved{world}" / "adapter_model.safetensors")
    return {
        "base": frozen_bytes(model),
        "ends": frozen_bytes(model) - frozen_bytes(model, ("embed_tokens", "lm_head", "model.norm")),
        "grown": grown,
        "read": meter["read"].bytes,
        "written": meter["write"].bytes,
        "disk": storage_of(engine).disk.nbytes,
        "losses": losses == expected,
        "files": sorted(path.name for path in (folder / f"saved{world}").iterdir()),
        "adapter": all(torch.equal(saved[key], value) for key, value in adapter_of(plain).items()),
    }


@pytest.mark.wide
@pytest.mark.parametrize("world", [1, 2])
def test_a_base_larger_than_memory(world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    """Under a limit of 128 MiB of new memory, and the most resident ever is less than a third of the base's 257 MiB.

    Two gathered blocks and two slices are 16 MiB of it; the rest is modules, adapters, activations, and holes between them.
    """
    large = tmp_path / "large"
    llama(64, 256).save_pretrained(large, max_shard_size="80MB")
    for found in pools[world].run(measured, bases / "small", large, tmp_path, timeout_s=240):
        assert found["base"] > 256 << 20
        assert found["grown"] < found["base"] / 3
        assert (found["written"], found["disk"]) == (0, 0)
        # Forward and backward bring each block once; what is at both ends of the model may be needed in one of them only.
        least, most = 2 * (found["base"] - found["ends"]) / world, 2 * found["base"] / world
        assert least <= found["read"] / STEPS <= most * 1.001, "padding is not read, slices may differ by a little"
        assert found["losses"], "bit-equal to plain PEFT"
        assert found["adapter"]
        assert "adapter_model.safetensors" in found["files"]
        assert "model.safetensors" not in found["files"]


def variants(rank: int, world: int, root: Path, folder: Path, name: str, mixed_precision: str) -> tuple[Any, ...]:
    model = born_lora(root / name)
    optimizer = optimizer_of(model)
    engine = engine_for(model, optimizer, folder, mixed_precision)
    losses = train(model, optimizer)
    plain = adapted(load(root / name))
    expected = train(plain, optimizer_of(plain), mixed_precision)
    model.eval(), plain.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
        same = torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        words = [
            m.generate(input_ids=IDS[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, plain)
        ]
    state, stock = model.state_dict(), plain.state_dict()
    equal = rank > 0 or all(torch.equal(state[key], value) for key, value in stock.items())
    return losses == expected, same, torch.equal(*words), equal, in_files(engine)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "mixed_precision"), [("bf16", "no"), ("small", "bf16"), ("bf16", "bf16")])
def test_other_types(
    name: str, mixed_precision: str, world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """A bf16 base; a float32 base that is computed with in bf16: cast as it is read."""
    for found in pools[world].run(variants, bases, tmp_path, name, mixed_precision):
        assert found == (True, True, True, True, True)


def bound_later(rank: int, world: int, root: Path, folder: Path, name: str, mixed_precision: str) -> None:
    """The optimizer comes after `shard`, as with `accelerator.prepare(model)`, and later another one."""
    runs = []
    for later in (False, True):
        model = born_lora(root / name)
        optimizer = optimizer_of(model)
        engine = engine_for(model, None if later else optimizer, folder, mixed_precision)
        meter, plan = storage_of(engine).meter, engine.plan.to_dict()
        adapters = sum(param.numel() for param in model.parameters() if param.requires_grad) * 4
        if later:
            meter.reset()
            engine.bind(optimizer)
            assert meter["read"].bytes <= 2 * adapters, "no frozen value is read"
            assert engine.plan.to_dict() == plan, "what is stored where is decided by shard"
        assert in_files(engine)
        losses = train(model, optimizer, mixed_precision)
        values = {key: zero.full_parameter(param) for key, param in model.named_parameters()}  # waits for the last step
        if later:
            copies = 0.5 if mixed_precision == "bf16" else 0
            per_step = (4 + copies) * adapters / world  # a gradient, a master, two states
            assert meter["write"].bytes == STEPS * per_step, "what is trained"
        assert in_files(engine)
        runs.append((losses, values))
        # Group 0 is now another set of parameters.
        lora_b = [param for key, param in model.named_parameters() if "lora_B" in key]
        engine.bind(torch.optim.SGD(lora_b, lr=1e-2))
        assert in_files(engine)
        assert all(torch.equal(zero.full_parameter(p), values[key]) for key, p in model.named_parameters())
        engine.detach()
    (losses, values), (losses_later, values_later) = runs
    assert losses == losses_later
    assert all(torch.equal(values[key], values_later[key]) for key in values)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "mixed_precision"), [("small", "no"), ("small", "bf16"), ("bf16", "no")])
def test_an_optimizer_that_comes_later(
    world: int, name: str, mixed_precision: str, bases: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    pools[world].run(bound_later, bases, tmp_path, name, mixed_precision)


def whole_checkpoint(rank: int, world: int, root: Path, folder: Path) -> None:
    """Without PEFT a save has all weights, those of the base from its files; loading it gives the base a place of its own."""
    with zero.Init(offload_params="disk"):
        model = load(root / "bf16")
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    optimizer = optimizer_of(model)
    engine = engine_for(model, optimizer, folder)
    train(model, optimizer)
    engine.save(folder / "saved")
    assert in_files(engine)
    base, saved = load_file(root / "bf16" / "model.safetensors"), load_file(folder / "saved" / "model.safetensors")
    assert [key for key in base if not torch.equal(base[key], saved[key])] == ["model.norm.weight"]
    expected = zero.full_parameter(model.model.norm.weight)
    train(model, optimizer)
    engine.load(folder / "saved")
    assert torch.equal(zero.full_parameter(model.model.norm.weight), expected)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(zero.full_parameter(model.get_parameter(name)), base[name])


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_with_the_base(world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(whole_checkpoint, bases, tmp_path)


# Adapters that are made of the base's values ------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "init_lora_weights": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}


def made_of_weights(rank: int, world: int, base: Path, kind: str, tier: str, folder: Path) -> None:
    plain = adapted(load(base), **KINDS[kind])
    expected = train(plain, optimizer_of(plain))
    options = {"offload_params": tier, "offload_dir": str(folder)}
    with zero.Init(**options):
        model = adapted(load(base), **KINDS[kind])
    optimizer = optimizer_of(model)
    zero.shard(model, optimizer, zero.ZeroConfig(stage=3, **options))
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-5)
    saved, wanted = adapter_of(model), get_peft_model_state_dict(plain)
    assert rank or all(torch.allclose(saved[key], wanted[key], atol=1e-5) for key in wanted)
    with zero.Init(**options):
        outside = load(base)
    with pytest.raises(zero.StateError, match="zero.Init"):
        adapted(outside, **KINDS[kind])


@pytest.mark.parametrize(("kind", "tier"), [("dora", "none"), ("dora", "disk"), ("pissa", "disk"), ("olora", "cpu")])
def test_adapters_made_of_deferred_weights(kind: str, tier: str, bases: Path, tmp_path: Path, two: RankPool) -> None:
    two.run(made_of_weights, bases / "small", kind, tier, tmp_path)


# The stock Trainer ----------------------------------------------------------------------------------------------------


def trainer(model: nn.Module, folder: Path, **changes: Any) -> transformers.Trainer:
    fresh()
    steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "max_grad_norm": 0.0}
    args = arguments(folder, None, **steps, **changes)
    return transformers.Trainer(model=model, args=args, train_dataset=Tokens(16, 8))


def stock_trainer(rank: int, world: int, root: Path, folder: Path) -> None:
    """To the bit, so nothing is clipped: torch adds its norm up in float32, ours is the true one, rounded once."""
    runs = {}
    plugin = zero.ZeroPlugin(stage=3, offload_params="disk", offload_dir=str(folder / "tier"))
    makers: dict[str, Callable[[], Any]] = {
        "stock": lambda: trainer(adapted(load(root / "bf16")), folder / "stock"),
        "zero": lambda: trainer(born_lora(root / "bf16"), folder / "zero", parallelism_config=plugin),
    }
    for name, make in makers.items():
        run = make()
        run.train()
        runs[name] = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert runs["zero"] == runs["stock"]
    engine = zero.engine_of(run.model)
    assert in_files(engine)
    assert storage_of(engine).disk.nbytes == 0
    mine, theirs = ({path.name for path in (folder / name / "checkpoint-4").iterdir()} for name in runs)
    assert "adapter_model.safetensors" in mine & theirs
    assert "model.safetensors" not in mine | theirs
    adapters = [load_file(folder / name / "checkpoint-4" / "adapter_model.safetensors") for name in runs]
    assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])
    again = trainer(born_lora(root / "bf16"), folder / "zero", parallelism_config=plugin)
    again.train(resume_from_checkpoint=str(folder / "zero" / "checkpoint-2"))
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == runs["stock"]
    assert in_files(zero.engine_of(again.model))
    reloaded = PeftModel.from_pretrained(load(root / "bf16"), folder / "zero" / "checkpoint-4")
    assert all(torch.equal(value, adapters[0][key]) for key, value in get_peft_model_state_dict(reloaded).items())


def test_stock_trainer(bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[1].run(stock_trainer, bases, tmp_path)
