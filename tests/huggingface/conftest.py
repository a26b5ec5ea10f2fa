"""What accelerate keeps for the whole process does not outlive a test; small language models in folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.kit.jobs.harness import fresh
from tests.kit.pool import RankPool

VOCAB = 500


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    fresh()
    yield
    fresh()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it when it is given an FSDP plugin


def llama(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=4,
        )
    )  # fmt: skip


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of language models: `small`; `bf16`."""
    root = tmp_path_factory.mktemp("bases")
    llama(2, 64).save_pretrained(root / "small")
    llama(3, 64).to(torch.bfloat16).save_pretrained(root / "bf16")
    return root


def _inside(rank: int, world: int, folder: Path, work: Callable[[], Any]) -> Any:
    fresh()
    with contextlib.chdir(folder):
        return work()


@pytest.fixture(scope="session")
def on_two(pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Calls a function on two ranks, in a folder that all such calls share; returns what it returned on rank 0."""
    folder = tmp_path_factory.mktemp("two")

    def call(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return pools[2].run(_inside, folder, partial(work, *args, **named), timeout_s=240)[0]

    return call
