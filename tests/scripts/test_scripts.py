"""The scripts as a user runs them: both launchers, two CPU ranks, a few steps.

Run: pytest tests/scripts/test_scripts.py. Every process has a time limit and is gone afterwards. Not here: CUDA.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    TrainingArguments,
    default_data_collator,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import finetune
import finetune_no_trainer
from common.models import AUTO_MODELS

import hf_zero as zero
from tests.kit.launch import fork_ranks

ROOT = Path(__file__).parents[2]
FINETUNE, NO_TRAINER = str(ROOT / "scripts" / "finetune.py"), str(ROOT / "scripts" / "finetune_no_trainer.py")
LAUNCHER = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}
SMALL = ["--max-steps=6", "--logging-steps=1", "--per-device-train-batch-size=4", "--block-size=64"]
SMALL += ["--max-train-samples=96", "--max-eval-samples=12", "--disable-tqdm=true", "--corpus-size=300000"]
LIMIT = 120  # seconds for one launch, on a machine that does other things too

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(400)]


@dataclass
class Ended:
    """One process that has ended."""

    status: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of all runs."""
    return tmp_path_factory.mktemp("scripts")


def environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def run(command: Sequence[str], place: Path, **variables: str) -> str:
    """The output of a command that has to succeed within `LIMIT` seconds; whatever is left of its session is ended."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=place,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output[-3000:]}\n{errors[-6000:]}")
    return output


def torchrun(words: Sequence[str], place: Path) -> str:
    return run(["-m", LAUNCHER["torchrun"], "--standalone", "--nproc-per-node=2", *words], place)


def forked(words: Sequence[str], place: Path, ranks: int = 2, **variables: str) -> list[Ended]:
    """A Python file on ranks without a launcher: nobody ends the one when the other has failed, their outputs stay apart.

    They are forked from a process that has imported torch and transformers: a start costs nothing.
    """
    outputs = [(place / f"out{rank}.txt", place / f"err{rank}.txt") for rank in range(ranks)]
    codes = fork_ranks(words, environment() | variables, outputs, folder=place, timeout=LIMIT, grace_s=LIMIT)
    texts = [[path.read_text() for path in pair] for pair in outputs]
    return [Ended(-1 if code is None else code, *pair) for code, pair in zip(codes, texts)]


def on_ranks(words: Sequence[str], place: Path, ranks: int = 2) -> str:
    """The output of ranks that have to succeed."""
    ended = forked(words, place, ranks)
    if any(rank.status for rank in ended):
        raise RuntimeError(
            f"{words} ended with " + "\n".join(f"{e.status}: {e.output}{e.errors}"[-5000:] for e in ended)
        )
    return "".join(rank.output for rank in ended)


def history(folder: Path, key: str) -> list[float]:
    return [log[key] for log in json.loads((folder / "trainer_state.json").read_text())["log_history"] if key in log]


# --- what works ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(place: Path) -> Path:
    """clm under plain data parallel on two ranks; the run that also fills the caches."""
    on_ranks([FINETUNE, *SMALL, "--zero-stage=0", "--output-dir=plain"], place)
    return place / "plain"


def test_stage_3_on_two_ranks_trains_like_plain_data_parallel(place: Path, plain: Path) -> None:
    command = ["-m", LAUNCHER["accelerate"], "--multi_gpu", "--num_processes=2", "--main_process_port=0", FINETUNE]
    output = run([*command, *SMALL, "--zero_stage=3", "--output_dir=sharded"], place, ACCELERATE_USE_CPU="true")
    sharded = place / "sharded"
    for key in ("loss", "grad_norm", "eval_loss", "eval_perplexity"):
        assert len(history(plain, key)) >= 2
        assert history(sharded, key) == pytest.approx(history(plain, key), rel=2e-4), key
    assert history(sharded, "eval_perplexity")[-1] < 0.8 * history(sharded, "eval_perplexity")[0]

    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (plain, sharded))
    for (name, expected), found in zip(one.named_parameters(), other.parameters()):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=name)
    text = "def main(argv):\n    return 0\n"
    tokenizer = AutoTokenizer.from_pretrained(sharded)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    for words in (
        "ZeRO stage 3 on 2 ranks",
        "plain data parallel",
        "tokens/s",
        "peak memory",
        "sharded",
    ):
        assert words in output, words
    assert output.index("ZeRO stage 3 on 2 ranks") < output.index("eval_perplexity")  # what goes where, before step 0
    assert output.count("6 steps on 2 rank(s)") == 1  # the main process alone


def test_perplexity_is_the_saved_models_own(place: Path, plain: Path) -> None:
    """Counted again, by hand, over the cached evaluation blocks."""
    _, _, data = finetune.prepare(*finetune.parse([*SMALL, f"--output-dir={place / 'again'}"]))
    model = AutoModelForCausalLM.from_pretrained(plain).eval()
    with torch.no_grad():
        loss = model(**default_data_collator(list(data.eval))).loss
    assert math.exp(loss) == pytest.approx(history(plain, "eval_perplexity")[-1], rel=1e-4)
    # The Trainer's own mean is over batches, which differ in size here; a miscounted token per row would be 1/64 off.
    assert loss.item() == pytest.approx(history(plain, "eval_loss")[-1], rel=5e-3)


@pytest.mark.wide
def test_masked_language_model_on_ranks(place: Path) -> None:
    on_ranks([FINETUNE, *SMALL, "--task=mlm", "--zero-stage=2", "--output-dir=mlm"], place)
    perplexities = history(place / "mlm", "eval_perplexity")
    assert perplexities[-1] < 0.9 * perplexities[0]
    loss = history(place / "mlm", "eval_loss")[0]
    assert loss == pytest.approx(math.log(perplexities[0]), rel=0.02)  # per token, not multiplied by the ranks
    AutoModelForMaskedLM.from_pretrained(place / "mlm")


@pytest.mark.wide
def test_classification_on_two_ranks_saves_and_resumes(place: Path) -> None:
    common = [FINETUNE, *SMALL, "--task=classification", "--zero-stage=3", "--output-dir=classes", "--save-steps=3"]
    output = on_ranks(common, place)
    assert "macro F1" in output
    folder = place / "classes"
    first = history(folder, "loss")
    scores = history(folder, "eval_accuracy") + history(folder, "eval_f1")
    assert all(0 <= score <= 1 for score in scores)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 8
    assert "email" in model.config.label2id
    with (folder / "checkpoint-6" / "optimizer" / "exp_avg.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"X")
    on_ranks([*common, "--resume-from-checkpoint=latest"], place, ranks=1)  # from checkpoint-3
    zero.verify(folder / "checkpoint-6")
    again = history(folder, "loss")
    assert again[:3] == first[:3]
    assert len(again) == len(first) == 6


@pytest.mark.wide
def test_accelerate_launch_as_typed_on_a_dataset_and_model_of_ones_own(place: Path, plain: Path) -> None:
    (place / "own.csv").write_text("".join(["body,kind\n", *(f"row number {n} of it,{n % 2}\n" for n in range(200))]))
    words = ["--zero-stage", "3", "--model", str(plain), "--dataset", "own.csv", "--text_column", "body"]
    words += ["--max_steps", "3", "--block_size", "32", "--disable_tqdm", "true", "--output_dir", "runs/own"]
    output = run(["-m", LAUNCHER["accelerate"], FINETUNE, *words], place)
    assert "ZeRO stage 3 on 1 rank" in output
    AutoModelForCausalLM.from_pretrained(place / "runs" / "own")


@pytest.mark.wide
def test_lora_saves_an_adapter_that_peft_loads(place: Path, plain: Path) -> None:
    from peft import PeftModel

    common = [FINETUNE, *SMALL, "--zero-stage=3", "--output-dir=adapter", "--model", str(plain), "--lora"]
    on_ranks([*common, "--lora-rank=4", "--lora-targets", "c_attn", "c_proj"], place)
    folder = place / "adapter"
    assert not list(folder.glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(plain)
    loaded = PeftModel.from_pretrained(base, folder)
    config = loaded.peft_config["default"]
    assert (config.r, set(config.target_modules)) == (4, {"c_attn", "c_proj"})
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == 2 * 3 * base.config.n_layer
    assert all(bool(value.any()) for value in saved.values()), "trained: both matrices of each are something"
    losses = history(folder, "eval_loss")
    assert losses[-1] < losses[0]


@pytest.mark.wide
def test_lora_of_random_weights_is_refused() -> None:
    with pytest.raises(finetune.UserError, match="starts from random weights"):
        finetune.parse(["--lora"])


def test_lora_has_a_learning_rate_of_its_own() -> None:
    words = ["--lora", "--model=some/model"]
    assert finetune.parse(words)[1].learning_rate == finetune.LORA_LEARNING_RATE
    assert finetune.parse([*words, "--learning-rate=1e-3"])[1].learning_rate == 1e-3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("steps", 0.25, "steps", 0.25)),
        (["--save-steps=2", "--eval-steps=2"], ("steps", 2, "steps", 2)),
        (["--save-steps=25"], ("steps", 25, "steps", 25)),
        (["--eval-steps=30"], ("steps", 30, "steps", 30)),
        (["--save-strategy=epoch"], ("epoch", 0.25, "epoch", 0.25)),
        (["--eval-strategy", "epoch"], ("epoch", 0.25, "epoch", 0.25)),
        (["--save-strategy=best"], ("steps", 0.25, "best", 0.25)),
    ],
)
def test_the_best_model_is_saved_where_it_is_evaluated(words: list[str], expected: tuple[object, ...]) -> None:
    _, args = finetune.parse(["--load-best-model-at-end=true", "--metric-for-best-model=loss", *words])
    assert (args.eval_strategy, args.eval_steps, args.save_strategy, args.save_steps) == expected


@pytest.mark.parametrize("task", ["classification", "token-classification", "question-answering"])
def test_lora_trains_and_saves_a_new_head(task: str, tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    script = finetune.ScriptArguments(task=task, lora=True, model="some/model")
    model = finetune.adapted(AUTO_MODELS[task].from_config(config), script)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    head = "qa_outputs" if task == "question-answering" else "classifier"
    assert {name for name in saved if head in name} == {
        f"base_model.model.{head}.{part}" for part in ("bias", "weight")
    }
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if head in name and p.requires_grad} == {
        "bias",
        "weight",
    }


def flags_in(text: str) -> dict[str, str]:
    """Of a `--help`: by the first spelling of every flag, its entry."""
    entries = re.split(r"\n  (?=-)", text.partition("\noptions:")[2])
    return {
        found[0].replace("_", "-"): " ".join(entry.split()) for entry in entries if (found := SPELLED.findall(entry))
    }


SPELLED = re.compile(r"(?:^|, )--([\w-]+)")


def test_both_scripts_take_the_same_flags(capsys: pytest.CaptureFixture[str]) -> None:
    both = []
    for main in (finetune.main, finetune_no_trainer.main):
        with pytest.raises(SystemExit):
            main(["--help-all"])
        both.append(flags_in(capsys.readouterr().out))
    trainer, loop = both
    assert set(loop) - set(trainer) == {"resume"}
    settings = {f"zero-{field.name.replace('_', '-')}" for field in fields(zero.ZeroConfig)}
    assert {name for name in trainer if name.startswith("zero")} == settings
    assert {name: trainer[name] for name in settings} == {name: loop[name] for name in settings}
    known, theirs = (
        {field.name.replace("_", "-") for field in fields(of)} for of in (zero.ZeroConfig, TrainingArguments)
    )
    assert not (known - theirs) & set(trainer), "a setting has one spelling; `--debug` is transformers' own"


def test_help_fits_a_screen_and_one_rank_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (finetune.main, finetune_no_trainer.main):
        texts = []
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(SystemExit) as ended:
                main(["--help", "--zero-stage=3"])
            assert ended.value.code == 0
            texts.append(capsys.readouterr().out)
        lines = texts[0].splitlines()
        assert 20 < len(lines) <= 90
        assert max(map(len, lines)) <= 120
        for words in ("--zero-offload-optimizer", "--per-device-train-batch-size", "--output-dir", "--help-all"):
            assert words in texts[0]
        assert texts[1] == ""


HELP = """
import sys, time, runpy
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("LOADED", time.process_time(), *(name for name in ("torch", "transformers") if name in sys.modules))
"""


@pytest.mark.parametrize("name", ["finetune", "finetune_no_trainer", "finetune_seq2seq", "finetune_vision"])
def test_help_answers_at_once_and_cuts_nothing(name: str, place: Path) -> None:
    script = ROOT / "scripts" / f"{name}.py"
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{script.parent}"}
    output = run(["-c", HELP, str(script)], place, **variables)
    spent_s, *heavy = output.rpartition("LOADED")[2].split()
    assert heavy == []
    assert float(spent_s) < 2
    assert "…" not in output


@pytest.mark.wide
def test_no_trainer_on_two_ranks_saves_and_resumes(place: Path, plain: Path) -> None:
    (place / "own.txt").write_text(Path(finetune.__file__).read_text() * 8)
    small = [
        "--max-steps=4",
        "--per-device-train-batch-size=2",
        "--block-size=512",  # more than the model has
        "--accumulation=2",
        "--output-dir=loop",
        "--save-steps=2",
        f"--model={plain}",
    ]
    output = torchrun([NO_TRAINER, *small, "--dataset=own.txt", "--zero-stage=3"], place)
    before, after = (float(word.replace(",", "")) for word in output.split("perplexity")[1].split("│")[1].split("→"))
    assert after < before
    AutoModelForCausalLM.from_pretrained(place / "loop")
    saved, own = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (place / "loop", plain))
    assert saved == own
    weights = (place / "loop" / "model.safetensors").read_bytes()
    shutil.rmtree(place / "loop" / "checkpoints" / "checkpoint_4")
    on_ranks([NO_TRAINER, *small, "--dataset=own.txt", "--zero-stage=2", "--resume"], place)
    assert (place / "loop" / "model.safetensors").read_bytes() == weights


# --- what does not ---------------------------------------------------------------------------------------------------

BAD = {
    "unknown model": (["--model=no/such"], "no model 'no/such'"),
    "gpt2 for mlm": (["--task=mlm", "--model=gpt2-tiny"], "--task mlm needs a bert model or one like it"),
    "bert for clm": (["--model=bert-tiny"], "--task clm needs a gpt2 model or one like it"),
    "missing file": (["--dataset=missing.jsonl"], "no dataset file 'missing.jsonl'"),
    "missing dataset": (["--dataset=no-such-user/no-such-dataset"], "could not be loaded"),
    "empty dataset": (["--dataset=empty.jsonl"], "empty.jsonl"),
    "empty text": (["--dataset=empty.txt"], "is empty"),
    "another kind of file": (["--dataset=a.docx"], "ends in none of"),
    "no JSON": (["--dataset=broken.json"], "could not be loaded"),
    "rows without text": (["--dataset=blank.jsonl"], "blocks of 64 tokens (--block-size): train 0"),
    "no text column": (["--dataset=columns.jsonl"], "no column 'text' or 'sentence' or 'content'"),
    "another column": (["--dataset=columns.jsonl", "--text-column=nope"], "no column 'nope'; it has ['a', 'b']"),
    "no label column": (["--dataset=text.jsonl", "--task=classification"], "no column 'label' or 'labels'"),
    "stage 7": (["--zero-stage=7"], "stage must be 0, 1, 2 or 3"),
    "no number": (["--zero-stage=three"], "'three'"),
    "ranks": (["--nproc", "0"], "unknown argument '--nproc'; the number of ranks is the launcher's"),
    "a typo": (["--lerning-rate", "1"], "unknown argument '--lerning-rate'; did you mean --learning-rate"),
    "no task": (["--task=poetry"], "poetry"),
    "no block": (["--block-size=0"], "--block-size must be at least 1"),
    "stage and offload": (
        ["--zero-stage=2", "--zero-offload-params=cpu", "--dataset=missing.txt"],
        "needs stage 3 on 2",
    ),
    "offload folder": (
        ["--zero-offload-optimizer=disk", "--zero-offload-dir=text.jsonl/under", "--dataset=missing.txt"],
        "--zero-offload-dir text.jsonl/under cannot be created",
    ),
    "unwritable folder": (["--output-dir=text.jsonl/under"], "'text.jsonl/under' is not writable"),
}


def one_error(ended: Ended, rank: int, message: str) -> None:
    lines = [line for line in ended.errors.splitlines() if "error:" in line]
    assert ended.status == 1, ended.errors
    assert len(lines) == 1, ended.errors
    assert lines[0].startswith(f"[rank {rank}] error:")
    assert message in lines[0]
    assert "Traceback" not in ended.errors


def test_bad_input_is_one_line_on_every_rank(place: Path) -> None:
    """All cases in one pair of processes: starting them is what takes long. How a process ends is tested below."""
    for name, text in {"empty.jsonl": "", "empty.txt": "", "a.docx": "x", "broken.json": "{not json"}.items():
        (place / name).write_text(text)
    (place / "blank.jsonl").write_text('{"text": ""}\n')
    (place / "columns.jsonl").write_text('{"a": "x", "b": "y"}\n')
    (place / "text.jsonl").write_text('{"text": "x"}\n' * 50)
    (place / "bad.py").write_text(
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "import finetune; from common import console\n"
        "for name, words in json.loads(sys.argv[2]).items():\n"
        "    try: finetune.main(words); print(json.dumps([name, 'no error']))\n"
        "    except Exception as error: print(json.dumps([name, console.one_line(error)]))\n"
    )
    cases = {name: [*SMALL, "--output-dir=bad", *words] for name, (words, _) in BAD.items()}
    for ended in forked(["bad.py", str(ROOT / "scripts"), json.dumps(cases)], place):
        assert ended.status == 0, ended.errors
        found = dict(json.loads(line) for line in ended.output.splitlines() if line.startswith("["))
        assert set(found) == set(BAD), ended.errors
        for name, (_, message) in BAD.items():
            assert message in found[name], name
            assert "\n" not in found[name]


def test_a_failing_command_ends_both_ranks_with_one_line_and_no_traceback(place: Path) -> None:
    for rank, ended in enumerate(forked([FINETUNE, *SMALL, "--dataset=missing.txt", "--output-dir=bad"], place)):
        one_error(ended, rank, "no dataset file 'missing.txt'")


def test_zero_ranks_are_refused_and_a_traceback_is_there_on_request(place: Path) -> None:
    (ended,) = forked([FINETUNE], place, ranks=1, WORLD_SIZE="0", RANK="0", LOCAL_RANK="0", HF_ZERO_DEBUG="1")
    assert ended.status == 1
    assert "Traceback" in ended.errors
    assert "[rank 0] error: expected WORLD_SIZE >= 1" in ended.errors.splitlines()[-1]


def test_torchrun_prints_the_message_last(place: Path) -> None:
    reply = place / "error.json"
    words = [FINETUNE, *SMALL, "--dataset=missing.txt", "--output-dir=bad"]
    (ended,) = forked(words, place, ranks=1, TORCHELASTIC_ERROR_FILE=str(reply))
    assert ended.status == 1
    assert json.loads(reply.read_text())["message"] == "error: no dataset file 'missing.txt'"
    assert "missing.txt" not in ended.errors, "torchrun prints it"


@pytest.mark.wide
def test_an_interrupted_run_says_how_to_continue(place: Path) -> None:
    words = [
        FINETUNE,
        *SMALL,
        "--max-steps=100000",
        "--save-steps=2",
        "--output-dir=stopped",
        "--corpus-size=290000",  # not cached yet
        "--resume-from-checkpoint=latest",
    ]
    with (place / "stopped.txt").open("w") as log:
        # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            [sys.executable, *words], cwd=place, env=environment(), stdout=log, stderr=log, preexec_fn=heard
        )
        try:
            for _ in range(10 * LIMIT):
                # Any: the first one is removed when later ones are saved.
                if [*(place / "stopped").glob("checkpoint-*")] or process.poll() is not None:
                    break
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
        finally:
            process.kill()
    text = (place / "stopped.txt").read_text()
    assert process.wait() == 130, text
    lines = text.splitlines()
    assert "examples/s" not in text  # a short preparation shows no bars
    assert text.count("no checkpoint in stopped: training starts from the beginning") == 1, text
    assert re.fullmatch(
        r"\[rank 0\] Interrupted after step \d+\. Newest checkpoint: stopped/checkpoint-\d+\. "
        r"To continue, repeat the command with --resume-from-checkpoint latest",
        lines[-1],
    ), text


@pytest.mark.wide
@pytest.mark.parametrize("when", ["at the end", "at a checkpoint"])
def test_a_full_disk_at_save_ends_both_ranks(place: Path, plain: Path, when: str) -> None:
    """No file may grow past 6 MiB: the weights (10 MiB) do not fit, everything before them is cached or small."""
    (place / "limited.py").write_text(
        "import resource, runpy, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, resource.RLIM_INFINITY))\n"
        "del sys.argv[0]; sys.path.insert(0, str(Path(sys.argv[0]).parent))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [*SMALL, "--zero-stage=3", "--output-dir=full", *(["--save-steps=2"] if when == "at a checkpoint" else [])]
    for rank, ended in enumerate(forked(["limited.py", FINETUNE, *words], place)):
        one_error(ended, rank, "model.safetensors cannot be written")
        assert "27" in ended.errors or "too large" in ended.errors
    assert not (place / "full" / "model.safetensors").exists() or when == "at the end"
