"""Several machines: two torchrun agents on this one's loopback, and the files that start the scripts elsewhere."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

import hf_zero as zero
from tests.kit.elastic import agent, ended, lose, rows_by_step
from tests.kit.launch import JOBS
from tests.kit.pool import free_port

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
PROGRAM = str(JOBS / "elastic_plain.py")


@pytest.mark.wide
@pytest.mark.gloo
def test_two_nodes_train_as_one_does(tmp_path: Path) -> None:
    two, one, log = tmp_path / "two", tmp_path / "one", tmp_path / "log"
    two.mkdir()
    one.mkdir()
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--nproc-per-node=1"]
    agents = [agent(log, *words, f"--node-rank={node}", PROGRAM, str(two)) for node in range(2)]
    agents.append(agent(log, "--standalone", "--nproc-per-node=2", PROGRAM, str(one)))
    try:
        for each in agents:
            ended(each, log)
    finally:
        for each in agents:
            lose(each)
    steps = rows_by_step(two, [2])
    assert len(steps) == 12
    assert steps == rows_by_step(one, [2])
    weights = [(zero.latest_checkpoint(folder) / "model.safetensors").read_bytes() for folder in (one, two)]
    assert weights[0] == weights[1]


def test_accelerate_reads_its_file() -> None:
    config = load_config_from_file(str(LAUNCH / "accelerate_2x8.yaml"))
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (2, 16, "bf16")


def test_the_other_files_are_well_formed() -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=True)
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    assert job["kind"] == "TrainJob"
    assert job["spec"]["trainer"]["command"][:2] == ["torchrun", "scripts/finetune.py"]
    ast.parse((LAUNCH / "ray_train.py").read_text())
