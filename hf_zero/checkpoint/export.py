"""A checkpoint as a clean model folder, here or on the Hub: weights, configuration, tokenizer, code and card; nothing else.

    zero.export("out/checkpoint-500", "model", dtype="bfloat16")
    zero.export("out/checkpoint-500", push_to_hub="user/model", private=True)

One process, without a model. Weights are written anew, in another type or split into other files, a few MiB at a time: no
tensor is ever whole in memory. A file that would come out as it is gets copied as bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..config import DTYPES, parse_bytes
from ..core.layout import itemsize
from ..core.precision import dtype_of
from ..errors import CheckpointError, ConfigError
from ..version import __version__
from .cards import CARD, is_generated, sealed
from .files import inside, open_plain, read_json
from .folder import link_files, recover, replacing, sync_tree, verify
from .hub import Hub, card_for, split_keys
from .kinds import stale_weights
from .manifest import MANIFEST, Manifest
from .safetensors import Stored, build_header, read_fully, write_fully
from .series import is_ours
from .weights import WeightSet, find_weights, index_text

MARKER = ".hf_zero_export.json"
"""In an exported folder, not on the Hub: names and sizes of what was written, so that a later export may replace it."""
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"}
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.md", "NOTICE", "NOTICE.md", "USE_POLICY.md")
_TRAINING = ("zero_", "trainer_state.json", "optimizer.json")  # names that begin like this are of the run
_TEMPLATES = "additional_chat_templates"
CHUNK_BYTES = 4 << 20
"""What is read of a tensor and what it becomes, together; temporaries take about as much again."""
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_OURS = re.compile(r"\..*|checkpoint-\d+").fullmatch  # hidden, or a checkpoint of its own
_DIGITS = re.compile(r"(\d+)")
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
        overwrite: write into an `output` that holds other files, and remove weights of another kind (a full model's where an
            adapter is exported, pickles) there and on the Hub. Without it such weights are refused. All other files stay.
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
    hub = None if push_to_hub is None else Hub(push_to_hub, token, revision)
    job = _examine(folder, wanted, parse_bytes(max_shard_size), note)
    parent, link = _room(job, target)
    if hub is not None:
        hub.prepare(private, job.names, overwrite)  # before the long work: most errors show here
    message = commit_message or f"Upload {folder.name} with hf_zero {__version__}"
    title = (target or folder).name if hub is None else hub.name
    if target is not None:
        with replacing(target) as staged:
            _write(job, staged, title, False, note)
            if target.is_dir():
                _keep(target, staged, job.names)
        if hub is not None:
            hub.upload(target, job.names, message, overwrite)
    elif hub is not None:
        with tempfile.TemporaryDirectory(prefix=".zero_export-", dir=parent) as name:
            place = Path(name)
            _write(job, place, title, link, note)
            hub.upload(place, job.names, message, overwrite)
    return target


# What is there, and what is to be -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor comes from, and the type it is to have."""

    stored: Stored
    dtype: str

    @property
    def numel(self) -> int:
        return (self.stored.stop - self.stored.start) // itemsize(self.stored.dtype)

    @property
    def out_bytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class _Output:
    """One file to be written."""

    name: str
    sources: dict[str, _Source]
    metadata: dict[str, str]
    copied: str | None = None
    """The file to copy byte for byte, where nothing changes."""

    @property
    def payload_bytes(self) -> int:
        return sum(source.out_bytes for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    weights: list[tuple[WeightSet, list[_Output]]]
    files: dict[str, int]
    """Small files that are copied, and their bytes."""
    dtype: str | None

    @property
    def payload_bytes(self) -> int:
        return sum(output.payload_bytes for _, outputs in self.weights for output in outputs)

    @property
    def names(self) -> set[str]:
        """All files that the export writes, without the marker."""
        found = {CARD, *self.files}
        for weights, outputs in self.weights:
            found |= {output.name for output in outputs}
            if self.index_of(weights, outputs):
                found.add(f"{weights.stem}.safetensors.index.json")
        return found

    @staticmethod
    def index_of(weights: WeightSet, outputs: list[_Output]) -> bool:
        """Whether the files have an index."""
        return len(outputs) > 1 or (weights.index is not None and all(output.copied for output in outputs))

    def need_bytes(self, link: bool) -> int:
        """What the disk must have, roughly."""
        made = [output for _, outputs in self.weights for output in outputs if not (link and output.copied)]
        return sum(output.payload_bytes + (1 << 20) for output in made) + sum(self.files.values()) + (4 << 20)


def _examine(folder: Path, dtype: str | None, limit: int, note: Progress) -> _Job:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected a checkpoint")
    recover(folder)
    manifest = None
    if is_ours(folder):
        manifest = verified(folder, note)
    else:
        warnings.warn(
            f"{folder} has no {MANIFEST}: its headers and index are checked, nothing vouches for its bytes",
            stacklevel=3,
        )
    found = _weight_sets(folder)
    for name in (name for weights in found for name in weights.names):
        if manifest is not None and name not in manifest.files:
            raise CheckpointError(
                f"{folder / name} is not in {MANIFEST}: it was added later; remove it, or the manifest"
            )
    if dtype is not None and (folder / "config.json").is_file():
        quantised = read_json(inside(folder, "config.json")).get("quantization_config")
        if quantised is not None:
            raise ConfigError(f"{folder} is quantised ({quantised}); export it without dtype")
    weights = [(each, _plan(each, dtype, limit)) for each in found]
    return _Job(folder, weights, {name: inside(folder, name).stat().st_size for name in _small_files(folder)}, dtype)


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


def _weight_sets(folder: Path) -> list[WeightSet]:
    """The weights of a model folder, headers checked, and that the index and the files hold the same.

    Raises:
        CheckpointError: none are there, a file is missing or damaged, or index and files disagree.
    """
    found: list[WeightSet] = []
    if (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file():
        found.append(find_weights(folder, "model"))
    for path in (
        folder,
        *(child for child in sorted(folder.iterdir()) if child.is_dir() and _NOT_OURS(child.name) is None),
    ):
        if (path / "adapter_config.json").is_file() and (path / "adapter_model.safetensors").is_file():
            stem = (path / "adapter_model").relative_to(folder).as_posix()
            found.append(find_weights(folder, stem))
    if not found:
        raise CheckpointError(
            f"{folder} has no weights: expected model.safetensors, model.safetensors.index.json or adapter_model.safetensors"
            + _hint(folder)
        )
    for weights in found:
        if weights.where is None:
            continue
        for name, header in weights.files.items():
            for key in header.tensors:
                place = weights.where.get(key)
                if place != name:
                    raise CheckpointError(f"{folder / name} holds {key!r}, which {weights.index} places in {place!r}")
    return found


def _hint(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin") if "model" in path.name)
    if pickled:
        return f"; {pickled[0]} is a pickle: load it with transformers and save it again"
    inner = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    return f"; take one of its checkpoints: {', '.join(inner)}" if inner else ""


def _plan(weights: WeightSet, dtype: str | None, limit: int) -> list[_Output]:
    """The files to write. Those that are there stay as they are where neither types nor `limit` ask for others.

    Raises:
        ConfigError: weights that are quantised, and so cannot be cast.
    """
    by_file = {
        file: {key: _Source(place, _cast(file, key, place.dtype, dtype)) for key, place in header.tensors.items()}
        for file, header in weights.files.items()
    }
    metadata = {k: v for header in weights.files.values() for k, v in header.metadata.items()} or {"format": "pt"}
    names = [f"{weights.stem}.safetensors"]
    if len(by_file) > 1:
        names = [f"{weights.stem}-{i:05d}-of-{len(by_file):05d}.safetensors" for i in range(1, len(by_file) + 1)]
    # Whether filling files in order up to `limit` could have come out like this.
    sizes = [[source.out_bytes for source in sources.values()] for sources in by_file.values()]
    fits = all(sum(file) <= limit or len(file) == 1 for file in sizes)
    fills = all(sum(file) + max(after, default=0) > limit for file, after in pairwise(sizes))
    is_kept = list(by_file) == names and fits and fills
    if not is_kept and not weights.stem.endswith("adapter_model"):  # an adapter has no index: it is one file always
        # Headers are sorted by type and name; the model's order is not known. Layer 2 before layer 10 is near to it.
        ordered = {key: s for sources in by_file.values() for key, s in sorted(sources.items(), key=_natural)}
        split = split_keys(weights.stem, {key: source.out_bytes for key, source in ordered.items()}, limit)
        return [_Output(name, {key: ordered[key] for key in keys}, metadata) for name, keys in split.items()]
    outputs = []
    for file, sources in by_file.items():
        same = all(source.dtype == source.stored.dtype for source in sources.values())
        outputs.append(_Output(file, sources, weights.files[file].metadata, file if same else None))
    return outputs


def _cast(file: str, key: str, dtype: str, wanted: str | None) -> str:
    if wanted is None or dtype == wanted:
        return dtype
    if dtype.startswith("float8"):
        raise ConfigError(f"{file}: {key!r} is quantised ({dtype}); casting it to {wanted} would drop its scales")
    return wanted if dtype in _FLOATS else dtype


def _natural(item: tuple[str, _Source]) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(item[0]))]


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
                    _write_weights(job.folder, output, place / output.name, written)
            if weights.index is not None and all(output.copied for output in outputs):
                shutil.copyfile(job.folder / weights.index, place / weights.index)
            elif job.index_of(weights, outputs):
                where = {key: output.name for output in outputs for key in output.sources}
                numel = sum(source.numel for output in outputs for source in output.sources.values())
                total_numel = numel if weights.total_parameters is None else weights.total_parameters
                text = index_text(where, total_numel, sum(output.payload_bytes for output in outputs))
                (place / f"{weights.stem}.safetensors.index.json").write_text(text)
        for name in job.files:
            (place / name).parent.mkdir(exist_ok=True)
            if job.dtype is not None and name == "config.json":
                config = read_json(job.folder / name)
                _set_dtype(config, job.dtype)
                (place / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            else:
                shutil.copyfile(job.folder / name, place / name)
        card = place / CARD
        if not card.exists() or _UNFILLED in card.read_text(encoding="utf-8", errors="replace"):
            card.write_text(sealed(card_for(job.folder, model_id=title)), encoding="utf-8")
        files = {p.relative_to(place).as_posix(): p.stat().st_size for p in sorted(place.rglob("*")) if p.is_file()}
        marker = {"format": "hf_zero_export", "version": __version__, "files": files}
        (place / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        sync_tree(place)
    except OSError as error:
        raise CheckpointError(f"{job.folder} could not be exported to {place}: {error}") from error


def _write_weights(folder: Path, output: _Output, target: Path, done: Callable[[int], None]) -> None:
    """Write one file to `target`, `done(bytes)` as they come.

    Raises:
        CheckpointError: a file cannot be read or written (disk full).
        ConfigError: a value is too large for the type.
    """
    opened: dict[Path, int] = {}
    try:
        if output.copied is not None:
            shutil.copyfile(folder / output.copied, target)
            done(output.payload_bytes)
            return
        entries = [(key, source.dtype, source.stored.shape) for key, source in output.sources.items()]
        text, header = build_header(entries, output.metadata, target)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with open(target, "xb", buffering=0) as file:
            write_fully(file.fileno(), memoryview(text), 0, target)
            for key, place in header.tensors.items():
                source = output.sources[key]
                path = source.stored.file
                if path not in opened:
                    opened[path] = open_plain(path)
                at = place.start
                for data in _chunks(opened[path], key, source, buffer):
                    write_fully(file.fileno(), data, at, target)
                    at += len(data)
                    done(len(data))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _chunks(fd: int, key: str, source: _Source, buffer: memoryview) -> Iterator[memoryview]:
    """A tensor's bytes in the type it is to have."""
    place = source.stored
    size, out_size = itemsize(place.dtype), itemsize(source.dtype)
    stride = len(buffer) // (size + out_size) * size
    for start in range(place.start, place.stop, stride):
        part = buffer[: min(stride, place.stop - start)]
        read_fully(fd, part, start, place.file)
        if place.dtype == source.dtype:
            yield part
            continue
        values = torch.frombuffer(part, dtype=dtype_of(place.dtype))
        cast = values.to(dtype_of(source.dtype))
        low, high = cast.aminmax()  # not finite where any is not; isinf is slow
        if not (low.isfinite() and high.isfinite()) and not torch.equal(cast.isinf(), values.isinf()):
            largest = values[values.isfinite()].abs().max().item()
            raise ConfigError(
                f"{place.file}: {key!r} has values up to {largest:.4g}, which {source.dtype} cannot hold: take bfloat16 or "
                "float32"
            )
        yield cast.view(torch.uint8).numpy().data


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


def _keep(target: Path, staged: Path, new: Collection[str]) -> None:
    """Take over what the export does not replace: hard links in `staged` to files of `target`, or copies."""
    marker = read_json(target / MARKER) if (target / MARKER).is_file() else {}
    earlier = marker.get("files")
    present = [path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()]
    same, other = stale_weights(present, new)
    gone = {MARKER, *new, *(earlier if isinstance(earlier, dict) else ()), *same, *other}
    if CARD in present and is_generated(staged / CARD) and not is_generated(target / CARD):
        gone.discard(CARD)
        (staged / CARD).unlink()
    link_files(target, staged, sorted({*present} - gone))


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
