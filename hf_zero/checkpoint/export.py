"""Export a checkpoint as a clean model folder, here or on the Hub: weights, configuration, tokenizer, code and card.

    zero.export("out/checkpoint-500", "model", dtype="bfloat16")
    zero.export("out/checkpoint-500", push_to_hub="user/model", private=True)

One process, without a model. A checkpoint already is a `from_pretrained` folder, so its files are copied
as they are. Weights are rewritten only for another dtype or another split, a few MiB at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..config import DTYPE_ALIASES, DTYPES, parse_bytes
from ..core.layout import itemsize
from ..core.precision import dtype_of
from ..errors import CheckpointError, ConfigError
from ..version import __version__
from .cards import CARD, card_for, is_generated, is_unfilled, read_card, sealed
from .files import inside, open_plain, read_json
from .folder import SUFFIX, Staging, verify
from .hub import Hub
from .kinds import stale_weights
from .manifest import MANIFEST, Manifest
from .safetensors import Stored, build_header, read_fully, write_fully
from .series import is_ours
from .weights import WeightSet, find_weights, index_text, split_keys

MARKER = ".hf_zero_export.json"
"""In an exported folder, not on the Hub: names and sizes of its files, so that a later export may replace them."""
CHUNK_BYTES = 4 << 20
"""Buffer for the bytes read of a tensor and their cast; temporaries take about as much again."""
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"}
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.md", "NOTICE", "NOTICE.md", "USE_POLICY.md")
_TRAINING = ("zero_", "trainer_state.json", "optimizer.json")  # beginnings of names that belong to the run
_TEMPLATES = "additional_chat_templates"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_WEIGHTS = re.compile(r"\..*|checkpoint-\d+").fullmatch  # hidden folders, and checkpoints of their own
_DIGITS = re.compile(r"(\d+)")

Progress = Callable[[str, int, int], None]
"""Called with (action, bytes done, bytes in all), from any thread, one at a time."""


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
    """Export a checkpoint as a clean model folder. Every byte of the checkpoint is checked first.

    Args:
        folder: a checkpoint of hf_zero, or any folder that `from_pretrained` loads (without digests to check).
        output: the folder to write. A new one appears by one rename; files of an earlier export are replaced.
        dtype: cast floating-point weights to float32, bfloat16 or float16. Default: keep them.
        max_shard_size: most bytes per weight file. Files that fit are copied unchanged.
        push_to_hub: `user/repo`, created if it is missing.
        private: create the repository as a private one.
        revision: a branch, created if it is missing.
        token: Hub token. Default: HF_TOKEN, or that of `hf auth login`.
        commit_message: of the commit on the Hub.
        overwrite: write into an `output` that holds other files, and remove weights of another kind (a full model where an
            adapter is exported, pickles) there and on the Hub. Otherwise such weights raise. All other files are kept.
        progress: called with (action, bytes done, bytes in all).

    Returns:
        The output folder, or None if there is none.

    Raises:
        CheckpointError: the checkpoint is damaged, a disk is full, or the Hub fails or cannot be reached.
        ConfigError: a setting that cannot work, or a repository that may not be written to.
    """
    folder, target = Path(folder), None if output is None else Path(os.path.realpath(output))
    if target is None and push_to_hub is None:
        raise ConfigError("export: neither output nor push_to_hub is set. Set at least one")
    if target is not None:
        _check_target(target, folder, overwrite)
    wanted = DTYPE_ALIASES.get(str(dtype).lower())
    if wanted is None and dtype is not None:
        raise ConfigError(f"export: dtype is {str(dtype)!r}. Choose one of {', '.join(DTYPES)}")
    report = progress or (lambda action, done, total: None)
    hub = None if push_to_hub is None else Hub(push_to_hub, token, revision)
    files = _plan(folder, wanted, parse_bytes(max_shard_size), report)
    scratch = _choose_scratch(folder, target, files)
    if hub is not None:
        hub.prepare(private, {CARD, *files}, overwrite)  # before the long work: most errors show here
    title = (target or folder).name if hub is None else hub.name
    if CARD not in files or is_unfilled(read_card(folder / CARD)):
        files[CARD] = sealed(card_for(folder, model_id=title)).encode()
    message = commit_message or f"Upload {folder.name} with hf_zero {__version__}"
    if target is not None:
        _write_folder(target, files, report)
        if hub is not None:
            hub.upload({name: target / name for name in files}, message, overwrite)
    elif hub is not None:
        with tempfile.TemporaryDirectory(prefix=".zero_export-", dir=scratch) as place:
            hub.upload(_write_rewritten(Path(place), files, report), message, overwrite)
    return target


def verified(folder: str | os.PathLike[str], progress: Progress) -> Manifest:
    """Run `verify` and report its progress as that of an export."""
    total, done, lock = Manifest.read(folder).total_bytes, 0, threading.Lock()

    def checked(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking", done, total)

    return verify(folder, progress=checked)


# Which files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, and the dtype to write it in."""

    stored: Stored
    dtype: str

    @property
    def numel(self) -> int:
        return (self.stored.stop - self.stored.start) // itemsize(self.stored.dtype)

    @property
    def size_bytes(self) -> int:
        return self.numel * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A weight file that is cast or split anew."""

    sources: dict[str, _Source]
    metadata: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources.values())


Content = Path | bytes | _Rewritten
"""A file to copy, a text, or weights to rewrite."""


def _plan(folder: Path, dtype: str | None, limit: int, report: Progress) -> dict[str, Content]:
    """Check the checkpoint. Returns name -> content of the files to export.

    Raises:
        CheckpointError: the checkpoint is damaged or has no weights.
        ConfigError: quantised weights cannot be cast.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the folder of a checkpoint")
    manifest = None
    if is_ours(folder):
        manifest = verified(folder, report)
    else:
        warnings.warn(
            f"{folder} has no {MANIFEST}: its headers and index are checked, nothing vouches for its bytes",
            stacklevel=3,
        )
    found = _weight_sets(folder)
    for name in (name for weights in found for name in weights.names):
        if manifest is not None and name not in manifest.files:
            raise CheckpointError(
                f"{folder / name} is not in {MANIFEST}: it was added later. Remove the file, or the manifest"
            )
    files: dict[str, Content] = {name: inside(folder, name) for name in _small_files(folder)}
    if dtype is not None and (folder / "config.json").is_file():
        config = read_json(inside(folder, "config.json"))
        if config.get("quantization_config") is not None:
            raise ConfigError(f"{folder} is quantised ({config['quantization_config']}). Export it without dtype")
        _set_dtype(config, dtype)
        files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    for weights in found:
        files |= _plan_weights(folder, weights, dtype, limit)
    return files


def _weight_sets(folder: Path) -> list[WeightSet]:
    """Return the weights of a model folder. Checks headers, and that index and files agree.

    Raises:
        CheckpointError: there are none, a file is missing or damaged, or index and files disagree.
    """
    found: list[WeightSet] = []
    if (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file():
        found.append(find_weights(folder, "model"))
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and _NOT_WEIGHTS(path.name) is None]
    for path in (folder, *inner):
        if (path / "adapter_config.json").is_file() and (path / "adapter_model.safetensors").is_file():
            found.append(find_weights(folder, (path / "adapter_model").relative_to(folder).as_posix()))
    if not found:
        raise CheckpointError(
            f"{folder} has no weights: expected model.safetensors, model.safetensors.index.json or adapter_model.safetensors"
            + _hint(folder)
        )
    for weights in found:
        for name, header in weights.files.items() if weights.where is not None else ():
            for key in header.tensors:
                listed = (weights.where or {}).get(key)
                if listed != name:
                    raise CheckpointError(f"{folder / name} holds {key!r}, which {weights.index} places in {listed!r}")
    return found


def _hint(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin") if "model" in path.name)
    if pickled:
        return f". {pickled[0]} is a pickle: load it with transformers and save it again"
    inner = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
    return f". Export one of its checkpoints: {', '.join(inner)}" if inner else ""


def _plan_weights(folder: Path, weights: WeightSet, dtype: str | None, limit: int) -> dict[str, Content]:
    """Return the weight files and their index. Files whose dtypes and sizes fit are copied."""
    by_file = {
        file: {key: _Source(found, _cast(file, key, found.dtype, dtype)) for key, found in header.tensors.items()}
        for file, header in weights.files.items()
    }
    if not weights.stem.endswith("adapter_model") and not _is_split_by(limit, by_file, weights.stem):
        # Headers are sorted by dtype and name, which loses the model's order. Natural order is close to it.
        ordered = {key: source for sources in by_file.values() for key, source in sorted(sources.items(), key=_natural)}
        metadata = {k: v for header in weights.files.values() for k, v in header.metadata.items()} or {"format": "pt"}
        names = split_keys(weights.stem, {key: source.size_bytes for key, source in ordered.items()}, limit)
        new = {name: _Rewritten({key: ordered[key] for key in keys}, metadata) for name, keys in names.items()}
        return new | _index_of(weights, new)
    kept: dict[str, Content] = {}
    written: dict[str, _Rewritten] = {}
    for file, sources in by_file.items():
        if all(source.dtype == source.stored.dtype for source in sources.values()):
            kept[file] = inside(folder, file)
        else:
            written[file] = _Rewritten(sources, weights.files[file].metadata)
    if weights.index is not None and not written:
        return kept | {weights.index: inside(folder, weights.index)}
    every = {file: _Rewritten(sources, {}) for file, sources in by_file.items()}
    return kept | written | _index_of(weights, every)


def _is_split_by(limit: int, by_file: Mapping[str, Mapping[str, _Source]], stem: str) -> bool:
    """Return whether filling files in order up to `limit` could give these files and names."""
    count = len(by_file)
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    sizes = [[source.size_bytes for source in sources.values()] for sources in by_file.values()]
    return (
        list(by_file) == (names if count > 1 else [f"{stem}.safetensors"])
        and all(sum(file) <= limit or len(file) == 1 for file in sizes)
        and all(sum(file) + max(after, default=0) > limit for file, after in pairwise(sizes))
    )


def _index_of(weights: WeightSet, files: Mapping[str, _Rewritten]) -> dict[str, Content]:
    """Return the index of several files; nothing for one."""
    if len(files) < 2:
        return {}
    where = {key: name for name, file in files.items() for key in file.sources}
    numel = sum(source.numel for file in files.values() for source in file.sources.values())
    total_numel = numel if weights.total_parameters is None else weights.total_parameters
    text = index_text(where, total_numel, sum(file.size_bytes for file in files.values()))
    return {f"{weights.stem}.safetensors.index.json": text.encode()}


def _cast(file: str, key: str, dtype: str, wanted: str | None) -> str:
    if wanted is None or dtype == wanted:
        return dtype
    if dtype.startswith("float8"):
        raise ConfigError(f"{file}: {key!r} is quantised ({dtype}), and a cast to {wanted} would drop its scales")
    return wanted if dtype in _FLOATS else dtype


def _natural(item: tuple[str, _Source]) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(item[0]))]


def _small_files(folder: Path) -> Iterator[str]:
    """Yield the model's files other than weights. Unknown files are not exported."""
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


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype as `save_pretrained` of the cast model does, also in nested configurations."""
    old = "torch_dtype" in config and "dtype" not in config
    config["torch_dtype" if old else "dtype"] = dtype
    for name, inner in config.items():
        if name.endswith("_config") and isinstance(inner, dict) and {"dtype", "torch_dtype"} & set(inner):
            _set_dtype(inner, dtype)


# Where to write -------------------------------------------------------------------------------------


def _check_target(target: Path, folder: Path, overwrite: bool) -> None:
    """Raise a ConfigError if the output may not be written: it overlaps the checkpoint or holds other files."""
    source = Path(os.path.realpath(folder))
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(
            f"the output {target} and the checkpoint {source} lie in one another. Choose another output folder"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"the output {target} is a file, expected a folder. Choose another output")
    if overwrite:
        return
    present, files = _files_in(target), _marked_files(target)
    if present and files is None:
        raise ConfigError(f"the output {target} is not empty and no earlier export. Choose another, or overwrite=True")
    for name in sorted(present - set(files or ()) - {MARKER})[:1]:
        raise ConfigError(f"the output {target} has {name!r}, which no export made. Move it, or overwrite=True")


def _files_in(target: Path) -> set[str]:
    found = {path.relative_to(target) for path in target.rglob("*") if path.is_file() or path.is_symlink()}
    return {path.as_posix() for path in found if not path.parts[0].startswith(SUFFIX)}  # left by a killed export


def _marked_files(target: Path) -> set[str] | None:
    """Return the files that an earlier export wrote; None if there was none."""
    files = read_json(target / MARKER).get("files") if (target / MARKER).is_file() else None
    return set(files) if isinstance(files, dict) else None


def _choose_scratch(folder: Path, target: Path | None, files: Mapping[str, Content]) -> Path:
    """Return a writable folder with enough free space: the output's parent, or one for temporary files.

    Raises:
        CheckpointError: there is none.
    """
    if target is None:
        parents = [folder.resolve().parent, Path(tempfile.gettempdir())]
    else:
        parents = [next(parent for parent in target.parents if parent.is_dir())]
    need = 4 << 20
    for content in files.values():
        if isinstance(content, _Rewritten):
            need += content.size_bytes + (1 << 20)
        elif target is not None:
            need += content.stat().st_size if isinstance(content, Path) else len(content)
    found = []
    for parent in parents:
        free = shutil.disk_usage(parent).free
        if not os.access(parent, os.W_OK):
            found.append(f"{parent} is not writable")
        elif free < need:
            found.append(f"{parent} has {free:,} bytes free and {need:,} are needed")
        else:
            return parent
    raise CheckpointError(f"no room to export {folder}: {', '.join(found)}. Free some space, or choose another folder")


# Writing --------------------------------------------------------------------------------------------


def _write_folder(target: Path, files: dict[str, Content], report: Progress) -> None:
    """Stage all files, then put them in place. Other files of the target are kept.

    Raises:
        CheckpointError: a file cannot be read or written, or another job writes to the target.
    """
    staging = Staging(target)
    staging.open()
    try:
        written = _write_rewritten(staging.path, files, report)
        for name, content in written.items():
            path = staging.path / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content != path:
                shutil.copyfile(content, path)
        present = _files_in(target) if target.is_dir() else set()
        same, other = stale_weights(present, files)
        stale = {*((_marked_files(target) or set()) & present), *same, *other} - set(files)
        if (
            CARD in present
            and is_generated(read_card(staging.path / CARD))
            and not is_generated(read_card(target / CARD))
        ):
            (staging.path / CARD).unlink()  # a user wrote or edited the target's card
        sizes = {name: (staging.path / name).stat().st_size for name in files if (staging.path / name).exists()}
        marker = {"format": "hf_zero_export", "version": __version__, "files": sizes}
        (staging.path / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        staging.put_in_place(MARKER, stale)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        staging.discard()


def _write_rewritten(place: Path, files: Mapping[str, Content], report: Progress) -> dict[str, Path | bytes]:
    """Write the rewritten weights into `place`. Returns all files, with these as paths."""
    total, done = sum(file.size_bytes for file in files.values() if isinstance(file, _Rewritten)), 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        report("writing", done, total)

    out: dict[str, Path | bytes] = {}
    for name, content in files.items():
        if isinstance(content, _Rewritten):
            (place / name).parent.mkdir(exist_ok=True)
            _write_weights(content, place / name, written)
            out[name] = place / name
        else:
            out[name] = content
    return out


def _write_weights(file: _Rewritten, target: Path, done: Callable[[int], None]) -> None:
    """Write one weight file. Calls `done(bytes)` after each chunk.

    Raises:
        CheckpointError: a file cannot be read or written (disk full).
        ConfigError: a value is too large for the dtype.
    """
    opened: dict[Path, int] = {}
    try:
        entries = [(key, source.dtype, source.stored.shape) for key, source in file.sources.items()]
        text, header = build_header(entries, file.metadata, target)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with open(target, "xb", buffering=0) as out:
            write_fully(out.fileno(), memoryview(text), 0, target)
            for key, stored in header.tensors.items():
                source = file.sources[key]
                path = source.stored.file
                if path not in opened:
                    opened[path] = open_plain(path)
                at = stored.start
                for data in _chunks(opened[path], key, source, buffer):
                    write_fully(out.fileno(), data, at, target)
                    at += len(data)
                    done(len(data))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _chunks(fd: int, key: str, source: _Source, buffer: memoryview) -> Iterator[memoryview]:
    """Yield a tensor's bytes in the dtype to write."""
    stored = source.stored
    size, out_size = itemsize(stored.dtype), itemsize(source.dtype)
    stride = len(buffer) // (size + out_size) * size
    for start in range(stored.start, stored.stop, stride):
        part = buffer[: min(stride, stored.stop - start)]
        read_fully(fd, part, start, stored.file)
        if stored.dtype == source.dtype:
            yield part
            continue
        values = torch.frombuffer(part, dtype=dtype_of(stored.dtype))
        cast = values.to(dtype_of(source.dtype))
        low, high = cast.aminmax()  # not finite if any value is not; isinf is slower
        if not (low.isfinite() and high.isfinite()) and not torch.equal(cast.isinf(), values.isinf()):
            largest = values[values.isfinite()].abs().max().item()
            raise ConfigError(
                f"{stored.file}: {key!r} has values up to {largest:.4g}, which {source.dtype} cannot hold. Choose bfloat16 or "
                "float32"
            )
        yield cast.view(torch.uint8).numpy().data
