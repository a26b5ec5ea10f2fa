"""Text for the scripts: load it, tokenize it, make batches.

Everything is a `datasets.Dataset`, cached on disk by its inputs. Call these functions under `main_process_first`:
the other ranks then read the cache.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from .arguments import CORPUS_SIZE
from .console import UserError, examples

with examples():
    from datasets import Dataset, DatasetDict, Features, Value, load_dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CACHE = Path(HF_HOME) / "hf_zero"
CORPUS_PACKAGES = 8  # classes of the built-in classification task
SNIPPET_LINES = 10
TOKENIZER_TEXT = 8 << 20  # characters of a dataset that a new tokenizer is trained on
# Not useful as text: tests, tables, and packages that newer Pythons have dropped.
SKIPPED = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
SKIPPED |= {"encodings", "pydoc_data", "lib2to3", "distutils", "idlelib", "turtledemo", "ensurepip"}
TEXT_COLUMNS, LABEL_COLUMNS = ("text", "sentence", "content"), ("label", "labels")
LOADERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
SPECIAL_TOKENS = {"bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "t5": ["<pad>", "</s>", "<unk>"]}
LOADERS |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}

# --- the embedded corpus: the sources of the Python standard library -------------------------------------------------


def stdlib_files(root: str | None = None) -> list[tuple[str, Path]]:
    """Return (package, file) of the standard library's modules, in a shuffled order that is equal on every rank.

    A module outside any package has the package "".
    """
    top = Path(root or sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, Path]] = []
    for folder, names, files in os.walk(top):
        names[:] = sorted(name for name in names if name not in SKIPPED and "-" not in name)
        inside = Path(folder).relative_to(top).parts
        found += [(inside[0] if inside else "", Path(folder, name)) for name in sorted(files) if name.endswith(".py")]
    if not found:
        raise UserError(f"this Python keeps no sources under {str(top)!r}; give a text with --dataset")
    random.Random(0).shuffle(found)
    return found


def corpus_files(held_out: bool, size: int, root: str | None = None) -> Iterator[dict[str, str]]:
    """Yield a row per file. Every 12th file is held out: evaluation never sees training text."""
    budget = size // 12 if held_out else size
    for number, (_, path) in enumerate(stdlib_files(root)):
        if (number % 12 == 0) == held_out and budget > 0:
            text = path.read_text(encoding="utf-8", errors="replace")[: max(budget, 0)]
            budget -= len(text)
            yield {"text": text}


def corpus_snippets(held_out: bool, size: int, root: str | None = None) -> Iterator[dict[str, str]]:
    """Yield rows of consecutive lines with their package, for the largest packages.

    Every 4th file of a package is held out: a snippet is classified by its package's style, not by neighbouring lines.
    """
    packages: dict[str, list[str]] = defaultdict(list)
    for package, path in stdlib_files(root):
        if package:
            packages[package].append(path.read_text(encoding="utf-8", errors="replace"))
    packages = {package: texts for package, texts in packages.items() if len(texts) >= 4}
    largest = sorted(packages, key=lambda package: (-sum(map(len, packages[package])), package))[:CORPUS_PACKAGES]
    rows: list[dict[str, str]] = []
    for package in sorted(largest):
        budget = size // len(largest) // (4 if held_out else 1)
        for number, text in enumerate(packages[package]):
            lines = [line for line in text.splitlines() if line.strip()] if (number % 4 == 0) == held_out else []
            for start in range(0, len(lines) - SNIPPET_LINES // 2, SNIPPET_LINES):
                snippet = "\n".join(lines[start : start + SNIPPET_LINES])
                if len(snippet) <= budget:
                    budget -= len(snippet)
                    rows.append({"text": snippet, "label": package})
    random.Random(0).shuffle(rows)
    yield from rows


def embedded_corpus(task: str, size: int = CORPUS_SIZE) -> DatasetDict:
    """Return the standard library's sources with the splits `train` and `validation`."""
    rows, columns = (corpus_snippets, ("text", "label")) if task == "classification" else (corpus_files, ("text",))
    return cached_corpus(rows, {column: Value("string") for column in columns}, size)


def cached_corpus(rows: Callable[..., Iterator[dict[str, Any]]], columns: dict[str, Any], size: int) -> DatasetDict:
    """Build and cache the rows that `rows(held_out, size)` yields; `columns` has their types."""
    version = ".".join(map(str, sys.version_info[:3]))
    return DatasetDict(
        {
            split: Dataset.from_generator(
                rows,
                features=Features(columns),
                gen_kwargs={"held_out": split == "validation", "size": size},
                # The generator reads files, which its own hash cannot know of: name what the rows depend on.
                fingerprint=_digest("stdlib", version, sysconfig.get_paths()["stdlib"], rows.__name__, size, split),
            )
            for split in ("train", "validation")
        }
    )


# --- any dataset -----------------------------------------------------------------------------------------------------


def load_text(name: str, config: str | None = None) -> DatasetDict:
    """Load a dataset of the Hub, or a local file or folder of text, json, csv or parquet, with its own splits."""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            loader = LOADERS.get(path.suffix.lower())
            if loader is None:
                raise UserError(f"--dataset {name!r} ends in none of {', '.join(LOADERS)}; rename or convert it")
            if path.stat().st_size == 0:
                raise UserError(f"--dataset {name!r} is empty: the file has no bytes")
            options: dict[str, Any] = {"keep_linebreaks": True} if loader == "text" else {}
            if path.suffix.lower() == ".tsv":
                options["sep"] = "\t"
            loaded = load_dataset(loader, data_files={"train": str(path)}, **options)
        else:
            if not path.exists() and (path.suffix.lower() in LOADERS or name.startswith((".", "/", "~"))):
                raise UserError(f"no dataset file {name!r}")
            loaded = load_dataset(name, config)
    except UserError:
        raise
    except Exception as error:  # the loaders have no common error type
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(
            f"dataset {name!r} could not be loaded: expected a local text, json, csv or parquet file, a folder of "
            f"these, or a Hub id that can be reached from here; found {type(error).__name__}: {reason}"
        ) from error
    if not isinstance(loaded, DatasetDict):
        loaded = DatasetDict({"train": loaded})
    if "train" not in loaded:
        raise UserError(f"dataset {name!r} has no split 'train'; it has {', '.join(map(str, loaded))}")
    held_out = next((split for split in ("validation", "test") if split in loaded and len(loaded[split])), None)
    return DatasetDict({"train": loaded["train"], **({"validation": loaded[held_out]} if held_out else {})})


def pick_column(data: Dataset, asked: str | None, usual: tuple[str, ...], flag: str) -> str:
    """Return the requested column, or one with a usual name; raise if it is missing."""
    choices = [asked] if asked else [name for name in usual if name in data.column_names]
    if not choices or choices[0] not in data.column_names:
        wanted = repr(asked) if asked else " or ".join(map(repr, usual))
        raise UserError(f"the dataset has no column {wanted}; it has {data.column_names}: name one with {flag}")
    return choices[0]


def take(data: Dataset, limit: int | None) -> Dataset:
    """Return the first `limit` rows."""
    return data if limit is None or limit >= len(data) else data.select(range(limit))


# --- tokenizer -------------------------------------------------------------------------------------------------------


def load_tokenizer(
    name: str | None, family: str, texts: Dataset, column: str, vocab_size: int, max_length: int
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hub or local model; without a name, train a BPE on `texts` and cache it."""
    if name is None:
        return trained_tokenizer(family, texts, column, vocab_size, max_length)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"no tokenizer in {name!r}; give one with --tokenizer (a Hub id or a local folder)") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def trained_tokenizer(
    family: str, texts: Dataset, column: str, vocab_size: int, max_length: int, cache: Path = CACHE
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE with the special tokens of `family` (bert, t5, else gpt2's), from the cache or newly trained."""
    key = _digest("tokenizer", family, texts._fingerprint, column, vocab_size, max_length)
    folder = cache / f"tokenizer-{family}-{key}"
    if not folder.exists():
        tokenizer = _train(family, _batches(texts, column), vocab_size, max_length)
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=cache))
        try:
            tokenizer.save_pretrained(scratch)
            # The rename is atomic. If another run was faster, its folder is equal.
            if not folder.exists():
                os.replace(scratch, folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return AutoTokenizer.from_pretrained(folder)


def _batches(texts: Dataset, column: str, limit: int = TOKENIZER_TEXT) -> Iterator[list[str]]:
    seen = 0
    for batch in texts.select_columns([column]).iter(batch_size=100):
        yield batch[column]
        seen += sum(map(len, batch[column]))
        if seen > limit:
            return


def _train(family: str, batches: Iterator[list[str]], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    special = SPECIAL_TOKENS.get(family, ["<|endoftext|>", "<|pad|>"])
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        batches,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if family == "bert":
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
        )
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        names |= {"mask_token": "[MASK]"}
    elif family == "t5":
        core.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", core.token_to_id("</s>"))]
        )
        names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    else:
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") | {"pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=max_length, **names)


# --- tokens and batches ----------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """Data for a training loop."""

    train: Dataset
    eval: Dataset
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    labels: list[str] = field(default_factory=list)

    @property
    def tokens_per_row(self) -> float:
        """Mean length of a training row, from the first of them."""
        lengths = [len(ids) for ids in take(self.train, 1000)["input_ids"]]
        return sum(lengths) / len(lengths)


@dataclass
class LanguageModelCollator:
    """Masks training batches anew each time; rows with labels (causal blocks, masked eval blocks) stay unchanged."""

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.15

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if "labels" in rows[0]:
            return default_data_collator(rows)
        return DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.mlm_probability)(rows)


def language_modeling(
    task: str,
    data: DatasetDict,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    eval_fraction: float = 0.05,
    limits: tuple[int | None, int | None] = (None, None),
) -> Prepared:
    """Convert rows of text to blocks of `block_size` tokens with labels (clm), or with masked evaluation blocks (mlm)."""
    sample = [text for text in take(data["train"], 10)[column] if text]
    lines = all(text.find("\n") == len(text) - 1 for text in sample)
    blocks = mapped(
        data,
        _pack,
        {
            "tokenizer": tokenizer,
            "column": column,
            "block_size": block_size,
            # The end mark parts documents; rows that are one line each, as of a text file, are one document.
            "end": tokenizer.eos_token_id if task == "clm" and not lines else None,
            "labels": task == "clm",
        },
    )
    train, held_out = splits(blocks, eval_fraction, f"blocks of {block_size} tokens (--block-size)", shuffle=False)
    held_out = take(held_out, limits[1])
    collator = LanguageModelCollator(tokenizer)
    if task == "mlm":
        # Drawn once: perplexity before, during and after training, on any number of ranks, is about the same tokens.
        held_out = held_out.map(
            _mask,
            batched=True,
            batch_size=len(held_out),
            fn_kwargs={"tokenizer": tokenizer, "probability": collator.mlm_probability},
            desc="masks of validation",
        )
    return Prepared(take(train, limits[0]), held_out, collator)


def _pack(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    block_size: int,
    end: int | None,
    labels: bool,
) -> dict[str, list[list[int]]]:
    """Concatenate the batch's tokens and cut them into whole blocks; the last, short one is left out."""
    texts = [text for text in batch[column] if text]
    rows = tokenizer(texts, add_special_tokens=not labels, verbose=False)["input_ids"] if texts else []
    tokens = list(chain.from_iterable([*row, end] if end is not None else row for row in rows))
    whole = len(tokens) - len(tokens) % block_size
    blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
    return {"input_ids": blocks, **({"labels": [list(block) for block in blocks]} if labels else {})}


def _mask(batch: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, probability: float) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the collator's own `seed` gives other masks each time in transformers 5.17
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        masked = collator([{"input_ids": ids} for ids in batch["input_ids"]])
    return {"input_ids": masked["input_ids"].tolist(), "labels": masked["labels"].tolist()}


def classification(
    data: DatasetDict,
    column: str,
    label_column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    eval_fraction: float = 0.1,
    limits: tuple[int | None, int | None] = (None, None),
) -> Prepared:
    """Convert rows of text and label to tokens with class numbers, in the order of the classes' names."""
    feature = data["train"].features[label_column]
    values = classes(chain.from_iterable(rows.unique(label_column) for rows in data.values()), label_column)
    names = [feature.int2str(value) if hasattr(feature, "int2str") else str(value) for value in values]
    encoded = mapped(
        data,
        _encode,
        {
            "tokenizer": tokenizer,
            "columns": (column, label_column),
            "block_size": block_size,
            "numbers": {value: number for number, value in enumerate(values)},
        },
    )
    train, held_out = splits(encoded, eval_fraction, "rows of text", shuffle=True)
    return Prepared(take(train, limits[0]), take(held_out, limits[1]), DataCollatorWithPadding(tokenizer), names)


def classes(found: Iterable[Any], column: str) -> list[Any]:
    """Return the classes of a column in order: numbers as numbers, as a pretrained head counts them."""
    values = set(found)
    if len(values) < 2 or None in values or any(isinstance(value, float) for value in values):
        shown = sorted(map(str, values))[:5]
        raise UserError(f"column {column!r} must hold at least 2 classes and no gaps; found {shown}")
    return sorted(values)


def _encode(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, str],
    block_size: int,
    numbers: dict[Any, int],
) -> dict[str, Any]:
    rows = [(text, label) for text, label in zip(batch[columns[0]], batch[columns[1]]) if text]
    if not rows:
        return {"input_ids": [], "attention_mask": [], "labels": []}
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=block_size)
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "labels": [numbers[label] for _, label in rows],
    }


def mapped(data: DatasetDict, encode: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> DatasetDict:
    """Replace the columns by the result of `encode` on batches of rows; splits may have different columns."""
    return DatasetDict(
        {
            split: rows.map(
                encode,
                batched=True,
                remove_columns=rows.column_names,
                fn_kwargs=arguments,
                desc=f"tokens of {split}",
            )
            for split, rows in data.items()
        }
    )


def splits(data: DatasetDict, fraction: float, what: str, shuffle: bool) -> tuple[Dataset, Dataset]:
    """Training and held-out rows; without a split of their own, the held-out ones are the last (or random) share."""
    train = data["train"]
    if "validation" in data:
        if len(train) and len(data["validation"]):
            return train, data["validation"]
    elif len(train) >= 2:
        parted = train.train_test_split(max(1, round(fraction * len(train))), shuffle=shuffle, seed=0)
        return parted["train"], parted["test"]
    counts = ", ".join(f"{split} {len(rows)}" for split, rows in data.items())
    raise UserError(
        f"the dataset is empty or too small: expected at least 1 train and 1 held-out row, found {what}: {counts}"
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
