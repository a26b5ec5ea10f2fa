"""A Hub on this machine's loopback: repositories with branches, LFS in one part and in several, tokens, and failures on demand.

Only what the huggingface_hub client asks for; it keeps what it is sent and gives it back.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good"
PART_BYTES = 16 << 10  # of a file that is sent in parts: small, so that tests have several
REPO = r"/(?P<repo>[\w.-]+/[\w.-]+)"
API = r"/api/models" + REPO
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": dict(INITIAL)})
    commits: list[tuple[str, str]] = field(default_factory=list)
    """(branch, message)"""

    def sha(self, branch: str) -> str:
        return hashlib.sha1(repr(sorted(self.branches[branch].items())).encode()).hexdigest()

    def find(self, revision: str) -> dict[str, bytes] | None:
        by_sha = {self.sha(branch): files for branch, files in self.branches.items()}
        return self.branches.get(revision) or by_sha.get(revision)


class Hub:
    """`with Hub() as hub:` serves at `hub.url` from a thread."""

    def __init__(self, multipart_bytes: int = 1 << 20) -> None:
        self.multipart_bytes = multipart_bytes
        """From this size on a file is sent in parts."""
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[str] = []
        self.fail: dict[str, int] = {}
        """Start of `METHOD /path` -> the status to answer with."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Hub:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        called = f"{self.command} {path}"
        self.hub.requests.append(called)
        for start, status in self.hub.fail.items():
            if called.startswith(start):
                return self.answer({"error": f"made to fail with {status}"}, status)
        for pattern, name in ROUTES:
            match = re.fullmatch(pattern, called)
            if match is not None:
                if not self.may(match.groupdict().get("repo")):
                    return self.answer({"error": "Invalid username or password."}, 401)
                return getattr(self, name)(**{key: unquote(text) for key, text in match.groupdict().items() if text})
        return self.answer({"error": f"nothing at {called}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do

    def may(self, repo: str | None) -> bool:
        """Writing takes the token, and so does reading what is private. Presigned uploads carry their right in the URL."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.command in ("GET", "HEAD"):
            return known or repo not in self.hub.repos or not self.hub.repos[repo].private
        return known or urlsplit(self.path).path.startswith(("/lfs/", "/api/validate-yaml"))

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # Repositories ---------------------------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repos:
            return self.answer({**answer, "error": "You already created this model repo"}, 409)
        self.hub.repos[name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        return self.answer(answer)

    def branch(self, repo: str, branch: str) -> None:
        branches = self.hub.repos[repo].branches
        if branch in branches:
            return self.answer({"error": "reference already exists"}, 409)
        branches[branch] = dict(branches["main"])
        return self.answer({})

    def info(self, repo: str, revision: str | None = None) -> None:
        found = self.files(repo, revision or "main")
        if found is not None:
            sha, files = found
            names = [{"rfilename": name} for name in files]
            private = self.hub.repos[repo].private
            self.answer({"id": repo, "modelId": repo, "sha": sha, "private": private, "siblings": names, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        found = self.files(repo, revision)
        if found is not None:
            self.answer([self.entry(name, data) for name, data in sorted(found[1].items())])

    def entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}

    def resolve(self, repo: str, revision: str, path: str) -> None:
        found = self.files(repo, revision)
        if found is None:
            return None
        if path not in found[1]:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = found[1][path]
        return self.answer(data, 200, {"ETag": f'"{git_oid(data)}"', "X-Repo-Commit": found[0]})

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if repo not in self.hub.repos:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        files = self.hub.repos[repo].find(revision)
        if files is None:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        known = self.hub.repos[repo]
        return (known.sha(revision) if revision in known.branches else revision), files

    # Uploads --------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        found = self.files(repo, revision)
        if found is None:
            return
        answers = []
        for file in json.loads(self.body)["files"]:
            name = file["path"]
            mode = "lfs" if name.endswith(".safetensors") else "regular"
            oid = git_oid(found[1][name]) if name in found[1] and mode == "regular" else None
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": answers})

    def batch(self, repo: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            upload: dict[str, Any] = {"href": f"{self.hub.url}/lfs/{oid}"}
            if size >= self.hub.multipart_bytes:
                count = -(-size // PART_BYTES)
                urls = {str(part): f"{self.hub.url}/lfs/{oid}/{part}" for part in range(1, count + 1)}
                upload = {
                    "href": f"{self.hub.url}/lfs/{oid}/complete",
                    "header": {"chunk_size": str(PART_BYTES), **urls},
                }
            actions = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/{oid}/verify"}}
            objects.append({"oid": oid, "size": size, **({} if oid in self.hub.blobs else {"actions": actions})})
        self.answer({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        self.hub.blobs[oid] = self.body
        self.answer({})

    def put_part(self, oid: str, part: str) -> None:
        self.hub.parts[oid, int(part)] = self.body
        self.answer({}, 200, {"ETag": f'"{part}"'})

    def complete(self, oid: str) -> None:
        listed = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self.hub.blobs[oid] = b"".join(self.hub.parts[oid, part] for part in listed)
        self.answer({})

    def verify(self, oid: str) -> None:
        data = self.hub.blobs.get(oid, b"")
        whole = hashlib.sha256(data).hexdigest() == oid and len(data) == json.loads(self.body)["size"]
        self.answer({} if whole else {"error": "the bytes are others"}, 200 if whole else 422)

    def commit(self, repo: str, revision: str) -> None:
        known = self.hub.repos[repo]
        files = dict(known.branches[revision])
        for line in filter(None, self.body.splitlines()):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            else:
                known.commits.append((revision, value["summary"]))
        known.branches[revision] = files
        sha = known.sha(revision)
        self.answer({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def log_message(self, *_: Any) -> None:
        """Quiet."""


ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"POST {API}/branch/(?P<branch>.+)", "branch"),
    (rf"POST {API}/preupload/(?P<revision>[^/]+)", "preupload"),
    (rf"POST {API}/commit/(?P<revision>[^/]+)", "commit"),
    (rf"GET {API}/tree/(?P<revision>[^/]+)", "tree"),
    (rf"GET {API}/revision/(?P<revision>[^/]+)", "info"),
    (rf"GET {API}", "info"),
    (rf"POST {REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs/(?P<oid>\w+)", "put"),
    (r"PUT /lfs/(?P<oid>\w+)/(?P<part>\d+)", "put_part"),
    (r"POST /lfs/(?P<oid>\w+)/complete", "complete"),
    (r"POST /lfs/(?P<oid>\w+)/verify", "verify"),
    (rf"(?:GET|HEAD) {REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


def git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
