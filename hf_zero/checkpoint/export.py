"""A checkpoint as a clean model folder, here or on the Hub: weights, configuration, tokenizer, code and card; nothing else.

    zero.export("out/checkpoint-500", "model", dtype="bfloat16")
    zero.export("out/checkpoint-500", push_to_hub="user/model", private=True)

One process, without a model: see `recast` for how weights stream. What needs huggingface_hub imports it when it is called.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import parse_bytes
from ..errors import CheckpointError, ConfigError
from ..version import __version__
from .cards import content, template
from .folder import recover, refuse_link, sync_tree, verify
from .manifest import MANIFEST, Manifest
from .recast import Output, WeightSet, find_weights, index_text, plan, read_json, write

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from .hub import Hub

DTYPES = ("float32", "bfloat16", "float16")
MARKER = ".hf_zero_export.json"
"""In an exported folder, not on the Hub: names and sizes of what was written, so that a later export may replace it."""
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"}
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.md", "NOTICE", "NOTICE.md", "USE_POLICY.md")
_TRAINING = ("zero_", "trainer_state.json", "optimizer.json")  # names that begin like this are of the run
_TEMPLATES = "additional_chat_templates"
_UNFILLED = "[More Information Needed]"  # a card that nobody has written yet

Progress = Callable[[str, int, int], None]
"""(what is done, bytes done, bytes in all); from any thread, one at a time."""


def export(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    push_to_hub: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path | None:
    """Make a clean model folder of a checkpoint, whatever wrote it; every byte of the checkpoint is checked before.

    Args:
        folder: a checkpoint of hf_zero, or any folder that `from_pretrained` loads (then nothing vouches for its bytes).
        output: where to; appears as a whole. A folder that an earlier export made is replaced.
        dtype: cast the weights to float32, bfloat16 or float16; by default they stay as they are.
        max_shard_size: most bytes per weight file; files that suit it are copied as they are.
        push_to_hub: `user/repo`, made where it is not there.
        private: of a repository that is made.
        revision: a branch, made where it is not there.
        token: by default HF_TOKEN, or that of `hf auth login`.
        overwrite: replace whatever is at `output`.
        progress: called with (what, bytes done, bytes in all).

    Returns:
        The output folder; None where there is only the Hub's.

    Raises:
        CheckpointError: the checkpoint is damaged, a disk is full, the Hub cannot be reached or fails.
        ConfigError: a setting that cannot work, a repository that may not be written to.
    """
    folder, target = Path(folder), None if output is None else Path(os.path.realpath(output))
    if target is None and push_to_hub is None:
        raise ConfigError("export: expected an output folder or push_to_hub, found neither")
    if target is not None:
        _check_target(target, folder, overwrite)
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    if wanted not in (None, *DTYPES):
        raise ConfigError(f"export: expected dtype {', '.join(DTYPES)}, found {wanted!r}")
    note = progress or (lambda what, done, total: None)
    hub = None if push_to_hub is None else _hub(push_to_hub, token, revision)
    job = _examine(folder, wanted, parse_bytes(max_shard_size), note)
    parent, link = _room(job, target)
    if hub is not None:
        hub.prepare(private)  # before the long work: most errors show here
    message = commit_message or f"Upload {folder.name} with hf_zero {__version__}"
    title = (target or folder).name if hub is None else hub.name
    if target is not None:
        with _staged(target) as staged:
            _write(job, staged, title, False, note)
        if hub is not None:
            hub.upload(target, message, ignore=[MARKER])
    elif hub is not None:
        with tempfile.TemporaryDirectory(prefix=".zero_export-", dir=parent) as name:
            place = Path(name)
            _write(job, place, title, link, note)
            hub.upload(place, message, ignore=[MARKER])
    return target


def _hub(name: str, token: str | None, revision: str | None) -> Hub:
    from .hub import Hub

    return Hub(name, token, revision)


def card_for(folder: str | os.PathLike[str], *, model_id: str | None = None, **facts: Any) -> ModelCard:
    """The model card of a checkpoint or model folder.

    Args:
        model_id: `user/repo` or a folder, for the title and the code that loads it; by default the folder.
        facts: fields of `RunFacts` that win over what the run wrote down.

    Raises:
        CheckpointError: a file of the folder is malformed.
        ConfigError: a fact that there is no place for.
    """
    metadata, variables = content(Path(folder), model_id or Path(folder).name, facts)
    from huggingface_hub import ModelCard, ModelCardData

    return ModelCard.from_template(ModelCardData(**metadata), template_str=template(), **variables)


# What is there, and what is to be -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    weights: list[tuple[WeightSet, list[Output]]]
    files: list[str]
    """Small files that are copied."""
    dtype: str | None

    @property
    def payload_bytes(self) -> int:
        return sum(output.payload_bytes for _, outputs in self.weights for output in outputs)

    def need_bytes(self, link: bool) -> int:
        """What the disk must have, roughly: small files count as 1 MiB each."""
        made = [output for _, outputs in self.weights for output in outputs if not (link and output.copied)]
        return sum(output.payload_bytes + (1 << 20) for output in made) + (len(self.files) + 4 << 20)


def _examine(folder: Path, dtype: str | None, limit: int, note: Progress) -> _Job:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected a checkpoint")
    recover(folder)
    manifest = None
    if (folder / MANIFEST).exists() or (folder / "optimizer" / "optimizer.json").exists():
        manifest = verified(folder, note)
    else:
        warnings.warn(
            f"{folder} has no {MANIFEST}: its headers and index are checked, nothing vouches for its bytes",
            stacklevel=3,
        )
    found = find_weights(folder)
    for name in (name for weights in found for name in weights.names):
        if manifest is not None and name not in manifest.files:
            raise CheckpointError(
                f"{folder / name} is not in {MANIFEST}: it was added later; remove it, or the manifest"
            )
    if dtype is not None and (folder / "config.json").is_file():
        quantised = read_json(folder / "config.json").get("quantization_config")
        if quantised is not None:
            raise ConfigError(f"{folder} is quantised ({quantised}); export it without dtype")
    weights = [(each, plan(each, dtype, limit, _split)) for each in found]
    return _Job(folder, weights, list(_small_files(folder)), dtype)


def verified(folder: str | os.PathLike[str], progress: Progress) -> Manifest:
    """`verify`, with its progress told as that of an export."""
    recover(folder)
    total, done, lock = Manifest.read(folder).total_bytes, 0, threading.Lock()

    def checked(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking", done, total)

    return verify(folder, progress=checked)


def _split(sizes: dict[str, int], limit: int, pattern: str) -> dict[str, list[str]]:
    """The rule of `save_pretrained`."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, filename_pattern=pattern, max_shard_size=limit
    )
    return split.filename_to_tensors


def _small_files(folder: Path) -> Iterator[str]:
    """Everything of the model but its weights, by name and kind: what is not known to belong to it stays behind."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith((".", *_TRAINING)) or name.endswith(("_results.json", ".safetensors.index.json")):
            continue
        if path.is_file() and (path.suffix in _SUFFIXES or name in _DOCUMENTS):
            yield name
        elif path.is_dir() and name == _TEMPLATES:
            yield from (f"{name}/{inner.name}" for inner in sorted(path.glob("*.jinja")))
        elif path.is_dir() and (path / "adapter_model.safetensors").is_file():
            yield from (f"{name}/{inner}" for inner in ("adapter_config.json",) if (path / inner).is_file())


# Writing ------------------------------------------------------------------------------------------------------------


def _write(job: _Job, place: Path, title: str, link: bool, note: Progress) -> None:
    """The whole model into the empty folder `place`."""
    total, done = job.payload_bytes, 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        note("writing", done, total)

    try:
        for weights, outputs in job.weights:
            for output in outputs:
                (place / output.name).parent.mkdir(exist_ok=True)
                if not (link and output.copied and _linked(job.folder / output.copied, place / output.name)):
                    write(job.folder, output, place / output.name, written)
            if weights.index is not None and all(output.copied for output in outputs):
                shutil.copyfile(job.folder / weights.index, place / weights.index)
            elif len(outputs) > 1:
                (place / f"{weights.stem}.safetensors.index.json").write_text(index_text(weights, outputs))
        for name in job.files:
            (place / name).parent.mkdir(exist_ok=True)
            if job.dtype is not None and name == "config.json":
                config = read_json(job.folder / name)
                _set_dtype(config, job.dtype)
                (place / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            else:
                shutil.copyfile(job.folder / name, place / name)
        _write_card(job.folder, place, title)
        files = {p.relative_to(place).as_posix(): p.stat().st_size for p in sorted(place.rglob("*")) if p.is_file()}
        marker = {"format": "hf_zero_export", "version": __version__, "files": files}
        (place / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        sync_tree(place)
    except OSError as error:
        raise CheckpointError(f"{job.folder} could not be exported to {place}: {error}") from error


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """As `save_pretrained` of the cast model would write it, in nested configurations too."""
    old = "torch_dtype" in config and "dtype" not in config
    config["torch_dtype" if old else "dtype"] = dtype
    for name, inner in config.items():
        if name.endswith("_config") and isinstance(inner, dict) and {"dtype", "torch_dtype"} & set(inner):
            _set_dtype(inner, dtype)


def _write_card(folder: Path, place: Path, title: str) -> None:
    """A card, unless a person has written one."""
    path = place / "README.md"
    if path.exists() and _UNFILLED not in path.read_text(encoding="utf-8", errors="replace"):
        return
    path.write_text(str(card_for(folder, model_id=title)), encoding="utf-8")


# Where to -----------------------------------------------------------------------------------------------------------


def _check_target(target: Path, folder: Path, overwrite: bool) -> None:
    source = Path(os.path.realpath(folder))
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(
            f"the output {target} and the checkpoint {source} lie in one another: give another output folder"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"the output {target} is a file, expected a folder")
    present = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file() or path.is_symlink()}
    if not present:
        return
    if overwrite:
        if Path.cwd() == target or target in Path.cwd().parents:
            raise ConfigError(f"the output {target} holds the working directory and is not replaced")
        return
    files = read_json(target / MARKER).get("files") if (target / MARKER).is_file() else None
    if not isinstance(files, dict):
        raise ConfigError(f"the output {target} is not empty and no earlier export: give another, or overwrite=True")
    for name in sorted(present - set(files) - {MARKER})[:1]:
        raise ConfigError(f"the output {target} has {name!r}, which no export made: move it, or overwrite=True")


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it when the block ends well, and vanishes when it does not."""
    root = target.parent / f".{target.name}.zero_export"
    older, staged = root / "older", root / "staged"
    lock = _locked(root, target)
    try:
        for path in (older, staged):
            refuse_link(path)
        if older.is_dir() and not target.exists():  # an export was killed between its two renames
            os.rename(older, target)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        yield staged
        if target.exists():
            shutil.rmtree(older, ignore_errors=True)
            os.rename(target, older)
        os.rename(staged, target)
        shutil.rmtree(older, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        with suppress(OSError):  # `older` is still there where a rename failed
            root.rmdir()
        os.close(lock)


def _locked(root: Path, target: Path) -> int:
    try:
        refuse_link(root)
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be written: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CheckpointError(f"another export to {target} is going on") from None
    except OSError:
        pass  # a file system without locks
    return lock


def _room(job: _Job, target: Path | None) -> tuple[Path, bool]:
    """A folder with room for what is to be written; whether files may be links there, which take none.

    That of `target`; without one, beside the checkpoint or else where temporary files go.
    """
    if target is None:
        parents = [job.folder.resolve().parent, Path(tempfile.gettempdir())]
    else:
        parents = [next(parent for parent in target.parents if parent.is_dir())]
    found = []
    for parent in parents:
        link = target is None and parent.stat().st_dev == job.folder.stat().st_dev
        need, free = job.need_bytes(link), shutil.disk_usage(parent).free
        if not os.access(parent, os.W_OK):
            found.append(f"{parent} is not writable")
        elif free < need:
            found.append(f"{parent} has {free:,} bytes free of {need:,}")
        else:
            return parent, link
    raise CheckpointError(f"no room to export {job.folder}: {', '.join(found)}; make room or choose another place")
