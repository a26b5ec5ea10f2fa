"""Offload of activations: inputs of checkpointed blocks leave the device after forward and return before the block's backward.

Rasley et al., "ZeRO-Infinity" (arXiv 2104.07857), section 5.1.2. `torch.utils.checkpoint` saves a block's inputs as autograd
saves any tensor, so saved-tensor hooks around that call see only these inputs. The graph owns the objects that the hooks return
and frees them with itself, however it ends.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.inflight import DONE, Inflight
from ..config import ZeroConfig
from ..core.patching import Attributes, patched
from ..engine.context import Context
from ..engine.engine import Engine
from ..engine.graph import GONE, backward_id, calls_of, tensors_in
from ..engine.observer import Observer
from ..errors import ConfigError, StateError, ZeroError
from ..tiers.array import DiskArray, OnDisk
from ..tiers.storage import Storage
from ..tiers.tier import WRITTEN_INPUTS

_SAVING = (("CheckpointFunction", "apply"), ("_CheckpointFrame", "save_inputs"), ("_NoopSaveInputs", "apply"))
"""Functions of `torch.utils.checkpoint` that save a block's inputs: with `use_reentrant`, and without, by version."""
_autograd: Any = torch._C._autograd


class OffloadedTensor:
    """A tensor moved off the device. Autograd's graph owns it.

    Attributes:
        host: its elements in host memory; None once they are on disk.
        array: its elements on disk; None without that tier.
        leaving, writing: transfers to the host and to the disk.
        arriving: the destination and the transfer of a prefetch, until the graph takes the tensor.
        before: the previously packed tensor, which a backward needs next.
        of: the storage on the device, to recognise a tensor that several blocks share.
        is_stale: user code wrote to the tensor before it was copied.
        dropped: queue for memory and transfers when the graph frees this tensor.
    """

    __slots__ = ("__weakref__", "array", "arriving", "before", "dropped", "dtype", "host", "is_stale", "leaving", "numel",
                 "of", "shape", "stride", "writing")  # fmt: skip

    def __init__(self, tensor: Tensor, dropped: deque[ReleasedMemory], before: OffloadedTensor | None) -> None:
        self.shape, self.stride, self.dtype, self.numel = tensor.shape, tensor.stride(), tensor.dtype, tensor.numel()
        self.of, self.dropped = StorageWeakRef(tensor.untyped_storage()), dropped
        self.before: Callable[[], OffloadedTensor | None] = (lambda: None) if before is None else weakref.ref(before)
        self.host: Tensor | None = None
        self.array: DiskArray | None = None
        self.leaving = self.writing = DONE
        self.arriving: tuple[Tensor, Inflight] | None = None
        self.is_stale = False

    def __del__(self) -> None:
        # The garbage collector may run this while the disk's lock is held, so the observer releases the memory later.
        filled, transfer = self.arriving or (None, DONE)
        self.dropped.append((self.host, self.array, filled, (self.leaving, self.writing, transfer)))


ReleasedMemory = tuple[Tensor | None, DiskArray | None, Tensor | None, tuple[Inflight, ...]]
"""Host memory, disk space, a prefetch's destination, and the transfers that use them."""


class HostBuffers:
    """Reuses host memory of any size; holds at most the peak that was in use at once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._free: list[Tensor] = []
        self._used = self._highest = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        fitting = [each for each in self._free if nbytes <= each.numel() <= 2 * nbytes]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [each for each in self._free if each is not memory]
        else:
            while self._free and self._used + sum(map(Tensor.numel, self._free)) + nbytes > self._highest:
                self._free_one()
            memory = self._storage.link.empty(nbytes, torch.uint8)
            self._storage.ledger.host.add("activations", nbytes)
        self._used += memory.numel()
        self._highest = max(self._highest, self._used)
        return memory[:nbytes].view(dtype)

    def release(self, values: Tensor) -> None:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(values.untyped_storage())
        self._used -= memory.numel()
        self._free.append(memory)

    def close(self) -> None:
        while self._free:
            self._free_one()

    def _free_one(self) -> None:
        self._storage.ledger.host.add("activations", -self._free.pop(0).numel())


class ActivationOffload(Observer):
    """Moves inputs of checkpointed blocks to host memory or disk between forward and backward.

    On a GPU the host never waits: a copy to the host runs while its block computes, and the next block's kernels wait for
    it, so the device holds at most two inputs. At most `WRITTEN_INPUTS` are being written to disk.
    """

    def __init__(self, config: ZeroConfig) -> None:
        self._tier = config.offload_activations
        self._is_used = False
        """An input of a checkpointed block was offloaded."""
        self._depth = 0
        self._handles: list[Any] = []
        self._undo = contextlib.ExitStack()
        self._dropped: deque[ReleasedMemory] = deque()
        self._leaving: tuple[OffloadedTensor, Tensor, int] | None = None
        """The last offloaded tensor, its memory on the device, and its version."""
        self._writing: list[weakref.ref[OffloadedTensor]] = []
        self._shared: weakref.WeakValueDictionary[Any, OffloadedTensor] = weakref.WeakValueDictionary()
        self._last: Callable[[], OffloadedTensor | None] = lambda: None

    def attach(self, engine: Engine) -> None:
        context = engine.context
        self._context: Callable[[], Context | None] = weakref.ref(context)  # graphs hold this observer
        self._storage, self._device = context.storage, context.device
        self._buffers = HostBuffers(context.storage)
        model = engine.model
        inner = [each for each in model.modules() if hasattr(each, "main_input_name") and each is not model]
        self._hooked = [weakref.ref(each) for each in (model, *inner)]
        for each in (model, *inner):
            self._handles.append(each.register_forward_pre_hook(self._before, prepend=True))
            self._handles.append(each.register_forward_hook(self._after, prepend=True, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._undo.close()
        self._wait_for_last_copy()
        self._reclaim(waits=True)
        self._buffers.close()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        if backward_id() >= 0:  # a recomputation saves tensors that are needed at once
            return
        if self._depth:  # nested, or Ctrl-C ended the outer one
            self._depth = min(self._depth, calls_of([each() for each in self._hooked]) - 1)
        self._depth += 1
        if self._depth == 1:
            self._undo.close()
            self._undo.enter_context(_around_saving(self._hooks))

    def _root(self) -> nn.Module | None:
        context = self._context()
        return None if context is None else context.model

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if backward_id() >= 0 or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        self._undo.close()
        self._wait_for_last_copy()
        for reference in self._writing:  # raise a disk's failure in this forward
            if (kept := reference()) is not None:
                self._wait_for_disk(kept)
        self._reclaim()
        if self._is_used or output is None or not (module.training and module is self._root()):
            return
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(output)):
            raise ConfigError(
                f"offload_activations={self._tier!r} moves the inputs of checkpointed blocks, and this forward of "
                f"{type(module).__name__} checkpointed none. Set gradient_checkpointing=True in the TrainingArguments, call "
                "model.gradient_checkpointing_enable(), or leave offload_activations out"
            )

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        if not _autograd._saved_tensors_hooks_is_enabled() or not torch.is_grad_enabled():
            yield
            return
        outer = _autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            yield  # nested in a checkpointed block, which recomputes this one
            return
        with saved_tensors_hooks(partial(self._pack, outer), self._unpack):
            yield

    def _pack(self, outer: Any, tensor: Tensor) -> Any:
        """Start to offload an activation. Masks, positions and parameters go to the outer hooks."""
        if not (tensor.requires_grad and tensor.is_floating_point() and tensor.device == self._device) or (
            isinstance(tensor, nn.Parameter)
            or tensor.layout is not torch.strided
            or torch.empty_like(tensor, device="meta").stride() != tensor.stride()
        ):
            return tensor if outer is None else (outer[1], outer[0](tensor))
        self._is_used = True
        where = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version
        kept = self._shared.get(where)
        if kept is not None and not kept.of.expired():
            return kept
        try:
            return self._offload(tensor, where)
        except ZeroError as error:  # the tensor stays on the device; all ranks raise at the end of the forward
            self._note(error)
            return tensor if outer is None else (outer[1], outer[0](tensor))

    def _offload(self, tensor: Tensor, where: Any) -> OffloadedTensor:
        self._wait_for_last_copy()
        self._reclaim()
        kept = OffloadedTensor(tensor, self._dropped, self._last())
        if self._tier == "disk":
            kept.array = DiskArray(self._storage.disk, kept.numel, kept.dtype)
        kept.host = self._buffers.take(kept.numel, kept.dtype)
        flat = tensor.detach().as_strided((kept.numel,), (1,))
        kept.leaving = self._storage.link.copy_to_host(flat, kept.host)
        self._leaving = kept, flat, tensor._version
        self._shared[where] = kept
        self._last = weakref.ref(kept)
        return kept

    def _wait_for_last_copy(self) -> None:
        """Make the device wait for the last copy to the host, so that its source may be freed or written."""
        if self._leaving is None:
            return
        (kept, flat, version), self._leaving = self._leaving, None
        self._storage.link.wait_for_copies_to_host()
        kept.is_stale = flat._version != version
        if kept.array is not None:
            self._writing.append(weakref.ref(kept))
        for reference in self._writing:
            if (one := reference()) is not None and one.leaving.ready:
                self._write(one)
        while len(self._writing) > WRITTEN_INPUTS:
            if (one := self._writing.pop(0)()) is not None and self._wait_for_disk(one) and one.host is not None:
                self._buffers.release(one.host)
                one.host = None

    def _write(self, kept: OffloadedTensor) -> None:
        if kept.writing is DONE and kept.array is not None and kept.host is not None:
            kept.leaving.close()
            kept.writing = OnDisk(kept.array).begin_write(kept.host)

    def _wait_for_disk(self, kept: OffloadedTensor) -> bool:
        """Wait for the write of `kept` and return True. On failure it stays in host memory."""
        self._write(kept)
        array = kept.array
        if array is None:
            return False
        try:
            kept.writing.close()
        except ZeroError as error:
            kept.array = None
            array.close()
            self._note(error)
            return False
        return True

    # Backward ---------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        last = self._last()
        if last is not None and last.arriving is None:
            self._prefetch(last)

    def after_backward(self) -> None:
        self._reclaim()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            unpack, inner = packed
            return unpack(inner)
        if not isinstance(packed, OffloadedTensor):
            return packed
        self._wait_for_last_copy()
        if packed.is_stale:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the input "
                f"{list(packed.shape)} of a checkpointed block, after the block was called"
            )
        if packed.arriving is None:
            self._prefetch(packed)
        before = packed.before()
        if before is not None and before.arriving is None:
            self._prefetch(before)
        (values, transfer), packed.arriving = packed.arriving or (None, DONE), None
        if values is None:
            raise StateError(GONE)
        try:
            transfer.wait()
        except ZeroError as error:  # all ranks raise it at the end of this backward
            values.zero_()
            self._note(error)
        if values.device != self._device:
            arrived = torch.empty(packed.numel, dtype=packed.dtype, device=self._device)
            transfer = self._storage.link.copy_to_device(values, arrived)
            transfer.wait()
            self._dropped.append((values, None, None, (transfer,)))
            values = arrived
        self._reclaim()
        return values.as_strided(packed.shape, packed.stride)

    def _prefetch(self, kept: OffloadedTensor) -> None:
        link = self._storage.link
        if kept.host is not None:
            target = torch.empty(kept.numel, dtype=kept.dtype, device=self._device)
            kept.arriving = target, link.copy_to_device(kept.host, target)
        elif kept.array is not None:
            # Full pages, which the disk reads into directly; a GPU gets them from host memory afterwards.
            own = link.shares_memory
            target = link.empty(kept.numel, kept.dtype) if own else self._buffers.take(kept.numel, kept.dtype)
            kept.arriving = target, OnDisk(kept.array).begin_read(target)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _reclaim(self, *, waits: bool = False) -> None:
        """Reuse the memory of freed tensors once no transfer uses it."""
        for _ in range(len(self._dropped)):
            host, array, filled, transfers = found = self._dropped.popleft()
            if not waits and not all(each.ready for each in transfers):
                self._dropped.append(found)
                continue
            for each in transfers:
                with contextlib.suppress(ZeroError):
                    each.close()
            if array is not None:
                array.close()
            for memory in (host, filled if not self._storage.link.shares_memory else None):
                if memory is not None and memory.device.type == "cpu":
                    self._buffers.release(memory)

    def _note(self, error: ZeroError) -> None:
        context = self._context()
        if context is None:
            raise error
        context.record_failure(error)


def _around_saving(around: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Patch `torch.utils.checkpoint` to save the inputs of blocks inside `around()`."""
    module: Any = sys.modules["torch.utils.checkpoint"]
    found: Attributes = []
    for name, method in _SAVING:
        cls = getattr(module, name, None)
        if (stock := getattr(cls, method, None)) is not None:
            made: Any = _within(around, stock)
            found.append((cls, method, made if method == "save_inputs" else staticmethod(made)))
    return patched(found)


def _within(around: Callable[[], Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def saving(*args: Any, **kwargs: Any) -> Any:
        with around():
            return stock(*args, **kwargs)

    return saving


def observers(config: ZeroConfig) -> Sequence[Observer]:
    """Return the observer of one engine if it offloads activations."""
    return [] if config.offload_activations == "none" else [ActivationOffload(config)]
