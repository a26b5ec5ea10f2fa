"""A checkpoint does not depend on where states were kept: the same bytes from every tier, and any tier goes on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_zero as zero
from tests.kit.offloading import PLACES, Run, equal

pytestmark = pytest.mark.gloo

NEXT = dict(zip(PLACES, [*list(PLACES)[1:], *PLACES]))
"""Where the checkpoint of each goes on."""


def digests(folder: Path) -> dict[str, str]:
    """Of the files with weights and optimizer state."""
    files = [
        path for path in folder.rglob("*") if path.suffix == ".safetensors" and path.name != "zero_state.safetensors"
    ]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def saved_and_resumed(rank: int, world: int, dtype: str, place: Path) -> Iterator[str]:
    offload_dir = str(place / "tier")
    written: dict[str, dict[str, str]] = {}
    for number, here in enumerate(PLACES):
        run = Run(here, dtype, rank, offload_dir, seed=0)
        run.train(0, 1)
        values = run.values()
        folder = place / f"from {here}"
        run.save(folder, async_save=number % 2 == 1)
        losses = run.train(2, 3)  # while it is being written, where it is
        run.engine.wait_for_save()
        zero.verify(folder)
        written[here] = digests(folder)
        after = run.values()
        run.engine.detach()
        other = Run(NEXT[here], dtype, rank, offload_dir, seed=1)
        if number % 3 == 1:
            other.train(7)  # with state of its own, which goes
        other.load(folder)
        if not equal(other.values(), values):
            yield f"{here} -> {NEXT[here]}: other values"
        if other.train(2, 3) != losses or not equal(other.values(), after):
            yield f"{here} -> {NEXT[here]}: trains on to other numbers"
        other.engine.detach()
    first = written["memory"]
    if len(first) < 4:
        yield f"only {list(first)} were written"
    for here, files in written.items():
        if files != first:
            yield f"saved from {here}: other bytes in {[name for name in first if files.get(name) != first[name]]}"


def listed(rank: int, world: int, dtype: str, place: Path) -> list[str]:
    return [f"rank {rank}: {line}" for line in saved_and_resumed(rank, world, dtype, place)]


def moved(rank: int, world: int, place: Path, saver: Path) -> list[Any]:
    """At another number of ranks: the same values, and the same bytes when saved from there."""
    out = []
    for here in ("disk", "split", "host, parameters too"):
        run = Run(here, "bf16", rank, str(place / "tier"), seed=1)
        run.load(saver)
        out.append(run.values())
        again = place / f"{world} ranks {here}"
        run.save(again)
        assert digests(again) == digests(saver), here
        with pytest.raises(zero.CheckpointError):
            run.load(place / "nowhere")
        run.load(saver, load_optimizer=False)
        run.train(2)
        run.engine.detach()
    return out


@pytest.mark.parametrize("dtype", ["no", "bf16"])
def test_saved_in_one_tier_and_resumed_in_another(two, tmp_path, dtype):
    wrong = [line for lines in two.run(listed, dtype, tmp_path, timeout_s=200) for line in lines]
    assert not wrong, "\n".join(wrong)


def test_saved_in_one_tier_and_resumed_on_other_ranks(pools, tmp_path):
    saver = tmp_path / "saved"
    values = pools[2].run(save_once, tmp_path, saver)[0]
    for world in (1, 3):
        for loaded in pools[world].run(moved, tmp_path, saver)[0]:
            assert equal(loaded, values)


def save_once(rank: int, world: int, place: Path, saver: Path) -> list[Any]:
    run = Run("split, parameters on disk", "bf16", rank, str(place / "tier"), seed=0)
    run.train(0, 1)
    run.save(saver)
    values = run.values()
    run.engine.detach()
    return values
