"""Models that stay in their files (`zero.Init(offload_params="disk")`): read, changed, sharded."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import hf_zero as zero
from tests.huggingface.conftest import VOCAB
from tests.huggingface.test_from_pretrained import header_bytes
from tests.huggingface.test_weights import build
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo

IDS = torch.randint(0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(1))
ONE, OTHER, LAST = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"


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


def test_copies_and_engines_have_what_was_just_written(tmp_path: Path) -> None:
    """A parameter that was written is still whole when it is copied, and when its model is sharded, inside the `with`."""
    build("llama").save_pretrained(tmp_path / "base")
    expected = 3 * load_file(file_of(tmp_path / "base"))[ONE]
    with zero.Init(offload_params="disk"), torch.no_grad():
        model = load(tmp_path / "base").requires_grad_(False)
        param = model.get_parameter(ONE)
        twin = copy.deepcopy(param.mul_(3))
        shard_frozen(model, tmp_path)
    assert torch.equal(zero.full_parameter(twin), expected)
    assert torch.equal(zero.full_parameter(param), expected)


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


def test_one_rank_touches(bases: Path, tmp_path: Path, two: RankPool) -> None:
    two.run(one_rank, bases / "small", tmp_path)


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


WORK: dict[str, Callable[..., None]] = {
    "touches": touches,
    "which units stay": which_units,
    "a write before": partial(written, when="before"),
    "a write after": partial(written, when="after"),
    "a file that changes": faults,
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", WORK)
def test_on_ranks(name: str, world: int, bases: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(WORK[name], bases / "small", tmp_path)


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
