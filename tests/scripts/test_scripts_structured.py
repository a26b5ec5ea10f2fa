"""Tags, answers, summaries and speech: what the scripts make of the standard library and of files, and how it is measured."""

from __future__ import annotations

import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import EvalPrediction, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from common import data, metrics, speech, structured
from common.console import UserError

CODE = '''def add(first, second):
    """Add two numbers.

    More.
    """
    return first + second  # plus


def nothing():
    total = 1 + 2
    return total
'''


@pytest.fixture
def library(tmp_path: Path) -> str:
    for number in range(24):
        (tmp_path / f"module{number}.py").write_text(CODE.replace("add", f"add_{number}"))
    return str(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    texts = Dataset.from_dict({"text": [CODE]})
    return data.trained_tokenizer("bert", texts, "text", 320, 64, tmp_path_factory.mktemp("tokenizer"))


def test_words_of_code_have_their_kind(library: str) -> None:
    row = next(structured.corpus_tags(False, 1 << 20, library))
    found = dict(zip(row["tokens"], row["tags"]))
    assert len(row["tokens"]) == len(row["tags"]) == structured.WORDS
    assert {found[word] for word in ("def", "return")} == {"keyword"}
    assert (found["first"], found["("], found["# plus"]) == ("name", "operator", "comment")


def test_questions_have_their_answer_in_the_context(library: str) -> None:
    rows = list(structured.corpus_questions(False, 1 << 20, library))
    assert len(rows) == 22  # the functions with arguments; the other files are held out
    for row in rows:
        (start,), (text,) = row["answers"]["answer_start"], row["answers"]["text"]
        assert row["context"][start : start + len(text)] == text == "first, second"
        assert row["question"].startswith("arguments of add_")


def test_summaries_are_first_lines_and_not_in_the_text(library: str) -> None:
    rows = list(structured.corpus_summaries(True, 1 << 20, library))
    assert {row["summary"] for row in rows} == {"Add two numbers."}
    assert all("Add two" not in row["text"] and "return first + second" in row["text"] for row in rows)


def test_the_first_token_of_a_word_has_its_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = Dataset.from_dict({"tokens": [["return", "unheard_of", "("]] * 4, "tags": [["k", "n", "o"]] * 4})
    prepared = structured.token_classification(DatasetDict({"train": rows}), tokenizer, 32, (None, None))
    row = prepared.train[0]
    assert prepared.labels == ["k", "n", "o"]
    assert len(row["input_ids"]) == len(row["labels"]) > 5  # words in pieces, between [CLS] and [SEP]
    assert [label for label in row["labels"] if label >= 0] == [0, 1, 2]
    assert row["labels"][0] == row["labels"][-1] == -100


def test_answers_become_their_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"question": "arguments of add", "context": CODE, "answers": {"text": ["first, second"], "answer_start": [8]}}
    lost = {**row, "answers": {"text": ["plus"], "answer_start": [CODE.index("plus")]}}
    rows = Dataset.from_list([row] * 4 + [lost])
    prepared = structured.question_answering(DatasetDict({"train": rows}), tokenizer, 40, (None, None))
    assert len(prepared.train) + len(prepared.eval) == 4  # what is cut off cannot be found
    found = prepared.train[0]
    answer = found["input_ids"][found["start_positions"] : found["end_positions"] + 1]
    assert tokenizer.decode(answer) == "first, second"


def test_missing_columns_are_named() -> None:
    with pytest.raises(UserError, match="needs the columns tokens, tags; the dataset has"):
        structured.check_columns("token-classification", DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}))


def test_metrics_of_texts() -> None:
    found, true = ["the cat sat", "one three", ""], ["the big cat sat", "one two", "x"]
    rouge = metrics.RougeL(keep_in_memory=True).compute(predictions=found, references=true)
    assert rouge["rouge_l"] == pytest.approx((6 / 7 + 1 / 2 + 0) / 3)
    errors = metrics.WordErrors(keep_in_memory=True).compute(predictions=found, references=true)
    assert errors["word_errors"] == pytest.approx((1 + 1 + 1) / 7)


def test_spans_and_tags_are_scored() -> None:
    scores = np.eye(5)[[1, 2, 3]], np.eye(5)[[2, 2, 4]]
    found = metrics.span_metrics()(EvalPrediction(scores, (np.array([1, 2, 3]), np.array([2, 3, 4]))))
    assert found["exact_match"] == pytest.approx(2 / 3)
    logits = np.eye(3)[[[0, 1, 2, 0]]]
    tags = metrics.class_metrics()(EvalPrediction(logits, np.array([[0, 1, 1, -100]])))
    assert tags["accuracy"] == pytest.approx(2 / 3)


def test_spoken_digits_and_files_are_the_same(tmp_path: Path) -> None:
    made = speech.spoken_digits(3, seed=1)
    assert all(len(sound.samples) == len(sound.text.split()) * int(speech.RATE * speech.WORD_S) for sound in made)
    assert len(set(speech.TONES)) == 10
    lines = ["file_name,transcription"]
    for number, sound in enumerate(made):
        lines.append(f"{number}.wav,{sound.text}")
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(speech.RATE)
            file.writeframes((sound.samples * 32767).astype(np.int16).tobytes())
    (tmp_path / "metadata.csv").write_text("\n".join(lines))
    read = speech.recordings(tmp_path)
    assert [sound.text for sound in read] == [sound.text for sound in made]
    assert all(np.abs(one.samples - other.samples).max() < 1e-3 for one, other in zip(read, made))
    with pytest.raises(UserError, match=r"no metadata.csv"):
        speech.recordings(tmp_path / "nothing")
    (tmp_path / "metadata.csv").write_text("file_name,transcription\ngone.wav,one\n")
    with pytest.raises(UserError, match=r"gone.wav.*could not be read"):
        speech.recordings(tmp_path)
