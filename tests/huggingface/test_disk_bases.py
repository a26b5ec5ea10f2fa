"""Models that stay in their files (`zero.Init(offload_params="disk")`): read, changed, sharded, trained with LoRA."""

from __future__ import annotations

import copy
import ctypes
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_zero as zero
from tests.huggingface.test_from_pretrained import header_bytes
from tests.huggingface.test_weights import build, edit
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo

VOCAB = 500
STEPS = 3
IDS = torch.randint(0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(1))
ONE, OTHER, LAST = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"


def llama(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=4,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`large`: 257 MiB in several files; `small`; `bf16`."""
    root = tmp_path_factory.mktemp("bases")
    llama(64, 256).save_pretrained(root / "large", max_shard_size="80MB")
    llama(2, 64).save_pretrained(root / "small")
    llama(3, 64).to(torch.bfloat16).save_pretrained(root / "bf16")
    return root


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def deferred(path: Path) -> Any:
    with zero.Init(offload_params="disk"):
        return load(path)


def own_copy(base: Path, folder: Path, rank: int) -> Path:
    """This rank's copy of a model's folder."""
    return shutil.copytree(base, folder / f"rank{rank}", dirs_exist_ok=True)


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def shard_frozen(model: nn.Module, folder: Path, **changes: Any) -> zero.Engine:
    options = {"stage": 3, "offload_params": "disk", "offload_dir": str(folder / "tier"), **changes}
    return zero.shard(model, None, zero.ZeroConfig(**options))


def stored_on_disk(engine: zero.Engine) -> int:
    """Bytes of the engine's own file on all ranks."""
    return sum(engine.exchange(engine.context.storage.disk.nbytes))


# What leaves values in the files, and what does not ---------------------------------------------------------------------


def test_what_is_cast_is_read(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    size_bytes = file_of(tmp_path).stat().st_size
    for options, cast, expected in (
        ({"offload_params": "disk"}, {"dtype": torch.bfloat16}, size_bytes),
        ({}, {}, size_bytes),
        ({"offload_params": "disk"}, {}, header_bytes(file_of(tmp_path))),
    ):
        with zero.Init(**options) as init:
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **cast)
        assert init.bytes_read == expected


def test_ties_are_found_without_loading(tmp_path: Path) -> None:
    build("llama-tied").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({OTHER: tensors["model.embed_tokens.weight"].clone()}))
    with zero.Init(offload_params="disk") as init:
        model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert init.peak_numel == 0


def _in_init(change: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], None]:
    def touch(param: nn.Parameter) -> None:
        with zero.Init(), torch.no_grad():
            change(param)

    return touch


def _edit(param: nn.Parameter) -> None:
    with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param[0, 0] = 9.0


def _look(param: nn.Parameter) -> None:
    with zero.GatheredParameters(param):
        param.sum().item()


def _fail(param: nn.Parameter) -> None:
    with pytest.raises(TypeError):
        param.normal_("no number")  # type: ignore[arg-type]


def _set_first(value: Tensor) -> Tensor:
    value[0, 0] = 9.0
    return value


Touch = Callable[[nn.Parameter], Any]
KEEPS: dict[str, Touch] = {
    "read": zero.full_parameter,
    "gathered": _look,
    "copied": _in_init(copy.deepcopy),
    "described": _in_init(lambda param: param.stride()),
    "failed write": _in_init(_fail),
    "frozen": lambda param: param.requires_grad_(False),
    "moved": lambda param: setattr(param, "data", param.to("cpu")),
}
LOADS: dict[str, tuple[Touch, Callable[[Tensor], Tensor]]] = {
    "operation": (_in_init(lambda param: param.mul_(3)), lambda value: 3 * value),
    "overwritten": (_in_init(nn.init.ones_), torch.ones_like),
    "read inside": (_in_init(lambda param: param.sum().item()), torch.clone),
    "edited": (_edit, _set_first),
    "set": (lambda param: zero.set_full_parameter(param, torch.ones(param.shape)), torch.ones_like),
    "local": (lambda param: zero.set_local_parameter(param, 2 * zero.local_parameter(param)), lambda value: 2 * value),
    "copied into": (lambda param: param.copy_(torch.full(param.shape, 2.0)), lambda value: torch.full_like(value, 2)),
    "cast": (lambda param: setattr(param, "data", param.double()), torch.Tensor.double),
}


def touches(rank: int, world: int, base: Path, folder: Path) -> None:
    """A value that is in the file alone is lost with it: an error on every rank that names the file."""
    expected = load_file(file_of(base))[ONE]
    for name in (*KEEPS, *LOADS):
        mine = own_copy(base, folder, rank)
        model = deferred(mine)
        param = model.get_parameter(ONE)
        touch, change = LOADS.get(name) or (KEEPS[name], torch.clone)
        with torch.no_grad():
            touch(param)
        assert torch.equal(zero.full_parameter(param), change(expected.clone())), name
        torch.distributed.barrier() if world > 1 else None
        assert torch.equal(load_file(file_of(mine))[ONE], expected), "the file is never written"
        file_of(mine).unlink()
        for key in [OTHER] + [ONE] * (name in KEEPS):
            with pytest.raises(zero.TierError, match="model.safetensors"):
                zero.full_parameter(model.get_parameter(key))
        if name in LOADS:
            assert torch.equal(zero.full_parameter(param), change(expected.clone())), name


@pytest.mark.parametrize("world", [1, 2])
def test_touching_loads(world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(touches, bases / "small", tmp_path)


def one_rank(rank: int, world: int, base: Path, folder: Path) -> None:
    """What one rank alone has changed is used; the others' parts stay as they were."""
    model = deferred(base).requires_grad_(False)
    expected = load_file(file_of(base))[ONE]
    param = model.get_parameter(ONE)
    mine = zero.local_parameter(param)
    if rank == 1:
        zero.set_local_parameter(param, 2 * mine)
    doubled = expected.reshape(-1).clone()
    per_rank = -(-doubled.numel() // world)
    doubled[per_rank : 2 * per_rank] *= 2
    assert torch.equal(zero.full_parameter(param), doubled.view(expected.shape))
    engine = shard_frozen(model, folder)
    assert torch.equal(zero.full_parameter(param), doubled.view(expected.shape))
    assert torch.equal(zero.full_parameter(model.get_parameter(OTHER)), load_file(file_of(base))[OTHER])
    assert stored_on_disk(engine) > 0


def test_one_rank_touches(bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[3].run(one_rank, bases / "small", tmp_path)


# Sharded --------------------------------------------------------------------------------------------------------------


def which_units(rank: int, world: int, base: Path, folder: Path) -> None:
    """Frozen units on disk are read from the files; trained ones, and those that are elsewhere, have values of their own."""
    expected = logits(load(base))
    for trained, changes in (
        ((), {}), (("lm_head",), {}), (("model", "lm_head"), {}), ((), {"offload_params": "cpu"}),
        ((), {"offload_params": "none"}), ((), {"stage": 1, "offload_params": "none"}),
    ):  # fmt: skip
        mine = own_copy(base, folder, rank)
        model = deferred(mine).requires_grad_(False)
        for name in trained:
            model.get_submodule(name).requires_grad_(True)
        engine = shard_frozen(model, folder, **changes)
        assert torch.equal(logits(model), expected)
        assert (stored_on_disk(engine) > 0) == bool(trained)
        file_of(mine).unlink()
        if changes or "model" in trained:
            assert torch.equal(logits(model), expected)
        else:
            with pytest.raises(zero.TierError, match="model.safetensors"):
                logits(model)


@pytest.mark.parametrize("world", [1, 2])
def test_which_units_stay_in_the_files(world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(which_units, bases / "small", tmp_path)


def written(rank: int, world: int, base: Path, folder: Path, when: str) -> None:
    """What is written, before or after `shard`, makes a copy; the file stays as it is."""
    model, stock = deferred(base).requires_grad_(False), load(base)
    engine = shard_frozen(model, folder) if when == "after" else None
    zero.set_full_parameter(model.get_parameter(ONE), torch.ones(stock.get_parameter(ONE).shape))
    with zero.GatheredParameters(model.get_parameter(LAST), modifier_rank=0):
        if rank == 0:
            model.get_parameter(LAST).data[0, 0] = 9.0
    with torch.no_grad():
        stock.get_parameter(ONE).fill_(1)
        stock.get_parameter(LAST)[0, 0] = 9
    engine = engine or shard_frozen(model, folder)
    assert torch.equal(logits(model), logits(stock))
    state = model.state_dict()
    assert rank or all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
    assert stored_on_disk(engine) > 0
    fresh = {name: torch.full(value.shape, 0.5) for name, value in stock.state_dict().items()}
    model.load_state_dict(fresh)
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), fresh[name])
    assert torch.equal(load_file(file_of(base))[ONE], load(base).get_parameter(ONE))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_first_write_makes_a_copy(
    world: int, when: str, bases: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    pools[world].run(written, bases / "small", tmp_path, when)


# Files that change ----------------------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    """Another file of the same size and time."""
    times = path.stat()
    other = path.with_suffix(".other")
    other.write_bytes(bytes(times.st_size))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(other, path)


def rewrite(path: Path) -> None:
    """Other bytes in the same file."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 1_000_000_000))
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80\x3f")


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


FAULTS: dict[str, Callable[[Path], None]] = {
    "vanished": Path.unlink, "replaced": replace, "rewritten": rewrite, "shortened": shorten,
}  # fmt: skip


def faults(rank: int, world: int, base: Path, folder: Path) -> None:
    """One rank's file changes, before the first read, before `shard`, and while it is used: an error on all, naming it."""
    expected = logits(load(base))
    whose = f"rank{world - 1}/model.safetensors"
    for kind, change in FAULTS.items():
        for sharded in (False, True):
            mine = own_copy(base, folder, rank)
            kept = mine / "kept"
            model = deferred(mine).requires_grad_(False)
            if sharded:
                shard_frozen(model, folder)
                assert torch.equal(logits(model), expected)
            kept.unlink(missing_ok=True)
            if rank == world - 1:
                os.link(file_of(mine), kept)
                change(file_of(mine))
            if not sharded:
                with pytest.raises(zero.TierError, match=whose):
                    zero.full_parameter(model.get_parameter(LAST))
                with pytest.raises(zero.TierError, match=whose):
                    shard_frozen(model, folder, offload_params="cpu")
                continue
            with pytest.raises(zero.TierError, match=whose):
                logits(model)
            if kind in ("vanished", "replaced"):  # it comes back
                if rank == world - 1:
                    os.replace(kept, file_of(mine))
                assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_that_changes_is_an_error_on_all_ranks(
    world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    pools[world].run(faults, bases / "small", tmp_path)


def test_a_parameter_on_disk_that_becomes_small(tmp_path: Path) -> None:
    """Its slice was stored on disk; what it has now is too little for that, and counts."""

    class Shrunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 16))
            self.after = nn.Linear(2, 2)  # what came before is closed
            self.weight.data = torch.full((10,), 3.0)

    with zero.Init(offload_params="disk", offload_dir=str(tmp_path)):
        model = Shrunk()
    assert torch.equal(zero.full_parameter(model.weight), torch.full((10,), 3.0))


def test_settings() -> None:
    with pytest.raises(zero.ConfigError, match=r"offload_params must be one of none, cpu, disk, auto, found 'ssd'"):
        zero.Init(offload_params="ssd")


# Training -------------------------------------------------------------------------------------------------------------


def adapted(base: nn.Module) -> Any:
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights="gaussian")
    return get_peft_model(base, config)


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


def memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def measured(rank: int, world: int, root: Path, folder: Path) -> dict[str, Any]:
    ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    model = born_lora(root / "small")  # threads, pools and caches of whoever is used below
    optimizer = optimizer_of(model)
    engine_for(model, optimizer, folder)
    train(model, optimizer)

    before, data = memory("VmRSS"), memory("VmData")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + (128 << 20), limits[1]))
    try:
        model = born_lora(root / "large")
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
    plain = adapted(load(root / "large"))
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
    for found in pools[world].run(measured, bases, tmp_path, timeout_s=240):
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


# The stock Trainer ----------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(model: nn.Module, folder: Path, **changes: Any) -> transformers.Trainer:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, logging_steps=1, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True, max_grad_norm=0.0, **changes,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=args, train_dataset=Tokens())


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
