"""Checkpoint folders from a stranger: the right values, or an error that names the file; nothing read or written elsewhere."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hf_zero as zero
from hf_zero import verify
from hf_zero.checkpoint.files import inside
from hf_zero.checkpoint.manifest import MANIFEST
from tests.kit.common import sign
from tests.test_architecture import imports, trees

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG = settings(QUICK, max_examples=3000, derandomize=False)
OPTIMIZER, STATE = "optimizer/optimizer.json", "zero_state.json"


class Run:
    """A model of two layers, its optimizer and its schedule."""

    def __init__(self, stage: int = 3, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.engine = zero.shard(self.model, self.optimizer, zero.ZeroConfig(stage=stage))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def train(self) -> None:
        for _ in range(3):
            self.model(torch.ones(2, 3)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        self.engine.save(folder, objects={"schedule": self.schedule}, max_shard_size="60B")

    def load(self, folder: Path) -> None:
        self.engine.load(folder, objects={"schedule": self.schedule})

    def values(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and the weights in it."""
    folder = tmp_path_factory.mktemp("hostile") / "template"
    run = Run()
    run.train()
    run.save(folder)
    return folder, run.values()


@pytest.fixture(scope="module")
def reader() -> Run:
    return Run(seed=1)


@pytest.fixture
def folder(template: tuple[Path, Any], tmp_path: Path) -> Path:
    return shutil.copytree(template[0], tmp_path / "checkpoint")


def refusal(act: Callable[[Path], Any], path: Path, default: str = "") -> str:
    """What is said of `path`; `default` where it is taken. Any other exception is the test's."""
    try:
        act(path)
    except zero.ZeroError as error:
        return str(error)
    return default


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """What waits for ever is a failure."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Folders --------------------------------------------------------------------------------------------------------------


def damaged(raw: bytes, kind: str, at: float, amount: int) -> bytes:
    place = int(at * len(raw))
    if kind == "flip" and raw:
        place = min(place, len(raw) - 1)
        return raw[:place] + bytes([raw[place] ^ (1 << amount % 8)]) + raw[place + 1 :]
    if kind == "cut":
        return raw[:place]
    if kind == "insert":
        return raw[:place] + bytes(amount) + raw[place:]
    if kind == "drop":
        return raw[:place] + raw[place + amount :]
    return raw[place:] + raw[:place]


def check_damage(template, reader, tmp_path, data):
    """The right weights or a named error, with digests that fit and with those that were there."""
    origin, expected = template
    target = tmp_path / "damaged"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(origin, target)
    names = sorted(path.relative_to(origin).as_posix() for path in origin.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(names))
    path = target / name
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "turn", "delete", "swap"]))
    before = path.read_bytes()
    signed = name != MANIFEST and data.draw(st.booleans())
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        other = target / data.draw(st.sampled_from(names))
        content = other.read_bytes()
        other.write_bytes(before)
        path.write_bytes(content)
        signed = signed and other.name != MANIFEST
    else:
        path.write_bytes(damaged(before, kind, data.draw(st.floats(0, 1)), data.draw(st.integers(1, 40))))
    if signed:
        sign(target)
    error = refusal(reader.load, target)
    if error:
        assert str(target) in error
        return
    if not signed:
        assert all(torch.equal(value, expected[key]) for key, value in reader.values().items())
    else:  # other bytes were vouched for; they are values of the model, in its shapes
        assert {key: value.shape for key, value in reader.values().items()} == {
            key: value.shape for key, value in expected.items()
        }


@settings(QUICK, max_examples=50)
@given(data=st.data())
def test_a_damaged_folder(template, reader, tmp_path, data):
    check_damage(template, reader, tmp_path, data)


@pytest.mark.torture
@LONG
@given(data=st.data())
def test_many_damaged_folders(template, reader, tmp_path, data):
    check_damage(template, reader, tmp_path, data)


NONSENSE = st.sampled_from(
    [None, True, -1, 2**60, 2**80, 0.5, float("nan"), float("inf"), "text", "", [], [1, "a"], {}, {"tensor": 1}, [[[]]]]
) | st.just({"tensor": "x", "dtype": "float32"}) | st.just({"tensor": 1.0, "dtype": "Tensor"})  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in inner for place in [(*above, key), *places(each, (*above, key))]]


def check_nonsense(template, reader, tmp_path, data):
    """Digests fit; one value of a JSON file is something else, is gone, or has another name."""
    origin, expected = template
    target = tmp_path / "nonsense"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(origin, target)
    name = data.draw(st.sampled_from([OPTIMIZER, STATE, "model.safetensors.index.json"]))
    body = json.loads((target / name).read_text())
    *above, last = data.draw(st.sampled_from(places(body)))
    holder = body
    for key in above:
        holder = holder[key]
    kind = data.draw(st.sampled_from(["replace", "delete", "rename"]))
    if kind == "replace":
        holder[last] = data.draw(NONSENSE)
    elif kind == "delete":
        del holder[last]
    elif isinstance(holder, dict):
        holder[f"{last}_"] = holder.pop(last)
    (target / name).write_text(json.dumps(body))
    sign(target)
    error = refusal(reader.load, target)
    if error:
        assert str(target) in error
        return
    assert all(torch.equal(value, expected[key]) for key, value in reader.values().items())
    for group in reader.optimizer.param_groups:
        assert all(value == value and value != "text" for value in group.values() if not isinstance(value, list))
    reader.optimizer.step()  # what was taken over can be used
    reader.schedule.step()


@settings(QUICK, max_examples=60)
@given(data=st.data())
def test_nonsense_with_digests_that_fit(template, reader, tmp_path, data):
    check_nonsense(template, reader, tmp_path, data)


@pytest.mark.torture
@LONG
@given(data=st.data())
def test_much_nonsense_with_digests_that_fit(template, reader, tmp_path, data):
    check_nonsense(template, reader, tmp_path, data)


def test_nonsense_is_named_by_its_key_on_every_rank(two, template):
    for told in zip(*two.run(refusals, template[0], timeout_s=120)):
        assert len(set(told)) == 1
        case, error = told[0]
        _, words = CASES[case]
        assert words in error, (case, error)


def change(name: str, to: Any) -> Callable[[dict[str, Any]], None]:
    """Sets what is under `name`, which is a path with dots."""

    def apply(body: dict[str, Any]) -> None:
        *above, last = name.split("/")
        for key in above:
            body = body[int(key)] if isinstance(body, list) else body[key]
        body[int(last) if isinstance(body, list) else last] = to

    return apply


CASES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "NaN": (change("groups/0/lr", to=float("nan")), "optimizer.json: groups[0].lr is nan, expected a finite number"),
    "text": (change("groups/0/lr", to="0.1"), "optimizer.json: groups[0].lr is '0.1', expected a finite number"),
    "negative": (change("groups/0/lr", to=-1.0), "groups[0] is refused by AdamW: ValueError: Invalid learning rate: -1.0"),
    "betas": (change("groups/0/betas", to=[0.9]), "groups[0].betas is [0.9], expected a list of 2"),
    "large betas": (change("groups/0/betas", to=[0.9, 2.0]), "groups[0] is refused by AdamW: ValueError: Invalid beta"),
    "a number for a truth": (change("groups/0/amsgrad", to=3), "groups[0].amsgrad is 3, expected true, false or null"),
    "unknown": (change("groups/0/warp", to=1.0), "groups[0].warp is an option that this run's AdamW does not have"),
    "renamed": (
        lambda body: body["parameters"].update({"other": body["parameters"].pop("0.weight")}),
        "parameters.other is the state of a parameter that is in no group",
    ),
    "negative steps": (
        change("parameters/0.weight/scalars/step", to=-3),
        "parameters.0.weight.scalars.step is -3, expected a number of steps",
    ),
    "steps": (
        change("parameters/0.weight/scalars/step", to={"tensor": 1e300, "dtype": "float32"}),
        "scalars.step is {'tensor': 1e+300, 'dtype': 'float32'}, expected a number of steps",
    ),
    "shape": (change("parameters/0.weight/shape", to=[1 << 80]), "parameters.0.weight.shape[0] is 1208925819614629174706176"),
    "no state": (change("parameters/0.weight/states", to=["exp_avg"]), "parameters.0.weight lacks the state 'exp_avg_sq'"),
    "no groups": (lambda body: body.pop("groups"), "optimizer.json: the file has no entry 'groups'"),
}  # fmt: skip


def refusals(rank: int, world: int, origin: Path) -> list[tuple[str, str]]:
    run, told = Run(), []
    for case, (damage, _) in CASES.items():
        folder = origin.parent / f"ranks_{case.replace(' ', '_')}"
        if rank == 0:
            shutil.copytree(origin, folder)
            body = json.loads((folder / OPTIMIZER).read_text())
            damage(body)
            (folder / OPTIMIZER).write_text(json.dumps(body))
            sign(folder)
        run.engine.exchange(None)
        with pytest.raises(zero.CheckpointError) as refused:
            run.load(folder)
        told.append((case, str(refused.value)))
    run.engine.detach()
    return told


STATES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a method": (change("objects/schedule/step", to=5), "objects.schedule.step is 5, expected nothing: it is a method"),
    "NaN": (change("objects/schedule/gamma", to=float("nan")), "objects.schedule.gamma is nan, expected a finite number"),
    "text": (change("objects/schedule/step_size", to="2"), "objects.schedule.step_size is '2', expected a finite number"),
    "negative": (change("objects/schedule/last_epoch", to=-4), "objects.schedule.last_epoch is -4, expected a whole number"),
    "too many": (change("objects/schedule/base_lrs", to=[1.0, 2.0]), "objects.schedule.base_lrs is [1.0, 2.0], expected"),
    "beyond memory": (change("random/0/numpy/2", to=1 << 40), "random[0] is"),
    "no such tensor": (change("random/0/torch", to={"__tensor__": "x"}), "expected random states (KeyError: 'x')"),
    "no objects": (lambda body: body.pop("objects"), "zero_state.json: the file has no entry 'objects'"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_nonsense_in_small_states_is_named_by_its_key(case, folder, reader):
    damage, words = STATES[case]
    body = json.loads((folder / STATE).read_text())
    damage(body)
    (folder / STATE).write_text(json.dumps(body))
    sign(folder)
    with pytest.raises(zero.CheckpointError) as refused:
        reader.load(folder)
    assert words in str(refused.value)
    assert STATE in str(refused.value)


# Links and special files ----------------------------------------------------------------------------------------------

FILES = [MANIFEST, "model.safetensors.index.json", "model-*.safetensors", OPTIMIZER, STATE]


def make_pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 characters
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


ODD: dict[str, Callable[[Path, Path], None]] = {
    "a pipe": make_pipe,
    "a socket": make_socket,
    "a folder": lambda path, _: path.mkdir(),
    "a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to elsewhere": lambda path, other: path.symlink_to(other),
    "a relative link": lambda path, other: path.symlink_to(os.path.relpath(other, path.parent)),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to nothing": lambda path, _: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_of_the_folder_is_refused(name, kind, folder, tmp_path, reader):
    path, victim = min(folder.glob(name)), tmp_path / "elsewhere"
    path.rename(victim)  # it fits, and must not be read all the same
    before = victim.read_bytes()
    ODD[kind](path, victim)
    with within(20):
        for act in (verify, reader.load, lambda where: zero.export(where, tmp_path / "exported")):
            with pytest.raises(zero.ZeroError) as refused:
                act(folder)
            assert str(folder) in str(refused.value)
    assert victim.read_bytes() == before
    assert not (tmp_path / "exported").exists()


def test_a_folder_of_the_checkpoint_that_is_a_link_is_refused(folder, tmp_path, reader):
    (folder / "optimizer").rename(tmp_path / "elsewhere")
    (folder / "optimizer").symlink_to(tmp_path / "elsewhere")
    for act in (verify, reader.load):
        with pytest.raises(zero.CheckpointError, match="leads out of"):
            act(folder)


def plain(folder: Path) -> Path:
    """As from a stranger who wrote no manifest."""
    for name in (MANIFEST, STATE, "zero_state.safetensors"):
        (folder / name).unlink()
    shutil.rmtree(folder / "optimizer")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["config.json", "README.md", "notes.txt", "trainer_state.json", "adapter_config.json"])
@pytest.mark.filterwarnings("ignore:.*nothing vouches")
def test_an_export_takes_nothing_along_from_elsewhere(name, folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"token": "hf_secret"}')
    target = plain(folder) / name
    target.unlink(missing_ok=True)
    target.symlink_to(secret)
    with pytest.raises(zero.CheckpointError, match=rf"{name} leads out of"):
        zero.export(folder, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.filterwarnings("ignore:.*plain model folder")
def test_the_hubs_cache_is_links_to_its_blobs(folder, template, tmp_path, reader):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    plain(folder)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    reader.engine.load(snapshot)
    assert all(torch.equal(value, template[1][key]) for key, value in reader.values().items())
    assert inside(snapshot, "../../blobs/0").exists()
    with pytest.raises(zero.CheckpointError, match="leads out of"):
        inside(snapshot, "../../../secret")


def test_an_index_names_no_file_outside(folder, tmp_path, reader):
    weights = next(plain(folder).glob("model-*"))
    shutil.copy(weights, tmp_path / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../other.safetensors", str(tmp_path / "other.safetensors"), "a/../../other.safetensors", "other\0"):
        index.write_text(json.dumps({"weight_map": {"0.weight": name}}))
        with pytest.raises(zero.CheckpointError, match=r"index\.json: the file name"):
            reader.engine.load(folder)


# Permissions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_that_the_user_wants(mask, tmp_path):
    before = os.umask(mask)
    try:
        run = Run(seed=2)
        run.save(tmp_path / "saved")
        zero.export(tmp_path / "saved", tmp_path / "exported")
    finally:
        os.umask(before)
    found = [path for top in ("saved", "exported") for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
    assert len(found) > 10
    for path in found:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# Code -----------------------------------------------------------------------------------------------------------------


def test_no_pickle_is_read_that_could_run_code():
    """Every `torch.load` refuses code, and nothing else reads pickles."""
    imported = {name.partition(".")[0] for module, tree in trees().items() for name, _ in imports(module, tree)}
    assert not imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    calls = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(node.func) for node in calls]
    assert not {*names} & {"eval", "exec", "yaml.load", "yaml.unsafe_load"}
    loads = [ast.unparse(node) for name, node in zip(names, calls) if name == "torch.load"]
    assert loads
    assert all("weights_only=True" in load for load in loads)
