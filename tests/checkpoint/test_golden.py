"""Checkpoints that earlier code wrote load to the bit, whatever has moved since; later formats are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import hf_zero as zero
from hf_zero.checkpoint.cards import RunFacts
from hf_zero.checkpoint.manifest import MANIFEST, digest_of
from hf_zero.core.units import Limits
from tests.conformance.checkpoint import same
from tests.kit.common import sign
from tests.kit.golden.make import GOLDEN, build, optimizer_of, plain, scheduler_of, step
from tests.kit.transports import Roads

pytestmark = pytest.mark.gloo
KINDS = ("whole", "pieces")
CUT = Roads(limits=Limits(unit_bytes=4 << 10, run_bytes=1 << 10))
"""Other units than those that were saved from: blocks cut inside."""


def expected() -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(GOLDEN / "expected.safetensors"), json.loads((GOLDEN / "expected.json").read_text())


def stored(folder: Path, stem: str) -> dict[str, Tensor]:
    """What plain safetensors finds in one file or in several."""
    out: dict[str, Tensor] = {}
    for path in folder.glob(f"{stem}[.-]*safetensors"):
        out.update(load_file(path))
    return out


def load(rank: int, world: int, *folders: Path) -> None:
    theirs, rest = expected()
    drawn = theirs.pop("drawn")
    for folder in folders:
        for stage, roads in ((0, Roads()), (2, Roads()), (3, Roads()), (3, CUT)):
            model = build(seed=2)
            optimizer = optimizer_of(model, lr=0.5)
            engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=stage), mixed_precision="bf16", **roads.given)
            scheduler = scheduler_of(optimizer)
            step(model, optimizer, rank, number=7)
            engine.load(folder, objects={"scheduler": scheduler})
            if world == 2:  # as many as saved: generators are restored too
                assert rank != 0 or torch.equal(torch.rand(3), drawn)
            weights, states = model.state_dict(), optimizer.state_dict()
            if rank == 0:
                assert weights["lm_head.weight"] is weights["transformer.wte.weight"]
                tensors, mine = plain(model, weights, states)
                same(tensors, theirs, "loaded")
                assert mine == {"groups": rest["groups"]}
                assert scheduler.state_dict() == rest["scheduler"]
            step(model, optimizer, rank, number=8)
            engine.detach()


@pytest.mark.parametrize("world", [1, 2])
def test_golden_checkpoints_load_to_the_bit(pools, world):
    pools[world].run(load, *(GOLDEN / kind for kind in KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_golden_files_are_plain(kind, tmp_path):
    """Read by safetensors alone; verified; exported, and read by transformers."""
    theirs, rest = expected()
    model = {name.removeprefix("model."): value for name, value in theirs.items() if name.startswith("model.")}
    same(stored(GOLDEN / kind, "model"), model, "model")
    assert {"average", "count"} <= model.keys()
    assert "passing" not in model
    for state in ("exp_avg", "exp_avg_sq"):
        found = {f"{state}.{name}": value for name, value in stored(GOLDEN / kind / "optimizer", state).items()}
        same(found, {name: value for name, value in theirs.items() if name.startswith(f"{state}.")}, state)
    index = json.loads((GOLDEN / kind / "optimizer" / "optimizer.json").read_text())
    assert index["groups"] == rest["groups"]
    for name, entry in index["parameters"].items():
        assert entry["scalars"]["step"]["tensor"] == theirs[f"step.{name}"].item() == 2.0
    manifest = zero.verify(GOLDEN / kind)
    assert (manifest.facts["world_size"], manifest.facts["stage"]) == (2, 3)

    zero.export(GOLDEN / kind, tmp_path / "out")
    same(stored(tmp_path / "out", "model"), model, "exported")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").state_dict()
    ours, stock = ({name: each[name] for name in model.keys() - {"average", "count"}} for each in (loaded, model))
    same(ours, stock, "loaded by transformers")


# What is added, and what is too new -----------------------------------------------------------------------------------


def change(folder: Path, name: str, alter: Callable[[Any], None]) -> None:
    """Alter a JSON file of a checkpoint as whoever wrote it would have, digests and all."""
    path = folder / name
    body = json.loads(path.read_text())
    alter(body)
    if name == MANIFEST:
        del body["digest"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        body["digest"] = digest_of(text)
        path.write_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    else:
        path.write_text(json.dumps(body))
        sign(folder)


JSON_FILES = ("optimizer/optimizer.json", "zero_state.json", MANIFEST)


def add_fields(body: dict[str, Any]) -> None:
    body["what_a_later_version_adds"] = {"deep": [1, None, "x"]}
    body["version_of_something"] = 9
    for entry in [*body.get("files", {}).values(), *body.get("parameters", {}).values()]:
        entry["added"] = [{"later": True}]


def set_version(version: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(version=version)


def refused(rank: int, world: int, folders: dict[str, Path], version: Any) -> None:
    model = build(seed=2)
    optimizer = optimizer_of(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3), mixed_precision="bf16")
    for name, folder in folders.items():
        with pytest.raises(zero.CheckpointError) as caught:
            engine.load(folder)
        assert str(folder / name) in str(caught.value)
        assert f"expected version 1, found {version!r}" in str(caught.value)
        assert ("update hf_zero" in str(caught.value)) == (version == 2)
    engine.detach()


def test_fields_that_are_not_known_are_passed_over(pools, tmp_path):
    folder = tmp_path / "more"
    shutil.copytree(GOLDEN / "whole", folder)
    for name in JSON_FILES:
        change(folder, name, add_fields)
    RunFacts().write(folder)
    path = folder / "zero_run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added": {"later": 1}}))
    manifest = zero.verify(folder)
    assert manifest.facts["version_of_something"] == 9
    pools[1].run(load, folder)
    zero.export(folder, tmp_path / "out")


@pytest.mark.parametrize("version", [2, "1", None, True, 0])
def test_a_later_version_is_refused_by_name(pools, version, tmp_path):
    folders = {}
    for name in JSON_FILES:
        folders[name] = tmp_path / name.replace("/", ".")
        shutil.copytree(GOLDEN / "whole", folders[name])
        change(folders[name], name, set_version(version))
    with pytest.raises(zero.CheckpointError, match=f"{MANIFEST}.*expected version 1, found {version!r}"):
        zero.verify(folders[MANIFEST])
    pools[1].run(refused, folders, version)
    path = RunFacts().write(tmp_path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "version": version}))
    with pytest.raises(zero.CheckpointError, match=rf"zero_run\.json.*expected version 1, found {version!r}"):
        RunFacts.read(tmp_path)
