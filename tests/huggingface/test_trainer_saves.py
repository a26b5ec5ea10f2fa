"""What the stock Trainer saves and loads on two ranks: rotation, damage, crashes, saves behind training."""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Trainer,
    TrainerCallback,
)

import hf_zero as zero
from tests.huggingface.trainer_runs import (
    FOLDER,
    curve,
    folders_in,
    saved,
    trainer,
    whole_run,
)
from tests.kit.jobs.harness import (
    RANK,
    assert_refused,
    barrier,
    distance,
    files_under,
    flip,
    gpt2,
    raised,
)
from tests.kit.pool import RankPool


def rotation() -> None:
    """`save_total_limit`: the best and the last stay, what is not complete goes first."""
    folder = Path("rotation")
    if RANK == 0:
        (folder / "checkpoint-99").mkdir(parents=True)
        (folder / "checkpoint-99" / "config.json").write_text("{}")
        (folder / ".checkpoint-98.zero_saving").mkdir()  # of a job that was killed
    barrier()
    run = trainer("rotation", 3, save_steps=2, eval_steps=2, save_total_limit=2, load_best_model_at_end=True)
    run.train()
    barrier()
    names = folders_in(folder)
    assert len(names) == 2
    assert {"checkpoint-8", Path(run.state.best_model_checkpoint or "").name} <= names
    assert not {"checkpoint-99", ".checkpoint-98.zero_saving"} & names


def stage_3() -> str:
    """Return the folder of a whole run."""
    whole_run("stage3", 3)
    return "stage3"


class Broken(Trainer):
    """Its rank 1 cannot write, from the second checkpoint on."""

    def _save_rng_state(self, output_dir: str) -> None:
        if RANK == 1 and self.state.global_step > 4:
            raise OSError("no space left")
        super()._save_rng_state(output_dir)


def crash(async_save: bool) -> None:
    """A failed checkpoint leaves the one before, which is the best that there is."""
    name = f"crash{int(async_save)}"
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    run = trainer(name, 2, kind=Broken, async_save=async_save, **best)
    assert_refused(run.train, "failed on rank 1: OSError: no space left", kind="CheckpointError")
    barrier()
    assert zero.verify(Path(name, "checkpoint-4")).facts["world_size"] == 2
    assert folders_in(Path(name)) == {"checkpoint-4"}
    assert run.state.best_model_checkpoint == f"{name}/checkpoint-4"


class SmallDisk(TrainerCallback):
    """From the seventh step on the kernel lets no file of rank 1 grow beyond 20 KB: its weights do not fit."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if RANK == 1 and state.global_step == 7:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def fails_behind() -> None:
    """The failure happens in the writing thread, while training goes on; the end of training reports it."""
    run = trainer("fails_behind", 3, async_save=True, callbacks=[SmallDisk()])
    try:
        assert_refused(run.train, "checkpoint-8", "File too large", kind="CheckpointError")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    barrier()
    assert folders_in(Path("fails_behind")) == {"checkpoint-4"}


def damaged() -> None:
    """A copy of a run whose newest checkpoint has one bit flipped: `resume_from_checkpoint=True` says so and goes on."""
    name, source = "damaged", stage_3()
    if RANK == 0:
        shutil.copytree(Path(source), Path(name))
        flip(Path(name, "checkpoint-8", "optimizer", "exp_avg.safetensors"))
    barrier()
    run = trainer(name, 3, seed=99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(resume_from_checkpoint=True)
    barrier()
    zero.verify(Path(name, "checkpoint-8"))
    assert distance(saved(Path(name, "checkpoint-8")), saved(Path(source, "checkpoint-8"))) == 0.0
    warned = [str(item.message) for item in caught if "Passed over" in str(item.message)]
    assert len(warned) == (RANK == 0), "rank 0 speaks"
    for message in warned:
        assert "checkpoint-4. Passed over: checkpoint-8:" in message
        assert "exp_avg.safetensors is damaged" in message
    state = Path(name, "checkpoint-4", "trainer_state.json")
    if RANK == 0:
        state.write_bytes(b"x" + state.read_bytes()[1:])
    barrier()
    again = partial(trainer(name, 3).train, resume_from_checkpoint=str(state.parent))
    assert_refused(again, f"{state} is damaged", kind="CheckpointError")


class Damages(TrainerCallback):
    """The best checkpoint goes bad when the last is there."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if RANK == 0 and state.global_step == 8:
            flip(Path(state.best_model_checkpoint) / "model.safetensors")
        barrier()  # the other rank may be the one that checks these bytes


def damaged_best() -> None:
    """At the end the stock Trainer drops all checkpoints but the best."""
    options = {"save_total_limit": 1, "metric_for_best_model": "eval_loss"}
    run = trainer("damaged_best", 3, save_steps=4, eval_steps=4, callbacks=[Damages()], **options)
    run.train()
    barrier()
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-4"
    assert (Path("damaged_best", "checkpoint-8")).is_dir()


def nothing_left() -> None:
    """Every checkpoint is damaged: no fresh start behind the user's back."""
    folder, source = Path("nothing_left"), stage_3()
    if RANK == 0:
        shutil.copytree(Path(source), folder)
        for path in folder.glob("checkpoint-*/zero_manifest.json"):
            path.unlink()
    barrier()
    run = trainer("nothing_left", 3)
    words = "holds 2 checkpoint folders and none is complete: checkpoint-8: "
    assert_refused(lambda: run.train(resume_from_checkpoint=True), words, kind="CheckpointError")


def behind() -> None:
    """Written behind training: the same files as when training waits."""
    settings: dict[str, Any] = {"save_steps": 2, "save_total_limit": 3, "load_best_model_at_end": True, "eval_steps": 2}
    runs = {}
    for name, async_save in (("waits", False), ("behind", True)):
        run = trainer(name, 3, async_save=async_save, **settings)
        run.train()
        barrier()
        runs[name] = curve(run)
    differ = {"training_args.bin", "trainer_state.json", "zero_manifest.json"}  # paths, seconds, digests of these
    differ |= {"zero_steps.jsonl", "zero_steps.rank1.jsonl"}
    names = [files_under(Path(name)) for name in ("waits", "behind")]
    assert names[0]
    assert names[0] == names[1]
    for name in names[0]:
        if Path(name).name not in differ:
            assert (Path("waits") / name).read_bytes() == (Path("behind") / name).read_bytes(), name
    states = [json.loads((Path("behind") / n).read_text()) for n in names[1] if n.endswith("trainer_state.json")]
    assert len(states) == 3
    for state in states:
        assert "behind/checkpoint-" in (state["best_model_checkpoint"] or ""), "of the finished one"
    assert runs["waits"] == runs["behind"]


def two_nodes() -> bool:
    """False where this process may not mount a file system. Rank 0's node gets the whole checkpoint, the other nothing.

    Rank 1 has a disk of its own where rank 0 saves: a file system mounted over the folder, for this thread alone.
    """
    folder = Path("node")
    if RANK == 0:
        folder.mkdir()
    barrier()
    apart = True
    if RANK == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private = 0x00020000, 0x4000 | 0x40000
        apart = (
            libc.unshare(new_mounts) == 0
            and libc.mount(b"none", b"/", None, private, None) == 0
            and libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=16m") == 0
        )
    if not agreed(apart):
        return False
    trainer("node", 3).train()
    barrier()
    if RANK == 0:
        files = [name for name in files_under(folder) if name.startswith("checkpoint-8/")]
        assert files == [f"checkpoint-8/{name}" for name in sorted([*FOLDER, "training_args.bin"])]
        zero.verify(folder / "checkpoint-8")
    else:
        assert not folders_in(folder)
    run = trainer("node", 3)
    resume = partial(run.train, resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert_refused(resume, "is missing on ranks [1]", kind="CheckpointError")  # to resume, both need to see it
    return True


def agreed(answer: bool) -> bool:
    answers: list[Any] = [None, None]
    torch.distributed.all_gather_object(answers, answer)
    return all(answers)


def born() -> None:
    """A model that never was whole on a rank: trained, saved, and resumed into another such model."""
    source = stage_3()
    whole_run("ddp", None)
    with zero.Init():
        model = gpt2()
    run = trainer("born", 3, model=model, load_best_model_at_end=True)
    run.train()
    barrier()
    assert distance(saved(Path("born", "checkpoint-8")), saved(Path(source, "checkpoint-8"))) == 0.0
    with zero.Init():
        model = gpt2(seed=99)
    again = trainer("born_again", 3, model=model)
    again.train(resume_from_checkpoint="born/checkpoint-4")
    assert distance(saved(Path("born_again", "checkpoint-8")), saved(Path(source, "checkpoint-8"))) == 0.0
    with zero.Init():
        model = gpt2(seed=98)
    again = trainer("born_from_ddp", 3, model=model)
    again.train(resume_from_checkpoint="ddp/checkpoint-4")
    assert distance(saved(Path("born_from_ddp", "checkpoint-8")), saved(Path("ddp", "checkpoint-8"))) < 1e-5


def plain_from_ours() -> None:
    """Plain data parallel is told that there is no state that it could read."""
    stage_3()
    message = raised(lambda: trainer("plain_resumes", None).train("stage3/checkpoint-4"))
    assert "optimizer.pt" in message, message


class Examines(Trainer):
    """Runs on one rank what it saves, as the model card of Sentence Transformers does."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save(logits(self.model), Path(str(output_dir), "example.bin"))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(8)[None]).logits
        return found


def save_only_model() -> None:
    trainer("only_model", 3, kind=Examines, save_only_model=True).train()
    barrier()
    folder = Path("only_model", "checkpoint-8")
    found = torch.load(folder / "example.bin")
    assert torch.equal(found, logits(type(gpt2()).from_pretrained(folder)))
    files = files_under(folder)
    assert {"model.safetensors", "zero_manifest.json"} <= set(files)
    assert not [name for name in files if "optimizer" in name or "rng" in name]


WORK: dict[str, Callable[[], None]] = {
    "plain from ours": plain_from_ours,
    "rotation": rotation,
    "damaged best": damaged_best,
    "born": born,
    "damaged": damaged,
    "nothing left": nothing_left,
    **{f"crash {async_save}": partial(crash, async_save) for async_save in (False, True)},
    "behind": behind,
    "fails behind": fails_behind,
    "save_only_model": save_only_model,
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", WORK)
def test_on_two_ranks(on_two: Callable[..., Any], name: str) -> None:
    on_two(WORK[name])


@pytest.mark.gloo
def test_two_nodes(two: RankPool, on_two: Callable[..., Any]) -> None:
    try:
        if not on_two(two_nodes):
            pytest.skip("needs the right to mount a file system")
    finally:
        two.stop()  # rank 1 may be in a mount namespace of its own
