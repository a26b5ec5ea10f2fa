"""What accelerate keeps for the whole process does not outlive a test; small language models in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

pytest.register_assert_rewrite("tests.kit.same")

from tests.kit.jobs.harness import fresh  # noqa: E402

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
