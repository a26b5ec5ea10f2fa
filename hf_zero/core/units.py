"""Find the units of a model: which parameters move together.

Blocks are the model's `_no_split_modules`, else children of one class in a `ModuleList` or `Sequential`, else runs of leaf
modules. The remaining parameters (embeddings, head, final norm) belong to the modules that hold them: a large one is a unit, a
small one joins the block next to it in registration order.

Two units, a bucket and running transfers are in memory at a time, so the bytes of a unit are bounded, whatever the model's
size: a block above `unit_bytes` is split into its children (attention | MLP), and runs of leaf modules end at `run_bytes`. A
parameter that several units use (tied weights, a bias of all layers) becomes a unit that all their hosts gather. Instead the
units are joined if that keeps at most twice the shared bytes in memory.

A module that the user names (`ZeroConfig.units`) is one unit of any size, with all modules inside it. Parameters that modules
outside of it also use are in other units, which its forward gathers as well.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from ..errors import ConfigError
from .layout import Visit

T = TypeVar("T")
_MIN_BLOCKS = 2
_SIZE_PARTS = 8  # a small model without blocks is split into about this many units
_SMALL = 16  # a part is small if it has at most 1/16 of the bytes of the block that it is split from, or joined to
_CHOOSING = frozenset({nn.AdaptiveLogSoftmaxWithLoss})
"""torch's modules that run a child only for the samples that select it, and not at all without any."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, in the parameters' own dtypes.

    Attributes:
        unit_bytes: a larger module is split into its children.
        run_bytes: consecutive leaf modules are one unit up to this size.
    """

    unit_bytes: int = 256 << 20
    run_bytes: int = 64 << 20


LIMITS = Limits()
"""Messages above a few MiB reach the full bandwidth, and three units of this size are small compared with a device's memory."""


@dataclass(slots=True)
class Group:
    """A unit before it has storage.

    Attributes:
        name: of the unit.
        hosts: modules whose forward uses it.
        params: in order.
        is_block: a block, or a part of one: other groups may join it, and it joins none.
        is_named: the user asked for exactly this unit.
        is_isolated: no small group may join it: it is used in several places or around other units, and so long in memory.
    """

    name: str
    hosts: list[nn.Module] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    is_block: bool = False
    is_named: bool = False
    is_isolated: bool = False

    @property
    def nbytes(self) -> int:
        return _nbytes(self.params)

    def absorb(self, other: Group) -> None:
        self.hosts += [host for host in other.hosts if all(host is not mine for mine in self.hosts)]
        known = set(self.params)
        self.params += [param for param in other.params if param not in known]


def find_groups(model: nn.Module, limits: Limits = LIMITS, units: Sequence[str] = ()) -> list[Group]:
    """Return groups that cover every parameter of `model` once, in registration order.

    Args:
        model: the model.
        limits: of sizes.
        units: patterns of modules that are one unit each, see `find_named`.

    Raises:
        ConfigError: no module with parameters matches a pattern.
    """
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    named = _named_hosts(model, find_named(model, units))
    inside = {inner for module in named for inner in module.modules()}
    blocks = [block for block in _blocks(model) if block not in inside]
    groups = _parts(model, blocks, names, limits, named)
    groups = _separate_shared(groups, {param: name for name, param in model.named_parameters()})
    _set_apart(groups)
    for group in groups:
        group.is_isolated = group.is_isolated or group.is_named
    if blocks:
        sizes = sorted(_nbytes(_unique(block.parameters())) for block in blocks)
        return _merge_small(groups, sizes[len(sizes) // 2] // _SMALL)
    return _join_runs(groups, min(sum(group.nbytes for group in groups) // _SIZE_PARTS, limits.run_bytes))


def find_named(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the modules with parameters whose full name or class name matches, outermost only, in registration order.

    Raises:
        ConfigError: no module matches a pattern; with the closest names.
    """
    candidates = [(name, module) for name, module in model.named_modules() if _has_params(module)]
    found: list[nn.Module] = []
    for pattern in patterns:
        mine = [
            module
            for name, module in candidates
            if fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)
        ]
        if not mine:
            known = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name, _ in candidates if name)
            known |= dict.fromkeys(type(module).__name__ for _, module in candidates)
            close = difflib.get_close_matches(pattern, known, 3, cutoff=0.0)
            raise ConfigError(
                f"units: no module with parameters has the name or class {pattern!r}. The closest are "
                f"{', '.join(map(repr, close))}. Patterns are compared with whole names; `*` stands for any text: '*.experts'"
            )
        found += mine
    chosen = set(_outermost(found))
    return [module for _, module in candidates if module in chosen]


def _named_hosts(model: nn.Module, named: Sequence[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return the module whose forward uses each named module: itself, or the one around a list, which is never called."""
    around = {child: module for module in model.modules() for child in module.children()} if named else {}
    hosts: dict[nn.Module, nn.Module] = {}
    for module in named:
        host = module
        while not _is_called(host) and host in around:
            host = around[host]
        hosts[module] = host
    return hosts


def find_visits(model: nn.Module, groups: Sequence[Group]) -> tuple[Visit, ...]:
    """Return a forward as registration order shows it: each group's hosts, and which run inside which."""
    units_of: dict[nn.Module, list[int]] = {}
    for place, group in enumerate(groups):
        for host in group.hosts:
            units_of.setdefault(host, []).append(place)
    known: set[nn.Module] = set()

    def visits(module: nn.Module) -> Iterator[Visit]:
        if module in known:
            return
        known.add(module)
        found = [visit for child in module.children() for visit in visits(child)]
        for place in units_of.get(module, ()):  # hooks of a later unit are around those of an earlier one
            found = [Visit(place, is_plain_embedding(module), tuple(found))]
        yield from found

    return tuple(visits(model))


def is_plain_embedding(module: nn.Module) -> bool:
    """Return True if its backward needs indices only, not weights. `weight_norm` computes the weight from parameters."""
    return type(module) is nn.Embedding and module.max_norm is None and "weight" in module._parameters


# Blocks ---------------------------------------------------------------------------------------------------------------


def _blocks(model: nn.Module) -> list[nn.Module]:
    wanted: set[str] = set()
    for module in model.modules():
        wanted.update(getattr(module, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in wanted and module is not model]
    found = _outermost([module for module in named if _has_params(module)])
    kinds = Counter(type(module) for module in found)
    # A class that occurs once (BertEmbeddings) is not a block: its embeddings and its norm are used at different times.
    found = [module for module in found if kinds[type(module)] >= _MIN_BLOCKS]
    if found:
        return found
    children: list[nn.Module] = []
    chosen = {inner for module in model.modules() if type(module) in _CHOOSING for inner in module.modules()}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module not in chosen:
            # Lists of optional layers (x-transformers) have None.
            there = [child for child in module if child is not None]
            kinds = Counter(type(child) for child in there if _has_params(child))
            # Repeated leaves (a stack of Linear layers) are split by size instead: one of them may be tiny.
            children += [
                c for c in there if kinds[type(c)] >= _MIN_BLOCKS and _is_called(c) and any(True for _ in c.children())
            ]
    return _outermost(children)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(m) for module in modules for m in module.modules() if m is not module}
    return _unique(module for module in modules if id(module) not in inner)


def _is_called(module: nn.Module) -> bool:
    """Return False for lists, which are never called: a hook of a unit that one hosts would not run."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# Parts ----------------------------------------------------------------------------------------------------------------


def _parts(
    model: nn.Module,
    blocks: list[nn.Module],
    names: dict[nn.Module, str],
    limits: Limits,
    named: dict[nn.Module, nn.Module],
) -> list[Group]:
    """Return blocks, and modules outside of them with their own parameters. A shared parameter is in each group that uses it.

    Args:
        model: the model.
        blocks: its blocks.
        names: of the modules.
        limits: of sizes.
        named: modules that are one unit each, with their hosts.
    """
    taken = {inner for module in named for inner in module.modules()}
    inside = {id(inner) for block in blocks for inner in block.modules()} | {id(inner) for inner in taken}
    heads = {id(block) for block in blocks}
    holders: Counter[nn.Parameter] = Counter(
        param for module in model.modules() for param in module._parameters.values() if param is not None
    )
    total = _nbytes(holders)
    largest = max((_nbytes(_unique(block.parameters())) for block in blocks), default=0)
    most = min(max(total // _SIZE_PARTS, largest), limits.unit_bytes)
    out: list[Group] = []
    skip: set[int] = set()
    for module in model.modules():
        if module in named:
            params = _unique(module.parameters())
            out.append(Group(names[module], [named[module]], params, is_block=True, is_named=True))
        elif id(module) in heads:
            out += _split(module, names, limits, taken)
        elif id(module) not in inside and id(module) not in skip:
            if _reads_its_children(module, inside, holders, most):
                skip.update(id(inner) for inner in module.modules())
                params = _unique(module.parameters())
            else:
                params = _own(module)
            if params:
                out.append(Group(names[module], [module], params))
    return out


def _split(
    block: nn.Module, names: dict[nn.Module, str], limits: Limits, taken: Collection[nn.Module] = ()
) -> Iterator[Group]:
    """Yield a block, or its large children if it is above the limit; the block hosts the remaining parameters.

    Args:
        block: the module to split.
        names: of the modules.
        limits: of sizes.
        taken: modules of other units.
    """
    params = _held(block, taken)
    own = set(_own(block))
    children: list[nn.Module] = []
    if _nbytes(params) > limits.unit_bytes and 2 * _nbytes(own) < _nbytes(params):
        large = limits.unit_bytes // _SMALL
        # Not through lists: ranks may run different experts, and at stage 3 all ranks must gather the same units.
        children = [
            c for c in block.children() if _is_called(c) and c not in taken and _nbytes(_held(c, taken)) > large
        ]
    apart = {param for child in children for param in _held(child, taken)}
    rest = [param for param in params if param not in apart or param in own]
    if rest:
        yield Group(names[block], [block], rest, is_block=True)
    for child in children:
        yield from _split(child, names, limits, taken)


def _held(module: nn.Module, taken: Collection[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the modules inside this one that are not `taken`."""
    return _unique(param for inner in module.modules() if inner not in taken for param in _own(inner))


def _reads_its_children(module: nn.Module, inside: set[int], holders: Counter[nn.Parameter], most: int) -> bool:
    """Return True if a module hosts its children's parameters, too.

    A module with parameters of its own may read its children's directly (MultiheadAttention does), or run its children
    depending on the batch, which differs between ranks. A module with few parameters of its own does not host a unit of more
    than `most` bytes: a read of a released parameter is detected anyway.
    """
    if any(id(inner) in inside for inner in module.modules()):
        return False
    if type(module) in _CHOOSING:
        return True
    own = _own(module)
    if not own or not any(True for _ in module.children()):
        return False
    here = Counter(param for inner in module.modules() for param in inner._parameters.values() if param is not None)
    alone = _nbytes(param for param, times in here.items() if times == holders[param])
    return alone <= most or 2 * _nbytes(own) >= alone


def _own(module: nn.Module) -> list[nn.Parameter]:
    return _unique(param for param in module._parameters.values() if param is not None)


# Joined ---------------------------------------------------------------------------------------------------------------


def _separate_shared(groups: list[Group], names: dict[nn.Parameter, str]) -> list[Group]:
    """Put every parameter into one group. A shared one becomes a group, or joins the groups that use it."""
    homes: dict[nn.Parameter, list[Group]] = {}
    for group in groups:
        for param in group.params:
            homes.setdefault(param, []).append(group)
    shared = {param: users for param, users in homes.items() if len(users) > 1}
    for linked in _linked(groups, shared.values()):
        params = _unique(param for group in linked for param in group.params)
        common = [param for param in params if param in shared]
        if _nbytes(params) <= 2 * _nbytes(common):
            for other in linked[1:]:
                linked[0].absorb(other)
                other.params = []
            continue
        together: dict[tuple[int, ...], Group] = {}
        for param in common:
            users = shared[param]
            key = tuple(id(group) for group in users)
            if key not in together:
                hosts = _unique(host for group in users for host in group.hosts)
                together[key] = Group(names[param], hosts)
                groups.insert(next(at for at, group in enumerate(groups) if group is users[0]), together[key])
            together[key].params.append(param)
        for group in linked:
            group.params = [param for param in group.params if param not in shared]
    return [group for group in groups if group.params]


def _linked(groups: list[Group], links: Iterable[list[Group]]) -> list[list[Group]]:
    """Return the groups that share parameters, directly or through others, in order."""
    parent = {id(group): group for group in groups}

    def root(group: Group) -> Group:
        while parent[id(group)] is not group:
            parent[id(group)] = group = parent[id(parent[id(group)])]
        return group

    for users in links:
        for other in users[1:]:
            parent[id(root(other))] = root(users[0])
    out: dict[int, list[Group]] = {}
    for group in groups:
        out.setdefault(id(root(group)), []).append(group)
    return [linked for linked in out.values() if len(linked) > 1]


def _set_apart(groups: list[Group]) -> None:
    hosts = {id(host) for group in groups for host in group.hosts}
    for group in groups:
        encloses = any(id(inner) in hosts and inner is not host for host in group.hosts for inner in host.modules())
        group.is_isolated = len(group.hosts) > 1 or encloses


def _merge_small(groups: list[Group], small_bytes: int) -> list[Group]:
    """Join small groups to the nearest block before them, else after them."""
    first = next((group for group in groups if group.is_block and not group.is_isolated), None)
    if first is None:
        return groups
    before: list[Group] = []
    out: list[Group] = []
    last: Group | None = None
    for group in groups:
        if group.is_block or group.is_isolated or group.nbytes > small_bytes:
            out.append(group)
            if group.is_block and not group.is_isolated:
                last = group
        elif last is None:
            before.append(group)
        else:
            last.absorb(group)
    for group in before:
        first.absorb(group)
    return out


def _join_runs(groups: list[Group], run_bytes: int) -> list[Group]:
    out: list[Group] = []
    for group in groups:
        is_open = bool(out) and not group.is_isolated and not out[-1].is_isolated
        if is_open and out[-1].nbytes + group.nbytes <= run_bytes:
            out[-1].absorb(group)
        else:
            out.append(group)
    return out


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() * param.element_size() for param in params)


def _unique(items: Iterable[T]) -> list[T]:
    seen: dict[int, T] = {}
    for item in items:
        seen.setdefault(id(item), item)
    return list(seen.values())
