"""Export a checkpoint as a clean model folder, here or on the Hub: weights, configuration, tokenizer, code and card.

    zero.export("out/checkpoint-500", "model", dtype="bfloat16")
    zero.export("out/checkpoint-500", push_to_hub="user/model", private=True)

One process, without a model. A checkpoint already is a `from_pretrained` folder, so its files are copied
as they are. Weights are rewritten only for another dtype, a few MiB at a time.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import DTYPE_ALIASES, DTYPES
from ..core.layout import itemsize
from ..core.precision import dtype_of
from ..errors import CheckpointError, ConfigError, TierError
from ..tiers.array import FileSource, OnDisk
from ..version import __version__
from .cards import CARD, card_for, is_generated, is_unfilled, read_card, sealed
from .files import inside, named_os_errors, read_json
from .folder import SUFFIX, Progress, Staging, counting, verify
from .hub import Hub
from .manifest import MANIFEST
from .ranges import bytes_of
from .safetensors import Header, StoredTensor, build_header, write_fully
from .save import is_hf_zero_checkpoint
from .weight_kinds import stale_weights
from .weights import WeightSet, find_weights, index_text

CHUNK_NUMEL = 1 << 20
"""Elements that are read, cast and written at a time."""
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".bpe", ".spm"}
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.md", "NOTICE", "NOTICE.md", "USE_POLICY.md")
_TRAINING = ("zero_", "trainer_state.json", "optimizer.json")  # beginnings of names that belong to the run
_TEMPLATES = "additional_chat_templates"
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_NOT_WEIGHTS = re.compile(r"\..*|checkpoint-\d+").fullmatch  # hidden folders, and checkpoints of their own


def export(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
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
        output: the folder to write. A new one appears by one rename.
        dtype: cast floating-point weights to float32, bfloat16 or float16. Default: keep them.
        push_to_hub: `user/repo`, created if it is missing.
        private: create the repository as a private one.
        revision: a branch, created if it is missing.
        token: Hub token. Default: HF_TOKEN, or that of `hf auth login`.
        commit_message: of the commit on the Hub.
        overwrite: write into an `output` that holds files, and remove weights of another kind (a full model where an
            adapter is exported, pickles) there and on the Hub. Otherwise these raise. All other files are kept.
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
    files = _plan(folder, wanted, report)
    if hub is not None:
        hub.prepare(private, {CARD, *files}, overwrite)  # before the long work: most errors show here
    title = (target or folder).name if hub is None else hub.name
    text = read_card(folder / CARD) if CARD in files else None
    if text is None or is_unfilled(text) or is_generated(text):
        files[CARD] = sealed(card_for(folder, model_id=title)).encode()
    message = commit_message or f"Upload {folder.name} with hf_zero {__version__}"
    if target is not None:
        _write_folder(target, files, report)
        if hub is not None:
            hub.upload(target, files, message, overwrite)
    elif hub is not None:
        beside = folder.resolve().parent
        scratch = beside if os.access(beside, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix=".zero_export-", dir=scratch) as place:
            _write_files(Path(place), files, report, links=True)
            hub.upload(Path(place), files, message, overwrite)
    return target


# Which files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """A weight file that is cast.

    Attributes:
        header: the source file's.
        dtypes: key -> dtype in the file to write.
    """

    header: Header
    dtypes: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(math.prod(stored.shape) * itemsize(self.dtypes[key]) for key, stored in self.header.tensors.items())


Content = Path | bytes | _Rewritten
"""A file to copy, a text, or weights to rewrite."""


def _plan(folder: Path, dtype: str | None, report: Progress) -> dict[str, Content]:
    """Check the checkpoint. Returns name -> content of the files to export.

    Raises:
        CheckpointError: the checkpoint is damaged or has no weights.
        ConfigError: quantised weights cannot be cast.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the folder of a checkpoint")
    manifest = None
    if is_hf_zero_checkpoint(folder):
        manifest = verify(folder, progress=report)
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
        files |= _plan_weights(folder, weights, dtype)
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


def _plan_weights(folder: Path, weights: WeightSet, dtype: str | None) -> dict[str, Content]:
    """Return the weight files and their index. Files that keep their dtypes are copied."""
    out: dict[str, Content] = {}
    size_bytes = 0
    for name, header in weights.files.items():
        dtypes = {key: _cast(name, key, stored.dtype, dtype) for key, stored in header.tensors.items()}
        rewritten = _Rewritten(header, dtypes)
        size_bytes += rewritten.size_bytes
        is_kept = all(stored.dtype == dtypes[key] for key, stored in header.tensors.items())
        out[name] = inside(folder, name) if is_kept else rewritten
    if weights.index is not None:
        path = out[weights.index] = inside(folder, weights.index)
        if any(isinstance(each, _Rewritten) for each in out.values()):
            table = read_json(path)
            before = table.get("metadata")
            table["metadata"] = {**(before if isinstance(before, dict) else {}), "total_size": size_bytes}
            out[weights.index] = index_text(table).encode()
    return out


def _cast(file: str, key: str, dtype: str, wanted: str | None) -> str:
    if wanted is None or dtype == wanted:
        return dtype
    if dtype.startswith("float8"):
        raise ConfigError(f"{file}: {key!r} is quantised ({dtype}), and a cast to {wanted} would drop its scales")
    return wanted if dtype in _FLOATS else dtype


def _small_files(folder: Path) -> Iterator[str]:
    """Yield the model's files other than weights. Unknown files are not exported."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if (
            _NOT_WEIGHTS(name)
            or name.startswith(_TRAINING)
            or name.endswith(("_results.json", ".safetensors.index.json"))
        ):
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
    if not all(path.name.startswith(SUFFIX) for path in target.iterdir()):  # of an export that was killed
        raise ConfigError(f"the output {target} is not empty. Choose another, or overwrite=True")


# Writing --------------------------------------------------------------------------------------------


def _write_folder(target: Path, files: dict[str, Content], report: Progress) -> None:
    """Stage all files, then put them in place. Other files of the target are kept.

    Raises:
        CheckpointError: a file cannot be read or written, or another job writes to the target.
    """
    staging = Staging(target)
    staging.open()
    try:
        with named_os_errors(target):
            _write_files(staging.path, files, report)
            found = target.rglob("*") if target.is_dir() else ()
            present = {path.relative_to(target).as_posix() for path in found if path.is_file()}
            same, other = stale_weights(present, files)
            ours, theirs = staging.path / CARD, target / CARD
            if CARD in present and is_generated(read_card(ours)) and not is_generated(read_card(theirs)):
                ours.unlink()  # a user wrote or edited the target's card
            staging.put_in_place(None, [*same, *other])
    finally:
        staging.discard()


def _write_files(place: Path, files: Mapping[str, Content], report: Progress, *, links: bool = False) -> None:
    """Write all files into `place`. With `links`, files that stay as they are become symbolic links."""
    total = sum(file.size_bytes for file in files.values() if isinstance(file, _Rewritten))
    written = counting(report, "writing", total)
    for name, content in files.items():
        path = place / name
        with named_os_errors(path):
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, _Rewritten):
                _write_weights(content, path, written)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            elif links:
                path.symlink_to(content.absolute())
            else:
                shutil.copyfile(content, path)


def _write_weights(rewritten: _Rewritten, target: Path, done: Callable[[int], None]) -> None:
    """Write one weight file. Calls `done(bytes)` after each chunk.

    Raises:
        CheckpointError: a file cannot be read or written (disk full).
        ConfigError: a value is too large for the dtype.
    """
    sources = rewritten.header.tensors
    entries = [(key, rewritten.dtypes[key], stored.shape) for key, stored in sources.items()]
    head, header = build_header(entries, rewritten.header.metadata, target)
    buffer = torch.empty(CHUNK_NUMEL * torch.float64.itemsize, dtype=torch.uint8, device="cpu")
    try:
        with open(target, "xb", buffering=0) as out:
            write_fully(out.fileno(), memoryview(head), 0, target)
            for key, place in header.tensors.items():
                source, at = sources[key], place.start
                values = OnDisk(FileSource(source.file, source.start, dtype_of(source.dtype), math.prod(source.shape)))
                for start in range(0, len(values), CHUNK_NUMEL):
                    part = values[start : start + CHUNK_NUMEL]
                    read = part.read_into(buffer[: len(part) * part.element_size()].view(part.dtype))
                    data = bytes_of(_converted(key, source, read, place.dtype))
                    write_fully(out.fileno(), data, at, target)
                    at += len(data)
                    done(len(data))
    except (OSError, TierError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def _converted(key: str, source: StoredTensor, values: torch.Tensor, dtype: str) -> torch.Tensor:
    if source.dtype == dtype:
        return values
    cast = values.to(dtype_of(dtype))
    low, high = cast.aminmax()  # not finite if any value is not; isinf is slower
    if not (low.isfinite() and high.isfinite()) and not torch.equal(cast.isinf(), values.isinf()):
        largest = values[values.isfinite()].abs().max().item()
        raise ConfigError(
            f"{source.file}: {key!r} has values up to {largest:.4g}, which {dtype} cannot hold. Choose bfloat16 or float32"
        )
    return cast
