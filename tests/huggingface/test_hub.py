"""From a checkpoint to the Hub and back, with the real client and a Hub on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.hub_server import Hub
from tests.kit.launch import Results, launch

pytestmark = [pytest.mark.gloo, pytest.mark.wide]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(multipart_bytes=64 << 10) as server:
        yield server


@pytest.fixture(scope="module")
def job(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("export_job", tmp_path_factory.mktemp("export"), hub.url, ranks=1, warm=False)


def test_private_repository(hub: Hub, job: Results) -> None:
    job("train")
    found = job("private_push")
    assert hub.repos["user/tiny"].private
    assert ("main", "the end") in hub.repos["user/tiny"].commits
    assert found["returned"] is None
    assert found["files"] == [
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert found["weights"]
    assert found["loaded"]
    assert found["beside"], "the temporary folder was left"
    assert (
        found["stranger"] == "RepositoryNotFoundError" or "401" in found["stranger"] or "HTTPError" in found["stranger"]
    )
    assert 'from_pretrained("user/tiny")' in found["card"]
    assert "stage 2 on 1 rank" in found["card"]


def test_sent_in_parts(hub: Hub, job: Results) -> None:
    job("private_push")
    sent = [request for request in hub.requests if request.startswith("PUT /lfs/") and request.count("/") == 3]
    assert len(sent) > 2
    assert any(request.endswith("/complete") for request in hub.requests)


def test_branch(hub: Hub, job: Results) -> None:
    found = job("branch_push")
    assert found["equal"]
    assert found["loaded"]
    assert found["dtype"] == "torch.bfloat16"
    assert found["main"] == job("private_push")["files"]
    assert Path(found["kept"]).is_dir()


def test_command_line(hub: Hub, job: Results) -> None:
    found = job("command_line")
    assert found["status"] == 0
    assert "uploaded to" in found["said"]
    assert not hub.repos["user/typed"].private
    assert found["public"].startswith("ConfigError: user/typed exists on the Hub and is public")


@pytest.mark.parametrize(
    ("what", "kind", "part"),
    [
        ("name", "ConfigError", "'user/repo'"),
        ("token", "ConfigError", "hf auth login"),
        ("none", "ConfigError", "hf auth login"),
        ("forbidden", "ConfigError", "may not write"),
        ("upload", "CheckpointError", "507"),
        ("commit", "CheckpointError", "507"),
    ],
)
def test_refusals(job: Results, what: str, kind: str, part: str) -> None:
    said = job("refusals")[what]
    assert said.startswith(kind)
    assert part in said
    assert "hf_bad" not in said


def test_unreachable(job: Results) -> None:
    said = job("unreachable")
    assert said.startswith("hf-zero: ")
    assert "Check the network and HF_ENDPOINT" in said


def test_damaged_checkpoint_makes_nothing(hub: Hub, job: Results) -> None:
    said = job("damaged")
    assert said.startswith("CheckpointError")
    assert "model.safetensors" in said
    assert "user/damaged" not in hub.repos


def test_nothing_leaves_the_machine(job: Results) -> None:
    job("damaged")
    assert job("contacted") == ["127.0.0.1"]
