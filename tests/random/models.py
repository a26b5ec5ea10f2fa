"""Random models: a description that can be printed, made smaller and built."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, TOKENS = 13, 4
WIDTHS = (6, 8, 11, 13)
"""11 and 13: nothing divides evenly."""
OUTPUTS = ("tensor", "tensor", "tuple", "dict", "data", "opaque")
CONTAINERS = ("list", "list", "sequential", "attributes", "nested")
FRONTS = ("embed", "linear", "both", "conv")


class Planned(Exception):
    """Raised inside a forward or a backward, and caught by the program."""


def short(value: Any) -> str:
    """Return the `repr` of a dataclass without fields that have their default."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = [(f.name, v) for f in dataclasses.fields(value) if (v := getattr(value, f.name)) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={short(v)}' for name, v in given)})"


class Block(NamedTuple):
    piece: str
    out: str = "tensor"
    frozen: str = ""


@dataclass(frozen=True, repr=False)
class Arch:
    """One model.

    Attributes:
        blocks: words `piece:out:frozen`, of which the last two may be left out.
        root: parameters of the root module: position, scale, empty.
    """

    blocks: str = "mlp mlp"
    width: int = 8
    container: str = "list"
    front: str = "embed"
    front_frozen: bool = False
    heads: int = 1
    tied: bool = False
    root: str = ""
    out: str = "tensor"

    def __repr__(self) -> str:
        return short(self)

    @property
    def parsed(self) -> list[Block]:
        return [Block(*word.split(":")) for word in self.blocks.split()]


def random_arch(rng: random.Random) -> Arch:
    def block() -> str:
        piece, out, frozen = rng.choice(PIECES), rng.choice(OUTPUTS), rng.random() < 0.15
        return f"{piece}:{out}" + ":frozen" * frozen

    return Arch(
        blocks=" ".join(block() for _ in range(rng.choice((2, 2, 3, 3, 4)))),
        width=rng.choice(WIDTHS),
        container=rng.choice(CONTAINERS),
        front=rng.choice(FRONTS),
        front_frozen=rng.random() < 0.15,
        heads=rng.choice((1, 1, 2, 3)),
        tied=rng.random() < 0.3,
        root=" ".join(name for name in ("position", "scale", "empty") if rng.random() < 0.25),
        out=rng.choice(OUTPUTS),
    )


# Outputs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    value: Tensor


class Opaque:
    """An output of a type that cannot be searched for tensors: no tuple, dict or dataclass."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


WRAP: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda value: value,
    "tuple": lambda value: (value, None),
    "dict": lambda value: {"value": value, "nothing": None},
    "data": Data,
    "opaque": Opaque,
}


def unwrap(output: Any) -> Tensor:
    if isinstance(output, (Tensor, tuple)):
        return output if isinstance(output, Tensor) else output[0]
    return output["value"] if isinstance(output, dict) else output.value


class Tape:
    """Keeps tensors from inside blocks, as hooks that record hidden states do."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


# Pieces -----------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """Maps [batch, tokens, width] to the same shape, in some container."""

    out = "tensor"
    make: Callable[..., dict[str, Any]]
    inner: Callable[[Any, Tensor, int], Tensor]

    def __init__(self, *args: Any) -> None:
        super().__init__()
        for name, value in type(self).make(*args).items():
            setattr(self, name, value)

    def forward(self, x: Tensor, route: int = 0, tape: Tape | None = None, fail: bool = False) -> Any:
        h = self.inner(x, route)
        if fail:
            raise Planned
        if tape is not None:
            tape.tensors.append(h)
        return WRAP[self.out](x + 0.5 * h)


def _piece(make: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Tensor]], type[Piece]]:
    """Return a decorator that makes a class of its own from what a piece has and what it computes."""
    return lambda inner: type(inner.__name__, (Piece,), {"make": staticmethod(make), "inner": inner})


@_piece(lambda d: {"norm": nn.LayerNorm(d), "up": nn.Linear(d, 2 * d), "down": nn.Linear(2 * d, d)})
def Mlp(self: Any, x: Tensor, route: int) -> Tensor:
    return self.down(F.gelu(self.up(self.norm(x))))


@_piece(lambda d: {"norm": nn.LayerNorm(d), "heads": nn.MultiheadAttention(d, 2 - d % 2, batch_first=True)})
def Attention(self: Any, x: Tensor, route: int) -> Tensor:
    h = self.norm(x)
    return self.heads(h, h, h, need_weights=True)[0]  # its other kernel cannot be differentiated twice


@_piece(lambda d: {"qkv": nn.Linear(d, 3 * d, bias=False), "proj": nn.Linear(d, d)})
def Sdpa(self: Any, x: Tensor, route: int) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    return self.proj((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v)


# No bias: before a norm its gradient is rounding alone, which bf16 and RMSprop together make large.
@_piece(lambda d: {"conv": nn.Conv1d(d, d, 3, padding=1, bias=False), "norm": nn.BatchNorm1d(d)})
def Conv(self: Any, x: Tensor, route: int) -> Tensor:
    return torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


@_piece(lambda d, cls: {"rnn": cls(d, d, batch_first=True)})
def Recurrent(self: Any, x: Tensor, route: int) -> Tensor:
    # Under autocast oneDNN's LSTM raises on processors without bfloat16.
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return self.rnn(x)[0]


@_piece(
    lambda d: {
        "gate": nn.Parameter(torch.tensor(0.5)),
        "one": nn.Parameter(torch.full((1,), 0.3)),
        "lin": nn.Linear(d, d),
    }
)
def ZeroDim(self: Any, x: Tensor, route: int) -> Tensor:
    return torch.tanh(self.lin(x) * self.gate) + self.one


@_piece(lambda d: {"none": nn.Parameter(torch.zeros(0, d)), "lin": nn.Linear(d, d)})
def Empty(self: Any, x: Tensor, route: int) -> Tensor:
    return torch.tanh(self.lin(x)) + self.none.sum()


@_piece(lambda d: {"body": nn.Sequential(nn.Linear(d, d + 3), nn.Tanh(), nn.Linear(d + 3, d, bias=False))})
def Sequence(self: Any, x: Tensor, route: int) -> Tensor:
    return self.body(x)


@_piece(lambda d: {"layers": nn.ModuleList([Mlp(d), Mlp(d)]), "norm": nn.LayerNorm(d)})
def Nested(self: Any, x: Tensor, route: int) -> Tensor:
    return self.norm(self.layers[1](self.layers[0](x)))


@_piece(lambda d: {"up": nn.Linear(d, d), "down": nn.Linear(d, d)})
def InPlace(self: Any, x: Tensor, route: int) -> Tensor:
    return self.down(self.up(x).mul_(0.5).tanh_()).add_(0.1)


@_piece(lambda d: {"lin": nn.Linear(d, d)})
def Twice(self: Any, x: Tensor, route: int) -> Tensor:
    return self.lin(torch.tanh(self.lin(x)).view(-1, x.shape[-1])).view_as(x)


@_piece(lambda d, other: {"lin": nn.Linear(d, d), "others": (other,)})  # a tuple: not a submodule
def Reads(self: Any, x: Tensor, route: int) -> Tensor:
    """Read the weight of a module that it does not hold, with its own operation."""
    h = F.linear(self.lin(x), self.others[0].weight)
    return torch.tanh(h.sum(-1, keepdim=True)) + x * 0.1


@_piece(lambda d: {"lin": nn.utils.parametrizations.weight_norm(nn.Linear(d, d))})
def WeightNorm(self: Any, x: Tensor, route: int) -> Tensor:
    return torch.tanh(self.lin(x))


@_piece(lambda d: {"experts": nn.ModuleList([nn.Linear(d, d) for _ in range(3)])})
def Experts(self: Any, x: Tensor, route: int) -> Tensor:
    return torch.tanh(self.experts[route % 3](x))


@_piece(lambda d: {"lin": nn.Linear(d, d), "calls": nn.Buffer(torch.zeros((), dtype=torch.long)),
                   "decay": nn.Buffer(torch.full((d,), 0.9), persistent=False)})  # fmt: skip
def Counter(self: Any, x: Tensor, route: int) -> Tensor:
    """Count training forwards in an integer buffer; another buffer is not saved."""
    if self.training:
        self.calls += 1
    return torch.tanh(self.lin(x)) * self.decay


@_piece(lambda d: {"lin": nn.Linear(d, d), "drop": nn.Dropout(0.3)})
def Dropout(self: Any, x: Tensor, route: int) -> Tensor:
    return self.drop(torch.tanh(self.lin(x)))


BUILD: dict[str, Callable[[int], Piece]] = {
    "mlp": Mlp, "attention": Attention, "sdpa": Sdpa, "conv": Conv, "gru": lambda d: Recurrent(d, nn.GRU),
    "lstm": lambda d: Recurrent(d, nn.LSTM), "zerodim": ZeroDim, "empty": Empty, "sequential": Sequence, "nested": Nested,
    "inplace": InPlace, "twice": Twice, "shared": Mlp, "tied": Mlp, "reads": Mlp, "weightnorm": WeightNorm,
    "experts": Experts, "counter": Counter, "dropout": Dropout,
}  # fmt: skip
"""`shared`, `tied` and `reads` depend on earlier blocks: see `Net`."""
PIECES = ("mlp", "mlp", *BUILD)


class Net(nn.Module):
    """Front, blocks, heads, and parameters of the root module."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch, d = arch, arch.width
        self.embed = nn.Embedding(VOCAB, d) if arch.front in ("embed", "both") else None
        self.proj = nn.Linear(d, d) if arch.front in ("linear", "both") else None
        self.conv = nn.Conv1d(d, d, 3, padding=1) if arch.front == "conv" else None
        if "position" in arch.root:
            self.position = nn.Parameter(torch.randn(TOKENS, d) * 0.1)
        if "empty" in arch.root:
            self.none = nn.Parameter(torch.zeros(0, 3))
        made: list[Piece] = []
        for block in arch.parsed:
            made.append(self._piece(block, made, d))
        half = len(made) // 2
        match arch.container:
            case "attributes":
                for i, piece in enumerate(made):
                    setattr(self, f"block{i}", piece)
            case "sequential":
                self.blocks = nn.Sequential(*made)
            case "nested":
                self.stages = nn.ModuleList([nn.ModuleList(made[:half]), nn.ModuleList(made[half:])])
            case _:
                self.blocks = nn.ModuleList(made)
        self.heads = nn.ModuleList([nn.Linear(d, VOCAB if i == 0 else 5 + i, bias=i > 0) for i in range(arch.heads)])
        if arch.tied and self.embed is not None:
            self.heads[0].weight = self.embed.weight
        if "scale" in arch.root:
            self.scale = nn.Parameter(torch.tensor(1.1))
        fronts = [front for front in (self.embed, self.proj, self.conv) if front is not None and arch.front_frozen]
        for module in [piece for piece, block in zip(made, arch.parsed) if block.frozen] + fronts:
            module.requires_grad_(False)

    def _piece(self, block: Block, made: list[Piece], d: int) -> Piece:
        if block.piece == "shared" and made:
            return made[0]
        linears = [m for piece in made for m in piece.modules() if type(m) is nn.Linear and m.in_features == d]
        linears = [m for m in linears if "weight" in m._parameters]
        piece = Reads(d, linears[0]) if block.piece == "reads" and linears else BUILD[block.piece](d)
        if block.piece == "tied":
            for other in made:
                if isinstance(other, Mlp):
                    piece.up.weight = other.up.weight
        piece.out = block.out
        return piece

    def pieces(self) -> list[Piece]:
        match self.arch.container:
            case "attributes":
                return [getattr(self, f"block{i}") for i in range(len(self.arch.parsed))]
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

            def run(t: Tensor, piece: Piece = piece, i: int = i) -> Tensor:
                return unwrap(piece(t, route, tape=tape, fail=i == fail))

            h = run(h) if recompute is None else checkpoint(run, h, use_reentrant=recompute)
        out = self.heads[head % len(self.heads)](torch.tanh(h))
        if "empty" in self.arch.root:
            out = out + self.none.sum()
        if "scale" in self.arch.root:
            out = out * self.scale
        return WRAP[self.arch.out](out)
