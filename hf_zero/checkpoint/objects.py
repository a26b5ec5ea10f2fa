"""Save and load states of schedulers, loss scalers and other objects, and the random state of every rank.

zero_state.json             nested values, with names of tensors
zero_state.safetensors      the tensors

States are nested dicts, lists, tuples, numbers, strings and tensors: `pack` turns them into JSON and named
tensors, `unpack` inverts it. No pickle is written or read.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save as serialized
from torch import Tensor

from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..errors import CheckpointError
from .files import Field, is_of_torch, named_os_errors, read_json
from .load import CheckpointReader
from .manifest import check_version
from .save import STATE, CheckpointWriter

_COUNTS = ("last_epoch", "_step_count")
_RATES = {"base_lrs", "_last_lr"}
_TENSOR, _TUPLE, _PAIRS, _COUNTER = "__tensor__", "__tuple__", "__pairs__", "__counter__"
_RESERVED = {_TENSOR, _TUPLE, _PAIRS, _COUNTER}


class Stateful(Protocol):
    """An object with a state: a scheduler, a loss scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Set the state."""
        ...


def save_objects(saving: CheckpointWriter, wire: Wire, objects: Mapping[str, Stateful]) -> None:
    """Write rank 0's states of `objects`, and the random states of all ranks. A collective."""
    tensors: dict[str, Tensor] = {}
    what = f"saving to {saving.target}"
    with on_all_ranks(wire, what) as report:
        mine: dict[str, Tensor] = {}
        # On every rank: `state_dict()` of an object that holds a sharded model is a collective.
        found = {name: item.state_dict() for name, item in objects.items()}
        report.local = pack(random_states(), mine, f"random.{wire.rank}"), mine
    with on_all_ranks(wire, what):
        if wire.rank != 0:
            return
        body: dict[str, Any] = {"version": 1, "random": [states for states, _ in report.by_rank]}
        for _, theirs in report.by_rank:
            tensors.update(theirs)
        body["objects"] = {name: pack(state, tensors, name) for name, state in found.items()}
        path = saving.folder / f"{STATE}.json"
        with named_os_errors(path):
            path.write_text(json.dumps(body, separators=(",", ":")))
        path = saving.folder / f"{STATE}.safetensors"
        with named_os_errors(path), open(path, "wb") as file:
            file.write(serialized(tensors, {"format": "pt"}))


def load_objects(
    loading: CheckpointReader, wire: Wire, objects: Mapping[str, Stateful], free_host_bytes: Callable[[], int]
) -> None:
    """Load the states of `objects`. Random states are restored where the number of ranks is the saved one. A collective.

    Raises:
        CheckpointError: the folder has no state of one of them, or a damaged one.
    """
    with on_all_ranks(wire, f"loading {loading.folder}"):
        path = loading.folder / f"{STATE}.json"
        if loading.manifest is None or path.name not in loading.manifest.files:
            if objects:
                raise CheckpointError(f"{loading.folder} holds no states of {sorted(objects)}: it has no {path.name}")
            return
        body = read_json(path)
        check_version(path, body, 1)
        states, generators = Field(path, body)["objects"], Field(path, body)["random"].items()
        tensors = loading.tensors(STATE, free_host_bytes())
        for name, item in objects.items():
            if name not in dict(states.entries()):
                raise CheckpointError(f"{path} has no state of {name!r}, only of {sorted(states.value)}")
            packed = states[name]
            state = packed.read_by(lambda value: unpack(value, tensors), "a packed state")
            load_state(item, Field(path, state, packed.key))
        if len(generators) == wire.size:
            generators[wire.rank].read_by(lambda value: set_random_states(unpack(value, tensors)), "random states")


def load_state(item: Stateful, saved: Field) -> None:
    """Load a saved state into `item`, checked first: torch's schedulers would accept a number in place of a method.

    Raises:
        CheckpointError: names the file and the key.
    """
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
        mine = item.state_dict()
        fixed = mine.keys() if is_of_torch(item) else _RATES & mine.keys()
        for name, entry in saved.entries():
            if name in _COUNTS:
                entry.integer(2**53)
            elif name == "lr_lambdas":  # attributes of callables, which differ between schedules
                entry.read_by(lambda found: [dict(each or {}) for each in found], "objects or null")
            elif name == "best":  # a metric, infinite before the first evaluation
                entry.read_by(float, "a number")
            elif name in fixed:
                entry.like(mine[name])
            elif name not in mine and hasattr(type(item), name):
                raise entry.refused(f"nothing: it is a method of {type(item).__name__}")
    saved.read_by(item.load_state_dict, f"a state of {type(item).__name__}")


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return `value` as JSON, and put its tensors into `tensors`.

    Args:
        value: nested dicts, lists, tuples, numbers, strings, arrays and tensors.
        tensors: name -> tensor; filled.
        where: prefix of the tensors' names.

    Raises:
        CheckpointError: a value of another type; the message has its path.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value, order="C"))  # `ascontiguousarray` adds a dimension to scalars
    if isinstance(value, Tensor):
        while where in tensors:  # keys with dots can give the same name twice
            where += "'"
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: where}
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [pack(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if isinstance(value, Counter):  # milestones of a MultiStepLR, which calls its methods
        return {_COUNTER: pack(dict(value), tensors, where)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not (len(value) == 1 and value.keys() <= _RESERVED):
            return {key: pack(item, tensors, f"{where}.{key}") for key, item in value.items()}
        pairs = [
            [pack(k, tensors, f"{where}.key{i}"), pack(v, tensors, f"{where}.{k}")]
            for i, (k, v) in enumerate(value.items())
        ]
        return {_PAIRS: pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which can be stored neither as JSON nor as a tensor. Give its object a "
        "state_dict() of plain values"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Invert `pack`. Numpy arrays become tensors."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        if set(value) == {_TUPLE}:
            return tuple(unpack(item, tensors) for item in value[_TUPLE])
        if set(value) == {_COUNTER}:
            return Counter(unpack(value[_COUNTER], tensors))
        if set(value) == {_PAIRS}:
            return {unpack(key, tensors): unpack(item, tensors) for key, item in value[_PAIRS]}
        return {key: unpack(item, tensors) for key, item in value.items()}
    return value


def random_states() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch (CPU, and CUDA if it is in use)."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    out: dict[str, Any] = {
        "python": [version, torch.tensor(state, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            kind,
            torch.tensor(np.asarray(keys, dtype=np.int64), device="cpu"),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned.

    Raises:
        Exception: of any type, from a generator that is given an invalid state.
    """
    version, state, gauss = states["python"]
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError(f"{gauss!r} is not a random number")
    random.setstate((version, tuple(state.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    if not 0 <= position <= len(keys):  # numpy would read out of bounds
        raise ValueError(f"position {position} in a state of {len(keys)}")
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
