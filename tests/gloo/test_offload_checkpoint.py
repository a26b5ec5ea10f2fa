"""A checkpoint does not depend on where states were kept: the same bytes from every tier, and any tier goes on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero as zero
from tests.common import MODELS, Case, batch, optimizer_for
from tests.offloading import mixed, same, small_blocks

pytestmark = pytest.mark.gloo

PLACES: dict[str, dict[str, Any]] = {
    "memory": {"stage": 2},
    "host": {"stage": 2, "offload_optimizer": "cpu"},
    "disk": {"stage": 3, "offload_optimizer": "disk", "offload_params": "disk"},
    "split": {"stage": 1, "offload_optimizer": "mixed"},
    "host, parameters too": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "parameters on disk": {"stage": 3, "offload_params": "disk"},
    "split, parameters on disk": {"stage": 3, "offload_optimizer": "mixed", "offload_params": "disk"},
}
NEXT = dict(zip(PLACES, [*list(PLACES)[1:], *PLACES]))
"""Where the checkpoint of each goes on."""


class Run:
    """A training run in one place."""

    def __init__(self, place: str, dtype: str, rank: int, folder: str, seed: int) -> None:
        self.rank = rank
        case = Case("bert", dtype=dtype, groups=2, **PLACES[place])
        self.model = MODELS["bert"]()
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0.01 * seed)
        self.optimizer = optimizer_for(self.model, 2, lr=1e-3, amsgrad=True)
        with mixed(case), small_blocks():
            self.engine = zero.shard(self.model, self.optimizer, case.config(folder), mixed_precision=dtype)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)

    def train(self, *steps: int) -> list[float]:
        losses = []
        with small_blocks():
            for step in steps:
                ids = batch(step, 0, self.rank)
                loss = self.model(input_ids=ids, labels=ids).loss
                loss.backward()
                self.engine.clip_grad_norm_(0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
            self.engine.finish_step()
        return losses

    def save(self, folder: Path, **options: Any) -> None:
        with small_blocks():
            self.engine.save(folder, objects={"scheduler": self.scheduler}, **options)

    def load(self, folder: Path, **options: Any) -> None:
        with small_blocks():
            self.engine.load(folder, objects={"scheduler": self.scheduler}, **options)

    def values(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *(state[i][key] for i in state for key in sorted(state[i]))]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))


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
