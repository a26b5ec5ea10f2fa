"""Exports to a Hub that listens on this machine's loopback, through the real client, and loading back from there."""

from __future__ import annotations

import os
import sys

os.environ.update(HF_ENDPOINT=sys.argv[2], HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(HF_HOME=os.path.join(sys.argv[1], "cache"))
os.environ.pop("HF_TOKEN", None)

import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import urllib.request  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from harness import OUT, check, files_under, gpt2, raised, watch  # noqa: E402
from huggingface_hub import snapshot_download  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import hf_zero as zero  # noqa: E402
import hf_zero.huggingface  # noqa: E402
from hf_zero.cli import main as cli  # noqa: E402

TOKEN = "hf_good"
CHECKPOINT = OUT / "run" / "checkpoint-3"
_contacted: set[str] = set()


def note_contact(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        _contacted.add(str(arguments[1][0]))
    elif event == "socket.getaddrinfo":
        _contacted.add(str(arguments[0]))


def fail(rules: dict[str, int]) -> None:
    request = urllib.request.Request(f"{sys.argv[2]}/control", json.dumps(rules).encode(), method="POST")
    urllib.request.urlopen(request).close()


def train() -> None:
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    ids = torch.arange(12).reshape(1, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    engine.save(CHECKPOINT)
    engine.detach()


def private_push() -> dict[str, Any]:
    """To a private repository, in parts; a temporary folder is used and removed."""
    left = zero.export(CHECKPOINT, push_to_hub="user/tiny", private=True, token=TOKEN, commit_message="the end")
    fetched = Path(snapshot_download("user/tiny", token=TOKEN))
    model = AutoModelForCausalLM.from_pretrained("user/tiny", token=TOKEN)
    mine = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    return {
        "returned": left,
        "files": files_under(fetched),
        "weights": (fetched / "model.safetensors").read_bytes() == (CHECKPOINT / "model.safetensors").read_bytes(),
        "loaded": all(torch.equal(a, b) for a, b in zip(model.parameters(), mine.parameters())),
        "beside": files_under(CHECKPOINT.parent) == [f"checkpoint-3/{name}" for name in files_under(CHECKPOINT)],
        "card": (fetched / "README.md").read_text(),
        "stranger": raised(lambda: snapshot_download("user/tiny", token=False, cache_dir=OUT / "other")).split(":")[0],
    }


def branch_push() -> dict[str, Any]:
    """Cast, to a branch, with a folder kept; `main` stays as it was."""
    kept = zero.export(
        CHECKPOINT,
        OUT / "half",
        dtype="bfloat16",
        push_to_hub="user/tiny",
        revision="half/precision",
        token=TOKEN,
    )
    fetched = Path(snapshot_download("user/tiny", revision="half/precision", token=TOKEN))
    model = AutoModelForCausalLM.from_pretrained(fetched, dtype="auto")
    mine = AutoModelForCausalLM.from_pretrained(CHECKPOINT).to(torch.bfloat16)
    return {
        "kept": str(kept),
        "files": files_under(fetched),
        "equal": all(
            (fetched / n).read_bytes() == (OUT / "half" / n).read_bytes()
            for n in files_under(fetched, [".gitattributes"])
        ),
        "dtype": str(model.dtype),
        "loaded": all(torch.equal(a, b) for a, b in zip(model.parameters(), mine.parameters())),
        "main": files_under(Path(snapshot_download("user/tiny", token=TOKEN))),
    }


def command_line() -> dict[str, Any]:
    os.environ["HF_TOKEN"] = TOKEN
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main(["export", str(CHECKPOINT), "--push-to-hub", "typed"])
    os.environ.pop("HF_TOKEN")
    public = raised(lambda: zero.export(CHECKPOINT, push_to_hub="user/typed", private=True, token=TOKEN))
    return {"status": status, "said": said.getvalue(), "public": public}


def refusals() -> dict[str, str]:
    def push(name: str = "user/other", token: str | None = TOKEN) -> str:
        # In a type that was not sent before: the Hub is not asked to take again what it has.
        return raised(lambda: zero.export(CHECKPOINT, push_to_hub=name, token=token, dtype="float16"))

    found = {"name": push("a/b/c"), "token": push(token="hf_bad"), "none": push(token=None)}
    for what, rules in {
        "forbidden": {"POST /api/repos/create": 403},
        "upload": {"PUT /lfs/": 507},  # one that the client does not try again after a pause
        "commit": {"POST /api/models/user/other/commit": 507},
    }.items():
        fail(rules)
        found[what] = push()
    fail({})
    return found


def unreachable() -> str:
    """The client takes the address from the environment when it is imported: in a process of its own."""
    command = [sys.executable, "-m", "hf_zero.cli.main", "export", str(CHECKPOINT), "--push-to-hub", "user/other"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stderr


def damaged() -> str:
    """Nothing is made on the Hub of a checkpoint that is not whole."""
    path = CHECKPOINT / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return raised(lambda: zero.export(CHECKPOINT, push_to_hub="user/damaged", token=TOKEN))


if __name__ == "__main__":
    watch()
    sys.addaudithook(note_contact)
    check("train", train)
    for work in (private_push, branch_push, command_line, refusals, unreachable, damaged):
        check(work.__name__, work)
    check("contacted", lambda: sorted(_contacted))
