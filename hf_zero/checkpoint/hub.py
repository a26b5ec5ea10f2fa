"""What the Hub gets: a model card, weights split as it expects, and an upload whose failures are told in words.

A card says what a run wrote down about itself and what lies in the folder; nothing is guessed. A run leaves `zero_run.json` in
each checkpoint (`RunFacts.write`); `card_for` puts it together with the model's configuration, the Trainer's log and the
adapter's, as metadata for the Hub and variables for `templates/model_card.md.jinja`.

huggingface_hub is imported when it is needed: checking and exporting folders start without it.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError
from ..version import __version__
from .cards import CARD, is_generated, is_unwritten
from .files import Field, inside, is_number, read_json, replace_file
from .kinds import refuse_other_weights, stale_weights
from .manifest import MANIFEST, check_version

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelCard

RUN_FILE = "zero_run.json"
_FORMAT, _VERSION = "hf_zero_run", 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Ends of architectures' names -> the Hub's task, the class that loads them.
_TASKS = {
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
}
_PEFT_TASKS = {
    "CAUSAL_LM": _TASKS["ForCausalLM"],
    "SEQ_CLS": _TASKS["ForSequenceClassification"],
    "TOKEN_CLS": _TASKS["ForTokenClassification"],
    "QUESTION_ANS": _TASKS["ForQuestionAnswering"],
}
_KINDS: dict[str, tuple[type, ...]] = {"str | None": (str,), "int | None": (int,), "list[str]": (list,)}
_TIMING = ("per_second", "time")
_METRIC_IDS = {"accuracy", "f1", "precision", "recall", "perplexity", "mse", "mae", "rouge", "bleu", "wer"}


@dataclass(slots=True)
class RunFacts:
    """What a run knows of itself. `None` and empty mean: not known, so not said."""

    base_model: str | None = None
    """Hub id of the model that was fine-tuned."""
    task: str | None = None
    """As the Hub calls it: text-generation, fill-mask, text-classification, …"""
    datasets: list[str] = field(default_factory=list)
    """Hub ids; other names are shown, but not as metadata."""
    language: str | None = None
    license: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Of these weights, on held-out data."""
    precision: str | None = None
    stage: int | None = None
    world_size: int | None = None
    offload: dict[str, str] = field(default_factory=dict)
    """optimizer, parameters -> none, cpu, disk"""
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    """Per rank: parameters, gradients, optimizer, gathered, … as the plan said before step 0."""
    measured_bytes: dict[str, int] = field(default_factory=dict)
    """The same as measured, on the highest rank."""
    versions: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Numbers, words and booleans; no paths, no tokens."""

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Put them into `folder` as `zero_run.json`; returns its path."""
        path = Path(folder) / RUN_FILE
        known = {name: value for name, value in asdict(self).items() if value not in (None, [], {})}
        body = {"format": _FORMAT, "version": _VERSION, **known}
        replace_file(path, (json.dumps(body, indent=2, sort_keys=True) + "\n").encode())
        return path

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> RunFacts:
        """Those of `folder`; none where there is no file. Entries that this version does not know are passed over.

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
                value = body[entry.name]
                if not isinstance(value, _KINDS.get(str(entry.type), (dict,))):
                    raise Field(path, value, entry.name).refused(str(entry.type))
                _check_inside(Field(path, value, entry.name))
                setattr(facts, entry.name, value)
        return facts


def _check_inside(entry: Field) -> None:
    """Raises CheckpointError where an entry of `RunFacts` holds what a card cannot show."""
    if entry.key == "datasets":
        entry.texts()
    elif entry.key == "metrics" or entry.key.endswith("_bytes"):
        for _, value in entry.entries():
            if not is_number(value.value):
                raise value.refused("a number")


def card_for(folder: str | os.PathLike[str], *, model_id: str | None = None, **facts: Any) -> ModelCard:
    """The model card of a checkpoint or model folder.

    Args:
        model_id: `user/repo` or a folder, for the title and the code that loads it; by default the folder.
        facts: fields of `RunFacts` that win over what the run wrote down.

    Raises:
        CheckpointError: a file of the folder is malformed.
        ConfigError: a fact that there is no place for.
    """
    metadata, variables = _content(Path(folder), model_id or Path(folder).name, facts)
    from huggingface_hub import ModelCard, ModelCardData

    template = files("hf_zero").joinpath("templates/model_card.md.jinja").read_text(encoding="utf-8")
    return ModelCard.from_template(ModelCardData(**metadata), template_str=template, **variables)


def _content(folder: Path, model_id: str, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a card and the variables of its template; see `card_for`."""
    unknown = set(facts) - {entry.name for entry in fields(RunFacts)}
    if unknown:
        raise ConfigError(f"a card has no place for {sorted(unknown)}; expected fields of RunFacts or model_id")
    run = replace(RunFacts.read(folder), **facts)
    ours = (folder / MANIFEST).is_file() or (folder / RUN_FILE).is_file()
    config = _optional(folder, "config.json", architectures=list)
    adapter = _optional(folder, "adapter_config.json")
    manifest = _optional(folder, MANIFEST)
    state = _optional(folder, "trainer_state.json", log_history=list, global_step=int)
    run.stage = manifest.get("stage") if run.stage is None else run.stage
    run.world_size = manifest.get("world_size") if run.world_size is None else run.world_size
    run.precision = str(run.precision or manifest.get("precision") or "").removeprefix("precision: ")
    base = run.base_model or adapter.get("base_model_name_or_path")
    task, auto_class = _task(config, adapter)
    task = run.task or task
    base_id = base if isinstance(base, str) and _is_hub_id(base) else None
    before, after = (metrics_at(state.get("log_history"), step) for step in (0, state.get("global_step")))
    metrics = {**after, **{name.removeprefix("eval_"): value for name, value in run.metrics.items()}}
    metadata = {
        "library_name": "peft" if adapter else "transformers" if "model_type" in config else None,
        "pipeline_tag": task,
        "language": run.language,
        "license": run.license,
        "base_model": base_id,
        "datasets": [name for name in run.datasets if _is_hub_id(name)] or None,
        "metrics": [name for name in metrics if name in _METRIC_IDS] or None,
        "tags": (["hf_zero"] if ours else []) + ([] if run.stage is None else [f"zero-stage-{run.stage}"]) or None,
    }
    variables = {
        "title": model_id.rsplit("/", 1)[-1],
        "model_id": model_id,
        "base": base_id,
        "ours": ours,
        "adapter": adapter,
        "transformers": "model_type" in config,
        "auto_class": auto_class,
        "remote_code": "auto_map" in config,
        "has_tokenizer": (folder / "tokenizer_config.json").is_file(),
        "rows": _rows(run, config, manifest, state, task, before, metrics),
        "memory": _memory(run),
        "hyperparameters": {
            name: value for name, value in sorted(run.hyperparameters.items()) if _is_plain(name, value)
        },
    }
    return {name: value for name, value in metadata.items() if value is not None}, variables


def _rows(
    run: RunFacts,
    config: dict[str, Any],
    manifest: dict[str, Any],
    state: dict[str, Any],
    task: str | None,
    before: dict[str, float],
    metrics: dict[str, float],
) -> dict[str, str]:
    """The card's table."""
    rows: dict[str, str] = {}
    if task:
        rows["task"] = task
    if config.get("architectures"):
        rows["architecture"] = ", ".join(map(str, config["architectures"]))
    if run.datasets:
        rows["data"] = ", ".join(run.datasets)
    for name, value in metrics.items():
        old = f"{_number(before[name])} before, " if name in before else ""
        rows[f"evaluation {name}" if name == "loss" else name] = f"{old}{_number(value)}{' after' if old else ''}"
    if state.get("global_step"):
        epochs = f", {state['epoch']:.4g} epochs" if isinstance(state.get("epoch"), (int, float)) else ""
        rows["training"] = f"{state['global_step']:,} steps{epochs}"
    if run.precision:
        rows["precision"] = run.precision
    if run.stage is not None:
        ranks = "" if run.world_size is None else f" on {run.world_size} rank{'s' if run.world_size > 1 else ''}"
        rows["ZeRO"] = f"stage {run.stage}{ranks}"
    offloaded = [f"{what} on {tier}" for what, tier in run.offload.items() if tier != "none"]
    if offloaded:
        rows["offload"] = ", ".join(offloaded)
    versions = {"hf_zero": manifest.get("hf_zero"), "transformers": config.get("transformers_version"), **run.versions}
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items() if isinstance(version, str))
    return {name: value.replace("|", "\\|").replace("\n", " ") for name, value in rows.items() if value}


def _memory(run: RunFacts) -> list[tuple[str, str, str]]:
    """(what, predicted, measured) in MiB."""
    names = dict.fromkeys([*run.predicted_bytes, *run.measured_bytes])

    def mib(sizes: dict[str, int], name: str) -> str:
        return f"{sizes[name] / (1 << 20):,.1f}" if name in sizes else ""

    return [(name, mib(run.predicted_bytes, name), mib(run.measured_bytes, name)) for name in names]


def metrics_at(log: Any, step: Any) -> dict[str, float]:
    """Of the weights after a step, from a Trainer's log: an evaluation at an earlier step is of others."""
    logs = [entry for entry in log or () if isinstance(entry, dict) and "eval_loss" in entry]
    found: dict[str, Any] = next((entry for entry in reversed(logs) if entry.get("step") == step), {})
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in found.items()
        if name.startswith("eval_") and isinstance(value, (int, float)) and not name.endswith(_TIMING)
    }


def _task(config: dict[str, Any], adapter: dict[str, Any]) -> tuple[str | None, str]:
    for name in map(str, config.get("architectures") or []):
        for end, found in _TASKS.items():
            if name.endswith(end):
                return found
    return _PEFT_TASKS.get(str(adapter.get("task_type")), (None, "AutoModel"))


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


def _optional(folder: Path, name: str, **kinds: type) -> dict[str, Any]:
    """A JSON file that may be there.

    Args:
        kinds: of entries that may be in it, else None.

    Raises:
        CheckpointError: it is malformed, or one of these entries is of another kind.
    """
    path = inside(folder, name)
    body = read_json(path) if path.is_file() else {}
    for key, kind in kinds.items():
        if not isinstance(body.get(key), (kind, type(None))):
            raise Field(path, body[key], key).refused(f"of type {kind.__name__}")
    return body


def split_keys(stem: str, sizes_bytes: Mapping[str, int], limit_bytes: int) -> dict[str, list[str]]:
    """File name -> keys of the tensors in it, by the rule of `save_pretrained`.

    Args:
        sizes_bytes: by key, in the order in which files are filled.
        limit_bytes: of a file; one larger tensor has a file of its own.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(sizes_bytes),
        get_storage_size=lambda size: size,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=limit_bytes,
    )
    return dict(split.filename_to_tensors) or {f"{stem}.safetensors": []}


# Uploading ------------------------------------------------------------------------------------------------------------


class Hub:
    """One repository."""

    def __init__(self, name: str, token: str | None, revision: str | None) -> None:
        from huggingface_hub import HfApi, errors
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except errors.HFValidationError as error:
            raise ConfigError(f"push_to_hub: expected 'user/repo', found {name!r}: {error}") from None
        self.name, self.revision = name, revision
        self._api = HfApi(token=token, library_name="hf_zero", library_version=__version__)

    def prepare(self, private: bool | None, new: Collection[str], overwrite: bool) -> None:
        """Create the repository and the branch where they are missing.

        Args:
            new: names of the files that will be uploaded.
            overwrite: weights of another kind may be removed.

        Raises:
            ConfigError: the repository holds weights of another kind, or is public where `private` is set.
        """
        with self._explained("creating"):
            url = self._api.create_repo(self.name, private=private, exist_ok=True)
            self.name = url.repo_id  # with the user's name, where only the repository's was given
            public = private and not self._api.repo_info(self.name).private
        if public:
            raise ConfigError(
                f"{self.name} is there already and public: make it private on the Hub, or choose another name"
            )
        with self._explained("listing the files of"):
            present = list_files(self._api, self.name, self.revision)
        if not overwrite:
            refuse_other_weights(present, new, self.where)
        with self._explained("making the branch in"):
            if self.revision is not None:
                self._api.create_branch(self.name, branch=self.revision, exist_ok=True)

    @property
    def where(self) -> str:
        return f"{self.name} on the Hub" + ("" if self.revision is None else f" (branch {self.revision})")

    def upload(self, folder: Path, new: Collection[str], message: str, overwrite: bool) -> None:
        """Upload these files of `folder`. Delete older weights of the same kind; of another kind only with `overwrite`.

        A card that a user wrote in the repository is kept where the new one is a generated one.
        """
        with self._explained("uploading to"):
            present = self._api.list_repo_files(self.name, revision=self.revision)
            same, other = stale_weights(present, new)
            generated = CARD in present and CARD in new and is_generated(folder / CARD)
            if generated and not _is_replaced(is_generated, self._api, self.name, self.revision):
                new = {*new} - {CARD}
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                revision=self.revision,
                commit_message=message,
                allow_patterns=[glob.escape(name) for name in new],
                delete_patterns=[glob.escape(name) for name in (*same, *(other if overwrite else ()))],
            )

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        from huggingface_hub import errors

        what = f"{doing} {self.name} on {self._api.endpoint}"
        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            raise ConfigError(f"{what}: HF_HUB_OFFLINE is set; unset it to upload") from error
        except (errors.LocalTokenNotFoundError, errors.HFValidationError) as error:
            raise ConfigError(f"{what}: {error}") from error
        except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise _explain(what, error) from error


@dataclass(frozen=True)
class Changes:
    """What one upload of a folder deletes, and which of the folder's files it does not upload, as patterns."""

    delete: list[str]
    keep: list[str]

    @classmethod
    def of(
        cls,
        api: HfApi,
        *,
        repo_id: str,
        folder_path: str | os.PathLike[str],
        path_in_repo: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        ignore_patterns: Sequence[str] = (),
        **_: Any,
    ) -> Changes:
        """For the arguments of `HfApi.upload_folder`: delete older weights of the same kind, keep a card that a user wrote."""
        from huggingface_hub.utils import filter_repo_objects

        root, folder = Path(folder_path), f"{path_in_repo.strip('/')}/" if path_in_repo else ""
        files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        new = list(filter_repo_objects(files, ignore_patterns=list(ignore_patterns)))
        listed = list_files(api, repo_id, revision, token)
        present = [name.removeprefix(folder) for name in listed if name.startswith(folder)]
        keep = []
        if not folder and CARD in present and CARD in new and is_unwritten(root / CARD):
            keep = [] if _is_replaced(is_unwritten, api, repo_id, revision, token) else [CARD]
        return cls([glob.escape(name) for name in stale_weights(present, new)[0]], keep)


def list_files(api: HfApi, name: str, revision: str | None, token: str | None = None) -> list[str]:
    """The files of a repository. A branch that is missing would start with those of the default one."""
    from huggingface_hub import errors

    try:
        return api.list_repo_files(name, revision=revision, token=token)
    except errors.RevisionNotFoundError:
        return api.list_repo_files(name, token=token)


def _is_replaced(
    check: Callable[[Path], bool], api: HfApi, name: str, revision: str | None, token: str | None = None
) -> bool:
    """Return what `check` says of the repository's card."""
    with tempfile.TemporaryDirectory() as local:
        return check(Path(api.hf_hub_download(name, CARD, revision=revision, token=token, local_dir=local)))


def _explain(what: str, error: Exception) -> CheckpointError | ConfigError:
    """What went wrong between here and the Hub, and what to do."""
    from huggingface_hub import errors

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, errors.HTTPError):  # the client wraps errors of its threads
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, errors.HfHubHTTPError):
        hint = "is the network there, and HF_ENDPOINT right?" if cause is not None else "try again"
        return CheckpointError(f"{what} failed: {cause or error} ({type(cause or error).__name__}); {hint}")
    status = cause.response.status_code
    said = cause.server_message or str(cause).splitlines()[0]
    if status == 401:
        return ConfigError(
            f"{what}: the Hub knows no such token (401: {said}); log in with `hf auth login`, set HF_TOKEN, or pass a token"
        )
    if status == 403:
        return ConfigError(f"{what}: the token may not write there (403: {said}); it needs the role `write`")
    if status < 500 and status not in (408, 429):
        return ConfigError(f"{what}: the Hub refused ({status}: {said}); is the name right, and is it yours?")
    return CheckpointError(f"{what}: the Hub failed ({status}: {said}); the upload is not complete; try again later")
