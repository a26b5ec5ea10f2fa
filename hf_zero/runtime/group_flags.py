"""`requires_grad` of the tensors in the optimizers' groups: what a program sets there holds for the model's parameters.

A program that freezes by way of `optimizer.param_groups` (a GAN's other network, Lightning's `toggle_optimizer`) finds this
rank's slices there, which no forward computes with. So their flags are read as forwards begin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import LayoutError, StateError
from .values.flat_param import Flat
from .values.reads import AsTheyAre
from .values.sharded import Sharded

_ADVICE = "set requires_grad of the model's own parameters instead (module.requires_grad_(False))"


class GroupFlags:
    """Of one sharded model."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self._parts: list[tuple[torch.Tensor, Flat, Sequence[nn.Parameter]]] = []
        """A tensor in the groups, and the parameters that it has values of."""
        self._seen: list[bool] = []
        self._frozen: set[nn.Parameter] = set()
        self._has_heard = False

    def set_out(self) -> None:
        """The optimizers' groups have other tensors."""
        self._parts = []
        for flat in self._sharded.trained:
            if flat.wholes is None:
                self._parts += [(shard.master, flat, flat.params) for shard in flat.shards]
            else:
                self._parts += [(whole, flat, [flat.params[index]]) for index, whole in flat.wholes.items()]
        self._seen = [True] * len(self._parts)

    def follow(self) -> bool:
        """A forward begins: parameters have the flags of the optimizers' tensors. Whether one has changed. No communication.

        Raises:
            LayoutError: of a matrix with one owner: the other ranks do not have it in their groups.
        """
        self._has_heard = True
        with AsTheyAre():
            now = [tensor.requires_grad for tensor, _, _ in self._parts]
        if now == self._seen:
            return False
        changed = [(*part, flag) for part, before, flag in zip(self._parts, self._seen, now) if before != flag]
        for _, flat, _, _ in changed:
            if flat.span.cuts:
                raise LayoutError(
                    f"requires_grad of {flat.span.spec.name!r}, or of a parameter beside it, was set through the optimizer's "
                    f"groups, which other ranks cannot see: {_ADVICE}"
                )
        self._seen = now
        with AsTheyAre():
            for _, _, params, flag in changed:
                for param in params:
                    if flag and param in self._frozen:
                        self._frozen.discard(param)
                        param.requires_grad = True
                    elif not flag and param.requires_grad:
                        self._frozen.add(param)
                        param.requires_grad = False
        return True

    def refuse_unheard(self) -> None:
        """A backward begins.

        Raises:
            StateError: flags were changed, and the forward came by no module that is known, so that it did not follow them.
        """
        if not self._has_heard and self._seen != [tensor.requires_grad for tensor, _, _ in self._parts]:
            raise StateError(
                "requires_grad was set through the optimizer's groups, and the forward went around the modules that were to "
                f"follow it: call the sharded model itself, or {_ADVICE}"
            )

    def end_pass(self) -> None:
        """A backward has ended."""
        self._has_heard = False

    def refuse_cut(self, params: Sequence[nn.Parameter]) -> None:
        """The optimizers' tensors of these are about to be replaced by others.

        Raises:
            LayoutError: one is frozen by its tensor in a group, which nobody could thaw then.
        """
        for param in params:
            if param in self._frozen:
                raise LayoutError(
                    f"parameter {self._sharded.names[param][0]!r} was frozen through the optimizer's groups, whose tensors are "
                    f"to be cut anew now: set requires_grad back before, or {_ADVICE}"
                )
