"""States of schedulers, loss scalers and the like, and the random states of every rank.

zero_state.json             nested values, with names of tensors
zero_state.safetensors      the tensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from ..comm.agree import on_all_ranks
from ..comm.wire import SoloWire
from ..errors import CheckpointError
from .files import Field, read_json
from .folder import naming
from .load import Loading
from .manifest import check_version
from .save import Saving
from .weights import Stateful, pack, random_states, set_random_states, unpack

_STATE = "zero_state"
_COUNTS = ("last_epoch", "_step_count")


def put_objects(saving: Saving, wire: SoloWire, objects: Mapping[str, Stateful]) -> None:
    """Write rank 0's states of `objects`, and the random states of all ranks. A collective."""
    tensors: dict[str, Tensor] = {}
    what = f"saving to {saving.target}"
    with on_all_ranks(wire, what) as report:
        mine: dict[str, Tensor] = {}
        report.mine = pack(random_states(), mine, f"random.{wire.rank}"), mine
    with on_all_ranks(wire, what):
        if wire.rank != 0:
            return
        body: dict[str, Any] = {"version": 1, "random": [states for states, _ in report.everyone]}
        for _, theirs in report.everyone:
            tensors.update(theirs)
        body["objects"] = {name: pack(item.state_dict(), tensors, name) for name, item in objects.items()}
        path = saving.folder / f"{_STATE}.json"
        with naming(path):
            path.write_text(json.dumps(body, separators=(",", ":")))
        path = saving.folder / f"{_STATE}.safetensors"
        with naming(path), open(path, "wb") as file:
            file.write(serialized(tensors, {"format": "pt"}))


def take_objects(
    loading: Loading, wire: SoloWire, objects: Mapping[str, Stateful], free_host_bytes: Callable[[], int]
) -> None:
    """Load the states of `objects`. Random states are restored where the number of ranks is the saved one. A collective.

    Raises:
        CheckpointError: the folder has no state of one of them, or a damaged one.
    """
    with on_all_ranks(wire, f"loading {loading.folder}"):
        path = loading.folder / f"{_STATE}.json"
        if loading.manifest is None or path.name not in loading.manifest.files:
            if objects:
                raise CheckpointError(f"{loading.folder} holds no states of {sorted(objects)}: it has no {path.name}")
            return
        body = read_json(path)
        check_version(path, body, 1)
        states, random = Field(path, body)["objects"], Field(path, body)["random"].items()
        tensors = _read_tensors(loading, free_host_bytes)
        for name, item in objects.items():
            if name not in dict(states.entries()):
                raise CheckpointError(f"{path} has no state of {name!r}, only of {sorted(states.value)}")
            packed = states[name]
            state = packed.read_by(lambda value: unpack(value, tensors), "a packed state")
            load_state(item, Field(path, state, packed.key))
        if len(random) == wire.size:
            random[wire.rank].read_by(lambda value: set_random_states(unpack(value, tensors)), "random states")


def _read_tensors(loading: Loading, free_host_bytes: Callable[[], int]) -> dict[str, Tensor]:
    """
    Raises:
        CheckpointError: the file is damaged, or claims more bytes than host memory has.
    """
    stored = loading.find(_STATE)
    need, free = sum(place.stop - place.start for place in stored.values()), free_host_bytes()
    if need > free:
        raise CheckpointError(f"{loading.folder}/{_STATE}.safetensors holds {need:,} bytes, and {free:,} are free here")
    return loading.read_whole(stored)


def load_state(item: Stateful, saved: Field) -> None:
    """Give `item` a saved state. Torch's schedulers accept any value, also a number in the place of a method.

    Raises:
        CheckpointError: names the file and the key.
    """
    if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
        mine = item.state_dict()
        for name, entry in saved.entries():
            if name in _COUNTS:
                entry.integer(2**53)
            elif name in mine:
                entry.like(mine[name])
            elif hasattr(type(item), name):
                raise entry.refused(f"nothing: it is a method of {type(item).__name__}")
    saved.read_by(item.load_state_dict, f"a state of {type(item).__name__}")
