"""The command of docs/long-context.md, as it is pasted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks_of


@pytest.mark.wide
@pytest.mark.gloo
def test_the_command(tmp_path: Path) -> None:
    block, _ = blocks_of(ROOT / "docs" / "long-context.md", "bash")
    program, *words = shlex.split(block)
    assert program == "torchrun"
    shorter = ["--max-steps", "1", "--max-eval-samples", "4", "--output-dir", str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *shorter]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "group of 2 ranks" in done.stdout
    assert (tmp_path / "model.safetensors").is_file()
