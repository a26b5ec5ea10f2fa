"""Checkpoints beyond `tests/conformance`: plain folders, what does not fit, states of other objects, memory."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero as zero
from hf_zero import verify
from hf_zero.config import parse_bytes
from tests.conformance.checkpoint import same
from tests.conformance.test_checkpoints import Zoo, optimizer_of
from tests.kit.health import peak_growth_bytes
from tests.kit.injection import instead
from tests.kit.jobs.harness import flip
from tests.optimizers import EachParameter

pytestmark = pytest.mark.gloo


def build(stage: int = 3) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Zoo()
    optimizer = optimizer_of("adamw", model)
    return model, optimizer, zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    ids = torch.randint(0, 23, (3, 5), generator=torch.Generator().manual_seed(rank))
    F.cross_entropy(model(ids), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


class TwoTypes(nn.Module):
    """A part of it computes in another type than the rest."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.other = nn.Parameter(torch.randn(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.other.abs()).square().mean()


def resumed(rank: int, world: int, folder: Path, dtype: torch.dtype) -> None:
    def go_on(stage: int, steps: int, load: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = TwoTypes(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage))
        if load:
            engine.load(folder)
        for step in range(steps):
            if step == 3:
                engine.save(folder)
            model(torch.ones(2, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = dict(model.named_parameters())
        return {name: zero.full_optimizer_state(param, "exp_avg_sq") for name, param in named.items()}

    for stages in ((3, 3), (2, 0), (0, 2)):
        same(go_on(stages[0], 5, False), go_on(stages[1], 2, True), str(stages))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_model_of_two_types_goes_on(dtype, two, tmp_path):
    two.run(resumed, tmp_path / "out", dtype)


# Plain folders, errors ------------------------------------------------------------------------------------------------


def plain(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(5)
    other = {name: value.clone() for name, value in Zoo().state_dict().items() if name != "head.weight"}
    for name, target in (("one", folder / "one"), ("many", folder / "many")):
        model, optimizer, engine = build(2 if name == "one" else 3)
        train(model, optimizer, rank)
        before = optimizer.state_dict()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load(target)
        assert [str(w.message) for w in caught if "plain model folder" in str(w.message)] or rank != 0
        found, after = model.state_dict(), optimizer.state_dict()
        if rank == 0:
            same({k: v for k, v in found.items() if k != "head.weight"}, other, name)
            assert found["head.weight"] is found["embed.weight"]
            same(after, before, name)
        for options in ({"load_optimizer": True}, {"objects": {"x": None}}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(zero.CheckpointError, match="holds no"):
                    engine.load(target, **options)
        train(model, optimizer, rank)


def test_plain_model_folders_are_loaded_with_a_warning(two, tmp_path):
    torch.manual_seed(5)
    state = {name: value.clone() for name, value in Zoo().state_dict().items() if name != "head.weight"}
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    save_file(state, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    names = {key: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(state)}
    for file in set(names.values()):
        save_file({key: state[key] for key in state if names[key] == file}, tmp_path / "many" / file)
    index = json.dumps({"weight_map": names})
    (tmp_path / "many" / "model.safetensors.index.json").write_text(index)
    (tmp_path / "one" / "model.safetensors.index.json").write_text(index)  # of an older, larger save
    two.run(plain, tmp_path)


def misfits(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 7)})
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    for name, match in (
        ("missing", r"1 missing \['b.weight'\], 0 unexpected"),
        ("unexpected", r"0 missing \[\], 1 unexpected \['c'\]"),
        ("shape", r"1 of another shape \[\"'b.bias' is \(8,\), expected \(7,\)\"\]"),
    ):
        with pytest.raises(zero.CheckpointError, match=match):
            engine.load(folder / name)
        before = model.state_dict()
        engine.load(folder / name, strict=False)
        after = model.state_dict()
        if rank == 0:
            wrong = {"missing": "b.weight", "shape": "b.bias"}.get(name)
            for key, value in load_file(folder / name / "model.safetensors").items():
                if key in after and key != wrong:
                    assert torch.equal(after[key], value), (name, key)
            if wrong is not None:
                assert torch.equal(after[wrong], before[wrong])
    with pytest.raises(zero.RankMismatchError, match="the files of rank 1 are not those of rank 0"):
        engine.load(folder / ("missing", "shape")[rank], strict=False)
    with pytest.raises(zero.CheckpointError, match="nowhere is not a folder"):
        engine.load(folder / "nowhere")
    with pytest.raises(zero.CheckpointError, match="no weights"):
        engine.load(folder)


@pytest.mark.filterwarnings("ignore:.*plain model folder")
def test_what_does_not_fit_the_model_is_named(two, tmp_path):
    state = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 7)}).state_dict()
    for name, changed in (
        ("missing", {k: v for k, v in state.items() if k != "b.weight"}),
        ("unexpected", {**state, "c": torch.zeros(2)}),
        ("shape", {**state, "b.bias": torch.zeros(8)}),
    ):
        (tmp_path / name).mkdir()
        save_file(changed, tmp_path / name / "model.safetensors")
    two.run(misfits, tmp_path)


class Odd:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def full_values(model: nn.Module) -> list[Any]:
    params = [*model.parameters()]
    return [[zero.full_parameter(p), zero.full_optimizer_state(p, "exp_avg")] for p in params if p.requires_grad]


def objects(rank: int, world: int, folder: Path) -> None:
    model, optimizer, engine = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    nested = {
        "a.b": torch.ones(2), "a": {"b": torch.zeros(3, dtype=torch.bfloat16)}, 3: (1, [2.5, float("inf")], None),
        "empty": torch.zeros(0, 2), "scalar": torch.tensor(7), "text": "ü\n", "big": 2**80, "none": {},
        "like ours": {"__tensor__": "x", "__tuple__": {"__tuple__": [1]}}, "ours": {"__pairs__": [[1, 2]]},
    }  # fmt: skip
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # its best metric is infinite before the first
    everything = {"scheduler": scheduler, "scaler": scaler, "odd": Odd(nested), "random.0": Odd({"x": torch.ones(1)})}
    for _ in range(3):
        scheduler.step()
    optimizer.param_groups[0]["lr"] = np.float32(0.1)
    engine.save(folder, objects={**everything, "plateau": plateau})
    plateau.step(0.5)
    engine.load(folder, objects={"plateau": plateau})
    assert (plateau.best, optimizer.param_groups[0]["lr"]) == (float("inf"), np.float32(0.1))
    fresh = torch.optim.lr_scheduler.StepLR(optimizer_of("adamw", Zoo()), 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found, other = Odd(None), Odd(None)
    engine.load(folder, objects={"scheduler": fresh, "scaler": scaler, "odd": found, "random.0": other})
    same(fresh.state_dict(), scheduler.state_dict(), "scheduler")
    assert scaler.get_scale() == 64.0
    same(found.state, nested, "odd")
    same(other.state, {"x": torch.ones(1)}, "random.0")
    engine.save(folder, objects={"odd": Odd({"none": np.array(3.0), "two": np.ones((4, 2))[::2].T})})
    engine.load(folder, objects={"odd": found})
    shapes = {"none": torch.tensor(3.0, dtype=torch.float64), "two": torch.ones(2, 2, dtype=torch.float64)}
    same(found.state, shapes, "arrays")
    engine.save(folder, objects=everything)
    with pytest.raises(zero.CheckpointError, match="no state of 'other', only of"):
        engine.load(folder, objects={"other": Odd(None)})
    for state in ({"x": object()}, {"y": [{"z": open}]}):
        with pytest.raises(zero.CheckpointError, match=r"bad\.[xy]"):
            engine.save(folder, objects={"bad": Odd(state)})

    class Writes(Odd):
        def state_dict(self) -> Any:
            (next(folder.glob(f".zero_saving-*/{folder.name}")) / "a\\b.txt").touch()

    with pytest.raises(zero.CheckpointError, match="the file name"):  # no load would take it
        engine.save(folder, objects={"bad": Writes(None)})
    train(model, optimizer, rank)
    own = {"model": model, "optimizer": optimizer}  # what is shared among the ranks
    before = full_values(model)
    engine.save(folder, objects={**own, "odd": found})
    train(model, optimizer, rank)
    for name, item in own.items():
        engine.load(folder, load_optimizer=False, objects={name: item})
    same(full_values(model), before, "what is shared among the ranks")
    engine.load(folder, objects={"odd": found})
    assert not [*folder.parent.glob(".*"), *folder.glob(".*")]


def test_states_of_other_objects(two, tmp_path):
    two.run(objects, tmp_path / "out")


def without(rank: int, world: int, folder: Path) -> None:
    model, optimizer, engine = build()
    train(model, optimizer, rank)
    engine.save(folder / "weights", save_optimizer=False)
    engine.save(folder / "all")
    with pytest.raises(zero.CheckpointError, match="weights holds no optimizer state"):
        engine.load(folder / "weights", load_optimizer=True)
    engine.load(folder / "weights")
    with pytest.raises(zero.RankMismatchError, match="the files of rank 1 are not those of rank 0"):
        engine.load(folder / ("weights", "all")[rank], load_optimizer=False)
    engine.save(folder / "behind", async_save=True)
    if rank == 1:
        optimizer.state.clear()
    with pytest.raises(zero.CheckpointError, match="not every rank has made the same steps"):
        engine.save(folder / "behind")
    engine.wait_for_save()
    engine.exchange(None)
    assert not [*folder.glob(".*"), *(folder / "behind").glob(".*")]
    for other in (torch.optim.SGD, torch.optim.Adam):  # Adam's options would be replaced by AdamW's
        model = Zoo()
        groups = [{"params": group["params"]} for group in optimizer_of("adamw", model).param_groups]
        optimizer = other(groups, lr=1e-4)
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=1))
        with pytest.raises(zero.CheckpointError, match=f"state of AdamW.*optimizer is {other.__name__}"):
            engine.load(folder / "all")
        assert optimizer.param_groups[0]["lr"] == 1e-4
        train(model, optimizer, rank)  # nothing was written
        engine.load(folder / "all", load_optimizer=False)
    torch.manual_seed(9)
    model = Zoo()
    engine = zero.shard(model, None, zero.ZeroConfig(stage=2))
    engine.load(folder / "all")
    with pytest.raises(zero.StateError, match="no optimizer"):
        engine.load(folder / "all", load_optimizer=True)
    state = model.state_dict()
    if rank == 0:
        same(load_file(folder / "all" / "model.safetensors")["scale"], state["scale"], "scale")
    torch.manual_seed(9)
    other = Zoo()
    other.body.requires_grad_(False)
    optimizer = optimizer_of("adamw", other)
    engine = zero.shard(other, optimizer, zero.ZeroConfig(stage=2))
    with pytest.raises(zero.CheckpointError, match="hold other parameters"):
        engine.load(folder / "all")
    engine.load(folder / "all", load_optimizer=False)


def test_with_and_without_an_optimizer(two, tmp_path):
    two.run(without, tmp_path)


class Warms(EachParameter):
    """Removes a state once it is warm."""

    def update(self, p: Any, group: Any) -> None:
        state = self.state[p]
        state["steps"] = state.get("steps", 0) + 1
        state["warm"] = state.get("warm", 0) + p.grad
        p.sub_(group["lr"] * state["warm"])
        if state["steps"] > 2:
            del state["warm"]


def test_a_state_that_the_optimizer_has_removed(tmp_path):
    found = []
    for steps in (range(5), range(4, 5)):
        torch.manual_seed(0)
        model = Zoo()
        optimizer = Warms(model.parameters())
        engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
        for step in steps:
            if step == 4:
                engine.load(tmp_path) if found else engine.save(tmp_path)
            train(model, optimizer, step)
        found.append(optimizer.state_dict()["state"] | model.state_dict())
    same(*found, "resumed")


def unverified(rank: int, world: int, folder: Path) -> None:
    model, _, engine = build()
    engine.save(folder)
    path = folder / "model.safetensors"
    if rank == 0:
        flip(path, -40)
    engine.exchange(None)
    with pytest.raises(zero.CheckpointError, match=r"model\.safetensors is damaged"):
        engine.load(folder)
    engine.load(folder, verify=False)
    state = model.state_dict()
    if rank == 0:
        same({k: v for k, v in state.items() if k != "head.weight"}, load_file(path), "damaged")


def test_without_verifying_bytes_are_taken_as_they_are(two, tmp_path):
    two.run(unverified, tmp_path / "out")


def half_loaded(rank: int, world: int, folder: Path) -> None:
    model, optimizer, engine = build()
    train(model, optimizer, rank)
    for name in ("good", "weights", "states"):
        engine.save(folder / name)
    if rank == 0:
        flip(folder / "weights" / "model.safetensors")
        flip(folder / "states" / "optimizer" / "exp_avg.safetensors")
    expected = {name: zero.full_parameter(param) for name, param in model.named_parameters()}
    for damaged, repairs in (("weights", {"load_optimizer": False}), ("weights", {}), ("states", {})):
        train(model, optimizer, rank)
        with pytest.raises(zero.CheckpointError, match="is damaged"):
            engine.load(folder / damaged)
        if damaged == "states":
            engine.load(folder / "good", load_optimizer=False)
        for use in (lambda: train(model, optimizer, rank), lambda: engine.save(folder / "mixed"), model.state_dict):
            with pytest.raises(zero.StateError, match=rf"a load stopped half-way \(.*{damaged}.*Load a checkpoint"):
                use()
        engine.load(folder / "good", **repairs)
        same({name: zero.full_parameter(param) for name, param in model.named_parameters()}, expected, damaged)
    with pytest.raises(zero.CheckpointError, match="nowhere is not a folder"):
        engine.load(folder / "nowhere")
    train(model, optimizer, rank)


def test_after_a_load_that_stopped_half_way_all_but_a_load_is_refused(two: Any, tmp_path: Path) -> None:
    two.run(half_loaded, tmp_path)


def test_sizes_are_read_as_people_write_them():
    for text, size in (
        (7, 7),
        ("50GB", 50 * 10**9),
        ("5 GiB", 5 << 30),
        ("1.5kb", 1500),
        ("12", 12),
        ("3MB", 3 * 10**6),
    ):
        assert parse_bytes(text) == size
    for wrong in ("", "GB", "-5MB", "5XB", 0, -1, "1e9", None, True):
        with pytest.raises(zero.ConfigError):
            parse_bytes(wrong)


# Memory ---------------------------------------------------------------------------------------------------------------


def large(rank: int, world: int, folder: Path) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 4096, bias=False, dtype=torch.bfloat16) for _ in range(12)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
    for segment in optimizer.param_groups[0]["params"]:
        optimizer.state[segment]["momentum_buffer"] = torch.ones_like(segment)
    engine.save(folder / "small", save_optimizer=False)  # what the first use of anything costs
    return peak_growth_bytes(lambda: engine.save(folder / "big")), peak_growth_bytes(
        lambda: engine.load(folder / "big")
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc")
def test_saving_and_loading_need_no_more_than_a_few_buffers(two, tmp_path):
    """100 MB of weights, 200 MB each of masters and momentum."""
    grown = two.run(large, tmp_path)
    assert sum(f.size for f in verify(tmp_path / "big").files.values()) > 450 << 20
    for saving, loading in grown:
        assert saving < 48 << 20
        assert loading < 64 << 20


class Shares(nn.Module):
    """A long matrix; one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2100, 2100))
        self.register_buffer("first", torch.randn(3))
        self.register_buffer("second", self.first)


@pytest.mark.filterwarnings("ignore:.*plain model folder")
def test_a_plain_folder_in_another_type_and_without_second_names(tmp_path):
    """9 MB, which are converted in two parts."""
    model = Shares()
    stored = {"weight": model.weight.detach().bfloat16(), "first": torch.ones(3)}
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    save_file(stored, tmp_path / "model.safetensors")
    engine.load(tmp_path)
    assert torch.equal(model.weight.detach(), stored["weight"].float())
    assert model.second.tolist() == [1, 1, 1]


def test_files_beside_an_index(tmp_path):
    """One that was added is not read; all of them must fit the disk together."""
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.save(tmp_path / "saved", max_shard_size="4KB")
    save_file({name: torch.zeros_like(value) for name, value in before.items()}, tmp_path / "saved/model.safetensors")
    engine.load(tmp_path / "saved")
    same(dict(model.state_dict()), before, "weights")
    with instead(os, statvfs=lambda real, folder: SimpleNamespace(f_bavail=6, f_frsize=1000)):
        with pytest.raises(zero.CheckpointError, match="need 7... bytes, the disk has 6000 left"):
            engine.save(tmp_path / "again", max_shard_size="4KB")


def sparse(rank: int, world: int, folder: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("links", torch.eye(2).to_sparse())
    engine = zero.shard(model, None, zero.ZeroConfig(stage=3))
    with pytest.raises(zero.CheckpointError, match="'links' is a tensor of layout torch.sparse_coo.*persistent=False"):
        engine.save(folder)
    assert not folder.exists()


def test_a_sparse_buffer_is_named(two: Any, tmp_path: Path) -> None:
    two.run(sparse, tmp_path / "saved")
