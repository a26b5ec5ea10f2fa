"""Parameters born at rest: their values stay in the files they come from until something needs them, on disk for good."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.checkpoint.safetensors import read_header
from hf_zero.params.deferred import born, born_at_rest, slice_bounds
from hf_zero.params.deferred import deferred_of as birth_of
from hf_zero.tiers.array import DiskArray, FilePieces, FileSource, OnDisk, Stamp
from hf_zero.tiers.disk import Disk
from hf_zero.tiers.tier import Meter
from tests.kit.pool import RankPool

pytestmark = pytest.mark.gloo

SHAPES = {"first.weight": (7, 5), "first.bias": (7,), "second.weight": (3, 7), "second.bias": (3,)}
X = torch.linspace(-1, 1, 20).view(4, 5)


class Two(nn.Module):
    """Two linear layers; the wide type of `SHAPES`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def values_of(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def write(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    path = folder / "model.safetensors"
    save_file(values_of(dtype), path)
    return path


def at_rest(path: Path, name: str) -> OnDisk:
    place, stamp = read_header(path).tensors[name], Stamp.of(path)
    dtype = getattr(torch, place.dtype)
    numel = (place.stop - place.start) // dtype.itemsize
    return OnDisk(FileSource(path, place.start, dtype, numel, Meter(), stamp))


def lay(path: Path) -> nn.Module:
    """The model, all of it born at rest in the file."""
    with zero.Init() as init:
        with torch.device("meta"):
            model = Two()
        for name, shape in SHAPES.items():
            module, _, last = name.rpartition(".")
            param = born_at_rest(shape, at_rest(path, name), init.wire, device="cpu")
            setattr(model.get_submodule(module), last, param)
    return model


def plain(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Two().to(dtype)
    model.load_state_dict(values_of(dtype))
    return model


def resting(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if birth_of(param).at_rest]


ALL = list(SHAPES)


# What leaves them at rest, and what does not ---------------------------------------------------------------------------


def looks(rank: int, world: int, path: Path) -> None:
    model, expected = lay(path), values_of(torch.float32)
    assert resting(model) == ALL
    for name, param in model.named_parameters():
        assert (param.shape, param.dtype, param.device) == (SHAPES[name], torch.float32, torch.device("cpu"))
        assert torch.equal(zero.full_parameter(param), expected[name])
    model.requires_grad_(False).to("cpu").float()
    with zero.GatheredParameters(model):
        assert torch.equal(model.first.weight, expected["first.weight"])
    with zero.Init():
        twin = copy.deepcopy(model)
        assert model.second.weight.stride() == (7, 1)
    assert resting(model) == ALL
    assert resting(twin) == ALL
    assert torch.equal(zero.full_parameter(twin.second.bias), expected["second.bias"])
    with pytest.raises(zero.StateError, match="call zero.shard"):
        model(X)


@pytest.mark.parametrize("world", [1, 3])
def test_looking_leaves_them_at_rest(world: int, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(looks, write(tmp_path))


def _in_init(change: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def touch(model: nn.Module) -> None:
        with zero.Init(), torch.no_grad():
            change(model.first.weight)

    return touch


def _edit(model: nn.Module) -> None:
    with zero.GatheredParameters(model.first.weight, modifier_rank=0), torch.no_grad():
        model.first.weight[0, 0] = 9.0


def _load(model: nn.Module) -> None:
    model.load_state_dict({"first.weight": torch.full((7, 5), 2.0)}, strict=False)


def _double_local(param: nn.Parameter) -> None:
    zero.set_local_parameter(param, 2 * zero.local_parameter(param))


def _set_first(value: Tensor) -> Tensor:
    value[0, 0] = 9.0
    return value


TOUCHES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Tensor], Tensor]]] = {
    "operation": (_in_init(lambda param: param.mul_(3)), lambda value: 3 * value),
    "overwritten": (_in_init(lambda param: nn.init.ones_(param)), torch.ones_like),
    "read inside": (_in_init(lambda param: param.sum().item()), torch.clone),
    "edited": (_edit, _set_first),
    "set": (lambda model: zero.set_full_parameter(model.first.weight, torch.ones(7, 5)), torch.ones_like),
    "local": (lambda model: _double_local(model.first.weight), lambda value: 2 * value),
    "loaded": (_load, lambda value: torch.full_like(value, 2)),
    "cast": (lambda model: model.first.double(), torch.Tensor.double),
}


def touches(rank: int, world: int, path: Path) -> None:
    for name, (touch, expected) in TOUCHES.items():
        model, value = lay(path), values_of(torch.float32)["first.weight"]
        touch(model)
        birth = birth_of(model.first.weight)
        assert not birth.at_rest, name
        low, high = slice_bounds(35, birth.wire.rank, birth.wire.size)
        assert torch.equal(birth.values(), expected(value.clone()).flatten()[low:high]), name
        assert torch.equal(zero.full_parameter(model.first.weight), expected(value.clone())), name
        assert torch.equal(load_file(path)["first.weight"], value), "the file is never written"


@pytest.mark.parametrize("world", [1, 2])
def test_touching_loads(world: int, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(touches, write(tmp_path))


def failing_write(rank: int, world: int, path: Path) -> None:
    """A write that raises before it has written: the values are those of the file."""
    model = lay(path)
    with zero.Init(), pytest.raises(TypeError):
        model.first.weight.normal_("no number")
    assert torch.equal(zero.full_parameter(model.first.weight), values_of(torch.float32)["first.weight"])


def test_a_write_that_fails(tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[2].run(failing_write, write(tmp_path))


def one_rank(rank: int, world: int, path: Path, folder: Path) -> None:
    """What one rank alone asked for, and may have changed, is used; the others' stay as they were."""
    model = lay(path).requires_grad_(False)
    expected = values_of(torch.float32)["first.weight"]
    low, high = slice_bounds(35, 1, world)
    if rank == 1:
        _double_local(model.first.weight)
    assert birth_of(model.first.weight).at_rest == (rank != 1)
    expected.view(-1)[low:high] *= 2
    assert torch.equal(zero.full_parameter(model.first.weight), expected)
    engine = shard_frozen(model, folder)
    assert in_files(engine) == ["second.weight", "second.bias"], "the other unit"
    assert torch.equal(zero.full_parameter(model.first.weight), expected)
    assert torch.equal(zero.full_parameter(model.second.weight), values_of(torch.float32)["second.weight"])


def test_one_rank_touches(tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[3].run(one_rank, write(tmp_path), tmp_path)


# Sharded --------------------------------------------------------------------------------------------------------------


def shard_frozen(model: nn.Module, folder: Path, mixed_precision: str = "no", **changes: Any) -> zero.Engine:
    options = {"stage": 3, "offload_params": "disk", "offload_dir": str(folder / "tier"), **changes}
    return zero.shard(model, None, zero.ZeroConfig(**options), mixed_precision=mixed_precision)


def spans(engine: zero.Engine) -> Iterator[Any]:
    return (span for unit in engine.units for span in unit.spans)


def is_in_files(span: Any) -> bool:
    return isinstance(span.master, OnDisk) and getattr(span.master.source, "base", None) is not None


def in_files(engine: zero.Engine) -> list[str]:
    """Parameters that are read from the model's own files."""
    return [slot.spec.name for span in spans(engine) if is_in_files(span) for slot in span.layout.slots]


def disk_bytes(engine: zero.Engine) -> int:
    return engine.context.storage.disk.nbytes


def frozen(rank: int, world: int, path: Path, folder: Path, dtype: torch.dtype, mixed_precision: str) -> None:
    model, stock = lay(path).requires_grad_(False), plain(dtype)
    x = X.to(dtype)
    engine = shard_frozen(model, folder, mixed_precision)
    meter = engine.context.storage.meter
    assert sorted(in_files(engine)) == sorted(ALL)
    assert (disk_bytes(engine), meter["read"].bytes) == (0, 0)
    held = [t for span in spans(engine) for t in (span.full, span.copy) if isinstance(t, Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
        expected = stock(x)
    for _ in range(2):
        meter.reset()
        assert torch.equal(model(x), expected)
        parts = [part for span in spans(engine) for part in span.layout.overlaps(span.rank)]
        assert meter["read"].bytes == sum(part.numel for part in parts) * dtype.itemsize, "its own part, once"
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), values_of(dtype)[name])
    assert (disk_bytes(engine), meter["write"].bytes) == (0, 0)
    engine.detach()
    assert torch.equal(model.second.weight, values_of(dtype)["second.weight"])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "mixed_precision"), [(torch.float32, "no"), (torch.bfloat16, "no"), (torch.float32, "bf16")], ids=str
)
def test_frozen_ones_are_read_where_they_are(
    world: int, dtype: torch.dtype, mixed_precision: str, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    pools[world].run(frozen, write(tmp_path, dtype), tmp_path, dtype, mixed_precision)


def poured(rank: int, world: int, path: Path, folder: Path) -> None:
    """Trained spans, and frozen ones that rest elsewhere, have values of their own."""
    expected = plain()(X)
    for frozen_ones, changes in (
        ([], {}), (["second"], {}), (["first", "second"], {"offload_params": "cpu"}),
        (["first", "second"], {"offload_params": "none"}), (["first", "second"], {"stage": 1, "offload_params": "none"}),
    ):  # fmt: skip
        model = lay(path)
        for name in frozen_ones:
            model.get_submodule(name).requires_grad_(False)
        engine = shard_frozen(model, folder, **changes)
        there = [] if changes else [name for name in ALL if name.split(".")[0] in frozen_ones]
        assert in_files(engine) == there
        assert torch.equal(model(X), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_others_are_loaded(world: int, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(poured, write(tmp_path), tmp_path)


def partly(rank: int, world: int, path: Path, folder: Path) -> None:
    """One parameter of the span has values of its own: all of it is copied."""
    model, stock = lay(path).requires_grad_(False), plain()
    with zero.Init() as init:
        own = torch.ones(7)[slice(*slice_bounds(7, init.wire.rank, init.wire.size))]
        model.first.bias = born((7,), torch.float32, own, init.wire, device="cpu", requires_grad=False)
    nn.init.ones_(stock.first.bias)
    engine = shard_frozen(model, folder)
    assert "first.weight" not in in_files(engine)
    assert torch.equal(model(X), stock(X))


def test_a_span_that_is_partly_at_rest(tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[2].run(partly, write(tmp_path), tmp_path)


# Written to -----------------------------------------------------------------------------------------------------------


def written(rank: int, world: int, path: Path, folder: Path, mixed_precision: str) -> None:
    model, stock = lay(path).requires_grad_(False), plain()
    engine = shard_frozen(model, folder, mixed_precision)
    zero.set_full_parameter(model.second.bias, torch.ones(3))
    nn.init.ones_(stock.second.bias)
    with zero.GatheredParameters(model.first.weight, modifier_rank=0):
        if rank == 0:
            model.first.weight.data[0, 0] = 9.0
    stock.first.weight.data[0, 0] = 9.0
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
        assert torch.equal(model(X), stock(X))
    state = model.state_dict()
    assert rank or all(torch.equal(state[name], value) for name, value in stock.state_dict().items())
    assert sum(engine.exchange(disk_bytes(engine))) > 0
    fresh = {name: torch.full(shape, 0.5) for name, shape in SHAPES.items()}
    model.load_state_dict(fresh)
    mine = {part.source.spec.name for span in spans(engine) for part in span.layout.overlaps(span.rank)}
    assert not mine & set(in_files(engine))
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), fresh[name])
    file = load_file(path)
    assert all(torch.equal(file[name], value) for name, value in values_of(torch.float32).items())


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_first_write_makes_a_copy(
    world: int, mixed_precision: str, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    pools[world].run(written, write(tmp_path), tmp_path, mixed_precision)


def saved(rank: int, world: int, path: Path, folder: Path) -> None:
    model = lay(path).requires_grad_(False)
    engine = shard_frozen(model, folder)
    engine.save(folder / "saved")
    assert sorted(in_files(engine)) == sorted(ALL)
    found = load_file(folder / "saved" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values_of(torch.float32).items())
    zero.set_full_parameter(model.first.bias, torch.zeros(7))
    engine.load(folder / "saved")
    for name, param in model.named_parameters():
        assert torch.equal(zero.full_parameter(param), values_of(torch.float32)[name])


@pytest.mark.parametrize("world", [1, 3])
def test_checkpoints(world: int, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(saved, write(tmp_path), tmp_path)


def test_an_array_with_a_base(tmp_path: Path) -> None:
    numel, meter = 2500, Meter()
    data = torch.arange(3000.0)
    (tmp_path / "weights").write_bytes(data.numpy().tobytes())
    source = OnDisk(FileSource(tmp_path / "weights", 0, torch.float32, 3000, meter))
    pieces = FilePieces(numel, torch.float32, [(100, source[:400]), (500, source[2000:3000])], meter)
    expected = torch.zeros(numel)
    expected[100:500], expected[500:1500] = data[:400], data[2000:3000]
    disk = Disk(str(tmp_path / "tier"), 0, Meter())
    array = DiskArray(disk, numel, torch.float32, pieces)
    before = OnDisk(array)
    for part in (slice(None), slice(0, 100), slice(50, 200), slice(450, 600), slice(1400, 2500), slice(7, 7)):
        used = torch.full((len(expected[part]),), torch.nan)
        before[part].begin_read(used).wait()
        assert torch.equal(used, expected[part])
    with pytest.raises(zero.StateError, match="cannot be written"):
        OnDisk(pieces).zero_()
    assert (array.nbytes, disk.nbytes) == (0, 0)

    os.truncate(tmp_path / "weights", 4)  # the copy fails, and nothing is lost
    with pytest.raises(zero.TierError, match="the file was truncated"):
        before[0:10].zero_()
    assert (array.nbytes, disk.nbytes) == (0, 0)
    (tmp_path / "weights").write_bytes(data.numpy().tobytes())
    assert torch.equal(before.read(), expected)

    before[90:600].copy_(torch.ones(510))
    expected[90:600] = 1
    (tmp_path / "weights").unlink()
    for values in (before, OnDisk(array)):
        assert torch.equal(values.read(), expected)
    assert disk.nbytes == array.nbytes == 12288
    array.close()
    assert disk.nbytes == 0
    with pytest.raises(zero.StateError, match="after it was closed"):
        before.read()
    disk.close()


# Files that change ----------------------------------------------------------------------------------------------------


def vanish(path: Path) -> None:
    path.unlink()


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


FAULTS = {"vanished": vanish, "replaced": replace, "rewritten": rewrite, "shortened": shorten}


def faults(rank: int, world: int, path: Path, folder: Path) -> None:
    """One rank's file changes, before the first read, before `shard`, and while it is used: an error on all, naming it."""
    for kind, change in FAULTS.items():
        mine = folder / f"{kind}{rank}.safetensors"
        kept = folder / f"{kind}{rank}.kept"

        def spoil(change: Callable[[Path], None] = change, mine: Path = mine, kept: Path = kept) -> None:
            if rank == world - 1:
                os.link(mine, kept) if change is not rewrite and change is not shorten else shutil.copy2(mine, kept)
                change(mine)

        shutil.copy(path, mine)
        model = lay(mine)
        spoil()
        whose = f"{kind}{world - 1}.safetensors"
        with pytest.raises(zero.TierError, match=whose):
            zero.full_parameter(model.second.bias)
        with pytest.raises(zero.TierError, match=whose):
            shard_frozen(model, folder, offload_params="cpu")
        kept.unlink(missing_ok=True)
        shutil.copy(path, mine)
        model = lay(mine).requires_grad_(False)
        shard_frozen(model, folder)
        expected = model(X)
        assert torch.equal(expected, plain()(X))
        spoil()
        with pytest.raises(zero.TierError, match=whose):
            model(X)
        if kind in ("vanished", "replaced"):  # it comes back
            if rank == world - 1:
                os.replace(kept, mine)
            assert torch.equal(model(X), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_that_changes_is_an_error_on_all_ranks(world: int, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    pools[world].run(faults, write(tmp_path), tmp_path)


def test_a_parameter_on_disk_that_becomes_small(tmp_path: Path) -> None:
    """Its slice rested on disk; what it has now is too little for that, and counts."""

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
    found = {name: zero.Init(offload_params=name).leaves_at_rest for name in ("none", "cpu", "disk", "auto")}
    assert found == {"none": False, "cpu": False, "disk": True, "auto": True}
