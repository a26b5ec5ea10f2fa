"""`zero.Engine`: the core engine plus the features of its observers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from ..compat.compiling import Compile, Compiling
from ..compat.evaluation import OtherDtype
from ..core.layout import Layout
from ..diagnostics.recorder import Recorder, RecorderObserver
from ..engine import engine as core
from ..engine.graph import backward_id
from ..errors import ConfigError, StateError
from ..plan.plan import Plan
from ..plan.report import Report
from ..sequence.parallel import SequenceParallel
from . import loss_weights
from .offload_states import StateOffload
from .unsharded import PinnedUnits, same_on_all_ranks

_DEEPSPEED_NAMES = {
    "backward": "write loss.backward()",
    "step": "write optimizer.step() and optimizer.zero_grad()",
    "save_checkpoint": "write engine.save(folder)",
    "load_checkpoint": "write engine.load(folder)",
    "save_16bit_model": "write engine.save(folder, save_optimizer=False)",
    "get_global_grad_norm": "engine.clip_grad_norm_(max_norm) returns the norm",
    "set_gradient_accumulation_boundary": "use engine.no_sync() around all micro-batches but the last",
    "is_gradient_accumulation_boundary": "use engine.no_sync() around all micro-batches but the last",
    "module": "write engine.model, which is the model that zero.shard received",
    **{name: f"write model.{name}()" for name in ("train", "eval", "parameters", "named_parameters", "state_dict")},
}
"""Names that DeepSpeed's engines have, and what to write instead."""


class Engine(core.Engine):
    """Trains one sharded model. Returned by `zero.shard`; see there."""

    _state_offload: StateOffload | None = None

    if not TYPE_CHECKING:  # mypy would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            advice = f": {_DEEPSPEED_NAMES[name]} (hf_zero's docs/migration.md)" if name in _DEEPSPEED_NAMES else ""
            raise AttributeError(f"'Engine' object has no attribute '{name}'{advice}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("an Engine cannot be called. Write model(...), with the model that zero.shard received")

    def report(self) -> Report:
        """Return this rank's memory by tier, in bytes: predicted, and measured now.

        While `record` measures, the report also has peaks, traffic and waits.
        """
        return self._records.report()

    def record(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        first_step: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> Recorder:
        """Measure every step until `Recorder.close`. `report` then has peaks, traffic and waits.

        Args:
            folder: where every step is appended to `zero_steps.jsonl` (other ranks: `zero_steps.rank1.jsonl`, …), for
                `hf-zero report`. None: no file.
            first_step: steps before this one, for a run that continues another.
            about: further facts about the run, as JSON values: `hf-zero report` shows `model` and `max_steps`.

        Raises:
            ConfigError: the folder cannot be written.
        """
        return self._records.record(folder, first_step, about)

    @property
    def recorder(self) -> Recorder | None:
        """Return the recorder of the last `record`, until it is closed."""
        return self._records.recorder

    def compile(self, *, using: Compile | None = None, **options: Any) -> None:
        """Compile the model block by block, as `model.compile(...)` does: gathers and releases stay outside the graphs.

        A block that cannot be compiled runs as it is, which is logged once. No communication.

        Args:
            using: compiles a function, instead of `torch.compile` with these options.
        """
        self.observer(Compiling).compile(using or partial(torch.compile, **options))

    @property
    def is_compiled(self) -> bool:
        """Return whether blocks of the model are compiled."""
        return bool(self.observer(Compiling).compiled)

    def local_sequence(
        self, batch: Mapping[str, Any], num_items_in_batch: Tensor | float | None = None
    ) -> dict[str, Any]:
        """Return this rank's part of a batch that the `sp_size` ranks of its group share. A collective.

        `model(**local).loss` is the mean over the tokens of all ranks, the same on every rank. Its backward computes the
        gradients of one process with the whole sequences. Also works with `sp_size=1`.

        Args:
            batch: the whole batch of the group, the same on its ranks: `input_ids` or `inputs_embeds` (rows x tokens), and
                `labels`, `attention_mask` (padding), `position_ids` and other tensors with these first two dimensions.
            num_items_in_batch: tokens with a loss in all batches of the step, on all ranks and each group's once, where a step
                has several backwards. None: the loss is the mean over this batch.

        Returns:
            Arguments of the model's forward: parts of the tensors, filled up to equal length, with `position_ids`,
            `attention_mask`, `num_items_in_batch` and, for language models, `shift_labels`.

        Raises:
            ConfigError: tensors that cannot be divided along the sequence.
            RankMismatchError: on the first call: ranks of a group have other batches.

        Example:
            >>> engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, sp_size=8))
            >>> model(**engine.local_sequence(batch)).loss.backward()
        """
        return self.observer(SequenceParallel).local(batch, num_items_in_batch)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "an Engine cannot be copied or pickled: it holds what this process shares with the other ranks. Copy the model "
            "instead (copy.deepcopy(model) on every rank gives a plain one), save with engine.save(folder) or "
            "torch.save(model.state_dict())"
        )

    def total_weight(self, weight: float | Tensor) -> float:
        """Return the sum of all ranks' `weight`, for `weigh`. Ranks without samples give 0. A collective.

        Raises:
            ConfigError: on every rank: a rank's weight is not a finite number of at least 0, or all are 0.
        """
        with self.wire.watch.operation("total_weight()"):
            return loss_weights.sum_over_ranks(self.wire, weight)

    def weigh(self, loss: Tensor, weight: float | Tensor, total: float | None = None) -> Tensor:
        """Scale `loss` so that a step's gradient is the weighted mean over the samples of all ranks, as in one process.

        Every rank must run the same number of forwards and backwards. A rank without samples runs any batch with weight 0.

        Args:
            loss: the (weighted) mean over this rank's samples, 0-dim.
            weight: the total weight of these samples: their number, their tokens, or the sum of their weights.
            total: `total_weight` of this rank's samples of the whole step, if a step has several backwards. None: this is the
                step's only backward, and the call is a collective.

        Raises:
            ConfigError: see `total_weight`; a loss that is not one number; a weight above `total`; `sp_size`.

        Example:
            >>> engine.weigh(model(**batch).loss, weight=len(batch["input_ids"])).backward()
        """
        if self.config.sp_size > 1:
            raise ConfigError(
                f"weigh() scales a mean over one rank's samples, and with sp_size={self.config.sp_size} the model's loss is "
                "the mean over the tokens of all ranks. Leave it out, or pass num_items_in_batch to local_sequence"
            )
        problem = loss_weights.loss_problem(loss)
        if total is None:
            with self.wire.watch.operation("weigh()"):
                total = loss_weights.sum_over_ranks(self.wire, weight, problem)
        elif problem is not None:
            raise ConfigError(problem)
        return loss_weights.scale_loss(loss, weight, total, self.world_size)

    def own_buffers(self) -> AbstractContextManager[None]:
        """Let every rank use its own buffers inside, as forwards of the module that DDP wraps do."""
        return self.context.own_buffers()

    @contextmanager
    def unsharded(self, *, in_compute_dtype: bool = False) -> Iterator[None]:
        """Keep all full parameters gathered inside, on every rank. A collective. See `zero.unsharded`.

        Raises:
            StateError: inside a backward.
        """
        context = self.context
        if context.is_unsharded:  # the outer context decides
            yield
            return
        if backward_id() >= 0:
            raise StateError("zero.unsharded cannot begin in a backward. Begin it before the forward")
        self.schedule.quiesce()
        self.wait_for_host_steps()
        self.follow_writes()  # no rank sends writes inside
        for event in self.events.before_unsharded:
            event()
        pinned = PinnedUnits(context, self.units, "zero.unsharded", exact=not in_compute_dtype)
        context.is_unsharded, self.pinned = True, pinned
        try:
            yield
            self.follow_writes()
            same_on_all_ranks(context)
        finally:
            context.is_unsharded, self.pinned = False, None
            pinned.end(pinned.written())

    def offload_states(self) -> None:
        """Move everything stored on the device to host memory, until `reload_states`. Call it on every rank.

        This frees device memory for other programs. Forwards, steps and saves raise until then.

        Raises:
            StateError: states are in host memory already.

        Example:
            >>> engine.offload_states()
            >>> generate_with_another_engine()
            >>> engine.reload_states()
        """
        self.context.refuse_unsharded("offload_states")
        with self.wire.watch.operation("Engine.offload_states"):
            if self._state_offload is not None:
                raise StateError("offload_states: states are in host memory already. Call reload_states() first")
            self.schedule.flush()
            self.quiesce()
            self._state_offload = StateOffload(self.context, self.bindings)
            self._state_offload.offload()

    def reload_states(self) -> None:
        """Move everything back, the same to the bit. A collective where the stage keeps full parameters.

        Raises:
            StateError: no states are offloaded.
        """
        with self.wire.watch.operation("Engine.reload_states"):
            if self._state_offload is None:
                raise StateError("reload_states: no states are in host memory. Call offload_states() first")
            self._state_offload.reload()
            self._state_offload = None

    @property
    def plan(self) -> Plan:
        """Return the plan from before step 0: what is stored where, and its cost."""
        return self.context.plan

    @property
    def layout(self) -> Layout:
        """Return which rank owns which elements; integers only."""
        return self.context.layout

    def shown_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Run forwards inside as after `model.to(dtype)`, without a graph; masters do not change. Call it on every rank.

        At stages 0 to 2 this takes a second copy of all parameters in this dtype, at stage 3 one of a unit at a time.
        """
        return self.observer(OtherDtype).shown_in(dtype)

    @property
    def _records(self) -> RecorderObserver:
        return self.observer(RecorderObserver)


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, also through wrappers that hold it as a submodule; None for any other module."""
    return cast("Engine | None", core.engine_of(model))
