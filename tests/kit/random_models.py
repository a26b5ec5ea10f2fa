"""Random architectures for `tests.kit.random_programs`: a description that can be printed, cut down and built again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, TOKENS = 13, 4
WIDTHS = (6, 8, 11, 13)  # 11 and 13: nothing divides evenly
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "data", "opaque")
PIECES = (
    "mlp", "mlp", "mlp", "attention", "sdpa", "conv", "gru", "lstm", "zerodim", "empty", "sequential", "nested", "inplace",
    "twice", "shared", "tied", "reads", "weightnorm", "experts", "counter", "dropout",
)  # fmt: skip
CONTAINERS = ("list", "list", "sequential", "attributes", "nested")
FRONTS = ("embed", "linear", "both", "conv")


class Planned(Exception):
    """Raised in the middle of a forward or a backward, and caught by the program."""


@dataclass(frozen=True)
class Block:
    piece: str = "mlp"
    out: str = "tensor"
    frozen: bool = False


@dataclass(frozen=True)
class Arch:
    """One model."""

    blocks: tuple[Block, ...] = (Block(), Block())
    width: int = 8
    container: str = "list"
    front: str = "embed"
    front_frozen: bool = False
    heads: int = 1
    tied: bool = False
    root: tuple[str, ...] = ()  # parameters of the root itself: "position", "scale", "empty"
    out: str = "tensor"


def random_arch(rng: random.Random) -> Arch:
    blocks = tuple(
        Block(rng.choice(PIECES), rng.choice(OUTPUTS), rng.random() < 0.15) for _ in range(rng.choice((2, 2, 3, 3, 4)))
    )
    return Arch(
        blocks=blocks,
        width=rng.choice(WIDTHS),
        container=rng.choice(CONTAINERS),
        front=rng.choice(FRONTS),
        front_frozen=rng.random() < 0.15,
        heads=rng.choice((1, 1, 2, 3)),
        tied=rng.random() < 0.3,
        root=tuple(name for name in ("position", "scale", "empty") if rng.random() < 0.25),
        out=rng.choice(OUTPUTS),
    )


# What can be turned off by name, and what a model without it has in its place.
def _pieces(*pieces: str) -> Any:
    def off(arch: Arch) -> Arch:
        return replace(arch, blocks=tuple(replace(b, piece="mlp") if b.piece in pieces else b for b in arch.blocks))

    return off


def _without_opaque(arch: Arch) -> Arch:
    blocks = tuple(replace(b, out="tuple") if b.out == "opaque" else b for b in arch.blocks)
    return replace(arch, blocks=blocks, out="tuple" if arch.out == "opaque" else arch.out)


def _without_empty(arch: Arch) -> Arch:
    return replace(_pieces("empty")(arch), root=tuple(name for name in arch.root if name != "empty"))


def _without_zerodim(arch: Arch) -> Arch:
    return replace(_pieces("zerodim")(arch), root=tuple(name for name in arch.root if name != "scale"))


FEATURES: dict[str, Any] = {
    "opaque": _without_opaque,
    "empty": _without_empty,
    "zerodim": _without_zerodim,
    "root": lambda arch: replace(arch, root=()),
    "heads": lambda arch: replace(arch, heads=1),
    "tied": lambda arch: replace(_pieces("tied")(arch), tied=False),
    "frozen": lambda arch: replace(
        arch, front_frozen=False, blocks=tuple(replace(b, frozen=False) for b in arch.blocks)
    ),
    "reads": _pieces("reads"),
    "shared": _pieces("shared"),
    "experts": _pieces("experts"),
    "rnn": _pieces("gru", "lstm"),
    "attention": _pieces("attention", "sdpa"),
    "conv": _pieces("conv"),
    "weightnorm": _pieces("weightnorm"),
    "dropout": _pieces("dropout"),
    "counter": _pieces("counter"),
    "nested": _pieces("nested"),
    "inplace": _pieces("inplace"),
    "twice": _pieces("twice"),
}


def features_of(arch: Arch) -> set[str]:
    return {name for name, off in FEATURES.items() if off(arch) != arch}


def smaller(arch: Arch) -> list[Arch]:
    """Simpler descriptions to try, most drastic first."""
    found = [replace(arch, blocks=arch.blocks[:i] + arch.blocks[i + 1 :]) for i in range(len(arch.blocks))]
    found = [other for other in found if other.blocks]
    plain = Arch(blocks=arch.blocks)
    for name in ("container", "front", "front_frozen", "heads", "tied", "root", "out", "width"):
        found.append(replace(arch, **{name: getattr(plain, name)}))
    for i, block in enumerate(arch.blocks):
        for name in ("piece", "out", "frozen"):
            changed = replace(block, **{name: getattr(Block(), name)})
            found.append(replace(arch, blocks=(*arch.blocks[:i], changed, *arch.blocks[i + 1 :])))
    return [other for other in found if other != arch]


# Outputs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    value: Tensor


class Opaque:
    """Nothing that can be looked into by type: no tuple, no dict, no dataclass."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def wrap(out: str, value: Tensor) -> Any:
    match out:
        case "tuple":
            return (value, None)
        case "dict":
            return {"value": value, "nothing": None}
        case "data":
            return Data(value)
        case "opaque":
            return Opaque(value)
    return value


def unwrap(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["value"] if isinstance(output, dict) else output.value


class Tape:
    """Where blocks leave inner tensors, as hooks that record hidden states do; not a container anybody can look into."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


# Pieces -----------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """[batch, tokens, width] -> the same, in some container."""

    out = "tensor"

    def inner(self, x: Tensor, route: int) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, route: int = 0, tape: Tape | None = None, fail: bool = False) -> Any:
        h = self.inner(x, route)
        if fail:
            raise Planned
        if tape is not None:
            tape.tensors.append(h)
        return wrap(self.out, x + 0.5 * h)


class Mlp(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Attention(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 2 if d % 2 == 0 else 1, batch_first=True)

    def inner(self, x: Tensor, route: int) -> Tensor:
        h = self.norm(x)
        return self.attention(h, h, h, need_weights=True)[0]  # its other kernel cannot be differentiated twice


class Sdpa(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.proj(weights @ v)


class Conv(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        # No bias: before a norm its gradient is rounding alone, which bf16 and RMSprop together make large.
        self.conv, self.norm = nn.Conv1d(d, d, 3, padding=1, bias=False), nn.BatchNorm1d(d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(Piece):
    def __init__(self, d: int, cls: Any) -> None:
        super().__init__()
        self.rnn = cls(d, d, batch_first=True)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.rnn(x)[0]


class ZeroDim(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.full((1,), 0.3))
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x) * self.gate) + self.one


class Empty(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, d))
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x)) + self.none.sum()


class Sequence(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d + 3), nn.Tanh(), nn.Linear(d + 3, d, bias=False))

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.body(x)


class Nested(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(d), Mlp(d)])
        self.norm = nn.LayerNorm(d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        for layer in self.layers:
            x = unwrap(layer(x))
        return self.norm(x)


class InPlace(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, d), nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        h = self.up(x).mul_(0.5).tanh_()
        return self.down(h).add_(0.1)


class Twice(Piece):
    """A module called twice in one forward; a view on the way."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.lin(torch.tanh(self.lin(x)).view(-1, x.shape[-1])).view_as(x)


class Reads(Piece):
    """Reads the weight of a module that it does not hold, with an operation of its own."""

    def __init__(self, d: int, other: nn.Linear) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.others = (other,)  # a tuple: not a submodule

    def inner(self, x: Tensor, route: int) -> Tensor:
        h = F.linear(self.lin(x), self.others[0].weight)
        return torch.tanh(h.sum(-1, keepdim=True)) + x * 0.1


class WeightNorm(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = torch.nn.utils.parametrizations.weight_norm(nn.Linear(d, d))

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.lin(x))


class Experts(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(3)])

    def inner(self, x: Tensor, route: int) -> Tensor:
        return torch.tanh(self.experts[route % 3](x))


class Counter(Piece):
    """Buffers that change in forward: whole numbers, and one that is not saved."""

    calls: Tensor
    decay: Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("decay", torch.full((d,), 0.9), persistent=False)

    def inner(self, x: Tensor, route: int) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(self.lin(x)) * self.decay


class Dropout(Piece):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(d, d), nn.Dropout(0.3)

    def inner(self, x: Tensor, route: int) -> Tensor:
        return self.drop(torch.tanh(self.lin(x)))


_BUILD: dict[str, Any] = {
    "mlp": Mlp, "attention": Attention, "sdpa": Sdpa, "conv": Conv, "gru": lambda d: Recurrent(d, nn.GRU),
    "lstm": lambda d: Recurrent(d, nn.LSTM), "zerodim": ZeroDim, "empty": Empty, "sequential": Sequence, "nested": Nested,
    "inplace": InPlace, "twice": Twice, "weightnorm": WeightNorm, "experts": Experts, "counter": Counter,
    "dropout": Dropout, "tied": Mlp, "shared": Mlp,
}  # fmt: skip


class Net(nn.Module):
    """Front, blocks, heads, and parameters of the root's own."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        d = arch.width
        self.embed = nn.Embedding(VOCAB, d) if arch.front in ("embed", "both") else None
        self.proj = nn.Linear(d, d) if arch.front in ("linear", "both") else None
        self.conv = nn.Conv1d(d, d, 3, padding=1) if arch.front == "conv" else None
        if "position" in arch.root:
            self.position = nn.Parameter(torch.randn(TOKENS, d) * 0.1)
        if "empty" in arch.root:
            self.none = nn.Parameter(torch.zeros(0, 3))
        made: list[Piece] = []
        for block in arch.blocks:
            made.append(self._block(block, made, d))
        self._hold(made)
        self.heads = nn.ModuleList([nn.Linear(d, VOCAB if i == 0 else 5 + i, bias=i > 0) for i in range(arch.heads)])
        if arch.tied and self.embed is not None:
            self.heads[0].weight = self.embed.weight
        if "scale" in arch.root:
            self.scale = nn.Parameter(torch.tensor(1.1))
        for piece, block in zip(made, arch.blocks):
            if block.frozen:
                piece.requires_grad_(False)
        for front in (self.embed, self.proj, self.conv):
            if front is not None and arch.front_frozen:
                front.requires_grad_(False)

    def _block(self, block: Block, made: list[Piece], d: int) -> Piece:
        if block.piece == "shared" and made:
            return made[0]
        if block.piece == "reads":
            linears = [m for piece in made for m in piece.modules() if type(m) is nn.Linear and m.in_features == d]
            linears = [m for m in linears if "weight" in m._parameters]
            piece: Piece = Reads(d, linears[0]) if linears else Mlp(d)
        else:
            piece = _BUILD[block.piece](d)
        if block.piece == "tied":
            for other in made:
                if isinstance(other, Mlp):
                    piece.up.weight = other.up.weight
        piece.out = block.out
        return piece

    def _hold(self, made: list[Piece]) -> None:
        match self.arch.container:
            case "attributes":
                for i, piece in enumerate(made):
                    setattr(self, f"block{i}", piece)
            case "sequential":
                self.blocks = nn.Sequential(*made)
            case "nested":
                half = len(made) // 2
                self.stages = nn.ModuleList([nn.ModuleList(made[:half]), nn.ModuleList(made[half:])])
            case _:
                self.blocks = nn.ModuleList(made)

    def pieces(self) -> list[Piece]:
        match self.arch.container:
            case "attributes":
                return [getattr(self, f"block{i}") for i in range(len(self.arch.blocks))]
            case "nested":
                return [piece for stage in self.stages for piece in stage]
        return list(self.blocks)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        head: int = 0,
        route: int = 0,
        skip: int = -1,
        tape: Tape | None = None,
        fail: int = -1,
        recompute: bool | None = None,
    ) -> Any:
        h = x if self.proj is None else self.proj(x)
        if self.embed is not None:
            h = h + self.embed(ids)
        if self.conv is not None:
            h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        if "position" in self.arch.root:
            h = h + self.position
        for i, piece in enumerate(self.pieces()):
            if i == skip:
                continue
            if recompute is None:
                h = unwrap(piece(h, route, tape=tape, fail=i == fail))
            else:

                def run(t: Tensor, piece: Piece = piece, i: int = i) -> Tensor:
                    return unwrap(piece(t, route, fail=i == fail))

                h = checkpoint(run, h, use_reentrant=recompute)
        out = self.heads[head % len(self.heads)](torch.tanh(h))
        if "empty" in self.arch.root:
            out = out + self.none.sum()
        if "scale" in self.arch.root:
            out = out * self.scale
        return wrap(self.arch.out, out)


def has_statistics(model: nn.Module) -> bool:
    """Whether what eval shows depends on what this rank has seen."""
    return any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
