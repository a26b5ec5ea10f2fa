"""Sequence parallelism of one engine: which forwards are divided, and what their losses weigh."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ZeroConfig
from ..engine.engine import Engine
from ..engine.graph import backward_id
from ..engine.observer import Observer
from ..errors import ConfigError, RankMismatchError, StateError
from .attention import SequenceAttention, check_model
from .exchange import SequenceGroup
from .parts import Mean, Part, divide, part_of, share_of


class SequenceParallel(Observer):
    """Divides forwards that train along the sequence, and leaves all others whole.

    A forward is divided if its arguments come from `local`; with `automatic` set, every forward that trains is.

    Attributes:
        automatic: divide what a prepared loader gives a forward in training.
        was_divided: whether the last forward was.
    """

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config
        self.size = config.sp_size
        self.automatic = self.was_divided = False
        self._configs: list[Any] = []
        self._handles: list[Any] = []
        self._depth = 0
        self._part: Part | None = None
        self._items: Any = None
        self._compared = self.size == 1

    def check(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        if self.size > 1:
            self._configs = check_model(model, self.size)

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._group = SequenceGroup(engine.wire, self.size)
        self._attention = SequenceAttention(self._group)
        self._attention.register(self._configs)
        if self.size > 1:
            self._hook()

    def detach(self) -> None:
        self._attention.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self) -> None:
        if self._handles:
            return
        model = self._engine.model
        inner = [each for each in model.modules() if hasattr(each, "main_input_name") and each is not model]
        for each in (model, *inner):
            # Prepended after the engine's: the engine sees divided arguments and the loss over all ranks.
            self._handles.append(each.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(each.register_forward_hook(self._after, prepend=True, always_call=True))

    def local(self, batch: Mapping[str, Any], num_items_in_batch: Tensor | float | None = None) -> dict[str, Any]:
        """See `Engine.local_sequence`."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"batch must be a mapping such as {{'input_ids': …, 'labels': …}}, found {type(batch).__name__}"
            )
        if part_of(batch) is not None:
            raise StateError("local_sequence got what local_sequence returned. Pass the group's whole batch, once")
        self._hook()
        named = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        if not self._compared or self._config.debug:
            self._compare(named)
        local, part = divide(
            named,
            self.size,
            self._group.index,
            shifts=self._shifts,
            default_positions=self._default_positions,
            packed_of=_packed_of,
        )
        wire = self._engine.wire
        if num_items_in_batch is not None:
            part.total = num_items_in_batch
        elif part.count is not None:
            # Clamped: a batch without labels on any rank has the loss 0, not NaN.
            part.total = wire.sum_scalar(part.count.to(getattr(wire, "device", part.count.device))).clamp(min=1)
        return local

    @property
    def _shifts(self) -> bool:
        """Whether the model's loss compares each token with the next label; transformers' default for an unnamed loss."""
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        model = self._engine.model
        kinds: list[Any] = [each.loss_type for each in model.modules() if hasattr(each, "loss_type")]
        return LOSS_MAPPING.get(kinds[0] if kinds else "", ForCausalLMLoss) is ForCausalLMLoss

    def _default_positions(self, input_ids: Tensor) -> Tensor | None:
        """Return positions that count from a model's own first one: those of RoBERTa and its relatives."""
        for module in self._engine.model.modules():
            create: Any = getattr(module, "create_position_ids_from_input_ids", None)
            if create is not None:
                found: Tensor = create(input_ids, module.padding_idx)
                return found
        return None

    def _compare(self, batch: Mapping[str, Any]) -> None:
        """Refuse a batch that the ranks of a group do not share. Bytes are compared, once: on a GPU that is a wait."""
        tensors = {name: each for name, each in batch.items() if isinstance(each, Tensor)}
        mine = {
            name: (
                tuple(each.shape),
                zlib.crc32(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()),
            )
            for name, each in tensors.items()
        }
        everyone = self._group.wire.exchange(mine)
        if any(each != everyone[0] for each in everyone):
            names = sorted(
                {
                    name
                    for each in everyone
                    for name in {**each, **everyone[0]}
                    if each.get(name) != everyone[0].get(name)
                }
            )
            raise RankMismatchError(
                f"the {self.size} ranks of a group divide one batch, and theirs differ in {', '.join(names)}. Give all "
                f"ranks of a group the same samples: rank r reads those of rank r - r % {self.size}"
            )
        self._compared = True

    # One forward ------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if backward_id() >= 0:  # a recomputation: its masks know their part
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self._part = self._items = None
        self.was_divided = False
        part = part_of(kwargs)
        if part is None:
            if not (self.size > 1 and module.training and torch.is_grad_enabled()):
                return None
            if not self.automatic or module is not self._engine.model or args:
                raise StateError(
                    f"a forward of {type(module).__name__} trains on whole sequences, with sp_size={self.size}. Call "
                    "model(**engine.local_sequence(batch)), or model(**batch) with the batch of a prepared loader, by name"
                )
            kwargs = dict(kwargs)
            self._items = kwargs.pop("num_items_in_batch", None)
            kwargs = self.local(kwargs, self._items)
            part = part_of(kwargs)
        else:
            kwargs = dict(kwargs)
            self._items = kwargs.pop("num_items_in_batch", None)
        if kwargs.get("output_router_logits") or kwargs.get("output_attentions"):
            raise ConfigError(
                f"output_router_logits and output_attentions are values of one rank's tokens or heads under "
                f"sp_size={self.size}. Leave them out"
            )
        self._part = self._attention.active = part
        self.was_divided = True
        self._attention.calls = 0
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if backward_id() >= 0 or self._depth == 0:
            return None
        self._depth -= 1
        if self._depth:
            return None
        part, self._part, self._attention.active = self._part, None, None
        if part is None or output is None:
            return None
        if self.size > 1 and not self._attention.calls:
            raise ConfigError(
                f"{type(module).__name__} did not call transformers' attention interface, which sp_size={self.size} divides: "
                "its tokens would not meet those of other ranks. Leave sp_size out"
            )
        return self._weighed(output, part)

    def _weighed(self, output: Any, part: Part) -> Any:
        """Replace the mean over this rank's tokens by the loss over all ranks."""
        loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
        if part.count is None or not isinstance(loss, Tensor) or loss.dim():
            return output
        wire = self._engine.wire
        if self._items is not None:
            # As the stock loss: the caller multiplies by the number of ranks, over which gradients are averaged.
            loss = share_of(loss, part, self._items, 1.0)
        elif part.total is not None:
            share = share_of(loss, part, part.total, float(wire.size))
            loss = Mean.apply(share, wire.sum_scalar(share.detach()) / wire.size)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output


def _packed_of(position_ids: Tensor) -> Tensor | None:
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(position_ids)
