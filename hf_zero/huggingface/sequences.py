"""`sp_size` in a Trainer and in a prepared DataLoader: ranks of a group get the same samples, and the engine divides them.

Evaluation and prediction run on whole samples. In a Trainer, their loaders give each rank samples of its own, as without
`sp_size`. An Accelerator cannot distinguish its loaders: ranks of a group evaluate the same samples, which
`gather_for_metrics` returns once.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from accelerate.utils import gather_object, recursively_apply

from ..checkpoint.objects import random_states, set_random_states
from ..config import ZeroConfig
from ..core.patching import patched
from ..errors import ConfigError
from ..params.engine import Engine, engine_of
from ..sequence.parallel import SequenceParallel
from .patches import AcceleratorBase, TrainerBase


class SharedSamplesMixin(AcceleratorBase):
    """Makes an Accelerator's loaders give all ranks of a group the same samples."""

    zero_config: ZeroConfig
    _zero_sharing = False
    """While a loader is prepared: groups of ranks count as one process."""
    _zero_own_samples = False
    """While a Trainer prepares a loader for evaluation."""

    @property
    def num_processes(self) -> int:
        return super().num_processes // (self.zero_config.sp_size if self._zero_sharing else 1)

    @property
    def process_index(self) -> int:
        return super().process_index // (self.zero_config.sp_size if self._zero_sharing else 1)

    @property
    def _zero_shared_loaders(self) -> WeakSet[Any]:
        return self.__dict__.setdefault("_zero_shared", WeakSet())

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.zero_config.sp_size == 1 or self._zero_own_samples:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.dispatch_batches:
            raise ConfigError(
                f"dispatch_batches=True reads batches on rank 0 for all ranks, and sp_size={self.zero_config.sp_size} gives "
                "ranks of a group the same ones. Set it to False"
            )
        self._zero_sharing = True
        try:
            with patched([(self.dataloader_config, "dispatch_batches", False)]):
                prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
            if self.num_processes == 1 and not self.use_seedable_sampler and "generator" in self.rng_types:
                _share_sample_order(prepared)
        finally:
            self._zero_sharing = False
        self._zero_shared_loaders.add(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as accelerate does. A step takes a batch of each group, so a schedule advances by the number of groups."""
        prepared = super().prepare_scheduler(scheduler)
        if self.zero_config.sp_size > 1 and not prepared.split_batches:
            prepared.split_batches = True  # once for each call of the stock method
            prepared.step = partial(_step_by_groups, prepared, self.num_processes // self.zero_config.sp_size)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does: results of whole samples once per group, those of divided forwards from every rank."""
        parallels = [
            each.observer(SequenceParallel) for model in self._models if (each := engine_of(model)) is not None
        ]
        if self.gradient_state.active_dataloader not in self._zero_shared_loaders:
            return super().gather_for_metrics(input_data, use_gather_object)
        size = self.zero_config.sp_size
        if any(each.has_parts for each in parallels):
            # Keep all: dropping repeated samples, as accelerate does, would drop parts of samples.
            if not use_gather_object:
                with suppress(TypeError):  # not all are tensors
                    return self.gather(input_data)
            return gather_object(input_data)
        if use_gather_object:
            raise ConfigError(
                f"gather_for_metrics(use_gather_object=True) cannot tell which objects sp_size={size} ranks of a group have in "
                "common. Gather tensors"
            )
        stock = self.gather

        def gather(tensor: Any) -> Any:  # rows of the first rank of each group
            return recursively_apply(lambda each: torch.cat(each.chunk(self.num_processes)[::size]), stock(tensor))

        with patched([(self, "gather", gather)]):
            return super().gather_for_metrics(input_data)


def _share_sample_order(loader: Any) -> None:
    """Use rank 0's order of samples on all ranks. accelerate does so for several groups, but sees one as one process."""
    sampler = loader.get_sampler()
    if not hasattr(sampler, "generator"):
        return
    if sampler.generator is None:
        sampler.generator = torch.Generator("cpu")
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))
    kinds = [*dict.fromkeys([*(loader.rng_types or ()), "generator"])]
    vars(loader).update(rng_types=kinds, synchronized_generator=sampler.generator)


def _step_by_groups(stock: Any, groups: int, *args: Any, **kwargs: Any) -> None:
    """Step as accelerate's scheduler does, with a number of groups in place of ranks."""
    schedule, is_whole = stock.scheduler, stock.step_with_optimizer and stock.gradient_state.sync_gradients
    for _ in range(groups if is_whole else 1):
        if not is_whole or schedule._step_count <= getattr(schedule, "total_steps", math.inf):
            type(stock).step(stock, *args, **kwargs)


class SequenceParallelMixin(TrainerBase):
    """Makes a Trainer train on parts of samples and count whole ones."""

    model: Any

    @property
    def _zero_sp_size(self) -> int:
        size: int = self.accelerator.zero_config.sp_size
        return size

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator._zero_own_samples = not kwargs.get("is_training", False)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.accelerator._zero_own_samples = False

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare as the stock Trainer does; in training, return this rank's part of the group's batch."""
        inputs = super()._prepare_inputs(inputs)
        engine: Engine | None = engine_of(self.model)
        if engine is None or self._zero_sp_size == 1 or not (self.model.training and torch.is_grad_enabled()):
            return inputs
        if self.neftune_noise_alpha is not None:
            raise ConfigError(
                "neftune_noise_alpha adds noise by the length of a sample, and each rank sees a part of it under "
                f"sp_size={self._zero_sp_size}. Leave it out"
            )
        return engine.observer(SequenceParallel).local(inputs, needs_labels=True)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the stock Trainer does. Collators may draw, and ranks of a group must draw alike in training again."""
        states = random_states()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            if self._zero_sp_size > 1:
                set_random_states(states)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Load as the stock Trainer does; ranks of a group all load those of its first rank."""
        state = self.args.distributed_state
        first = self.args.process_index // self._zero_sp_size * self._zero_sp_size
        with patched([] if state is None else [(state, "process_index", first)]):
            super()._load_rng_state(checkpoint)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with `sp_size=1`: the stock Trainer would count labels as if ranks of a group had the same samples."""
        with patched([(self.accelerator.parallelism_config, "sp_size", 1)]):
            return super().prediction_step(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any) -> Any:
        """Compute the stock Trainer's values. It expects DeepSpeed's loader, which yields each batch once per rank."""
        total = self.get_total_train_batch_size(args)
        stock = super().set_initial_training_values
        with patched([(self, "get_sp_size", lambda: 1), (self, "get_total_train_batch_size", lambda args: total)]):
            return stock(args, dataloader, *others)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self._zero_sp_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Return this rank's share of a batch's operations."""
        return int(super().floating_point_ops(inputs)) // self._zero_sp_size
