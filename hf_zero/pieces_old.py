"""Optimizer state at rest: every rank writes the pieces it owns, any number of ranks reads them back.

A folder holds one safetensors file per writing rank and `optimizer.json`, written last. A tensor's key is
`state/parameter/first element`; its value is that contiguous run of the parameter's elements, row-major. So nothing
depends on the number of ranks or the stage, and there is no pickle. Masters are kept only where they are finer than the
parameter's own type; else the model's weights are the masters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .engine import Engine
from .errors import CheckpointError, StateError
from .layout import Overlap
from .unit import Flat

_INDEX = "optimizer.json"
_VERSION = 1
_MASTER = "master"


def save_optimizer(engine: Engine, directory: str | os.PathLike[str]) -> None:
    """Write this rank's share of the optimizer state into `directory`. A collective (barriers only, no tensors move).

    Raises:
        StateError: no optimizer is bound.
        CheckpointError: a rank could not write; raised on every rank, the folder then has no index and is not loadable.
    """
    optimizer = engine.optimizer
    if optimizer is None:
        raise StateError("save_optimizer: the engine has no optimizer; call engine.bind(optimizer) first")
    folder = Path(directory)

    def prepare() -> None:
        if engine.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _INDEX).unlink(missing_ok=True)
            for old in folder.glob("rank-*.safetensors"):
                old.unlink()

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.contiguous() for key, value in _owned(engine)}
        path = folder / _file_name(engine.rank, engine.world_size)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, {"format": "pt"})
        os.replace(partial, path)

    def publish() -> None:
        if engine.rank == 0:
            partial = folder / (_INDEX + ".partial")
            partial.write_text(json.dumps(_index(engine), indent=1))
            os.replace(partial, folder / _INDEX)

    for step in (prepare, write, publish):
        _together(engine, step, folder)


def load_optimizer(engine: Engine, directory: str | os.PathLike[str]) -> None:
    """Read this rank's share back, whatever number of ranks and whatever stage wrote it. A collective.

    Raises:
        CheckpointError: a file or a piece is missing or of another size, or the state is of other parameters; on every rank.
    """
    folder = Path(directory)
    _together(engine, lambda: _load(engine, folder), folder)


def is_optimizer_folder(directory: str | os.PathLike[str]) -> bool:
    """Whether a complete optimizer state lies here."""
    return (Path(directory) / _INDEX).is_file()


def _owned(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for flat, entries in _states(engine):
        for state, value in entries.items():
            if not _is_sliced(flat, state, value):
                continue
            for part in flat.span.overlaps(flat.rank):
                if flat.span.shards > 1 or engine.rank == 0:
                    yield _key(state, part), value.detach()[part.slice_start : part.slice_start + part.numel].cpu()


def _states(engine: Engine) -> Iterator[tuple[Flat, dict[str, Any]]]:
    optimizer = engine.optimizer
    for unit in engine.units:
        for flat in unit.trained:
            entries: dict[str, Any] = dict(optimizer.state.get(flat.master, {})) if optimizer is not None else {}
            if flat.span.spec.master_dtype != flat.span.spec.dtype:
                entries[_MASTER] = flat.master
            yield flat, entries


def _is_sliced(flat: Flat, state: str, value: Any) -> bool:
    return isinstance(value, Tensor) and state != "step" and value.dim() > 0 and value.numel() == flat.span.slice_numel


def _index(engine: Engine) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for flat, entries in _states(engine):
        sliced = {k: str(v.dtype).removeprefix("torch.") for k, v in entries.items() if _is_sliced(flat, k, v)}
        scalars = {k: _scalar(k, v) for k, v in entries.items() if k not in sliced}
        for slot in flat.span.slots:
            parameters[slot.spec.name] = {"shape": slot.spec.shape, "states": sliced, "scalars": scalars}
    return {
        "version": _VERSION,
        "optimizer": type(engine.optimizer).__name__,
        "files": [_file_name(rank, engine.world_size) for rank in range(engine.world_size)],
        "groups": [{k: _scalar(k, v) for k, v in group.items()} for group in engine.group_options()],
        "parameters": parameters,
    }


def _scalar(name: str, value: Any) -> Any:
    """A JSON value for an option or a scalar state."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise CheckpointError(
                f"optimizer state {name!r} has shape {tuple(value.shape)}, neither one value nor one per element: it cannot be "
                "saved by parameter"
            )
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_scalar(name, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return value
    raise CheckpointError(f"optimizer option {name!r} is a {type(value).__name__}, which has no place in JSON")


def _unscalar(value: Any, like: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tuple(value) if isinstance(like, tuple) else value


def _load(engine: Engine, folder: Path) -> None:
    optimizer = engine.optimizer
    if optimizer is None:
        raise StateError("load_optimizer: the engine has no optimizer; call engine.bind(optimizer) first")
    index = _read_index(folder)
    saved: dict[str, Any] = index["parameters"]
    pieces = _pieces(folder, index["files"])
    groups = engine.group_options()
    if [group["params"] for group in index["groups"]] != [group["params"] for group in groups]:
        raise CheckpointError(
            f"{folder / _INDEX}: the optimizer groups hold other parameters than this run's: it is of another model, or of "
            "one with other parameters frozen"
        )
    fresh: list[tuple[Flat, dict[str, Any]]] = []
    for unit in engine.units:
        for flat in unit.trained:
            fresh.append((flat, _read_flat(flat, saved, pieces, folder)))
    for flat, entries in fresh:
        master = entries.pop(_MASTER, None)
        if master is not None:
            flat.master.detach().copy_(master)
        if entries:
            optimizer.state[flat.master] = entries
    for group, packed in zip(optimizer.param_groups, index["groups"]):
        group.update({k: _unscalar(v, group.get(k)) for k, v in packed.items() if k != "params"})
    engine.refresh()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: no complete optimizer state was saved here") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(index, dict) or index.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: expected version {_VERSION}, found {index.get('version') if isinstance(index, dict) else index!r}"
        )
    return index


Pieces = dict[tuple[str, str], list[tuple[int, Path, str]]]


def _pieces(folder: Path, files: list[str]) -> Pieces:
    """(state, parameter) -> where its runs of elements begin, and in which file under which key."""
    out: Pieces = {}
    for name in files:
        path = folder / name
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    state, rest = key.split("/", 1)
                    param, start = rest.rsplit("/", 1)
                    out.setdefault((state, param), []).append((int(start), path, key))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    for runs in out.values():
        runs.sort(key=lambda run: run[0])
    return out


def _read_flat(flat: Flat, saved: dict[str, Any], pieces: Pieces, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    parts = list(flat.span.overlaps(flat.rank))
    for slot in flat.span.slots:
        entry = saved.get(slot.spec.name)
        if entry is None or tuple(entry["shape"]) != slot.spec.shape:
            raise CheckpointError(
                f"{folder / _INDEX}: parameter {slot.spec.name!r} expected with shape {slot.spec.shape}, "
                f"found {None if entry is None else tuple(entry['shape'])}"
            )
        for state, value in entry["scalars"].items():
            out.setdefault(state, _unscalar(value, None))
        for state, dtype in entry["states"].items():
            if state == _MASTER and flat.span.spec.master_dtype == flat.span.spec.dtype:
                continue
            if state not in out:
                out[state] = torch.zeros(flat.span.slice_numel, dtype=getattr(torch, dtype), device=flat.own.device)
            for part in parts:
                if part.slot is slot:
                    _read_part(part, pieces.get((state, slot.spec.name), []), out[state], state, folder)
    return out


def _read_part(part: Overlap, runs: list[tuple[int, Path, str]], out: Tensor, state: str, folder: Path) -> None:
    done, stop = part.param_start, part.param_start + part.numel
    for start, path, key in runs:
        if start > done or done >= stop:
            break
        with safe_open(path, "pt") as file:
            run = file.get_slice(key)
            length = run.get_shape()[0]
            end = min(stop, start + length)
            if end > done:
                place = part.slice_start + done - part.param_start
                out[place : place + end - done].copy_(run[done - start : end - start])
                done = end
    if done < stop:
        raise CheckpointError(
            f"{folder}: {state!r} of {part.slot.spec.name!r} lacks elements {done} to {stop} in every file: the state is "
            "incomplete"
        )


def _key(state: str, part: Overlap) -> str:
    return f"{state}/{part.slot.spec.name}/{part.param_start}"


def _file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _together(engine: Engine, step: Callable[[], None], folder: Path) -> None:
    """Run on every rank; an error on one is an error on all."""
    error: Exception | None = None
    try:
        step()
    except (OSError, SafetensorError, CheckpointError, StateError) as caught:
        error = caught
    failures = engine.exchange(None if error is None else f"{type(error).__name__}: {error}")
    if isinstance(error, (CheckpointError, StateError)):
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"optimizer state in {folder}, rank {rank}: {failure}") from error
