"""Measure memory and time of long sequences: `sp_size`, checkpoints, `offload_activations` and `chunked_loss`.

    python benchmarks/long_context.py                                            # 4 ranks, S = 1, 2, 4, to 8,192 tokens
    python benchmarks/long_context.py --ranks 2 --sp-size 1 2 --tokens 1024 2048 --output runs/long.json

A Llama of 4 blocks at stage 3, one row per group of S ranks, ranks on CPUs. Memory is what the process has more at the peak of
a step than before it (VmHWM after a reset), the most of any rank. The exchange is what a rank sends in one step, counted. Each
launch is of its own. `--limit` adds the longest of the sequences whose peak stays below it. `--plot` draws the peaks, with
`--rows` those of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import MALLOC, free_port, machine

SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 688,
    "vocab_size": 32000, "max_position_embeddings": 1 << 20, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints": {"gradient_checkpointing": True},
    "all": {"gradient_checkpointing": True, "offload_activations": "disk", "chunked_loss": True},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sp-size", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--features", nargs="+", choices=[*FEATURES], default=[*FEATURES])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a launch; their median counts")
    parser.add_argument("--limit", type=int, default=2 << 30, help="bytes of a rank for the longest sequence")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--plot", type=Path, help="PNG file for the peaks; needs matplotlib")
    parser.add_argument("--rows", type=Path, help="take the results from this JSON file, and measure nothing")
    return parser.parse_args()


def launch(ranks: int, case: dict[str, Any]) -> list[dict[str, float]]:
    """Each rank's measurements of one case."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "_CASE": json.dumps(case),
        **MALLOC["pinned"],
    }
    processes = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | shared | {"RANK": str(rank)}, stdout=-1)
        for rank in range(ranks)
    ]
    try:
        found = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(each) for each in found]


def memory(name: str) -> int:
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found) * 1024


def work(case: dict[str, Any]) -> dict[str, float]:
    """Run on one rank: a short step, then the timed ones."""
    import torch
    import transformers

    import hf_zero as zero

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    settings = dict(case["settings"])
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()  # type: ignore[arg-type]
    if settings.pop("gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    size = case["sp_size"]
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3, sp_size=size, stall_s=0, **settings))
    group = engine.rank // size

    def step(tokens: int, seed: int) -> float:
        ids = torch.randint(
            0, SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(97 * group + seed)
        )
        torch.distributed.barrier()
        start = time.perf_counter()
        model(**engine.local_sequence({"input_ids": ids, "labels": ids})).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step(64, 0)
    step(64, 1)
    engine.traffic.reset()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    seconds = statistics.median(step(case["tokens"], number) for number in range(case["steps"]))
    peak = memory("VmHWM") - before
    count = engine.traffic.kinds["sequence"].bytes if size > 1 else 0
    torch.distributed.destroy_process_group()
    return {"peak_bytes": peak, "seconds": seconds, "sequence_bytes": count / case["steps"]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw peaks against tokens, a line for each setting."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for features, style in zip(FEATURES, (":", "--", "-")):
        for color, size in enumerate(sorted({row["sp_size"] for row in rows})):
            line = [row for row in rows if (row["features"], row["sp_size"]) == (features, size)]
            if line:
                tokens, peaks = [row["tokens"] for row in line], [row["peak_bytes"] / (1 << 20) for row in line]
                axes.plot(tokens, peaks, style, color=f"C{color}", marker="o", ms=3, label=f"{features}, S={size}")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="peak of a rank, MiB")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    options = parse()
    if options.rows and options.plot:
        draw(json.loads(options.rows.read_text())["rows"], options.plot)
        return
    about, rows = machine(options.ranks), []
    for features in options.features:
        for size in options.sp_size:
            for tokens in options.tokens:
                case = {"settings": FEATURES[features], "sp_size": size, "tokens": tokens, "steps": options.steps}
                found = launch(options.ranks, case)
                most = {name: max(each[name] for each in found) for name in found[0]}
                rows.append({"features": features, "sp_size": size, "tokens": tokens, **most})
                print(
                    f"{features:12} S={size} {tokens:7,} tokens: {most['peak_bytes'] / (1 << 20):8,.0f} MiB, "
                    f"{most['seconds']:7.2f} s, exchange {most['sequence_bytes']:13,.0f} bytes",
                    flush=True,
                )
    longest = {}
    for row in rows:
        if row["peak_bytes"] <= options.limit:
            name = f"{row['features']} S={row['sp_size']}"
            longest[name] = max(longest.get(name, 0), row["tokens"])
    print(f"longest within {options.limit:,} bytes of a rank: {longest}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": about, "ranks": options.ranks, "model": SIZES, "rows": rows, "longest": longest}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    if "_CASE" in os.environ:
        print(json.dumps(work(json.loads(os.environ["_CASE"]))))
    else:
        main()
