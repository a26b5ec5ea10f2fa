"""A full disk while a checkpoint is written: the error names the file, which the system's own message lacks."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import hf_zero as zero
from tests.faults.faults import faults
from tests.kit.pool import on_ranks
from tests.models import adamw, inputs, mlp

pytestmark = pytest.mark.gloo


@on_ranks(1)
def test_the_file_is_named(rank: int, world: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "ck")
    torch.manual_seed(0)
    model = mlp()
    optimizer = adamw(model)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    model(inputs(rank, 0)).square().mean().backward()
    optimizer.step()
    engine.save(folder)

    def save_failing_at(k: int) -> str | None:
        try:
            with faults(tmp_path, ("create", "pwrite"), k, "nameless"):
                engine.save(folder)
        except zero.CheckpointError as error:
            return str(error)
        return None

    messages = list(itertools.takewhile(lambda message: message is not None, map(save_failing_at, itertools.count())))
    found = [re.search(rf"{re.escape(folder)}/\.zero_saving-\w+/ck/?([\w./]*)", message) for message in messages]
    assert all(found), messages
    assert all("No space left" in message for message in messages[::2]), messages
    named = {match[1].rstrip(":") for match in found}
    files = ("model.safetensors", "optimizer/exp_avg.safetensors", "zero_state.safetensors", "zero_manifest.json")
    assert named >= {*files}
    zero.verify(folder)  # the checkpoint before is whole
