"""Save a checkpoint: every rank writes its own byte ranges of the final files, without gathering.

    with CheckpointWriter(wire, folder) as saving:        # creates the staging folder, see `folder`
        saving.weights(parameters, plan_files)  # rank 0 creates the files, each rank collects its ranges
        saving.optimizer(state, max_shard_size=limit)
        saving.commit()                         # write, fsync, manifest, put in place

All steps are collectives and fail on all ranks together. After `snapshot()`, which copies the values,
`commit` may run in another thread over a wire of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..core.layout import Extent
from ..core.precision import dtype_of
from ..errors import CheckpointError, ZeroError
from ..optimizers.scalars import scalar_to_json
from ..version import __version__
from .files import named_os_errors
from .folder import Staging
from .manifest import MANIFEST, SEGMENT_BYTES, FileDigest, Manifest, Segment, check_name, digest_file
from .ranges import OptimizerState, Parameters, ParameterState, Range, RangeWriter, copy_to, ranges_of
from .safetensors import StoredTensor, build_header
from .weights import Conversion, Entry, Files, split_files

OPTIMIZER_FOLDER = "optimizer"
OPTIMIZER_INDEX = "optimizer.json"
STATE = "zero_state"
"""Stem of the files with states of schedulers and generators; see `objects`."""
_UNLISTED = {MANIFEST, "README.md"}  # users may edit a model card
_SAFE_STATE = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


def is_hf_zero_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return whether hf_zero saved the folder, also if its manifest is missing."""
    names = (MANIFEST, f"{OPTIMIZER_FOLDER}/{OPTIMIZER_INDEX}", f"{STATE}.json")
    return any((Path(folder) / name).exists() for name in names)


def optimizer_folder(index: int) -> str:
    """Return the folder of one of several optimizers."""
    return f"{OPTIMIZER_FOLDER}_{index}" if index else OPTIMIZER_FOLDER


class CheckpointWriter:
    """Saves one checkpoint.

    Attributes:
        target: the folder that will be written.
        folder: the staging folder. Files that other code writes here before `commit` become part of the checkpoint.

    Raises:
        CheckpointError: on every rank: another job is saving to `target`, or it cannot be written.
    """

    def __init__(self, wire: Wire, target: str | os.PathLike[str], **facts: Any) -> None:
        self._wire = wire
        self._facts = facts
        self._ranges: list[Range] = []
        self._conversions: list[tuple[Parameters, Conversion, Mapping[str, StoredTensor]]] = []  # the places: on rank 0
        self._promised_bytes = 0
        self._staging = Staging(target)
        self.target = self._staging.target
        try:
            with on_all_ranks(wire, f"saving to {self.target}") as report:
                if wire.rank == 0:
                    self._staging.open()
                    report.local = str(self._staging.path)
            folder = report.by_rank[0]
            # The name is random: a rank that finds it shares rank 0's file system.
            sees = wire.exchange(os.path.exists(folder))
        except BaseException:
            self._staging.discard()
            raise
        self.folder = Path(folder)
        # Ranks on nodes that do not see rank 0's folder send it their bytes.
        self._remote_ranks = [rank for rank, seen in enumerate(sees) if not seen]

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()

    def discard(self) -> None:
        """Remove everything staged; the target is unchanged."""
        self._ranges.clear()
        self._conversions.clear()
        self._staging.discard()

    def weights(self, parameters: Parameters, plan_files: Callable[[], Files], folder: str = "") -> None:
        """Add parameters and buffers.

        Args:
            parameters: the model's.
            plan_files: called on rank 0; may write further files next to the weights.
            folder: the subfolder of a second or later model.
        """
        with on_all_ranks(self._wire, f"saving weights to {self.target}") as report:
            if self._wire.rank == 0:
                # Without a graph: in a graph, reading a released weight would gather it on this rank alone.
                with named_os_errors(self.folder), torch.no_grad():
                    (self.folder / folder).mkdir(exist_ok=True)
                    files = plan_files()
                placed = [item for name in files for item in self._create(self.folder / folder / name, files[name])]
                computed: dict[Conversion, dict[str, StoredTensor]] = {}
                for entry, stored in placed:
                    if isinstance(entry.value, Conversion):
                        computed.setdefault(entry.value, {})[entry.key] = stored
                    elif entry.value is not None:
                        if entry.value.layout is not torch.strided:
                            raise CheckpointError(
                                f"{entry.key!r} is a tensor of layout {entry.value.layout}, which files cannot hold. "
                                "Register the buffer with persistent=False, or store it dense"
                            )
                        self._ranges.append(Range(stored, 0, entry.value.detach().contiguous().view(-1)))
                self._conversions += [(parameters, each, computed[each]) for each in computed]
                report.local = places_of(placed), [each.sources for each in computed]
        places, sources = report.by_rank[0]
        if self._wire.rank != 0:  # rank 0 converts
            self._conversions += [(parameters, Conversion(names, dict), {}) for names in sources]
        self._ranges += ranges_of(parameters.written(self._wire.rank, self._wire.size), places)

    def optimizer(
        self, optimizer: OptimizerState, *, max_shard_size: int | str, folder: str = OPTIMIZER_FOLDER
    ) -> None:
        """Add the optimizer's state: files per state, with the parameters' names and shapes; scalars as JSON."""
        with on_all_ranks(self._wire, f"saving optimizer state to {self.target}") as report:
            pieces = optimizer.written(self._wire.rank, self._wire.size)
            out: dict[str, dict[str, list[Extent[StoredTensor]]]] = {}
            if self._wire.rank == 0:
                described = optimizer.described()
                index = _index(optimizer, described)
                path = self.folder / folder / OPTIMIZER_INDEX
                with named_os_errors(path):
                    path.parent.mkdir()
                    path.write_text(json.dumps(index, separators=(",", ":")))
                for state in pieces:
                    files = split_files(f"{folder}/{state}", _entries(state, described), max_shard_size)
                    out[state] = places_of(
                        item for name in files for item in self._create(self.folder / name, files[name])
                    )
            report.local = out, sorted(pieces)
        answers = report.by_rank
        for rank, (_, states) in enumerate(answers):
            if states != answers[0][1]:
                raise CheckpointError(
                    f"saving optimizer state to {self.target}: rank 0's optimizer has the states {answers[0][1]}, "
                    f"rank {rank}'s {states}. Make the same steps on every rank"
                )
        for state, places in answers[0][0].items():
            self._ranges += ranges_of(pieces[state], places)

    def _create(self, path: Path, entries: Sequence[Entry]) -> list[tuple[Entry, StoredTensor]]:
        """Create a file of its final size on rank 0, which also writes the header. Returns where its tensors lie."""
        head, header = build_header([(e.key, e.dtype, e.shape) for e in entries], {"format": "pt"}, path)
        self._promised_bytes += header.file_bytes  # the files are sparse: the system still counts their bytes as free
        stat = os.statvfs(self.folder)
        if self._promised_bytes > stat.f_bavail * stat.f_frsize:
            raise CheckpointError(
                f"{self.target}: the files up to {path.relative_to(self.folder)} need {self._promised_bytes} bytes, the disk "
                f"has {stat.f_bavail * stat.f_frsize} left. Free some space, or save to another disk"
            )
        with named_os_errors(path), open(path, "wb") as out:
            # Must have its final size before ranks write at offsets: none may truncate what another wrote.
            out.truncate(header.file_bytes)
        place = StoredTensor(path, "uint8", (len(head),), 0, len(head))
        self._ranges.append(Range(place, 0, torch.frombuffer(bytearray(head), dtype=torch.uint8)))
        return [(entry, header.tensors[entry.key]) for entry in entries]

    def snapshot(self, background_wire: Wire, buffer: Tensor | None = None) -> Tensor:
        """Copy all values to host memory. `commit` then uses `background_wire` and may run in another thread.

        Takes as much memory as this rank writes; rank 0 also holds all converted tensors until they are written.

        Args:
            background_wire: a wire for `commit`.
            buffer: the memory that an earlier call returned, reused if it is large enough. Page faults take most of the time
                of a copy into new memory.

        Returns:
            The memory that holds the copies.
        """
        if self._remote_ranks:
            self.discard()
            raise CheckpointError(
                f"async_save needs a folder that all ranks see; ranks {self._remote_ranks} do not see {self.target}. Use a "
                "shared file system, or save synchronously"
            )
        with on_all_ranks(self._wire, f"copying what is to be saved to {self.target}"):
            total = sum(_padded(item.length) for item in self._ranges)
            memory = (
                buffer
                if buffer is not None and buffer.numel() >= total
                else torch.empty(total, dtype=torch.uint8, device="cpu")
            )
            at = 0
            for item in self._ranges:
                place = memory[at : at + item.length].view(item.dtype)
                item.values, at = copy_to(item.values, place), at + _padded(item.length)
        for conversion in self._conversions:
            self._ranges += self._convert(*conversion)
        self._conversions.clear()
        self._wire = background_wire
        return memory

    def commit(self) -> None:
        """Write all bytes, make them durable, and put the checkpoint in place."""
        what = f"saving to {self.target}"
        writer = RangeWriter()
        try:
            with on_all_ranks(self._wire, what):
                if not self.is_remote:
                    writer.write(self._ranges)
            for conversion in self._conversions:
                made = self._convert(*conversion)
                with on_all_ranks(self._wire, what):
                    writer.write(made)
            for rank in self._remote_ranks:
                self._receive(rank, writer)
            # Must end before rank 0 publishes: every rank has fsynced its bytes then.
            with on_all_ranks(self._wire, what) as report:
                report.local = writer.finish()
            with on_all_ranks(self._wire, what):
                if self._wire.rank == 0:
                    self._publish(report.by_rank)
        finally:
            writer.close()
            self.discard()

    @property
    def is_remote(self) -> bool:
        """Return whether this rank cannot see rank 0's `folder`. Its own files there are on its own disk."""
        return self._wire.rank in self._remote_ranks

    def _publish(self, written: Sequence[dict[Path, list[Segment]]]) -> None:
        segments: dict[Path, list[Segment]] = {}
        for theirs in written:
            for path, items in theirs.items():
                segments.setdefault(path, []).extend(items)
        files = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in _UNLISTED:
                check_name(self.target, name)
                # Where ranks wrote, use digests of memory: the next load then detects a disk that altered bytes.
                known = segments.get(path)
                files[name] = (
                    digest_file(path) if known is None else FileDigest.of(path.stat().st_size, known, str(path))
                )
        self._staging.publish(Manifest(files, {"hf_zero": __version__, "world_size": self._wire.size, **self._facts}))

    def _convert(
        self, parameters: Parameters, conversion: Conversion, places: Mapping[str, StoredTensor]
    ) -> list[Range]:
        """Send complete sources to rank 0, which computes the tensors of `places`. A collective."""
        sources: dict[str, Tensor] = {}
        failure: ZeroError | None = None
        for name in conversion.sources:
            spec = parameters.spec(name)
            dtype = dtype_of(spec.master_dtype)
            value = torch.empty(spec.numel if self._wire.rank == 0 else 0, dtype=dtype, device="cpu")
            for rank, part in parameters.shares(name):
                mine = None
                if self._wire.rank == rank:
                    try:
                        mine = part.source()
                    except ZeroError as error:  # rank 0 waits for the bytes even then
                        failure = failure or error
                        mine = torch.zeros(part.numel, dtype=dtype, device="cpu")
                self._wire.send_to_rank_0(mine, value[part.as_slice], rank)
            if self._wire.rank == 0:
                sources[name] = value.view(spec.shape).to(dtype_of(spec.dtype))
        out: list[Range] = []
        # Raised only here: a rank that left the loop above would leave rank 0 waiting there.
        with on_all_ranks(self._wire, f"converting weights for {self.target}"):
            if failure is not None:
                raise failure
            made = conversion.convert(sources)
            sources.clear()
            for key, stored in places.items():
                out.append(Range(stored, 0, made[key].detach().contiguous().view(-1).cpu()))
        return out

    def _receive(self, rank: int, writer: RangeWriter) -> None:
        """Receive the bytes of `rank`, on another node, in bounded pieces; rank 0 writes them. A collective.

        After a failure both sides continue to send and receive, because the other one waits for it.
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
                self._wire.send_to_rank_0(data if mine else None, nothing if mine else data, rank)
                try:
                    if self._wire.rank == 0 and failure is None:
                        at = offset + start
                        writer.write([Range(StoredTensor(file, "uint8", (count,), at, at + count), 0, data)])
                except ZeroError as error:
                    failure = error
        with on_all_ranks(self._wire, f"writing what rank {rank} sent to {self.target}"):
            if failure is not None:
                raise failure


def places_of(placed: Iterable[tuple[Entry, StoredTensor]]) -> dict[str, list[Extent[StoredTensor]]]:
    """Return parameter -> where files hold its elements. `start` counts in the parameter."""
    out: dict[str, list[Extent[StoredTensor]]] = {}
    for entry, stored in placed:
        for run in entry.runs:
            out.setdefault(run.source, []).append(Extent(stored, run.start, run.source_start, run.numel))
    return out


def _padded(length: int) -> int:
    return -(-length // 64) * 64  # slices are viewed in the file's dtype and must be aligned for it


def _index(optimizer: OptimizerState, described: Mapping[str, ParameterState]) -> dict[str, Any]:
    for array in (array for state in described.values() for array in state.arrays):
        if not _SAFE_STATE.fullmatch(array):
            raise CheckpointError(
                f"the optimizer state {array!r} cannot be a file name. Save with save_optimizer=False"
            )
    return {
        "version": 1,
        "optimizer": type(optimizer.optimizer).__name__,
        "groups": [{key: scalar_to_json(key, value) for key, value in group.items()} for group in optimizer.groups],
        "parameters": {
            name: {
                "shape": state.shape,
                "states": list(state.arrays),
                "scalars": {
                    # A load takes the type of an option from the run's own option; for states it has no such example.
                    key: {"tuple": scalar_to_json(key, value)}
                    if isinstance(value, tuple)
                    else scalar_to_json(key, value)
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
