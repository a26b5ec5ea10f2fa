"""One Trainer script, run plainly and at every stage in the same processes: what each run logged, and where it ended.

A run that fails, or waits for its peer for longer than `LIMIT`, takes only itself down: every run that follows one has a
process group of its own.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import OUT, RANK, WORLD, barrier, check, fresh, watch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer

import hf_zero as zero

Build = Callable[[dict[str, Any]], Trainer]
"""A case: a Trainer that was given these arguments besides its own."""

LIMIT = timedelta(seconds=float(os.environ.get("JOB_WAIT", "25")))
_CLOCKS = re.compile("runtime|per_second|step_time|profiling|/tps|time$")


def llama(tied: bool = False, seed: int = 0, kind: type[PreTrainedModel] = LlamaForCausalLM, **changes: Any) -> Any:
    """No biases: a key's bias has no true gradient, and Adam would make steps of its rounding."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return kind(LlamaConfig(**{**config, **changes}))


def settings(stage: int | None, name: str) -> dict[str, Any]:
    """The arguments of every case; `stage=None` is plain data parallel. What differs is one argument."""
    fresh()
    common: dict[str, Any] = {
        "output_dir": str(OUT / f"{name}_{stage}"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "optim": "adamw_torch",
    }
    if stage is not None:
        common["parallelism_config"] = zero.ZeroPlugin(stage=stage)
    return common


class Comparison:
    """Runs cases, remembers the plain run's weights, and says how far the others end from them."""

    def __init__(self, saves: Collection[str] = ()) -> None:
        self._saves = saves  # cases whose files are compared, too
        self._plain: dict[str, dict[str, Tensor]] = {}
        self._files: dict[str, dict[str, Tensor]] = {}
        self._runs = 0

    def run(self, name: str, build: Build, stage: int | None) -> None:
        """`stage=None` is plain data parallel, and comes first."""
        self._runs += 1
        if WORLD > 1 and not dist.is_initialized():
            store = f"file://{OUT.absolute()}/store{self._runs}"
            dist.init_process_group("gloo", store, timeout=LIMIT, rank=RANK, world_size=WORLD)
        check(f"{name} {'plain' if stage is None else stage}", lambda: self._together(name, stage, build))

    def _together(self, name: str, stage: int | None, build: Build) -> dict[str, Any]:
        """The outcome where all ranks have one."""
        try:
            outcome = self._outcome(name, stage, build)
            barrier()
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()  # whoever waits for this rank learns it
            raise
        return outcome

    def _outcome(self, name: str, stage: int | None, build: Build) -> dict[str, Any]:
        torch.manual_seed(1)
        started = time.perf_counter()
        run = build(settings(stage, name))
        before = {key: value.clone() for key, value in run.model.state_dict().items()}
        run.train()
        after = {key: value.clone() for key, value in run.model.state_dict().items()}  # of rank 0, under the plugin
        files = saved(run) if name in self._saves else {}
        if stage is None:
            self._plain[name], self._files[name] = after, files
        return {
            "class": type(run).__name__,
            "logs": [numbers(entry) for entry in run.state.log_history],
            "apart": apart(after, self._plain.get(name, {})) if RANK == 0 else {},
            "files": sorted(files),
            "files apart": apart(files, self._files.get(name, {})),
            "seconds": time.perf_counter() - started,
            "moved": [key for key in after if not torch.equal(after[key], before[key])] if RANK == 0 else [],
        }


def compare(cases: Mapping[str, Build], saves: Collection[str] = ()) -> None:
    """The whole of a job: every case, plainly first and then at every stage."""
    watch()
    stages, names = arguments(cases)
    comparison = Comparison(saves)
    for stage in stages:
        for name in names:
            comparison.run(name, cases[name], stage)
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(run: Trainer) -> dict[str, Tensor]:
    """What `save_model` writes."""
    run.save_model()
    barrier()
    return {
        key: value
        for file in Path(str(run.args.output_dir)).glob("*.safetensors")
        for key, value in load_file(file).items()
    }


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """What was logged and is no measurement of time. `NaN` is a word: no two are equal, and JSON has none."""
    return {
        key: float(value) if math.isfinite(value) else str(value)  # type: ignore[misc]
        for key, value in entry.items()
        if isinstance(value, (int, float)) and not _CLOCKS.search(key)
    }


def apart(mine: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the largest difference in parts of the largest value; infinite where there is none or no number."""
    out = {}
    for key in sorted({*mine, *plain}):
        if key not in mine or key not in plain or mine[key].shape != plain[key].shape:
            out[key] = float("inf")
            continue
        one, other = mine[key].double(), plain[key].double()
        gap = float((one - other).abs().max()) if one.numel() else 0.0
        if gap != 0.0:
            scale = float(other.abs().max())
            out[key] = gap / scale if math.isfinite(gap) and scale else float("inf")
    return out


def arguments(default: Mapping[str, Any]) -> tuple[list[int | None], list[str]]:
    """Of a job: OUT [STAGES [NAME …]], such as `plain,1,3`, for a closer look at some."""
    words = sys.argv[2].split(",") if len(sys.argv) > 2 else ["plain", "1", "2", "3"]
    return [None if word == "plain" else int(word) for word in words], sys.argv[3:] or [*default]
