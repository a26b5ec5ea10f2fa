"""Load and tokenize tagged words, questions with answers, and texts with summaries.

Without a dataset they are made of the Python standard library, like the other corpora: words of code with their kind,
questions about the arguments of a function, functions with the first line of their docstring.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
)

from .arguments import CORPUS_SIZE
from .console import UserError, examples
from .data import Prepared, cached_corpus, classes, corpus_files, mapped, splits, take

with examples():
    from datasets import Dataset, DatasetDict, List, Value

WORDS = 24  # of a tagged row
BODY = 600  # characters of a function, at most
DEFINITION = re.compile(r"def (\w+)\(([^()\n]+)\)")
Limits = tuple[int | None, int | None]

# --- made of the standard library -----------------------------------------------------------------------------------


def corpus_tags(held_out: bool, size: int, root: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield words of code with their kind: keyword, name, number, string, operator, comment."""
    kinds = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator", tokenize.COMMENT: "comment"}
    for row in corpus_files(held_out, size, root):
        found: list[tuple[str, str]] = []
        try:
            for token in tokenize.generate_tokens(io.StringIO(row["text"]).readline):
                kind = kinds.get(token.type)
                if token.type == tokenize.NAME:
                    kind = "keyword" if keyword.iskeyword(token.string) else "name"
                if kind is not None and "\n" not in token.string:
                    found.append((token.string[:40], kind))
        except (tokenize.TokenError, SyntaxError):
            pass  # the last file is cut
        for start in range(0, len(found) - WORDS + 1, WORDS):
            words, tags = zip(*found[start : start + WORDS])
            yield {"tokens": list(words), "tags": list(tags)}


def corpus_questions(held_out: bool, size: int, root: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield lines of code with a question about the arguments of a function in them, in SQuAD's format."""
    for row in corpus_files(held_out, size, root):
        for found in DEFINITION.finditer(row["text"]):
            start = max(0, row["text"].rfind("\n", 0, max(0, found.start() - 80)) + 1)
            yield {
                "context": row["text"][start : found.end() + 120],
                "question": f"arguments of {found[1]}",
                "answers": {"text": [found[2]], "answer_start": [found.start(2) - start]},
            }


def corpus_summaries(held_out: bool, size: int, root: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield functions without their docstring, and its first line."""
    for row in corpus_files(held_out, size, root):
        try:
            tree = ast.parse(row["text"])
        except (SyntaxError, ValueError):
            continue  # the last file is cut
        for node in ast.walk(tree):
            summary = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if summary and isinstance(node, ast.FunctionDef) and len(node.body) > 1:
                node.body = node.body[1:]
                yield {"text": ast.unparse(node)[:BODY], "summary": summary.strip().splitlines()[0]}


_TEXT = Value("string")
_ANSWERS = {"text": List(_TEXT), "answer_start": List(Value("int32"))}
CORPORA: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], dict[str, Any]]] = {
    "token-classification": (corpus_tags, {"tokens": List(_TEXT), "tags": List(_TEXT)}),
    "question-answering": (corpus_questions, {"context": _TEXT, "question": _TEXT, "answers": _ANSWERS}),
    "summarization": (corpus_summaries, {"text": _TEXT, "summary": _TEXT}),
}


def structured_corpus(task: str, size: int = CORPUS_SIZE) -> DatasetDict:
    """Build a dataset for `task` from the standard library, with the splits `train` and `validation`."""
    return cached_corpus(*CORPORA[task], size)


def text_for_tokenizer(task: str, data: Dataset) -> tuple[Dataset, str]:
    """Return rows of plain text and their column, to train a tokenizer on."""
    if task == "token-classification":
        words = data.select(range(min(len(data), 5000)))["tokens"]
        return Dataset.from_dict({"text": [" ".join(row) for row in words]}), "text"
    return data, "context" if task == "question-answering" else "text"


def check_columns(task: str, data: DatasetDict) -> None:
    """
    Raises:
        UserError: a column that `task` needs is missing.
    """
    missing = [name for name in CORPORA[task][1] if name not in data["train"].column_names]
    if missing:
        raise UserError(
            f"--task {task} needs the columns {', '.join(CORPORA[task][1])}; the dataset has {data['train'].column_names}"
        )


# --- tokens ----------------------------------------------------------------------------------------------------------


def token_classification(
    data: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int, limits: Limits
) -> Prepared:
    """Convert words and tags to tokens with labels: a word's first token has its tag, the loss ignores the others."""
    feature = data["train"].features["tags"].feature
    values = classes(chain.from_iterable(chain.from_iterable(rows["tags"] for rows in data.values())), "tags")
    names = [feature.int2str(value) if hasattr(feature, "int2str") else str(value) for value in values]
    numbers = {value: number for number, value in enumerate(values)}
    arguments = {"tokenizer": tokenizer, "length": length, "numbers": numbers}
    encoded = mapped(data, _encode_tags, arguments)
    train, held_out = splits(encoded, 0.1, "rows of tagged words", shuffle=True)
    collator = DataCollatorForTokenClassification(tokenizer)
    return Prepared(take(train, limits[0]), take(held_out, limits[1]), collator, names)


def _encode_tags(
    batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, length: int, numbers: dict[Any, int]
) -> dict[str, Any]:
    encoded = tokenizer(batch["tokens"], is_split_into_words=True, truncation=True, max_length=length)
    labels = []
    for row, tags in enumerate(batch["tags"]):
        words = encoded.word_ids(row)
        first = [word is not None and word != before for word, before in zip(words, [None, *words])]
        labels.append([numbers[tags[word]] if new else -100 for word, new in zip(words, first)])
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def question_answering(data: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int, limits: Limits) -> Prepared:
    """Convert questions, contexts and answers to tokens with the answer's ends; rows that do not fit are dropped."""
    encoded = mapped(data, _encode_answers, {"tokenizer": tokenizer, "length": length})
    train, held_out = splits(encoded, 0.1, "questions whose answer fits", shuffle=True)
    return Prepared(take(train, limits[0]), take(held_out, limits[1]), DataCollatorWithPadding(tokenizer))


def _encode_answers(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, Any]:
    encoded = tokenizer(batch["question"], batch["context"], truncation="longest_first", max_length=length)
    kept: dict[str, list[Any]] = {name: [] for name in (*encoded, "start_positions", "end_positions")}
    for row, answers in enumerate(batch["answers"]):
        if not answers["text"] or not answers["text"][0]:
            continue
        start = answers["answer_start"][0]
        ends = start, start + len(answers["text"][0]) - 1
        first, last = (encoded.char_to_token(row, place, sequence_index=1) for place in ends)
        if first is not None and last is not None:
            values = {**{name: encoded[name][row] for name in encoded}, "start_positions": first, "end_positions": last}
            for name, value in values.items():
                kept[name].append(value)
    return kept


def summarization(data: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int, limits: Limits) -> Prepared:
    """Convert texts to tokens, and summaries to labels. The script sets the collator, which needs the model."""
    encoded = mapped(data, _encode_pairs, {"tokenizer": tokenizer, "length": length})
    train, held_out = splits(encoded, 0.1, "texts with summaries", shuffle=True)
    return Prepared(take(train, limits[0]), take(held_out, limits[1]), DataCollatorWithPadding(tokenizer))


def _encode_pairs(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, Any]:
    pairs = [(text, summary) for text, summary in zip(batch["text"], batch["summary"]) if text and summary]
    if not pairs:
        return {"input_ids": [], "attention_mask": [], "labels": []}
    texts, summaries = (list(column) for column in zip(*pairs))
    encoded = tokenizer(texts, truncation=True, max_length=length)
    labels = tokenizer(text_target=summaries, truncation=True, max_length=max(8, length // 4))["input_ids"]
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}
