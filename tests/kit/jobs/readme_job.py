"""One Python block of README.md, as a user starts it: `readme_job.py OUT README NUMBER BASE [--ddp]`.

What it ends with on each rank goes to files: the weights of its model, and the rows that the rank trained on. `--ddp`: with DDP
written in place of hf_zero. BASE is the folder of a small model, in place of the one that a block names on the Hub.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import OUT, RANK, check, watch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import hf_zero as zero

ENDS = ("dist.destroy_process_group()\n", "accelerator.end_training()\n")
"""Last lines, after which weights cannot be gathered any more: these come after."""
DDP = (
    (", parallelism_config=zero.ZeroPlugin(stage=3)", ""),
    (", parallelism_config=zero.ZeroPlugin(stage=2)", ""),
    (', parallelism_config=zero.ZeroPlugin(stage=3, offload_params="cpu")', ""),
    ("with zero.Init():", "if True:"),
    ('with zero.Init(offload_params="cpu"):', "if True:"),
    (
        "engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3), device=device)",
        "model = torch.nn.parallel.DistributedDataParallel(model)",
    ),
    ("engine.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"),
    ('engine.save("out")', "pass"),
)


def run(code: str) -> dict[str, Any]:
    rows: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and not rows_are_positions(args[0]):
            rows.append(args[0].detach().cpu().clone())

    def rows_are_positions(ids: Tensor) -> bool:
        return bool((ids[0] == torch.arange(ids.shape[-1])).all())

    end = next((line for line in ENDS if code.endswith(line)), "")
    names: dict[str, Any] = {"__name__": "__main__"}
    handle = register_module_forward_pre_hook(note)
    exec(compile(code.removesuffix(end), "train.py", "exec"), names)  # noqa: S102
    handle.remove()
    model = names["trainer"].model if "trainer" in names else names["model"]
    model = getattr(model, "module", model)
    engine = zero.engine_of(model)
    if engine is None:
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    else:
        with engine.unsharded():
            weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    torch.save({"weights": weights, "rows": torch.cat(rows)}, OUT / f"run{RANK}.pt")
    found = {"ranks": dist.get_world_size(), "stage": None if engine is None else engine.config.stage}
    exec(compile(end, "train.py", "exec"), names)  # noqa: S102
    return found


def main() -> None:
    watch()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    code = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[2]).read_text("utf-8"), re.S | re.M)[int(sys.argv[3])]
    code = code.replace("meta-llama/Meta-Llama-3-8B", sys.argv[4])
    os.chdir(OUT)
    if "--ddp" in sys.argv:
        for ours, plain in DDP:
            code = code.replace(ours, plain)
        if "zero." in code:
            raise SystemExit(f"hf_zero is left in the file for DDP:\n{code}")
    check("run", lambda: run(code))
    os._exit(0)


main()
