"""What the jobs share: named checks, tiny models, data, and comparisons. Imported by scripts that run on every rank."""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[3]))  # scripts are started by their path

import hf_zero as zero
from tests import models

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WORDS = 60
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
SAVED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer/exp_avg.safetensors",
    "optimizer/exp_avg_sq.safetensors",
    "optimizer/optimizer.json",
]
"""What a checkpoint of GPT-2 and AdamW has, whichever library asked for it."""

_found: dict[str, Any] = {}


def check(name: str, work: Callable[[], Any]) -> Any:
    """Run one check on this rank and write down what it returned, or how it failed."""
    try:
        _found[name] = {"value": work()}
    except Exception:
        _found[name] = {"error": traceback.format_exc()[-4000:]}
        print(f"rank {RANK}: check {name} failed\n{_found[name]['error']}", flush=True)
    (OUT / f"rank{RANK}.json").write_text(json.dumps(_found))
    return _found[name].get("value")


def watch() -> None:
    """Shortly before the launcher's limit, say where every thread is, so that a hang has a place."""
    gc.freeze()  # the Trainer collects garbage at every start; what the imports made need not be looked at each time
    faulthandler.dump_traceback_later(max(5.0, float(os.environ.get("JOB_TIMEOUT", "150")) - 10), exit=True)


def fresh() -> None:
    """Forget accelerate's process-wide state, so that one process can hold runs with different settings."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def raised(work: Callable[[], Any]) -> str:
    """`Type: message` of what `work` raises; empty when it raises nothing."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_refused(work: Callable[[], Any], *parts: str, kind: str = "ConfigError") -> None:
    said = raised(work)
    assert said.startswith(f"{kind}: "), said
    for part in parts:
        assert part in said, (part, said)


def gpt2(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings = {"vocab_size": 64, "n_positions": 32, "eos_token_id": 1, "use_cache": True, **changes}
    return models.gpt2(**settings)


def bert(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def arguments(folder: str | Path, stage: int | None, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Settings of a small run on CPUs that reports to nobody, under the plugin where there is a stage."""
    if stage is not None:
        changes["parallelism_config"] = zero.ZeroPlugin(stage=stage)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 2}
    return kind(output_dir=str(folder), **{**quiet, **changes})


def tokenizer() -> PreTrainedTokenizerFast:
    """Of four special words, and `w0`, `w1`, … behind them: as many as the models here have embeddings."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{i}" for i in range(WORDS))])}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    names = {f"{word[1:-1]}_token": word for word in special}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


class Tokens(torch.utils.data.Dataset):
    """Random token rows; `labels` are the tokens, or a class computed from them."""

    def __init__(self, rows: int = 32, length: int = 12, classes: int = 0, seed: int = 7) -> None:
        ids = torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
        self.rows = [{"input_ids": row, "labels": row.sum() % classes if classes else row} for row in ids]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference of two state dicts; infinite where names or shapes differ, or it is no number."""
    if sorted(left) != sorted(right):
        return float("inf")
    worst = 0.0
    for name, tensor in left.items():
        if tensor.shape != right[name].shape or tensor.dtype != right[name].dtype:
            return float("inf")
        if tensor.numel():
            gap = float((tensor.double() - right[name].double()).abs().max())
            worst = max(worst, gap) if math.isfinite(gap) else float("inf")
    return worst


def optimizer_distance(left: dict[str, Any], right: dict[str, Any]) -> float:
    """The same for two optimizer state dicts, groups and scalars included."""
    skipped = {"params"}
    groups = [
        [{k: v for k, v in g.items() if k not in skipped} for g in side["param_groups"]] for side in (left, right)
    ]
    sizes = [[list(g["params"]) for g in side["param_groups"]] for side in (left, right)]
    if groups[0] != groups[1] or sizes[0] != sizes[1] or list(left["state"]) != list(right["state"]):
        return float("inf")
    flat = [
        {f"{i}.{k}": torch.as_tensor(v) for i, e in side["state"].items() for k, v in e.items()}
        for side in (left, right)
    ]
    return distance(*({name: side[name] for name in sorted(side)} for side in flat))


def flip(path: Path, at: int = -3) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files_under(folder: Path, but: Iterable[str] = ()) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name not in set(but))
