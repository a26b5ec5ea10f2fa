"""Pushing from a sharded model to a Hub that listens on this machine's loopback; it keeps what it is sent."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
PORT = int(sys.argv[2])
os.environ.update(HF_ENDPOINT=f"http://127.0.0.1:{PORT}", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1")

_received: dict[str, bytes] = {}
_commits: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """Just enough of the Hub's HTTP interface for commits of ordinary files."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            for line in filter(None, body.splitlines()):
                entry = json.loads(line)
                if entry["key"] == "file":
                    _received[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "header":
                    _commits.append(entry["value"]["summary"])
            self._answer({"commitUrl": f"http://127.0.0.1:{PORT}/user/tiny/commit/1", "commitOid": "1" * 40})
        elif self.path == "/api/repos/create":
            self._answer({"url": f"http://127.0.0.1:{PORT}/user/tiny", "name": "user/tiny"})
        else:
            self._answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self._answer({"error": "nothing here"}, status=404)

    do_HEAD = do_GET

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


if RANK == 0:
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", PORT), Hub).serve_forever, daemon=True).start()

import torch  # noqa: E402
from harness import OUT, Tokens, barrier, check, distance, fresh, gpt2, watch  # noqa: E402
from safetensors.torch import load  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import hf_zero as zero  # noqa: E402


def push(stage: int) -> dict[str, Any]:
    fresh()
    _received.clear()
    _commits.clear()
    args = TrainingArguments(
        output_dir=str(OUT / f"run{stage}"),
        parallelism_config=zero.ZeroPlugin(stage=stage, async_save=True),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        push_to_hub=True,
        hub_strategy="checkpoint",
        hub_always_push=True,
        hub_model_id="user/tiny",
        hub_token="x",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    run = Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback(report=False)])
    run.train()
    run.push_to_hub(commit_message="the end")
    state = run.model.state_dict()
    barrier()
    if RANK != 0:
        return {}
    pushed = load(_received["model.safetensors"])
    final = {name: tensor for name, tensor in state.items() if name in pushed}
    card = _received["README.md"].decode()
    return {"files": sorted(_received), "commits": list(_commits), "weights": distance(pushed, final), "card": card}


if __name__ == "__main__":
    watch()
    for stage in range(4):
        check(f"push {stage}", partial(push, stage))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
