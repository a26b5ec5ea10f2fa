"""Several machines: two torchrun agents on this one's loopback, and the files that start the scripts elsewhere."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.kit.pool import free_port

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
import hf_zero as zero

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=3))
losses = []
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
engine.save(sys.argv[1] + "/saved")
found = {"losses": losses, "node": os.environ["GROUP_RANK"], "world": dist.get_world_size()}
with open(f"{sys.argv[1]}/rank{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
"""


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(folder / "program.py"), str(folder)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def ended(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [agent.wait(90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.wide
@pytest.mark.gloo
def test_two_nodes_train_as_one_does(tmp_path: Path) -> None:
    port = free_port()
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    nodes = [
        start(
            two,
            "--nnodes=2",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            "--nproc-per-node=1",
        )
        for node in range(2)
    ]
    assert ended(nodes) == [0, 0]
    assert ended([start(one, "--standalone", "--nproc-per-node=2")]) == [0]
    for rank in range(2):
        found = json.loads((two / f"rank{rank}.json").read_text())
        assert found["node"] == str(rank)
        assert found["world"] == 2
        assert found["losses"] == json.loads((one / f"rank{rank}.json").read_text())["losses"]
    weights = [(folder / "saved" / "model.safetensors").read_bytes() for folder in (one, two)]
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
