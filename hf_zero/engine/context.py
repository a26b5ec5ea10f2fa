"""The settings, transports and units that all parts of one engine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm.agreement import on_all_ranks
from ..comm.wire import Wire
from ..config import StagePolicy, ZeroConfig
from ..core.layout import Layout
from ..core.precision import Precision
from ..errors import RankMismatchError, StateError, TierError, ZeroError
from ..plan.machine import free_device_bytes, free_host_bytes
from ..plan.plan import Plan
from ..tiers.storage import Storage
from ..tiers.tier import Tier
from .observer import Events

if TYPE_CHECKING:
    from .unit import Unit


@dataclass
class Context:
    """One sharded model: its settings, transports, layout and units.

    Attributes:
        names: all names of each parameter, the first one first.
        device: where the model computes.
        layout: of all units; integers only.
        plan: the tier of each span's parts, and the costs.
        units: in registration order.
        kept: indices of units that stay gathered from a forward to its backward. The same on every rank.
        requires_grad_digest: an integer that is equal on ranks whose parameters have equal `requires_grad` flags.
        failure: the step or load that was interrupted, if any. See `check`.
        mixes_states: the failure also left optimizer states of two steps.
        hides_host_gradients: an optimizer's own step runs, and must not see gradients of masters in host memory.
        states_offloaded: `offload_states` has moved the model's states to host memory.
        has_updated: with `step_in_backward`, units were updated since the last step.
        step_wait_s: the seconds that training has waited for updates by the other thread.
        is_unsharded: inside `Engine.unsharded`.
        keeps_buffers: inside `own_buffers`.
    """

    model: nn.Module
    config: ZeroConfig
    policy: StagePolicy
    precision: Precision
    wire: Wire
    storage: Storage
    device: torch.device
    names: dict[nn.Parameter, list[str]]
    events: Events
    layout: Layout
    plan: Plan
    units: list[Unit] = field(default_factory=list)
    kept: frozenset[int] = frozenset()
    requires_grad_digest: int = 0
    failure: str | None = None
    mixes_states: bool = False
    hides_host_gradients: bool = False
    states_offloaded: bool = False
    has_updated: bool = False
    step_wait_s: float = 0.0
    is_unsharded: bool = False
    keeps_buffers: bool = False
    _noted: ZeroError | None = None
    _severity: int = 0

    @property
    def shard_rank(self) -> int:
        """Return the number of the slice that this rank owns of every span."""
        return (self.wire.shard_group or self.wire).rank if self.layout.shards > 1 else 0

    def __post_init__(self) -> None:
        self.reshards = not self.policy.keep_full
        """Full parameters are released between their uses."""

    def check(self) -> None:
        """Check that all values are of one step and in place.

        Raises:
            StateError: a step or a load was interrupted, so that old and new values are mixed; or states are offloaded.
        """
        if self.states_offloaded:
            raise StateError("the model's states are in host memory. Call engine.reload_states() first")
        if self.failure is not None:
            raise StateError(
                f"{self.failure}: some values are old, and some are new. Load a checkpoint (engine.load), or stop"
            )

    def fail_step(self, why: str) -> None:
        """Refuse the model from now on: a step was interrupted."""
        self.failure, self.mixes_states = f"an optimizer's step stopped half-way ({why})", True

    def fail_load(self, why: str, *, of_states: bool) -> None:
        """Refuse the model until a load completes: this one was interrupted in weights, or in an optimizer's states."""
        self.failure = f"a load stopped half-way ({why})"
        self.mixes_states = self.mixes_states or of_states

    def forget_failure(self) -> None:
        """Forget failures: all values were loaded again."""
        self.failure, self.mixes_states, self._noted, self._severity = None, False, None, 0
        self.has_updated = False

    @contextmanager
    def own_buffers(self) -> Iterator[None]:
        """Let every rank keep its own buffers inside."""
        before, self.keeps_buffers = self.keeps_buffers, True
        try:
            yield
        finally:
            self.keeps_buffers = before

    def refuse_unsharded(self, what: str) -> None:
        """
        Raises:
            StateError: inside `Engine.unsharded`: the full parameters there would be old after `what`.
        """
        if self.is_unsharded:
            raise StateError(
                f"{what} was called inside zero.unsharded: the weights that it shows would be old. End the context first"
            )

    def free_bytes(self) -> int:
        """Return the device memory that this rank may still take: of the budget, if there is one. A collective."""
        budget, now = self.config.device_memory, self.storage.ledger.device.now
        if budget is not None:
            temporary = sum(nbytes for kind, nbytes in now.items() if kind != "gradients")  # the plan stores these
            return int(budget) - self.plan.memory.stored_bytes(Tier.DEVICE) - temporary
        if self.device.type == "cuda":
            return free_device_bytes(self.device)
        return free_host_bytes(self.wire.local_world_size())

    def raise_mismatch(self, *, sends: bool) -> None:
        """Raise the difference between ranks in `requires_grad` or in whether this backward reduces. A collective.

        Args:
            sends: this rank's backward reduces gradients.

        Raises:
            RankMismatchError: names the difference.
        """
        flags = {names[0]: param.requires_grad for param, names in self.names.items()}
        each = self.wire.exchange((sends, flags))
        step, waiting = self.wire.watch.step, [rank for rank, (theirs, _) in enumerate(each) if not theirs]
        if 0 < len(waiting) < len(each):
            raise RankMismatchError(
                f"ranks disagree in no_sync: this backward of step {step} leaves its gradients on rank(s) "
                f"{', '.join(map(str, waiting))}, inside no_sync(defer=True), and sends them on the others. Use no_sync, with "
                "the same `defer`, for the same micro-batches on every rank"
            )
        name = next((name for name in flags if len({theirs[name] for _, theirs in each}) > 1), None)
        found = ", ".join(f"{theirs[name]} on rank {rank}" for rank, (_, theirs) in enumerate(each) if name)
        raise RankMismatchError(
            f"ranks differ in step {step}: requires_grad of parameter {name!r} is not the same everywhere ({found}). "
            "Freeze and unfreeze parameters on every rank alike"
        )

    # Offload ----------------------------------------------------------------------------------------------------------

    @property
    def severity(self) -> int:
        """Return the severity of the recorded failure. 0: none. 1: a transfer failed. 2: a step was interrupted."""
        return self._severity

    def record_failure(self, error: BaseException, *, half_done: bool = False) -> None:
        """Record an error of this rank. With a disk, all ranks raise it at the end of the pass; without one, it is raised here.

        Raises:
            BaseException: `error`, where no rank uses a disk: the same error then occurs on all ranks.
        """
        if not self.storage.uses_disk:
            if half_done:
                if self.failure is not None:
                    self.check()  # the first failure is the reason of the later ones
                self.fail_step(f"{type(error).__name__}: {error}")
            raise error
        known = error if isinstance(error, ZeroError) else TierError(f"{type(error).__name__}: {error}")
        self._noted = self._noted or known
        self._severity = max(self._severity, 1 + half_done)

    def raise_failures(self, what: str, agreed: int | None = None) -> None:
        """Raise on every rank a failure that any rank recorded. A collective where a rank uses a disk.

        Args:
            agreed: the highest severity of all ranks, where they have agreed on it already.

        Raises:
            TierError: a rank could not read or write.
        """
        if not self.storage.uses_disk:
            return
        if agreed is None:
            agreed = self.wire.start_maximum([self._severity], at_end=True)()[0]
        if not agreed:
            return
        error, self._noted, self._severity = self._noted, None, 0
        try:
            with on_all_ranks(self.wire, what, kind=TierError):
                if error is not None:
                    raise TierError(str(error)) from error
        except ZeroError as raised:
            if agreed > 1:
                self.fail_step(str(raised))
            raise
