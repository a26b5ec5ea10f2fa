"""Which parameters move together: finds the units of a model by itself.

Blocks are the model's own `_no_split_modules`, else children of the same class in a `ModuleList` or `Sequential`, else
runs of leaf modules of about equal size. What is left over (embeddings, head, final norm) is owned by the modules that
hold it: a large one is a unit of its own, a small one joins the block next to it in registration order. Units that share
a parameter (tied weights) are one unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from .layout import Visit

T = TypeVar("T")
_MIN_BLOCKS = 2
_SIZE_PARTS = 8  # a model without blocks is cut into about this many units


@dataclass(slots=True)
class Group:
    """A unit before it has storage: the modules whose forward uses it (hosts), and its parameters in order."""

    name: str
    hosts: list[nn.Module] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    def absorb(self, other: Group) -> None:
        self.hosts += [host for host in other.hosts if all(host is not mine for mine in self.hosts)]
        known = set(self.params)
        self.params += [param for param in other.params if param not in known]


def find_groups(model: nn.Module) -> list[Group]:
    """Groups that cover every parameter of `model` once, in registration order."""
    names = {module: name for name, module in model.named_modules()}
    blocks = _blocks(model)
    inside = {id(inner) for block in blocks for inner in block.modules()}
    groups: list[Group] = []
    is_block: list[bool] = []
    for module in _walk(model, inside):
        if any(module is block for block in blocks):
            params = list(module.parameters())
        elif id(module) in inside:
            continue
        else:
            params = _owned(module, inside)
        if params:
            groups.append(Group(names[module] or type(model).__name__, [module], _unique(params)))
            is_block.append(id(module) in inside)
    groups = _merge_small(groups, is_block) if blocks else _by_size(groups)
    return _merge_tied(groups)


def find_visits(model: nn.Module, groups: Sequence[Group]) -> tuple[Visit, ...]:
    """A pass forward as registration order shows it: each group's hosts, and what runs inside which."""
    unit_of = {host: place for place, group in enumerate(groups) for host in group.hosts}
    known: set[nn.Module] = set()

    def visits(module: nn.Module) -> Iterator[Visit]:
        if module in known:
            return
        known.add(module)
        inner = (visit for child in module.children() for visit in visits(child))
        if module in unit_of:
            yield Visit(unit_of[module], is_plain_embedding(module), tuple(inner))
        else:
            yield from inner

    return tuple(visits(model))


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether its backward needs its indices and not its weights."""
    return type(module) is nn.Embedding and module.max_norm is None


def _blocks(model: nn.Module) -> list[nn.Module]:
    wanted: set[str] = set()
    for module in model.modules():
        wanted.update(getattr(module, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in wanted and module is not model]
    found = _outermost([module for module in named if _has_params(module)])
    kinds = Counter(type(module) for module in found)
    # A class that occurs once (BertEmbeddings) is not a block: its embeddings and its norm have different lives.
    found = [module for module in found if kinds[type(module)] >= _MIN_BLOCKS]
    if found:
        return found
    children: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in module if _has_params(child))
            # Leaves that repeat (a stack of Linear layers) are cut by size instead: one of them may be tiny. A list is never
            # called: a unit hosted by one would have no hook that runs.
            children += [
                c
                for c in module
                if kinds[type(c)] >= _MIN_BLOCKS
                and not isinstance(c, (nn.ModuleList, nn.ModuleDict))
                and any(True for _ in c.children())
            ]
    return _outermost(children)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(m) for module in modules for m in module.modules() if m is not module}
    return _unique(module for module in modules if id(module) not in inner)


def _walk(model: nn.Module, inside: set[int]) -> Iterator[nn.Module]:
    """Modules outside blocks, and the blocks, in registration order; nothing below a host that owns its children."""
    skip: set[int] = set()
    for module in model.modules():
        if id(module) in skip:
            continue
        yield module
        if id(module) not in inside and _owns_children(module, inside):
            skip.update(id(inner) for inner in module.modules())


def _owns_children(module: nn.Module, inside: set[int]) -> bool:
    """A module with parameters of its own may read its children's directly (MultiheadAttention does): it hosts both."""
    return any(p is not None for p in module._parameters.values()) and not any(
        id(inner) in inside for inner in module.modules()
    )


def _owned(module: nn.Module, inside: set[int]) -> list[nn.Parameter]:
    if _owns_children(module, inside):
        return list(module.parameters())
    return [param for param in module._parameters.values() if param is not None]


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _merge_small(groups: list[Group], is_block: list[bool]) -> list[Group]:
    """Leftovers that weigh less than 1/16 of a typical block join the nearest block before them, else after them."""
    block_numel = sorted(group.numel for group, block in zip(groups, is_block) if block)
    small = block_numel[len(block_numel) // 2] // 16
    first = is_block.index(True)
    before: list[Group] = []
    out: list[Group] = []
    last_block: Group | None = None
    for index, (group, block) in enumerate(zip(groups, is_block)):
        if block:
            last_block = group
            out.append(group)
        elif group.numel > small or _encloses(group, last_block or groups[first]):
            out.append(group)
        elif index < first:
            before.append(group)
        elif last_block is not None:
            last_block.absorb(group)
    for group in before:
        groups[first].absorb(group)
    return out


def _encloses(group: Group, block: Group) -> bool:
    """Whether a host of `group` runs around the block: joining would keep the block gathered all that time."""
    return any(inner is block.hosts[0] for host in group.hosts for inner in host.modules())


def _by_size(groups: list[Group]) -> list[Group]:
    target = sum(group.numel for group in groups) / _SIZE_PARTS
    out: list[Group] = []
    for group in groups:
        if out and out[-1].numel + group.numel <= target:
            out[-1].absorb(group)
        else:
            out.append(group)
    return out


def _merge_tied(groups: list[Group]) -> list[Group]:
    out: list[Group] = []
    home: dict[nn.Parameter, Group] = {}
    for group in groups:
        shared = _unique(home[param] for param in group.params if param in home)
        target = shared[0] if shared else group
        if not shared:
            out.append(group)
        for other in [*shared[1:], *([group] if shared else [])]:
            target.absorb(other)
            if any(other is kept for kept in out):
                out = [kept for kept in out if kept is not other]
        for param in target.params:
            home[param] = target
    return out


def _unique(items: Iterable[T]) -> list[T]:
    seen: dict[int, T] = {}
    for item in items:
        seen.setdefault(id(item), item)
    return list(seen.values())
