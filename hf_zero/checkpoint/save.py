"""One checkpoint, written by all ranks at once: every rank its own byte ranges of the final files, nothing gathered.

    with Saving(wire, folder) as saving:        # staged beside the target, see `folder`
        saving.weights(parameters, draw)        # rank 0 says what the files are, each rank notes its ranges
        saving.optimizer(state, max_shard_size=limit)
        saving.commit()                         # write, fsync, manifest, rename

Rank 0 decides and creates files; the others write into them. All steps are collectives and fail on all ranks together.
With `freeze()` before, the values are copied first and `commit` may run in another thread over a wire of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..comm.agree import on_all_ranks
from ..comm.wire import SoloWire
from ..core.layout import Extent
from ..core.precision import dtype_name, dtype_of
from ..errors import CheckpointError, ZeroError
from ..version import __version__
from .folder import Staging, naming
from .manifest import MANIFEST, SEGMENT_BYTES, FileDigest, Manifest, Segment, digest_file, digest_of
from .ranges import OptimizerState, Parameters, ParameterState, Range, Writer, copy_to, ranges_of
from .safetensors import Stored, build_header
from .weights import Drawing, Entry, WeightFile, split_files

OPTIMIZER_FOLDER = "optimizer"
OPTIMIZER_INDEX = "optimizer.json"
_UNWATCHED = {MANIFEST, "README.md"}  # a model card is for people to edit
_SAFE_STATE = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


def optimizer_folder(index: int) -> str:
    """The folder in a checkpoint of one of several optimizers."""
    return f"{OPTIMIZER_FOLDER}_{index}" if index else OPTIMIZER_FOLDER


@dataclass(slots=True)
class _Conversion:
    """Tensors that rank 0 computes from whole parameters, when its turn comes."""

    parameters: Parameters
    sources: tuple[str, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None  # on rank 0
    places: Mapping[str, Stored]  # by key; on rank 0


class Saving:
    """A save under way.

    Raises:
        CheckpointError: on every rank: another job saves to `target`, it cannot be written, or ranks do not share it.
    """

    def __init__(self, wire: SoloWire, target: str | os.PathLike[str], **facts: Any) -> None:
        self._wire = wire
        self._facts = facts
        self._ranges: list[Range] = []
        self._conversions: list[_Conversion] = []
        self._segments: dict[Path, list[Segment]] = {}
        self._promised_bytes = 0
        self._staging = Staging(target)
        self.target = self._staging.target
        try:
            with on_all_ranks(wire, f"saving to {self.target}") as report:
                if wire.rank == 0:
                    self._staging.open()
                    report.mine = str(self._staging.path)
            folder = report.everyone[0]
            # The name is random: a rank that finds it shares rank 0's file system.
            sees = wire.exchange(os.path.exists(folder))
        except BaseException:
            self._staging.discard()
            raise
        self.folder = Path(folder)
        """Where to write: files that other code puts here before `commit` become part of the checkpoint."""
        self._blind = [rank for rank, seen in enumerate(sees) if not seen]
        """Ranks on nodes that do not see rank 0's folder: they send it their bytes."""

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    def discard(self) -> None:
        """Give up: nothing of it stays, the target is as it was."""
        self._ranges.clear()
        self._conversions.clear()
        self._staging.discard()

    # What is to be written ------------------------------------------------------------------------------------------

    def weights(self, parameters: Parameters, draw: Callable[[], Drawing], folder: str = "") -> None:
        """Parameters and buffers. `draw` is called on rank 0 and may write further files beside the weights.

        Args:
            folder: inside the checkpoint, of a further model.
        """
        with on_all_ranks(self._wire, f"saving weights to {self.target}") as report:
            if self._wire.rank == 0:
                # No graph: between a forward and its backward a look at a weight would bring it in, on this rank alone.
                with naming(self.folder), torch.no_grad():
                    (self.folder / folder).mkdir(exist_ok=True)
                    drawing = draw()
                placed = [item for file in drawing.files for item in self._create(file, folder)]
                for entry, stored in placed:
                    if not entry.runs and entry.key in drawing.values:
                        value = drawing.values[entry.key].detach().contiguous()
                        self._ranges.append(Range(stored, 0, value.view(-1)))
                where = {entry.key: stored for entry, stored in placed}
                self._conversions += [
                    _Conversion(parameters, item.sources, item.convert, {key: where[key] for key in item.targets})
                    for item in drawing.conversions
                ]
                report.mine = places_of(placed), [item.sources for item in drawing.conversions]
        places, sources = report.everyone[0]
        if self._wire.rank != 0:
            self._conversions += [_Conversion(parameters, names, None, {}) for names in sources]
        self._ranges += ranges_of(parameters.written(self._wire.rank, self._wire.size), places)

    def optimizer(
        self, optimizer: OptimizerState, *, max_shard_size: int | str, folder: str = OPTIMIZER_FOLDER
    ) -> None:
        """The optimizer's state: one set of files per state, named and shaped as the parameters; scalars in JSON."""
        with on_all_ranks(self._wire, f"saving optimizer state to {self.target}") as report:
            held = optimizer.written(self._wire.rank, self._wire.size)
            out: dict[str, dict[str, list[Extent[Stored]]]] = {}
            if self._wire.rank == 0:
                described = optimizer.described()
                index = _index(optimizer, described)
                path = self.folder / folder / OPTIMIZER_INDEX
                with naming(path):
                    path.parent.mkdir()
                    path.write_text(json.dumps(index, separators=(",", ":")))
                for state in held:
                    files = split_files(f"{folder}/{state}", _entries(state, described), max_shard_size)
                    out[state] = places_of(item for file in files for item in self._create(file))
            report.mine = out, sorted(held)
        answers = report.everyone
        for rank, (_, states) in enumerate(answers):
            if states != answers[0][1]:
                raise CheckpointError(
                    f"saving optimizer state to {self.target}: rank 0's optimizer has the states {answers[0][1]}, "
                    f"rank {rank}'s {states}: not every rank has made the same steps"
                )
        for state, places in answers[0][0].items():
            self._ranges += ranges_of(held[state], places)

    def _create(self, file: WeightFile, folder: str = "") -> list[tuple[Entry, Stored]]:
        """Rank 0: the file with its header, at its final size. Returns where its tensors lie."""
        path = self.folder / folder / file.name
        head, header = build_header([(e.key, e.dtype, e.shape) for e in file.entries], file.metadata, path)
        self._promised_bytes += header.file_bytes  # the files are sparse: what they will take is still counted as free
        stat = os.statvfs(self.folder)
        if self._promised_bytes > stat.f_bavail * stat.f_frsize:
            raise CheckpointError(
                f"{self.target}: the files up to {path.relative_to(self.folder)} need {self._promised_bytes} bytes, the disk "
                f"has {stat.f_bavail * stat.f_frsize} left: free some, or save elsewhere"
            )
        with naming(path), open(path, "wb") as out:
            out.write(head)
            # Its final size before any rank opens it: they write at offsets, and none may cut what another has written.
            out.truncate(header.file_bytes)
        for start in range(0, len(head), SEGMENT_BYTES):
            part = head[start : start + SEGMENT_BYTES]
            self._segments.setdefault(path, []).append((start, len(part), digest_of(part)))
        return [(entry, header.tensors[entry.key]) for entry in file.entries]

    # Writing --------------------------------------------------------------------------------------------------------

    def freeze(self, side: SoloWire, slab: Tensor | None = None) -> Tensor:
        """Copy everything to host memory now; `commit` then talks over `side` and may run in another thread.

        Costs the bytes this rank writes (on rank 0 also all converted tensors, until they are written).

        Args:
            slab: what an earlier call returned, used again where it is large enough: most of the time of a copy into new
                memory is the page faults.

        Returns:
            The memory that holds the copies.
        """
        if self._blind:
            self.discard()
            raise CheckpointError(
                f"async_save needs a folder that all ranks see; ranks {self._blind} do not see {self.target}: use a shared "
                "file system, or save synchronously"
            )
        with on_all_ranks(self._wire, f"copying what is to be saved to {self.target}"):
            total = sum(_padded(item.length) for item in self._ranges)
            memory = (
                slab
                if slab is not None and slab.numel() >= total
                else torch.empty(total, dtype=torch.uint8, device="cpu")
            )
            at = 0
            for item in self._ranges:
                place = memory[at : at + item.length].view(item.dtype)
                item.values, at = copy_to(item.values, place), at + _padded(item.length)
        for conversion in self._conversions:
            self._ranges += self._convert(conversion)
        self._conversions.clear()
        self._wire = side
        return memory

    def commit(self) -> None:
        """Write all bytes, make them durable, and let the checkpoint appear."""
        what = f"saving to {self.target}"
        writer = Writer()
        try:
            with on_all_ranks(self._wire, what):
                if not self.is_blind:
                    writer.write(self._ranges)
            for conversion in self._conversions:
                made = self._convert(conversion)
                with on_all_ranks(self._wire, what):
                    writer.write(made)
            for rank in self._blind:
                self._receive(rank, writer)
            # Every rank has fsynced its bytes when this exchange is over; rank 0 commits after it, and syncs only what it sees.
            with on_all_ranks(self._wire, what) as report:
                report.mine = writer.finish()
            with on_all_ranks(self._wire, what):
                if self._wire.rank == 0:
                    self._seal(report.everyone)
        finally:
            writer.close()
            self.discard()

    @property
    def is_blind(self) -> bool:
        """Whether this rank does not see `folder`: what it wrote there is on a disk of its own."""
        return self._wire.rank in self._blind

    def _seal(self, written: Sequence[dict[Path, list[Segment]]]) -> None:
        segments = dict(self._segments)
        for theirs in written:
            for path, items in theirs.items():
                segments[path] = segments.get(path, []) + items
        files = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in _UNWATCHED:
                # Digests are of what ranks had in memory: what a disk made of it is found when it is read, not signed here.
                known = segments.get(path)
                files[name] = (
                    digest_file(path) if known is None else FileDigest.of(path.stat().st_size, known, str(path))
                )
        self._staging.publish(Manifest(files, {"hf_zero": __version__, "world_size": self._wire.size, **self._facts}))

    def _convert(self, conversion: _Conversion) -> list[Range]:
        """A collective: whole sources to rank 0, which computes the tensors."""
        whole: dict[str, Tensor] = {}
        failure: ZeroError | None = None
        for name in conversion.sources:
            spec = conversion.parameters.spec(name)
            dtype = dtype_of(spec.master_dtype)
            value = torch.empty(spec.numel if self._wire.rank == 0 else 0, dtype=dtype, device="cpu")
            for rank, part in conversion.parameters.shares(name):
                mine = None
                if self._wire.rank == rank:
                    try:
                        mine = part.source()
                    except ZeroError as error:  # rank 0 waits for something all the same
                        failure = failure or error
                        mine = torch.zeros(part.numel, dtype=dtype, device="cpu")
                self._wire.carry(mine, value[part.here], rank)
            if self._wire.rank == 0:
                whole[name] = value.view(spec.shape).to(dtype_of(spec.dtype))
        out: list[Range] = []
        # The failure waits until here: a rank that left the loop above would leave rank 0 in a `carry`.
        with on_all_ranks(self._wire, f"converting weights for {self.target}"):
            if failure is not None:
                raise failure
            made = conversion.convert(whole) if conversion.convert is not None else {}
            whole.clear()
            for key, stored in conversion.places.items():
                out.append(Range(stored, 0, made[key].detach().contiguous().view(-1).cpu()))
        return out

    def _receive(self, rank: int, writer: Writer) -> None:
        """A collective of all: rank 0 writes what `rank`, on another node, sends in bounded pieces.

        Where one of the two fails it goes on sending or taking in, for which the other would wait.
        """
        failure: ZeroError | None = None
        mine = self._wire.rank == rank
        plan = [(item.stored.file, item.offset, item.length) for item in self._ranges] if mine else None
        plans: list[tuple[Path, int, int]] = self._wire.exchange(plan)[rank]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for index, (file, offset, length) in enumerate(plans):
            for start in range(0, length, SEGMENT_BYTES):
                count = min(SEGMENT_BYTES, length - start)
                data = torch.empty(count if mine or self._wire.rank == 0 else 0, dtype=torch.uint8, device="cpu")
                try:
                    if mine and failure is None:
                        item = self._ranges[index]
                        size = item.dtype.itemsize
                        copy_to(item.values[start // size : (start + count) // size], data.view(item.dtype))
                except ZeroError as error:
                    failure = error
                self._wire.carry(data if mine else None, nothing if mine else data, rank)
                try:
                    if self._wire.rank == 0 and failure is None:
                        at = offset + start
                        writer.write([Range(Stored(file, "uint8", (count,), at, at + count), 0, data)])
                except ZeroError as error:
                    failure = error
        with on_all_ranks(self._wire, f"writing what rank {rank} sent to {self.target}"):
            if failure is not None:
                raise failure


def places_of(placed: Iterable[tuple[Entry, Stored]]) -> dict[str, list[Extent[Stored]]]:
    """Parameter -> where files hold its elements. "Here" is the parameter."""
    out: dict[str, list[Extent[Stored]]] = {}
    for entry, stored in placed:
        for run in entry.runs:
            out.setdefault(run.source, []).append(Extent(stored, run.start, run.source_start, run.numel))
    return out


def _padded(length: int) -> int:
    return -(-length // 64) * 64  # a slice is viewed as the type in the file, which must be aligned for it


def _index(optimizer: OptimizerState, described: Mapping[str, ParameterState]) -> dict[str, Any]:
    for array in (array for state in described.values() for array in state.arrays):
        if not _SAFE_STATE.fullmatch(array):
            raise CheckpointError(f"the optimizer state {array!r} has no name for a file")
    return {
        "version": 1,
        "optimizer": optimizer.kind,
        "groups": [{key: scalar(key, value) for key, value in group.items()} for group in optimizer.groups],
        "parameters": {
            name: {
                "shape": state.shape,
                "states": list(state.arrays),
                "scalars": {
                    # Options have an example of what is a tuple; a state has none.
                    key: {"tuple": scalar(key, value)} if isinstance(value, tuple) else scalar(key, value)
                    for key, value in state.scalars.items()
                },
            }
            for name, state in described.items()
        },
    }


def _entries(state: str, described: Mapping[str, ParameterState]) -> Iterator[Entry]:
    for name, one in described.items():
        if state in one.arrays:
            dtype, shape = one.arrays[state]
            yield Entry(name, dtype, shape, (Extent(name, 0, 0, math.prod(shape)),))


def scalar(name: str, value: Any) -> Any:
    """A JSON value for an option or a scalar state; tensors of one element, or of none, keep their type and shape.

    Raises:
        CheckpointError: anything else.
    """
    if isinstance(value, Tensor):
        if value.numel() > 1 or value.is_complex():
            raise CheckpointError(
                f"optimizer option {name!r} is a tensor of shape {tuple(value.shape)} and type {value.dtype}: it has no place"
            )
        shape = {"shape": list(value.shape)} if value.dim() else {}
        return {"tensor": value.item() if value.numel() else None, "dtype": dtype_name(value.dtype), **shape}
    if isinstance(value, (tuple, list)):
        return [scalar(name, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"optimizer option or state {name!r} is a {type(value).__name__}, which has no place in JSON: save with "
        "save_optimizer=False, and optimizer.state_dict() by yourself"
    )
