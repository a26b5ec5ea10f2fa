"""Tiny models, batches and loops; what holds a folder's files open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hf_zero as zero
from hf_zero.checkpoint.manifest import MANIFEST, Manifest, digest_file
from tests import models
from tests.kit.transports import SIZES, Roads, Sizes

transformers.logging.set_verbosity_error()
VOCAB = 97


def gpt2(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.gpt2(**{"vocab_size": VOCAB, **changes})


def bert(frozen: bool = True, **changes: Any) -> nn.Module:
    """Its first layer and position embeddings are frozen."""
    torch.manual_seed(0)
    model = models.bert(**{"vocab_size": VOCAB, **changes}).requires_grad_(True)
    if frozen:
        model.bert.encoder.layer[0].requires_grad_(False)
        model.bert.embeddings.position_embeddings.requires_grad_(False)
    return model


MODELS = {"gpt2": gpt2, "bert": bert}


@dataclass(frozen=True)
class Case:
    model: str = "gpt2"
    stage: int = 2
    dtype: str = "no"  # accelerate's words: no, bf16, fp16
    accumulation: int = 1
    clip: float | None = None
    steps: int = 10
    groups: int = 1
    offload_optimizer: str = "none"
    offload_params: str = "none"
    step_in_backward: bool = False
    checkpointing: bool = False
    sizes: Sizes = SIZES

    def config(self, offload_dir: str | None = None) -> zero.ZeroConfig:
        return zero.ZeroConfig(
            stage=self.stage,
            offload_optimizer=self.offload_optimizer,
            offload_params=self.offload_params,
            offload_dir=offload_dir,
            step_in_backward=self.step_in_backward,
        )

    def roads(self, roads: Roads | None = None) -> Roads:
        return replace(roads or Roads(), sizes=self.sizes)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, VOCAB, (2, 8), generator=generator)


def optimizer_for(model: nn.Module, groups: int, cls: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    options = options or {"lr": 1e-3}
    params = [p for p in model.parameters() if p.requires_grad]
    if groups == 1:
        return cls(params, **options)
    return cls(
        [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        **options,
    )


def loss_of(model: Any, rank: int, step: int, micro: int = 0) -> Tensor:
    ids = batch(step, micro, rank)
    return model(input_ids=ids, labels=ids).loss


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *steps: int) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def holders(folder: str | os.PathLike[str]) -> int:
    """Processes that have a file of the folder open. The kernel frees a file that has neither a name nor a holder.

    Free space would say it too, but is everybody's.
    """
    return sum(bool(_open_in(folder, process)) for process in os.listdir("/proc") if process.isdigit())


def nameless_files(folder: str | os.PathLike[str]) -> int:
    """Files in the folder that this process has open and that have no name (any more)."""
    return sum(path.endswith(" (deleted)") for path in _open_in(folder, "self"))


def _open_in(folder: str | os.PathLike[str], process: str) -> list[str]:
    paths = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile; another user's
        for fd in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                paths.append(os.readlink(f"/proc/{process}/fd/{fd}"))
    return [path for path in paths if path.startswith(f"{os.fspath(folder)}/")]


def sign(folder: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Give a folder the manifest that a save writes, with digests that fit. `facts`: None: those of the one that it has."""
    facts = Manifest.read(folder).facts if facts is None else facts
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    manifest = Manifest({name: digest_file(folder / name) for name in names if name != MANIFEST}, {**facts})
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


def is_on_the_bar(kind: str, told: int, found: int, unit_bytes: int, beside_bytes: int = 0) -> bool:
    """Whether a peak of this kind was predicted to 3 % and one unit; of all kinds together, to a unit and its gradients.

    `beside_bytes`: what no formula counts.
    """
    allowed = 2 * unit_bytes if kind == "all" else unit_bytes
    return found <= 1.03 * told + allowed + beside_bytes and told <= 1.03 * found + allowed
