"""Machines: what is free, what control groups and limits leave, what a probe measures, files of machines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import hf_zero as zero
from hf_zero.plan.machine import Machine, free_host_bytes, free_memory, group_bytes

CPU = torch.device("cpu")


def test_what_is_free_is_shared_and_keeps_a_margin(tmp_path):
    one, four = free_memory(CPU, offload_dir=str(tmp_path)), free_memory(CPU, ranks=4, offload_dir=str(tmp_path))
    assert one.shares_memory
    assert one.device_memory == one.host_memory
    assert 0.2 < 4 * four.host_memory / one.host_memory < 5  # others use the machine meanwhile
    assert four.disk_free == pytest.approx(one.disk_free / 4, rel=0.05)
    assert one.host_memory < free_host_bytes() * 1.2
    # A folder that will be made has the space of the one it will be in.
    assert free_memory(CPU, offload_dir=str(tmp_path / "a" / "b")).disk_free == pytest.approx(one.disk_free, rel=0.05)


def test_control_groups_limit_what_is_free(tmp_path):
    """Version 2, version 1, and a limit set on a group above."""
    root = tmp_path / "cgroup"
    for group, limit, used in ((root / "job", "1000000", "700000"), (root / "job" / "rank", "max", "300000")):
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(used)
        (group / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    membership = tmp_path / "self"
    membership.write_text("0::/job/rank\n")
    assert group_bytes(root, membership) == 350_000
    old = root / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("5000")
    (old / "memory.usage_in_bytes").write_text("1000")
    (old / "memory.stat").write_text("total_inactive_file 500\n")
    membership.write_text("3:cpu:/job\n4:memory:/job\n")
    assert group_bytes(root, membership) == 4500
    assert group_bytes(root, tmp_path / "none") == 1 << 62


def test_an_address_space_limit_counts():
    program = (
        "import resource, torch; from hf_zero.plan.machine import free_host_bytes; "
        "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30)); print(free_host_bytes())"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert 0 < int(out.stdout) < 3 << 30


def test_files_of_machines(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"device_memory": 24 << 30, "link_up": 2.5e10, "flops": {"bfloat16": 1e14}}))
    assert Machine.load(path) == Machine(device_memory=24 << 30, link_up=2.5e10, flops={"bfloat16": 1e14})
    for text, message in (
        ("{", "not a machine file"),
        ("[1]", "expected a JSON object"),
        ('{"speed": 1}', "unknown speed"),
        ('{"link_up": "fast"}', "link_up must be a number"),
        ('{"flops": {"float32": -1}}', "flops must be a number"),
        ('{"latency": -1e-6}', "latency must be a number"),
        ('{"link_up": NaN}', "link_up must be a number"),
        ('{"link_up": 1e999}', "link_up must be a number"),
        ('{"flops": 3}', "flops must be numbers"),
        ('{"flops": {"float32": 0}}', "flops is 0"),
        ('{"link_down": 0}', "link_down is 0"),
    ):
        path.write_text(text)
        with pytest.raises(zero.ConfigError, match=message):
            Machine.load(path)


def test_a_plan_is_for_the_least_of_all_ranks():
    a = Machine(
        device_memory=10,
        host_memory=20,
        disk_read=5.0,
        link_up=1.0,
        latency=1.0,
        flops={"float32": 3.0, "bfloat16": 1.0},
    )
    b = Machine(device_memory=12, host_memory=8, disk_read=7.0, shares_memory=True, latency=2.0, flops={"float32": 2.0})
    least = Machine.minimum([a, b])
    assert least == Machine(
        device_memory=10, host_memory=8, disk_read=5.0, shares_memory=True, latency=2.0, flops={"float32": 2.0}
    )
