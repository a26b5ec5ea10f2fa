"""The scripts' pure parts: corpus, files, tokenizer, blocks, labels, metrics, flags and messages.

Run: pytest tests/scripts/test_scripts_data.py. Not covered: training and several ranks (tests/scripts/test_scripts.py).
"""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import AutoTokenizer, EvalPrediction, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import finetune
from common import console, data, metrics
from common.console import UserError

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(60)]


@pytest.fixture
def library(tmp_path: Path) -> str:
    """A small standard library: 9 packages of 8 files, some modules, and folders that are to be passed over."""
    root = tmp_path / "lib"
    for number in range(9):
        for file in range(8):
            path = root / f"package{number}" / f"module{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"value_{number}_{file}_{line} = {line}\n\n" for line in range(40 + number)))
    for name in ("test/hidden.py", "package0/tests/hidden.py", "encodings/hidden.py", "config-3.11/hidden.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("hidden = True\n")
    for number in range(30):
        (root / f"single{number}.py").write_text(f"single_{number} = {number}\n" * 20)
    return str(root)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    texts = Dataset.from_dict({"text": TEXTS})
    cache = tmp_path_factory.mktemp("tokenizers")
    return {family: data.trained_tokenizer(family, texts, "text", 400, 64, cache) for family in ("gpt2", "bert")}


# --- corpus ----------------------------------------------------------------------------------------------------------


def test_no_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no sources"):
        data.stdlib_files(str(tmp_path))


def test_corpus_snippets_are_labelled_by_package_and_no_file_is_on_both_sides(library: str) -> None:
    sides = [list(data.corpus_snippets(held_out, 1 << 20, library)) for held_out in (False, True)]
    labels = [{row["label"] for row in rows} for rows in sides]
    assert labels[0] == labels[1] == {f"package{number}" for number in range(1, 9)}  # the 8 largest
    for rows in sides:
        for row in rows:
            assert row["text"].startswith(f"value_{row['label'].removeprefix('package')}_")
            assert len(row["text"].splitlines()) <= data.SNIPPET_LINES
    files = [{tuple(row["text"].split("_")[1:3]) for row in rows} for rows in sides]
    assert not files[0] & files[1]


# --- files -----------------------------------------------------------------------------------------------------------


def test_local_files_of_every_kind_load_alike(tmp_path: Path) -> None:
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "d.csv").write_text("text,label\none,a\ntwo,b\n")
    (tmp_path / "d.tsv").write_text("text\tlabel\none\ta\ntwo\tb\n")
    Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.csv", "d.tsv", "d.parquet"):
        assert data.load_text(str(tmp_path / name))["train"].to_list() == rows, name
    (tmp_path / "d.txt").write_text("one\n\ntwo\n")
    assert "".join(data.load_text(str(tmp_path / "d.txt"))["train"]["text"]) == "one\n\ntwo\n"
    folder = tmp_path / "folder"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert set(data.load_text(str(folder))) == {"train", "validation"}


# --- tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_tokenizer_gives_back_any_text(tokenizers: dict[str, PreTrainedTokenizerBase], family: str) -> None:
    tokenizer = tokenizers[family]
    text = "def función(x):\n\treturn '日本' + x  # 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.pad_token is not None
    assert len(tokenizer) <= 400


def test_tokenizer_training_in_several_runs_at_once_leaves_one_whole_folder(tmp_path: Path) -> None:
    texts = Dataset.from_dict({"text": TEXTS})
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(data.trained_tokenizer, "bert", texts, "text", 400, 64, tmp_path) for _ in range(4)]
        vocabularies = [job.result().get_vocab() for job in jobs]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(list(tmp_path.iterdir())) == 1
    AutoTokenizer.from_pretrained(next(tmp_path.iterdir()))


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_causal_blocks_are_the_text_with_an_end_mark_after_each_document(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    tokenizer = tokenizers["gpt2"]
    texts = [text.strip() for text in TEXTS]
    prepared = data.language_modeling(
        "clm", DatasetDict(train=Dataset.from_dict({"text": texts})), "text", tokenizer, 16
    )
    rows = [*prepared.train, *prepared.eval]
    assert all(len(row["input_ids"]) == 16 and row["labels"] == row["input_ids"] for row in rows)
    whole = tokenizer.decode([token for row in rows for token in row["input_ids"]])
    assert tokenizer.eos_token.join(texts).startswith(whole.removesuffix(tokenizer.eos_token))
    assert len(prepared.eval) == round(0.05 * len(rows))
    assert prepared.tokens_per_row == 16


def test_the_lines_of_a_text_file_are_one_document(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    tokenizer = tokenizers["gpt2"]
    lines = "".join(TEXTS).splitlines(keepends=True)
    prepared = data.language_modeling(
        "clm", DatasetDict(train=Dataset.from_dict({"text": lines})), "text", tokenizer, 16
    )
    tokens = [token for row in prepared.train for token in row["input_ids"]]
    assert tokenizer.eos_token_id not in tokens
    assert "".join(TEXTS).startswith(tokenizer.decode(tokens))


def test_masks_of_the_evaluation_are_drawn_once_those_of_training_each_time(
    tokenizers: dict[str, PreTrainedTokenizerBase],
) -> None:
    tokenizer = tokenizers["bert"]
    splits = DatasetDict(train=Dataset.from_dict({"text": TEXTS}), validation=Dataset.from_dict({"text": TEXTS}))
    one, two = (data.language_modeling("mlm", splits, "text", tokenizer, 32) for _ in range(2))
    assert one.eval["labels"][:] == two.eval["labels"][:]
    labels = np.array(one.eval["labels"][:])
    assert 0.05 < (labels != metrics.IGNORED).mean() < 0.25
    assert set(one.collator([one.eval[0]])) >= {"input_ids", "labels"}
    assert one.collator([one.eval[0]])["labels"].tolist() == [one.eval[0]["labels"]]
    rows = [one.train[number] for number in range(8)]
    first, second = one.collator(rows)["labels"], one.collator(rows)["labels"]
    assert not torch.equal(first, second)
    special = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
    assert not torch.isin(first, special).any()


# --- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["names", "numbers", "ClassLabel"])
def test_classes_are_numbered_alike_in_both_splits(tokenizers: dict[str, PreTrainedTokenizerBase], kind: str) -> None:
    values = {"names": ["zebra", "ape", "cat"], "numbers": [100, 9, 20], "ClassLabel": [2, 0, 1]}[kind]
    label = {
        "names": Value("string"),
        "numbers": Value("int64"),
        "ClassLabel": ClassLabel(names=["ape", "cat", "zebra"]),
    }
    features = Features({"text": Value("string"), "kind": label[kind]})
    train = Dataset.from_dict({"text": ["t u v"] * 2, "kind": values[:2]}, features=features)
    held_out = Dataset.from_dict({"text": ["w"], "kind": values[2:]}, features=features)
    prepared = data.classification(
        DatasetDict(train=train, validation=held_out), "text", "kind", tokenizers["bert"], 32
    )
    assert prepared.labels == (["9", "20", "100"] if kind == "numbers" else ["ape", "cat", "zebra"])
    assert prepared.train["labels"][:] == [2, 0]
    assert prepared.eval["labels"][:] == [1]
    batch = prepared.collator([prepared.train[0], {**prepared.train[1], "input_ids": [1], "attention_mask": [1]}])
    assert batch["input_ids"].shape[0] == 2


def test_bad_labels_are_named(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    for values in (["a", "a"], ["a", None], [0.5, 1.5]):
        rows = DatasetDict(train=Dataset.from_dict({"text": ["x", "y"], "label": values}))
        with pytest.raises(UserError, match="'label' must hold at least 2 classes"):
            data.classification(rows, "text", "label", tokenizers["bert"], 32)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_accuracy_and_f1_equal_sklearn() -> None:
    reference = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    for classes, size in ((2, 50), (8, 200), (8, 5), (1, 3)):
        true, guessed = generator.integers(0, classes, (2, size))
        values = {"predictions": guessed, "references": true}
        accuracy = metrics.Accuracy(keep_in_memory=True).compute(**values)["accuracy"]
        assert accuracy == pytest.approx(reference.accuracy_score(true, guessed))
        f1 = metrics.MacroF1(keep_in_memory=True).compute(**values)["f1"]
        assert f1 == pytest.approx(reference.f1_score(true, guessed, average="macro"))


@pytest.mark.parametrize("shift", [0, 1])
def test_token_metrics_equal_the_loss_over_all_logits(shift: int) -> None:
    logits = torch.randn(3, 7, 11)
    labels = torch.randint(0, 11, (3, 7))
    labels[0, 3:] = metrics.IGNORED
    scores = metrics.token_scores(shift)(logits, labels)
    assert scores[0].shape == scores[1].shape == (3, 7 - shift)
    prediction = EvalPrediction(tuple(part.numpy() for part in scores), labels.numpy())
    found = metrics.token_metrics(shift)(prediction)
    kept, wanted = logits[:, : 7 - shift].reshape(-1, 11), labels[:, shift:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(kept, wanted, ignore_index=metrics.IGNORED)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    right = (kept.argmax(-1) == wanted)[wanted != metrics.IGNORED]
    assert found["accuracy"] == pytest.approx(right.float().mean().item())


# --- flags and messages ----------------------------------------------------------------------------------------------


def test_flags_are_the_same_with_dashes_and_underscores_and_win_over_defaults(tmp_path: Path) -> None:
    for dash in ("-", "_"):
        words = ["--zero-stage", "1", "--max-steps", "7", "--learning-rate", "0.5", "--eval-strategy", "no"]
        words = [f"--{word[2:].replace('-', dash)}" if word.startswith("--") else word for word in words]
        script, args = finetune.parse([*words, "--task", "mlm", f"--output{dash}dir", str(tmp_path)])
        assert (args.zero_stage, args.max_steps, args.learning_rate) == (1, 7, 0.5)
        assert args.eval_strategy == "no"
        assert (script.task, script.model) == ("mlm", "bert-tiny")
        assert args.output_dir == str(tmp_path)
        assert args.parallelism_config.stage == 1


def test_defaults_suit_the_model_and_give_way() -> None:
    _, args = finetune.parse([])
    assert args.output_dir == "runs/gpt2-tiny-clm"
    assert (args.max_steps, args.save_strategy) == (finetune.TINY_STEPS, "no")
    assert args.use_cpu is (not torch.accelerator.is_available())
    _, args = finetune.parse(["--num-train-epochs", "2", "--save-steps", "5"])
    assert (args.max_steps, args.num_train_epochs, args.save_strategy, args.save_steps) == (-1, 2, "steps", 5)
    _, args = finetune.parse(["--model", "some/model", "--dataset", "some/data"])
    assert (args.max_steps, args.learning_rate, args.num_train_epochs) == (-1, 5e-5, 3)
    assert args.output_dir == "runs/model-clm"


def test_messages_are_one_short_line() -> None:
    assert console.one_line(UserError("a\n  b")) == "a b"
    long = console.one_line(RuntimeError("x " * 5000))
    assert "\n" not in long
    assert long.startswith("RuntimeError: x x")
    assert len(long) < 500
    assert "another rank" in console.one_line(RuntimeError("[gloo/pair.cc:1] Connection closed by peer"))


def test_output_folder_is_checked_before_the_work(tmp_path: Path) -> None:
    console.check_output(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not writable.*--output-dir"):
        console.check_output(tmp_path / "file" / "b")
    with torch.device("meta"):
        huge = torch.nn.Linear(1 << 25, 1 << 25)
    with pytest.raises(UserError, match="the trained model takes 4096.01 TiB"):
        console.check_space(tmp_path, huge)


def test_an_error_on_this_rank_is_an_error_everywhere() -> None:
    console.everywhere(lambda: None, "nothing")

    def full() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="saving failed on rank 0: OSError: .*No space left"):
        console.everywhere(full, "saving")
