"""Sequence parallelism of one engine: divide forwards along the sequence and weight their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config import ZeroConfig
from ..core.patching import Attributes, patched
from ..engine.engine import Engine
from ..engine.graph import backward_id, calls_of
from ..engine.observer import Observer
from ..errors import ConfigError, RankMismatchError, StateError, ZeroError
from ..tiers.fingerprint import fingerprint
from .all_to_all import SequenceGroup
from .attention import SequenceAttention, check_model
from .parts import IGNORED, Part, divide, part_of, share_of

PROBED_TOKENS = 4
"""Tokens per rank in the check of the first forward, if rows have so many."""


class SequenceParallel(Observer):
    """Divides training forwards along the sequence. All others run on whole sequences.

    A forward is divided if its arguments come from `local`, or, with `automatic`, if it trains.

    Attributes:
        automatic: divide the batches of a prepared loader in training.
        was_divided: whether the last forward was divided.
    """

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config
        self.size = config.sp_size
        self.automatic = self.was_divided = self._mode = False
        self._configs: list[Any] = []
        self._handles: list[Any] = []
        self._depth = 0
        self._part: Part | None = None
        self._items: Any = None
        self._head: dict[str, Any] | None = None
        """A few tokens of a batch, until a forward has used them for the check."""
        self._compared = self.size == 1

    def check(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        if self.size > 1:
            self._configs = check_model(model, self.size)

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._group = SequenceGroup(engine.wire, self.size)
        self._attention = SequenceAttention(self._group)
        self._attention.register(self._configs, engine.model)
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
        self._hooked = (model, *inner)
        for each in self._hooked:
            # Prepended after the engine's hooks, so they see divided arguments and the loss over all ranks.
            self._handles.append(each.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
            self._handles.append(each.register_forward_hook(self._after, prepend=True, always_call=True))

        for each in model.modules():
            kinds = getattr(each, "rope_type", None)
            if any(
                "dynamic" in kind or kind == "longrope"
                for kind in (kinds.values() if isinstance(kinds, dict) else [kinds or ""])
            ):
                self._handles.append(each.register_forward_pre_hook(self._with_last_position, with_kwargs=True))
                self._handles.append(each.register_forward_hook(self._without_last_position))

    def _with_last_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Show the highest position of the whole rows to rotary embeddings whose frequencies depend on it."""
        if backward_id() >= 0 and self.was_divided:
            raise ConfigError(
                f"{type(module).__name__} changes its frequencies with the length, within a checkpointed block: under "
                f"sp_size={self.size} it would not find the length again. Leave gradient checkpointing or sp_size out"
            )
        if self._part is None:
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = self._part.position_ids.max().to(positions).expand(*positions.shape[:-1], 1)
        positions = torch.cat([positions, last], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def _without_last_position(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._part is None:
            return None
        return tuple(each[..., :-1, :] for each in output) if isinstance(output, tuple) else output[..., :-1, :]

    def local(
        self, batch: Mapping[str, Any], num_items_in_batch: Tensor | float | None = None, *, needs_labels: bool = False
    ) -> dict[str, Any]:
        """See `Engine.local_sequence`, and `Part.needs_labels`."""
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"batch must be a mapping such as {{'input_ids': …, 'labels': …}}, found {type(batch).__name__}"
            )
        if part_of(batch) is not None:
            raise StateError("local_sequence got what local_sequence returned. Pass the group's whole batch, once")
        self._hook()
        named = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        local, part = divide(
            named,
            self.size,
            self._group.index,
            shifts=self._shifts,
            default_positions=self._default_positions,
            packed_of=_packed_of,
        )
        part.needs_labels = needs_labels
        if not self._compared:
            self._compare(named, _window(named, self.size))
        elif self._config.debug and self.size > 1:
            self._compare(named, None)
        wire = self._engine.wire
        if num_items_in_batch is None:
            num_items_in_batch = batch.get("num_items_in_batch")
        if num_items_in_batch is not None:
            part.total = num_items_in_batch
        elif part.count is not None:
            # Clamped: a batch without labels on any rank has the loss 0, not NaN.
            part.total = wire.sum_scalar(part.count.to(wire.device or part.count.device)).clamp(min=1)
        if part.total is not None:
            local["num_items_in_batch"] = part.total
        return local

    @property
    def has_parts(self) -> bool:
        """Return whether outputs are parts of samples: the last forward was divided, and the mode has not changed since."""
        return self.was_divided and self._engine.model.training is self._mode

    @property
    def _shifts(self) -> bool:
        """Return whether the model's loss compares each token with the next label, transformers' default."""
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

        model = self._engine.model
        kinds: list[Any] = [each.loss_type for each in model.modules() if hasattr(each, "loss_type")]
        return LOSS_MAPPING.get(kinds[0] if kinds else "", ForCausalLMLoss) is ForCausalLMLoss

    def _default_positions(self, input_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Return positions of models that count them differently: RoBERTa and its relatives, and OPT without padding."""
        for module in self._engine.model.modules():
            create: Any = getattr(module, "create_position_ids_from_input_ids", None)
            if create is not None and input_ids is not None:
                found: Tensor = create(input_ids, module.padding_idx)
                return found
            if type(module).__name__ == "OPTDecoder" and mask is not None:
                return (mask.cumsum(1) * mask - 1).long()
        return None

    def _compare(self, batch: Mapping[str, Any], head: dict[str, Any] | None) -> None:
        """Refuse a batch that differs within a group. Comparing bytes waits for a GPU, so `_compared` ends it.

        Args:
            head: tokens for the check of the next forward, if each rank of all groups has one.
        """
        mine = {
            name: (tuple(each.shape), *fingerprint(each).tolist())
            for name, each in batch.items()
            if isinstance(each, Tensor)
        }
        answers = self._engine.wire.exchange((mine, head is not None))
        first = self._engine.rank - self._group.index
        others = [theirs.items() ^ mine.items() for theirs, _ in answers[first : first + self.size]]
        if different := sorted({name for each in others for name, _ in each}):
            raise RankMismatchError(
                f"the {self.size} ranks of a group divide one batch, and theirs differ in {', '.join(different)}. Give all "
                f"ranks of a group the same samples: rank r reads those of rank r - r % {self.size}"
            )
        if all(has_head for _, has_head in answers):
            self._head, self._compared = head, True

    # One forward ------------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if backward_id() >= 0:  # a recomputation: its masks have their part
            return None
        if self._depth:  # nested, or Ctrl-C ended the outer one
            self._depth = min(self._depth, calls_of(self._hooked) - 1)
        if self._depth:
            self._depth += 1
            return None
        self._part = self._attention.active = None
        part = part_of(kwargs)
        kwargs = dict(kwargs)
        items = kwargs.pop("num_items_in_batch", None)
        if part is None:
            if not (self.size > 1 and module.training and torch.is_grad_enabled()):
                self._depth, self.was_divided = 1, False
                return None  # arguments as they are
            if not self.automatic or module is not self._engine.model or args:
                raise StateError(
                    f"a forward of {type(module).__name__} trains on whole sequences, with sp_size={self.size}. Call "
                    "model(**engine.local_sequence(batch)), with a batch on the device, or model(**batch) with the keywords "
                    "of a prepared loader's batch"
                )
            kwargs = self.local(kwargs, items, needs_labels=True)
            kwargs.pop("num_items_in_batch", None)
            part = part_of(kwargs)
        elif items is part.total:  # from `local`, not from the caller
            items = None
        asked = {"position_ids", *(() if kwargs.get("labels") is None else ("shift_labels",))}
        if part is not None and (lost := sorted((asked & part.names) - kwargs.keys())):
            raise ConfigError(
                f"a forward without {' and '.join(lost)} of local_sequence: the model would count positions from this rank's "
                "first token, or shift labels twice. Call model(**engine.local_sequence(batch))"
            )
        if part is not None and part.needs_labels and kwargs.get("labels") is None:
            raise ConfigError(
                "a forward without labels: a loss that is computed outside of the model counts the tokens of one rank, and "
                f"sp_size={self.size} divides each sample among several. Let the model compute it from labels, or leave "
                "sp_size out"
            )
        if kwargs.get("output_router_logits") or kwargs.get("output_attentions"):
            raise ConfigError(
                f"output_router_logits and output_attentions are values of one rank's tokens or heads under "
                f"sp_size={self.size}. Leave them out"
            )
        if self._head is not None and module is self._engine.model:
            self._probe()
        self._part = self._attention.active = part
        self._depth, self._items, self.was_divided = 1, items, True
        self._mode = self._engine.model.training
        self._attention.calls = 0
        return args, kwargs

    @torch.no_grad()
    def _probe(self) -> None:
        """Refuse a model whose divided forward differs from an undivided one, on a few tokens before the first step.

        It finds what the configuration does not show: tokens mixed outside of attention, unusual positions, and losses that
        are not a mean over tokens. A collective.

        Raises:
            ConfigError: on every rank.
        """
        head: dict[str, Any] = self._head or {}
        self._head = None
        model, index = self._engine.model, self._group.index
        shown: Attributes = [(module, "training", False) for module in model.modules()]
        # With a cache, transformers does not detect packed rows.
        shown += [(config, "use_cache", False) for config in self._configs if getattr(config, "use_cache", False)]
        with patched(shown):
            whole = model(**head)
            try:
                mine = model(**self.local(head))
            except (ZeroError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # from the model's code, which expects whole sequences
                raise ConfigError(
                    f"a forward of {type(model).__name__} on a part of a sequence raises {type(error).__name__}: {error}. The "
                    "whole sequence works: leave sp_size out"
                ) from error
        worst = torch.zeros(1, device=getattr(self._engine.wire, "device", None))
        parts = _values(mine, "labels" in head)
        for name, wanted in _values(whole, "labels" in head).items():
            found = parts.get(name, worst)
            if name == "loss":  # the mean over the labels of all groups
                labels = head["labels"][:, 1:] if self._shifts else head["labels"]
                labelled = (labels >= 0).sum()
                both = torch.stack([labelled.to(wanted), wanted * labelled]).to(worst.device)
                count, total = self._engine.wire.sum_scalar(both)
                wanted = total / count
            elif wanted.dim() > 1 and found.dim() > 1 and wanted.shape[1] == found.shape[1] * self.size:
                wanted = wanted.chunk(self.size, 1)[index]
                if "attention_mask" in head:
                    is_real = head["attention_mask"].bool().chunk(self.size, 1)[index]
                    wanted, found = wanted[is_real], found[is_real]
            fits = wanted.shape == found.shape
            scale = wanted.float().norm().clamp(min=1e-6)
            off = (wanted.float() - found.float()).norm() / scale if fits else torch.inf
            worst = torch.maximum(worst, torch.nan_to_num(torch.as_tensor(off, device=worst.device), torch.inf))
        off = float(self._engine.wire.max_scalar(worst))
        dtypes = {param.dtype for param in model.parameters()} | {self._engine.precision.autocast_dtype}
        rounding = max(torch.finfo(each).eps for each in dtypes if each is not None and each.is_floating_point)
        exact = 1e-4 if self._engine.context.device.type == "cpu" else 1e-2  # GPUs may round factors to TF32
        if off > max(exact, 12 * rounding):
            raise ConfigError(
                f"a forward of {type(model).__name__} on {self.size} parts of a sequence differs from one on the whole, by "
                f"{off:.2g} of its size on a few tokens. Its tokens meet outside of attention, it counts positions in its own "
                "way, or its loss is no mean over labels: pass position_ids in the batch, or leave sp_size out"
            )

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
        """Replace the mean over this rank's tokens by the loss over all ranks; drop outputs of whole samples."""
        if self.size > 1 and isinstance(output, Mapping) and output.get("pooler_output") is not None:
            cast(Any, output)["pooler_output"] = None
        loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
        if part.count is None or not isinstance(loss, Tensor) or loss.dim():
            return output
        wire = self._engine.wire
        if self._items is not None:
            # Like the stock loss: the caller multiplies by the number of ranks to undo the average of gradients.
            loss = share_of(loss, part, self._items, 1.0)
        elif part.total is not None:
            share = share_of(loss, part, part.total, float(wire.size))
            # The mean over all ranks to the bit, with the gradient of this rank's share.
            loss = wire.sum_scalar(share.detach()) / wire.size + (share - share.detach())
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output


def _values(output: Any, has_labels: bool) -> dict[str, Tensor]:
    """Return a forward's floating-point outputs, keyed by their names, without `pooler_output`, which a part lacks."""
    if isinstance(output, tuple):
        output = {"loss" if has_labels and not place else f"{place}": each for place, each in enumerate(output)}
    if not isinstance(output, Mapping):
        return {}
    named = ((name, each) for name, each in output.items() if name != "pooler_output" and isinstance(each, Tensor))
    return {name: each for name, each in named if each.is_floating_point()}


def _window(batch: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """Return tokens of one row for `size` ranks, with what later batches may have: padding, packed rows, a part with fewer
    labels."""
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    most = 0 if not isinstance(ids, Tensor) or ids.dim() < 2 else min(PROBED_TOKENS, ids.shape[1] // size) * size
    if not most:
        return None
    found = {
        name: each[:1, :most] if isinstance(each, Tensor) and each.dim() > 1 else each for name, each in batch.items()
    }
    mask, positions = found.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor):
        mask = found["attention_mask"] = torch.ones_like(mask)
        mask[:, : most // 4] = 0
    elif isinstance(positions, Tensor) and positions.dim() == 2 and (positions.diff() <= 0).any():
        found["position_ids"] = torch.arange(most, device=positions.device).remainder(most // 2).expand(1, -1)
    for name in ("labels", "shift_labels"):
        if name in found:
            found[name] = found[name].clamp(min=0)
            found[name][:, most - 2] = IGNORED
            if isinstance(mask, Tensor):
                found[name] = found[name].where(mask > 0, IGNORED)
    return found


def _packed_of(position_ids: Tensor) -> Tensor | None:
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(position_ids)
