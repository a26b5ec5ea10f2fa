"""Measure memory and time of creating a model under `zero.Init`, against the plain constructor and the raw disk.

    python benchmarks/init.py --folder /data/scratch                # a 1.3 GB Llama-class model, 2 ranks
    python benchmarks/init.py --folder /data/scratch --layers 32 --output runs/init.json

Each measurement is one launch of all ranks. Memory is the high-water mark of resident anonymous memory over that after the
imports; glibc's thresholds are pinned, so that freed memory is returned. Files leave the page cache before each load. `raw`
reads the same share of the same bytes with plain `preadv` into one small buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import MALLOC, free_port, threads

KINDS = (
    "raw",
    "zero from_pretrained",
    "zero from_config",
    "zero from_config fast",
    "stock from_config",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/init"), help="on the disk to be measured")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=16_000,
    )


def launch(options: argparse.Namespace, kind: str) -> list[dict[str, float]]:
    """Run one measurement, one process per rank; return results in rank order."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(options.ranks),
        "OMP_NUM_THREADS": str(threads(options.ranks)),
        "HF_HUB_OFFLINE": "1",
        "_KIND": kind,
    } | MALLOC["pinned"]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(options.ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{kind}: a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def run_rank(options: argparse.Namespace, kind: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import hf_zero as zero

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = options.folder / "model"
    config = config_of(options)
    torch.manual_seed(0)
    if rank == 0:
        for file in folder.glob("*.safetensors"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def raw() -> None:
        buffer = memoryview(bytearray(8 << 20))
        for file in sorted(folder.glob("*.safetensors")):
            fd = os.open(file, os.O_RDONLY)
            total = os.fstat(fd).st_size
            low, high = total * rank // size, total * (rank + 1) // size
            for start in range(low, high, len(buffer)):
                os.preadv(fd, [buffer[: min(len(buffer), high - start)]], start)
            os.close(fd)

    def born(build: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        def work() -> Any:
            with zero.Init(**options):
                return build()

        return work

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder)

    def make() -> Any:
        return AutoModelForCausalLM.from_config(config)

    work = {
        "raw": raw,
        "zero from_pretrained": born(load),
        "zero from_config": born(make),
        "zero from_config fast": born(make, init="fast"),
        "stock from_config": make,
    }[kind]
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS") - status("RssFile")
    start = time.perf_counter()
    model = work()
    seconds = time.perf_counter() - start
    peak, after = status("VmHWM") - status("RssFile") - before, status("VmRSS") - status("RssFile") - before
    del model
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "peak_bytes": peak, "after_bytes": after}


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel does not report {field}")


def main() -> int:
    options = parse()
    if os.environ.get("_KIND"):
        print(json.dumps(run_rank(options, os.environ["_KIND"])))
        return 0
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoModelForCausalLM

    folder = options.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    AutoModelForCausalLM.from_config(config_of(options)).save_pretrained(folder, max_shard_size="500MB")
    os.sync()
    payload = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        for kind in KINDS:
            found[kind].append(launch(options, kind))
    table = Table(
        title=f"{payload / 1e6:.0f} MB of weights on {options.ranks} ranks (the rank with most)", min_width=100
    )
    for heading in ("what", "seconds", "of raw speed", "peak MB", "÷ shard", "afterwards MB"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    raw = [max(rank["seconds"] for rank in ranks) for ranks in found["raw"]]
    for kind, rounds in found.items():
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in rounds]
        peak, after = (
            statistics.median(max(r[f] for r in ranks) for ranks in rounds) for f in ("peak_bytes", "after_bytes")
        )
        share = statistics.median(a / b for a, b in zip(raw, seconds))
        table.add_row(
            kind,
            f"{statistics.median(seconds):.2f}",
            f"{share:.2f}" if "pretrained" in kind else "",
            f"{peak / 1e6:.0f}",
            f"{peak / (payload / options.ranks):.2f}",
            f"{after / 1e6:.0f}",
        )
    Console(width=110).print(table)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "options": {k: getattr(options, k) for k in ("layers", "width", "ranks")},
            "payload_bytes": payload,
            "rounds": found,
        }
        options.output.write_text(json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
