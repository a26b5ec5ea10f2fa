"""Scripts at stage 0 and at another, one after the other in the same two ranks: <out> <script> <case> <words> …, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from harness import OUT, RANK, check, fresh, watch

watch()


def meet(name: str) -> None:
    """A run ends its process group; the next one's needs a port of its own, which rank 0 chooses."""
    told = OUT / f"port of {name}"
    if RANK == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            told.with_suffix(".new").write_text(str(probe.getsockname()[1]))
        told.with_suffix(".new").rename(told)
    while not told.exists():
        time.sleep(0.02)
    os.environ["MASTER_PORT"] = told.read_text()


def run(name: str, script: str, words: list[str]) -> Any:
    meet(name)
    fresh()
    return importlib.import_module(script).main([*words, f"--output-dir={OUT / name}"])


for name, (script, words) in json.loads(sys.argv[2]).items():
    check(name, lambda name=name, script=script, words=words: run(name, script, words))
