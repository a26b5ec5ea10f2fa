"""Model cards: the facts that a run records about itself, and the README.md generated from them.

A run writes `zero_run.json` into each checkpoint (`RunFacts.write`). `card_for` combines it with the
model's configuration, the Trainer's log and the adapter's configuration, and fills
`templates/model_card.md.jinja`. Nothing is guessed: unknown facts are left out. A generated card ends
with a seal; a later export replaces it only if no user edited it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ranks_text
from ..errors import CheckpointError, ConfigError
from .files import Field, inside, is_number, read_json, replace_file
from .manifest import MANIFEST, check_version

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CARD = "README.md"
RUN_FILE = "zero_run.json"
_FORMAT, _VERSION = "hf_zero_run", 1
_SEAL = re.compile(r"\n<!-- Generated card \((\w+)\)\. [^\n]*-->\n")
_UNFILLED = "[More Information Needed]"
"""Placeholder in the templates of huggingface_hub and PEFT."""
_TRAINERS = "has been generated automatically according to the information the Trainer had"
"""Sentence in the stock Trainer's card."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Suffix of an architecture's class, shared by the AutoModel class that loads it -> the Hub's task.
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
_OTHER_ENDS = {
    "LMHeadModel": "ForCausalLM",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}  # GPT-2's suffix, and PEFT's task types
_KINDS: dict[str, tuple[type, ...]] = {"str | None": (str,), "int | None": (int,), "list[str]": (list,)}
_TIMING = ("per_second", "time")
_METRIC_IDS = {"accuracy", "f1", "precision", "recall", "perplexity", "mse", "mae", "rouge", "bleu", "wer"}


@dataclass(slots=True)
class RunFacts:
    """Facts about a training run. `None` and empty values are unknown and left out of the card.

    Attributes:
        base_model: Hub id of the model that was fine-tuned.
        task: the Hub's name of the task: text-generation, fill-mask, text-classification, …
        datasets: Hub ids; other names are shown but not put into the metadata.
        metrics: measured with these weights on held-out data.
        versions: library -> version.
        hyperparameters: numbers, words and booleans; no paths and no tokens.
    """

    base_model: str | None = None
    task: str | None = None
    datasets: list[str] = field(default_factory=list)
    language: str | None = None
    license: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    precision: str | None = None
    stage: int | None = None
    world_size: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write the facts to `zero_run.json` in `folder`. Returns its path."""
        path = Path(folder) / RUN_FILE
        known = {name: value for name, value in asdict(self).items() if value not in (None, [], {})}
        body = {"format": _FORMAT, "version": _VERSION, **known}
        replace_file(path, (json.dumps(body, indent=2, sort_keys=True) + "\n").encode())
        return path

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> RunFacts:
        """Read the facts of `folder`; none if the file is missing. Unknown entries are ignored.

        Raises:
            CheckpointError: the file is malformed.
        """
        path = inside(folder, RUN_FILE)
        if not path.is_file():
            return RunFacts()
        body = read_json(path)
        if body.get("format") != _FORMAT:
            raise CheckpointError(f"{path}: expected the format {_FORMAT!r}, found {body.get('format')!r}")
        check_version(path, body, _VERSION)
        facts = RunFacts()
        for entry in fields(RunFacts):
            if entry.name in body:
                found = Field(path, body[entry.name], entry.name)
                if not isinstance(found.value, _KINDS.get(str(entry.type), (dict,))):
                    raise found.refused(str(entry.type))
                _check_entries(found)
                setattr(facts, entry.name, found.value)
        return facts


def _check_entries(found: Field) -> None:
    """Raise a CheckpointError if a fact holds values that a card cannot show."""
    if found.key == "datasets":
        found.texts()
    elif found.key == "metrics":
        for _, value in found.entries():
            if not is_number(value.value):
                raise value.refused("a number")


def card_for(folder: str | os.PathLike[str], *, model_id: str | None = None, **facts: Any) -> ModelCard:
    """Return the model card of a checkpoint or model folder.

    Args:
        folder: the checkpoint or model folder.
        model_id: `user/repo` or a folder, for the title and the loading example. Default: the folder's name.
        facts: fields of `RunFacts` that replace what the run recorded.

    Raises:
        CheckpointError: a file of the folder is malformed.
        ConfigError: a fact that `RunFacts` does not have.

    Example:
        >>> zero.card_for("out/checkpoint-500", model_id="user/model", license="mit").save("README.md")
    """
    from huggingface_hub import ModelCard, ModelCardData

    folder = Path(folder)
    unknown = set(facts) - {entry.name for entry in fields(RunFacts)}
    if unknown:
        raise ConfigError(f"card_for: {sorted(unknown)} are not fields of RunFacts. Use those, or model_id")
    run = replace(RunFacts.read(folder), **facts)
    run.datasets = [run.datasets] if isinstance(run.datasets, str) else run.datasets
    config = _optional_json(folder, "config.json", architectures=list)
    adapter = _optional_json(folder, "adapter_config.json")
    manifest = _optional_json(folder, MANIFEST)
    state = _optional_json(folder, "trainer_state.json", log_history=list, global_step=int)
    run.stage = manifest.get("stage") if run.stage is None else run.stage
    run.world_size = manifest.get("world_size") if run.world_size is None else run.world_size
    run.precision = str(run.precision or manifest.get("precision") or "").removeprefix("precision: ")
    versions: dict[str, Any] = {
        "hf_zero": manifest.get("hf_zero"),
        "transformers": config.get("transformers_version"),
        **run.versions,
    }
    run.versions = {name: version for name, version in versions.items() if isinstance(version, str)}
    task, auto_class = _task_of(config, adapter)
    run.task = run.task or task
    before, after = (metrics_at(state.get("log_history"), step) for step in (0, state.get("global_step")))
    run.metrics = {**after, **{name.removeprefix("eval_"): value for name, value in run.metrics.items()}}
    base = run.base_model or adapter.get("base_model_name_or_path")
    base_id = base if isinstance(base, str) and _is_hub_id(base) else None
    ours = (folder / MANIFEST).is_file() or (folder / RUN_FILE).is_file()
    data = ModelCardData(
        library_name="peft" if adapter else "transformers" if "model_type" in config else None,
        pipeline_tag=run.task,
        language=run.language,
        license=run.license,
        base_model=base_id,
        datasets=[name for name in run.datasets if _is_hub_id(name)] or None,
        metrics=[name for name in run.metrics if name in _METRIC_IDS] or None,
        tags=(["hf_zero"] if ours else []) + ([] if run.stage is None else [f"zero-stage-{run.stage}"]) or None,
    )
    model_id = model_id or folder.name
    template = files("hf_zero").joinpath("templates/model_card.md.jinja").read_text(encoding="utf-8")
    return ModelCard.from_template(
        data,
        template_str=template,
        title=model_id.rsplit("/", 1)[-1],
        model_id=model_id,
        base=base_id,
        ours=ours,
        adapter=adapter,
        transformers="model_type" in config,
        auto_class=auto_class,
        remote_code="auto_map" in config,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        rows=_table_of(run, config, state, before),
        hyperparameters={k: v for k, v in sorted(run.hyperparameters.items()) if _is_plain(k, v)},
    )


def _table_of(run: RunFacts, config: dict[str, Any], state: dict[str, Any], before: dict[str, float]) -> dict[str, str]:
    """Return the rows of the card's table."""
    rows = {
        "task": run.task or "",
        "architecture": ", ".join(map(str, config.get("architectures") or ())),
        "data": ", ".join(run.datasets),
    }
    for name, value in run.metrics.items():
        earlier = f"{_number(before[name])} before, " if name in before else ""
        rows[f"evaluation {name}" if name == "loss" else name] = (
            f"{earlier}{_number(value)}{' after' if earlier else ''}"
        )
    if state.get("global_step"):
        epochs = f", {state['epoch']:.4g} epochs" if isinstance(state.get("epoch"), (int, float)) else ""
        rows["training"] = f"{state['global_step']:,} steps{epochs}"
    rows["precision"] = run.precision or ""
    if run.stage is not None:
        ranks = "" if run.world_size is None else f" on {ranks_text(run.world_size)}"
        rows["ZeRO"] = f"stage {run.stage}{ranks}"
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return {name: value.replace("|", "\\|").replace("\n", " ") for name, value in rows.items() if value}


def metrics_at(log: Any, step: Any) -> dict[str, float]:
    """Return the metrics that a Trainer logged at `step`. Those of earlier steps belong to other weights."""
    logs = [entry for entry in log or () if isinstance(entry, dict) and "eval_loss" in entry]
    found: dict[str, Any] = next((entry for entry in reversed(logs) if entry.get("step") == step), {})
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in found.items()
        if name.startswith("eval_") and isinstance(value, (int, float)) and not name.endswith(_TIMING)
    }


def _task_of(config: dict[str, Any], adapter: dict[str, Any]) -> tuple[str | None, str]:
    """Return the Hub's task, and the class that loads the model."""
    for name in (*map(str, config.get("architectures") or ()), str(adapter.get("task_type"))):
        for end in (*_TASKS, *_OTHER_ENDS):
            if name.endswith(end):
                end = _OTHER_ENDS.get(end, end)
                return _TASKS[end], f"AutoModel{end}"
    return None, "AutoModel"


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name and not Path(name).exists()


def _is_plain(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < 80 and os.sep not in value and "token" not in name
    return isinstance(value, (bool, int, float))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _optional_json(folder: Path, name: str, **kinds: type) -> dict[str, Any]:
    """Read a JSON file that may be missing.

    Args:
        folder: holds the file.
        name: the file.
        kinds: entry -> the type that it has if it exists.

    Raises:
        CheckpointError: the file is malformed, or an entry has another type.
    """
    path = inside(folder, name)
    body = read_json(path) if path.is_file() else {}
    for key, kind in kinds.items():
        if not isinstance(body.get(key), (kind, type(None))):
            raise Field(path, body[key], key).refused(f"of type {kind.__name__}")
    return body


# Origin of a card ---------------------------------------------------------------------------------


def sealed(card: object) -> str:
    """Return the text of a card with a comment by which `is_generated` recognises it."""
    text = _SEAL.sub("", str(card)).rstrip("\n") + "\n"
    note = "The next export replaces this card. A card that was edited, or that lacks this line, is kept."
    return f"{text}\n<!-- Generated card ({_digest(text)}). {note} -->\n"


def is_generated(text: str) -> bool:
    """Return whether hf_zero wrote this card and no user edited it: an export may replace it."""
    found = _SEAL.search(text)
    return found is not None and found.end() == len(text) and _digest(text[: found.start()]) == found[1]


def is_unfilled(text: str) -> bool:
    """Return whether the card is a template with gaps."""
    return _UNFILLED in text


def is_machine_written(text: str) -> bool:
    """Return whether a training program wrote this card: a generated one, a template with gaps, or the stock Trainer's.

    A user may have edited the last two, which have no seal: check `is_generated` before replacing a card outside a run.
    """
    return is_generated(text) or (_SEAL.search(text) is None and any(part in text for part in (_UNFILLED, _TRAINERS)))


def read_card(path: Path) -> str:
    """Read a card; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def adding_to_card(folder: Path, target: Path) -> Iterator[None]:
    """Let other code (PEFT) extend a copy of `target`'s card in `folder`, which replaces `target` later."""
    card, before = folder / CARD, target / CARD
    known = read_card(before) if before.is_file() else None
    if known is not None:
        card.write_text(known, encoding="utf-8")
    yield
    if known is not None and read_card(card) == known:
        card.unlink()  # nothing to replace
    elif known is not None and is_generated(known):
        card.write_text(sealed(read_card(card)), encoding="utf-8")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
