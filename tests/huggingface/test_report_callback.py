"""ZeroCallback in the real Trainer: what it logs, writes and prints."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

import hf_zero as zero
from hf_zero.cli.main import main
from tests.kit.jobs.harness import Tokens, arguments, gpt2


def train(folder: Path, callbacks: list[TrainerCallback], resume: bool = False, **changes: Any) -> Trainer:
    settings = {
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "zero_stage": 3,
    }
    args = arguments(folder, None, zero.ZeroTrainingArguments, **{**settings, **changes})
    trainer = Trainer(gpt2(), args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Seen(TrainerCallback):
    """What a reporter sees."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_logs_file_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = Seen(), Seen()
    callbacks = [first, zero.ZeroCallback(), last]
    run = train(tmp_path, callbacks, zero_offload_optimizer="cpu", eval_strategy="steps", eval_steps=2)
    of_training = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(of_training) == 2
    for entry in of_training:
        assert entry["zero/device_gib"] > 0
        assert entry["zero/host_gib"] > 0
        assert entry["zero/disk_gib"] == 0
        assert 0 <= entry["zero/wait_s"] < entry["zero/step_s"]
    for seen in (first, last):
        assert [entry for entry in seen.logs if "zero/step_s" in entry] == [
            {name: value for name, value in entry.items() if name != "step"} for entry in of_training
        ]
    assert not any("zero/step_s" in entry for entry in run.state.log_history if "eval_loss" in entry)

    facts, *rest = steps_in(tmp_path / "zero_steps.jsonl")
    steps = [record for record in rest if record["kind"] == "step"]
    logged = [record for record in rest if record["kind"] == "log"]
    assert [record["step"] for record in logged] == [entry["step"] for entry in run.state.log_history]
    assert [record["values"]["loss"] for record in logged if "loss" in record["values"]] == [
        entry["loss"] for entry in of_training
    ]
    assert not any(name.startswith("zero/") for record in logged for name in record["values"])
    assert rest[-1]["kind"] == "end"
    assert facts["about"] == {"model": "GPT2LMHeadModel", "max_steps": 4, "batch_per_rank": 2}
    rows = 2 * 2  # micro-batches of two rows
    ids = len(Tokens()[0]["input_ids"])
    assert [(step["samples"], step["tokens"]) for step in steps] == [(rows, rows * ids)] * 4
    assert str(tmp_path) not in json.dumps([facts, *rest])
    assert (facts["kind"], facts["stage"], facts["predicted"]["backward_per_step"]) == ("facts", 3, 2)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for entry, covered in zip(of_training, (steps[:2], steps[2:]), strict=True):
        assert entry["zero/step_s"] == pytest.approx(sum(step["seconds"] for step in covered) / 2)
        assert entry["zero/device_gib"] == max(step["peak"]["device"]["all"] for step in covered) / 2**30
    assert [step["forwards"] for step in steps] == [2, 2, 2, 2]
    assert steps[2]["evaluations"] > 0

    text = capsys.readouterr().out
    assert text.count("4 steps in ") == 1
    assert f"hf-zero report {tmp_path}" in text
    assert "zero/" not in text, "a log line has what the stock Trainer's has"
    engine = zero.engine_of(run.model)
    assert engine is not None
    assert engine.recorder is None, "nothing is measured after training"
    assert main(["report", str(tmp_path)]) == 0
    assert "host, optimizer" in capsys.readouterr().out


def test_a_log_has_all_steps_since_the_previous_one() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = zero.shard(model, optimizer, zero.ZeroConfig(stage=2)).record()
    seconds = []
    for _ in range(80):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        seconds.append(recorder.last["seconds"])
    assert recorder.logs()["step_s"] == pytest.approx(sum(seconds) / 80)
    assert recorder.logs() == {}


def test_tensorboard(tmp_path: Path) -> None:
    """Event files as TensorBoard reads them: every measurement, under the step that it was logged at."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tmp_path, [zero.ZeroCallback(report=False)], report_to=["tensorboard"])
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = reader.EventAccumulator(str(folder)).Reload()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    measured = [name for name in logged[0] if name.startswith("zero/")]
    assert len(measured) >= 8
    for name in ("loss", *measured):
        found = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert [step for step, _ in found] == [2, 4]
        assert [value for _, value in found] == pytest.approx([entry[name] for entry in logged], rel=1e-5)


def test_reporters_of_a_trainer_that_knows_of_no_plugin(tmp_path: Path) -> None:
    """A model sharded by hand: nothing but the callback tells the Trainer of it."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    args = arguments(tmp_path, None, max_steps=2, logging_steps=1, save_strategy="no", per_device_train_batch_size=8)
    seen = Seen()
    trainer = Trainer(
        model,
        args,
        train_dataset=Tokens(),
        callbacks=[seen, zero.ZeroCallback(report=False, record=False)],
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert type(trainer) is Trainer
    of_training = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["zero/step_s"] > 0 for entry in of_training] == [True, True]
    assert [entry["zero/step_s"] for entry in seen.logs if "loss" in entry] == [
        entry["zero/step_s"] for entry in of_training
    ]


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind half a line of a run that was killed; what is resumed is said."""
    file, half = tmp_path / "zero_steps.jsonl", '{"kind": "step", "st'
    file.write_text(half)
    train(tmp_path, [zero.ZeroCallback(report=False)], max_steps=2, save_strategy="steps", save_steps=2)
    AcceleratorState._reset_state(True)
    train(tmp_path, [zero.ZeroCallback()], resume=True, max_steps=4)
    assert f"after step 2, from {tmp_path / 'checkpoint-2'}" in " ".join(capsys.readouterr().out.split())
    first, *whole = file.read_text().splitlines()
    assert first == half
    records = [record for record in map(json.loads, whole) if record["kind"] in ("facts", "step")]
    assert [record.get("step", "facts") for record in records] == ["facts", 1, 2, "facts", 3, 4]


def test_nothing_is_written_when_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, [zero.ZeroCallback(report=False, record=False)])
    assert not list(tmp_path.rglob("zero_steps*"))
    assert "hf_zero: ZeRO stage" not in capsys.readouterr().out
    assert any("zero/step_s" in entry for entry in run.state.log_history)


class Stream(io.StringIO):
    """What one terminal shows that standard output and standard error both go to."""

    encoding = "utf-8"


@pytest.mark.parametrize("bar", [True, False])
def test_what_a_person_sees(bar: bool, tmp_path: Path) -> None:
    """One screen at the start, a compact line per log, a few lines at the end, none behind a bar."""
    seen = Stream()
    with contextlib.redirect_stdout(seen), contextlib.redirect_stderr(seen):
        train(tmp_path, [zero.ZeroCallback()], disable_tqdm=not bar)
    text = seen.getvalue()
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]
    begin = lines.index("hf_zero: ZeRO stage 3 on 1 rank")
    first = next(at for at, line in enumerate(lines) if at > begin and not line.startswith("  "))
    screen = lines[begin:first]
    assert len(screen) <= 15
    assert any(line.startswith("  device ") and "free" in line for line in screen)
    last = lines.index("hf_zero: ZeRO stage 3 on 1 rank, done")
    ending = [lines[last], *itertools.takewhile(lambda line: line.startswith("  "), lines[last + 1 :])]
    assert 4 <= len(ending) <= 10
    for words in (
        "4 steps in ",
        "tokens/s",
        "counted at peak, planned",
        "resident at peak",
        f"hf-zero report {tmp_path}",
    ):
        assert words in " ".join(" ".join(ending).split())
    assert sum("1 rank: nothing is sharded. Start with torchrun --nproc-per-node N" in line for line in screen) == 1
    assert sum("precision" in line for line in screen) == 1
    logs = [line for line in lines if line.startswith("step ") and "  loss " in line]
    assert [line.split()[1] for line in logs] == ["2/4", "4/4"]
    for line in logs:
        assert re.fullmatch(
            r"step \d/4  loss [\d.]+  grad norm [\d.e+-]+  lr [\d.e+-]+  tokens/s [\d,]+  memory [\d.]+ [KMG]iB  epoch [\d.]+",
            line,
        ), line
    assert "{'loss'" not in text
    for word in ("spans", "in passing", "now 0.0"):
        assert word not in text


def test_tables_for_those_who_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, [zero.ZeroCallback(verbose=True)])
    text = capsys.readouterr().out
    assert text.count("MiB per rank") == 1
    assert text.count("MiB by tier") == 2
    assert text.count("4 steps recorded") == 1


def test_the_trainer_adds_the_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hf-zero report` has data without a word in the program; a callback that the program passes stays the only one."""
    (tmp_path / "default" / "checkpoint-4").mkdir(parents=True)  # of an older run
    first = train(tmp_path / "default", [])
    assert [record["kind"] for record in steps_in(tmp_path / "default" / "zero_steps.jsonl")][-1] == "end"
    text = capsys.readouterr().out
    assert text.count("4 steps in ") == 1
    assert "checkpoint-4" not in text
    first.train()
    assert "hf_zero: ZeRO stage 3 on 1 rank\n" in capsys.readouterr().out
    AcceleratorState._reset_state(True)
    run = train(tmp_path / "given", [zero.ZeroCallback(report=False)])
    assert sum(isinstance(callback, zero.ZeroCallback) for callback in run.callback_handler.callbacks) == 1
    assert "4 steps in " not in capsys.readouterr().out


class NeedsRoom(GPT2LMHeadModel):
    """Fits one row."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def test_the_batch_size_that_was_found_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"auto_find_batch_size": True, "max_steps": 1, "save_steps": 1}
    args = arguments(tmp_path, None, zero.ZeroTrainingArguments, zero_stage=2, **settings)
    with zero.Init():
        model = NeedsRoom(gpt2().config)
    run = Trainer(model, args, train_dataset=Tokens())
    run.save_model(str(tmp_path / "before"))
    assert NeedsRoom.from_pretrained(tmp_path / "before").num_parameters() == gpt2().num_parameters()
    run.train()
    assert capsys.readouterr().out.count("hf_zero: ZeRO stage 2 on 1 rank\n") == 1
    saved = zero.verify(tmp_path / "checkpoint-1").facts["batches"]
    assert (saved["asked_rows"], saved["rows_per_step"]) == (1, 1)
    facts = json.loads((tmp_path / "checkpoint-1" / "zero_run.json").read_text())
    assert facts["hyperparameters"]["per_device_train_batch_size"] == 1
    assert steps_in(tmp_path / "zero_steps.jsonl")[0]["about"]["batch_per_rank"] == 1


class Interrupts(TrainerCallback):
    """Ctrl-C in the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_ctrl_c_names_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, [Interrupts()], save_strategy="steps", save_steps=2)
    text = capsys.readouterr().err
    assert f"the newest checkpoint is {tmp_path / 'checkpoint-2'}. Continue with trainer.train(" in text


def test_latest_says_that_it_starts_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, [], resume="latest", max_steps=2)  # type: ignore[arg-type]
    assert f"no checkpoint in {tmp_path}: training starts from the beginning" in capsys.readouterr().err
