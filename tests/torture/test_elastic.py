"""Jobs that lose ranks and go on by themselves: the same data, schedule and losses as a run that nobody has disturbed.

`HF_ZERO_ROUNDS`: how often a rank is killed in the long test.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Trainer

import hf_zero as zero
from tests.kit.elastic import agent, ended, lose, ranks_of, rows_by_step, until
from tests.kit.launch import JOBS, launch
from tests.kit.pool import free_port

sys.path.insert(0, str(JOBS))

from elastic_job import NumberedRows, arguments
from harness import fresh, gpt2

ROWS, TAKEN = 24, 6
SCRIPTS = Path(__file__).parents[2] / "scripts"
PLAIN = str(JOBS / "elastic_plain.py")


def each_row_once_per_epoch(steps: dict[int, list[int]], count: int) -> None:
    assert sorted(steps) == list(range(count))
    per_epoch = ROWS // TAKEN
    for first in range(0, count, per_epoch):
        seen = [row for step in range(first, first + per_epoch) for row in steps[step]]
        assert sorted(seen) == list(range(ROWS)), f"epoch from step {first}"


# ---- the Trainer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    return launch("elastic_job", folder / "out", str(folder / "run"))("run"), folder / "run"


@pytest.mark.wide
@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind", ["device", *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("disk", "auto", "born"))]
)
def test_a_trainer_goes_on_with_one_rank_and_with_three(
    whole: tuple[dict[str, Any], Path], tmp_path: Path, kind: str
) -> None:
    """Two ranks, one killed before step 5; then one, killed before step 7; then three, past a damaged checkpoint."""
    expected, undisturbed = whole
    run = tmp_path / "run"
    launch("elastic_job", tmp_path / "two", str(run), "5", "1", "2", kind)
    assert (run / "checkpoint-4").is_dir()
    one = launch("elastic_job", tmp_path / "one", str(run), "7", "0", "2", kind, ranks=1)
    assert "1 rank(s) share the 6 rows of a step: 3 per rank, 2 times per step" in one.output
    with (run / "checkpoint-6" / "optimizer" / "exp_avg.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"X")
    three = launch("elastic_job", tmp_path / "three", str(run), "-1", "-1", "2", kind, ranks=3)
    assert three.output.count("Passed over: checkpoint-6: ") == 1
    assert "3 rank(s) share the 6 rows of a step: 2 per rank" in three.output
    found = three("run")
    assert found["step"] == expected["step"] == list(range(1, 9))
    assert found["learning_rate"] == expected["learning_rate"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    steps = rows_by_step(run, [2, 1, 3])
    each_row_once_per_epoch(steps, 8)
    assert steps == rows_by_step(undisturbed, [2])


@pytest.mark.wide
@pytest.mark.gloo
def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    """On as many ranks as before, each takes up its own random numbers: equal to the bit."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    expected = launch("elastic_job", tmp_path / "whole", str(undisturbed), "-1", "-1", "2", "dropout")("run")
    launch("elastic_job", tmp_path / "cut", str(run), "5", "1", "2", "dropout")
    assert launch("elastic_job", tmp_path / "again", str(run), "-1", "-1", "2", "dropout")("run") == expected
    one, other = (load_file(folder / "final" / "model.safetensors") for folder in (undisturbed, run))
    assert all(other[name].equal(value) for name, value in one.items())


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataloader_drop_last": True}, "an epoch had 4 steps of 6 rows, and has 5 on 1 ranks .dataloader_drop_last"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "group_by_length orders samples by the size of a rank's batches",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(
    whole: tuple[dict[str, Any], Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(whole[1] / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer = trainer_of(tmp_path, rows=27, **changes)
    with pytest.raises(zero.ConfigError, match=message):
        trainer.train(resume_from_checkpoint="latest")


@pytest.mark.gloo
def test_who_does_not_ask_for_it_is_warned(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """A folder by name: the arguments are taken as they are, and what follows for the data is said."""
    trainer = trainer_of(tmp_path, max_steps=5)
    with pytest.warns(UserWarning, match="a step takes 3 rows, and took 6 .* keeps the rows of a step"):
        trainer.train(resume_from_checkpoint=str(whole[1] / "checkpoint-4"))
    assert trainer.state.global_step == 5


def trainer_of(folder: Path, rows: int = ROWS, **changes: Any) -> Trainer:
    fresh()
    return Trainer(gpt2(), arguments(str(folder), **changes), train_dataset=NumberedRows(rows))


# ---- zero.shard under torchrun ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain program on two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("plain")
    launch("elastic_plain", folder)
    return folder


def weights(folder: Path) -> dict[str, Any]:
    return load_file(zero.latest_checkpoint(folder) / "model.safetensors")


@pytest.mark.wide
@pytest.mark.gloo
def test_torchrun_starts_again_after_a_rank_was_killed(plain: Path, tmp_path: Path) -> None:
    """SIGKILL before step 7: the newest checkpoint is that of step 6. The result is the same to the last bit."""
    log = tmp_path / "log"
    job = agent(log, "--standalone", "--nproc-per-node=2", "--max-restarts=1", PLAIN, str(tmp_path), "7")
    ended(job, log)
    expected, found = weights(plain), weights(tmp_path)
    assert all(found[name].equal(value) for name, value in expected.items())
    steps = rows_by_step(tmp_path, [2])
    each_row_once_per_epoch(steps, 12)
    assert steps == rows_by_step(plain, [2])
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-10", "checkpoint-12"]


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.gloo
def test_a_machine_is_lost_and_another_comes(plain: Path, tmp_path: Path) -> None:
    """Two agents, `--nnodes=1:2`; one is killed with its rank. The other goes on alone, and with a third when that comes."""
    log = tmp_path / "log"
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=lost"]
    words += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]

    def start(is_host: int) -> Any:
        conf = f"--rdzv-conf=is_host={is_host},last_call_timeout=3,keep_alive_interval=1"
        return agent(log, *words, conf, PLAIN, str(tmp_path), "-1", "1.5")

    agents = [start(1), start(0)]
    try:
        until((tmp_path / "checkpoint-4").is_dir, 120, log)
        lose(agents[1])
        until((tmp_path / "checkpoint-6").is_dir, 120, log)
        agents.append(start(0))
        for process in (agents[0], agents[2]):
            ended(process, log, 180)
    finally:
        for process in agents:
            lose(process)
    # Which steps were made by how many is a matter of time; the rows are the same by whomever.
    assert (tmp_path / "rows.1.0.jsonl").is_file()
    steps = rows_by_step(tmp_path, [2, 1, 2])
    each_row_once_per_epoch(steps, 12)
    assert steps == rows_by_step(plain, [2])
    expected, found = weights(plain), weights(tmp_path)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < 1e-6, name


FLAGS = {
    "finetune.py": "--corpus-size=60000 --max-eval-samples=8 --logging-steps=1 --save-total-limit=2 --disable-tqdm=true "
    "--resume-from-checkpoint=latest",
    "finetune_no_trainer.py": "--resume",
}
CHECKPOINTS = {"finetune.py": "checkpoint-*", "finetune_no_trainer.py": "checkpoints/checkpoint_*"}


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.gloo
@pytest.mark.parametrize(("script", "stage"), [("finetune.py", 2), ("finetune.py", 3), ("finetune_no_trainer.py", 3)])
def test_a_script_goes_on_after_a_kill(tmp_path: Path, script: str, stage: int) -> None:
    """As it is typed: killed after its first checkpoint, it ends with the losses and weights of a whole run."""
    log = tmp_path / "log"
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", str(SCRIPTS / script), f"--zero-stage={stage}"]
    words += ["--block-size=32", "--max-steps=40", "--per-device-train-batch-size=4", "--save-steps=5"]
    words += FLAGS[script].split()
    ended(agent(log, *words, f"--output-dir={tmp_path / 'whole'}"), log, 300)
    job = agent(log, *words, f"--output-dir={tmp_path / 'cut'}")
    try:
        until(lambda: list((tmp_path / "cut").glob(CHECKPOINTS[script])), 180, log)
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        ended(job, log, 300)
    finally:
        lose(job)
    assert log.read_text().count("exitcode: -9") == 1
    one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "cut"))
    assert all(other[name].equal(value) for name, value in one.items())
    if script == "finetune.py":
        assert "hf_zero: resumed from checkpoint-" in log.read_text()
        states = [json.loads((tmp_path / run / "trainer_state.json").read_text()) for run in ("whole", "cut")]
        for name in ("loss", "grad_norm", "learning_rate"):
            losses = [[entry[name] for entry in state["log_history"] if name in entry] for state in states]
            assert len(losses[0]) == 40
            assert losses[0] == losses[1], name


# ---- many kills ------------------------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.gloo
def test_ranks_of_a_trainer_are_killed_at_random(tmp_path: Path) -> None:
    """Any rank, at any time from its start on, also in a save; the result is that of a run that nobody disturbs, to the bit."""
    rounds, seed = int(os.environ.get("HF_ZERO_ROUNDS", "20")), int(os.environ.get("HF_ZERO_SEED", "0"))
    epochs = str(20 * rounds)  # a fast machine must not be done before it is hit
    whole = launch("elastic_job", tmp_path / "whole", str(tmp_path / "expected"), "-1", "-1", epochs, timeout=600)
    log, run, chance = tmp_path / "log", tmp_path / "run", random.Random(seed)
    (tmp_path / "out").mkdir()
    # Tries that end while they start count, too: two for each kill that is meant.
    words = ["--standalone", "--nproc-per-node=2", f"--max-restarts={2 * rounds}", str(JOBS / "elastic_job.py")]
    job = agent(log, *words, str(tmp_path / "out"), str(run), "-1", "-1", epochs)
    killed: list[str] = []
    try:
        began, none_yet = time.monotonic(), newest_in(run)
        until(lambda: job.poll() is not None or newest_in(run) > none_yet, 180, log)
        start_s = time.monotonic() - began
        for _ in range(rounds):
            newest = newest_in(run)
            # Every third one hits a start: anything from the import of torch to the loading of the checkpoint.
            until(lambda: job.poll() is not None or len(ranks_of(job)) == 2, 120, log)
            if chance.random() < 2 / 3:
                until(lambda newest=newest: job.poll() is not None or newest_in(run) > newest, 180, log)
                time.sleep(chance.uniform(0, 1.5))
            else:
                time.sleep(chance.uniform(0, start_s))
            if job.poll() is not None:
                break
            victims = ranks_of(job)
            if not victims:
                continue
            with suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
                killed.append(newest_in(run))
            until(lambda victims=victims: job.poll() is not None or set(ranks_of(job)).isdisjoint(victims), 120, log)
        ended(job, log, 900)
    finally:
        lose(job)
    print(f"killed {len(killed)} times, after {killed}; seed {seed}")
    assert len(killed) >= 0.8 * rounds
    steps = rows_by_step(run, [2])
    each_row_once_per_epoch(steps, 4 * int(epochs))
    assert steps == rows_by_step(tmp_path / "expected", [2])
    expected, found = (load_file(folder / "final" / "model.safetensors") for folder in (tmp_path / "expected", run))
    assert all(found[name].equal(value) for name, value in expected.items())
    assert whole("run")["step"] == list(range(1, 4 * int(epochs) + 1))
    assert not list(run.glob(".*zero_saving"))


def newest_in(run: Path) -> str:
    """The name of the newest checkpoint, such that names compare as their steps do."""
    return max((f"{int(path.name.split('-')[1]):06d}" for path in run.glob("checkpoint-*")), default="")
