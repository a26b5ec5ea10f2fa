"""Scripts at stage 0 and at another, one after the other in the same two ranks: <out> and, as JSON, a script, its words and a
port for each run. A run ends its process group, and the next one's needs a port of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from harness import OUT, check, fresh, watch

watch()


def run(name: str, script: str, words: list[str], port: int) -> Any:
    os.environ["MASTER_PORT"] = str(port)
    fresh()
    return importlib.import_module(script).main([*words, f"--output-dir={OUT / name}"])


for name, case in json.loads(sys.argv[2]).items():
    check(name, lambda name=name, case=case: run(name, *case))
