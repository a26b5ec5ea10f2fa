"""One engine's checkpoint: `Engine.save` and `Engine.load`, and the save that goes on behind training.

    folder/  weights and small files as `save_pretrained` writes them (see `weights.WeightFormat`)
             optimizer/STATE.safetensors, optimizer/optimizer.json; of further optimizers optimizer_1/, optimizer_2/, …
             zero_state.json, zero_state.safetensors     schedulers and the like, random states of every rank
             zero_manifest.json                          last: see `manifest`

Nothing in it depends on the number of ranks, the stage, or where states were kept.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from ..checkpoint.files import Field, read_json
from ..checkpoint.folder import naming
from ..checkpoint.load import Loading
from ..checkpoint.manifest import check_version
from ..checkpoint.save import Saving, optimizer_folder
from ..checkpoint.weights import Stateful, format_of, pack, random_states, set_random_states, unpack
from ..comm.agree import on_all_ranks
from ..comm.wire import SoloWire
from ..errors import CheckpointError, StateError, ZeroError
from ..plan.machine import free_host_bytes
from .training import Training
from .values.pieces import ParameterPieces
from .values.sharded import Sharded

_STATE = "zero_state"


def save(
    training: Training,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    save_optimizer: bool,
    objects: Mapping[str, Stateful] | None,
    finish: Callable[[Saving], None],
) -> None:
    """See `Engine.save`. The masters are those of one step, and no other save is under way.

    Args:
        finish: commits, now or behind training.
    """
    sharded = training.sharded
    optimizers = training.optimizers.pieces() if save_optimizer else []
    saving = Saving(sharded.wire, folder, stage=sharded.config.stage, precision=str(sharded.precision))
    with saving:
        put_weights(saving, sharded, training.state_dict_hooks.outline, max_shard_size)
        for index, state in enumerate(optimizers):
            saving.optimizer(state, max_shard_size=max_shard_size, folder=optimizer_folder(index))
        _put_objects(saving, sharded.wire, objects or {})
        finish(saving)


def put_weights(
    saving: Saving, sharded: Sharded, outline: Callable[[], dict[str, Any]], max_shard_size: int | str, folder: str = ""
) -> None:
    """The model, under the names it has at rest, in a folder inside the checkpoint or in the checkpoint itself."""
    form = format_of(sharded.model)
    saving.weights(
        ParameterPieces(sharded.units), lambda: form.draw(outline(), saving.folder / folder, max_shard_size), folder
    )


def load(
    training: Training,
    folder: str | os.PathLike[str],
    *,
    load_optimizer: bool | None,
    objects: Mapping[str, Stateful] | None,
    verify: bool,
    strict: bool,
) -> None:
    """See `Engine.load`. No save is under way."""
    sharded = training.sharded
    loading = Loading(sharded.wire, folder, verify=verify)
    if loading.manifest is None and sharded.wire.rank == 0:
        warnings.warn(
            f"{folder} has no zero_manifest.json: it is a plain model folder. Its weights are loaded; nothing vouches for "
            "their bytes, and there is no optimizer state",
            stacklevel=3,
        )
    wanted = loading.has_optimizer() if load_optimizer is None else load_optimizer
    if wanted and not sharded.optimizers:
        if load_optimizer:
            raise StateError("load: the engine has no optimizer; call engine.bind(optimizer) first")
        wanted = False
    folders = [optimizer_folder(index) for index in range(len(sharded.optimizers))] if wanted else []
    if wanted:  # before anything is written: spans may be cut anew
        training.optimizers.make_room(
            {name: mark for folder in folders for name, mark in loading.marks(folder).items()}
        )
    try:
        loading.weights(ParameterPieces(sharded.units), sharded.model, format_of(sharded.model), strict=strict)
        if wanted:
            for folder, state in zip(folders, training.optimizers.pieces()):
                loading.optimizer(state, folder=folder)
    finally:
        training.state_dict_hooks.after_load()  # masters were written, also where that broke off
    if wanted or not sharded.optimizers:
        training.offload.recover()
    _take_objects(loading, sharded.wire, objects or {})


# States beside the weights -------------------------------------------------------------------------------------------


def _put_objects(saving: Saving, wire: SoloWire, objects: Mapping[str, Stateful]) -> None:
    tensors: dict[str, Tensor] = {}
    with on_all_ranks(wire, f"saving to {saving.target}") as report:
        mine: dict[str, Tensor] = {}
        report.mine = pack(random_states(), mine, f"random.{wire.rank}"), mine
    with on_all_ranks(wire, f"saving to {saving.target}"):
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


def _take_objects(loading: Loading, wire: SoloWire, objects: Mapping[str, Stateful]) -> None:
    with on_all_ranks(wire, f"loading {loading.folder}"):
        path = loading.folder / f"{_STATE}.json"
        if loading.manifest is None or path.name not in loading.manifest.files:
            if objects:
                raise CheckpointError(f"{loading.folder} holds no states of {sorted(objects)}: it has no {path.name}")
            return
        body = read_json(path)
        check_version(path, body, 1)
        states, random = Field(path, body)["objects"], Field(path, body)["random"].items()
        tensors = _read_tensors(loading)
        for name, item in objects.items():
            if name not in dict(states.entries()):
                raise CheckpointError(f"{path} has no state of {name!r}, only of {sorted(states.value)}")
            packed = states[name]
            state = packed.read_by(lambda value: unpack(value, tensors), "a packed state")
            load_state(item, Field(path, state, packed.key))
        if len(random) == wire.size:
            random[wire.rank].read_by(lambda value: set_random_states(unpack(value, tensors)), "random states")


def _read_tensors(loading: Loading) -> dict[str, Tensor]:
    """Those of the states beside the weights.

    Raises:
        CheckpointError: damaged, or more than there is memory for: a file may claim what no disk holds.
    """
    stored = loading.find(_STATE)
    need, free = sum(place.stop - place.start for place in stored.values()), free_host_bytes()
    if need > free:
        raise CheckpointError(f"{loading.folder}/{_STATE}.safetensors holds {need:,} bytes, and {free:,} are free here")
    return loading.read_whole(stored)


_COUNTS = ("last_epoch", "_step_count")


def load_state(item: Stateful, saved: Field) -> None:
    """Give `item` a saved state. A scheduler of torch takes whatever it is given, also a number in the place of a method.

    Raises:
        CheckpointError: naming the file and the key.
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


# Behind training -----------------------------------------------------------------------------------------------------


class Behind:
    """A frozen save that is being written by a thread. At most one at a time per engine.

    Args:
        wire: for this thread alone.
        slab: host memory of the save before, which is complete: its thread reads it no more.

    Attributes:
        slab: host memory that the values are copied to, for the next one.
    """

    def __init__(self, saving: Saving, wire: SoloWire, slab: Tensor | None) -> None:
        self.slab = saving.freeze(wire, slab)
        self.target = saving.target
        self._saving = saving
        self._failure: BaseException | None = None
        # Not a daemon: the interpreter waits for it at exit, and `_at_exit` then reports.
        self._thread = threading.Thread(target=self._run, name=f"hf_zero save {saving.target}")
        self._thread.start()
        _UNREPORTED.append(self)

    def _run(self) -> None:
        try:
            self._saving.commit()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Return when the checkpoint is there.

        Raises:
            CheckpointError: it failed, on this or any other rank; raised once.
        """
        self._thread.join()
        if self in _UNREPORTED:
            _UNREPORTED.remove(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            if isinstance(failure, ZeroError):
                raise failure
            raise CheckpointError(f"the save to {self.target}, written behind, failed: {failure}") from failure


class Saves:
    """Of one engine, written behind training, one at a time.

    Attributes:
        pending: the one under way.
    """

    def __init__(self, wire: SoloWire) -> None:
        self._wire = wire
        self._side: SoloWire | None = None
        self._slab: Tensor | None = None  # host memory, kept for the next one
        self.pending: Behind | None = None

    def side_wire(self) -> SoloWire:
        """For a thread that communicates while training goes on; made once, a collective then."""
        if self._side is None:
            self._side = self._wire.side()
        return self._side

    def write_behind(self, saving: Saving) -> None:
        """Commit a save that has all its parts. A collective."""
        self.wait()  # it still reads the slab, and talks over the side wire
        self.pending = Behind(saving, self.side_wire(), self._slab)
        self._slab = self.pending.slab

    def wait(self) -> None:
        """See `Engine.wait_for_save`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._wire.watch.doing(f"waiting for the save to {pending.target}"):
                pending.wait()


_UNREPORTED: list[Behind] = []
"""Saves whose outcome nobody has asked for yet; the process must not end as if they had succeeded."""


@atexit.register
def _at_exit() -> None:
    failed = False
    for behind in list(_UNREPORTED):
        try:
            behind.wait()
        except ZeroError as error:
            failed = True
            print(f"hf_zero: {error}", file=sys.stderr, flush=True)
    if failed:
        sys.stdout.flush()
        os._exit(1)  # an exception in an exit handler would leave the exit status 0
