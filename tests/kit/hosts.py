"""Two hosts on one machine: network namespaces with a veth pair between them, each with a host name of its own.

All of it, and every process in it, is gone after the `with` block. Processes have a time limit as well: a test may be killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TOOLS = ("ip", "unshare", "mount", "timeout")
HOSTS = ("hosta", "hostb")
ADDRESSES = ("10.99.0.1", "10.99.0.2")


class NoNamespaces(Exception):
    """Carries the reason."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    """End all processes in a namespace and delete it. Its devices are deleted with it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_stale() -> None:
    """Remove namespaces of test runs that were killed: their names have the number of the process."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name, process in re.findall(r"^(hfz(\d+)[ab])\b", listed, re.M):
        if not Path(f"/proc/{process}").exists():
            _remove(name)


class Link:
    """The two hosts, by number 0 and 1, and what is between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = [f"hfz{os.getpid()}{side}" for side in "ab"]
        self._devices = [f"vz{os.getpid()}{side}" for side in "ab"]
        self._started: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """Raises:
        NoNamespaces: this machine does not permit them.
        """
        _remove_stale()
        table = "".join(f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS))
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        for name in self._names:
            _ip("netns", "add", name)
        (a, b), (first, second) = self._names, self._devices
        _ip("link", "add", first, "netns", a, "type", "veth", "peer", "name", second, "netns", b)
        for name, device, address in zip(self._names, self._devices, ADDRESSES):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        if subprocess.run(self._inside(0, ["true"], 5), capture_output=True, check=False).returncode:
            raise NoNamespaces("unshare or mount is not permitted")

    def close(self) -> None:
        for name in self._names:
            _remove(name)
        for process in self._started:
            process.wait(10)

    def _inside(self, host: int, words: Sequence[str], limit_s: float) -> list[str]:
        begin = f'mount --bind "{self._folder}/hosts" /etc/hosts && hostname {HOSTS[host]} && exec "$@"'
        outer = ["ip", "netns", "exec", self._names[host], "unshare", "-um", "sh", "-c", begin, "sh"]
        return [*outer, "timeout", "-k", "5", str(limit_s), *words]

    def start(
        self,
        host: int,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        limit_s: float = 150,
    ) -> subprocess.Popen[bytes]:
        """Run a command on one host, for at most so long."""
        own = {"GLOO_SOCKET_IFNAME": self._devices[host], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("w") as file:
            process = subprocess.Popen(
                self._inside(host, words, limit_s),
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **own, **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        """Take the link down, at this end."""
        _ip("-n", self._names[host], "link", "set", self._devices[host], "down")

    def heal(self, host: int) -> None:
        _ip("-n", self._names[host], "link", "set", self._devices[host], "up")

    def drop_from(self, host: int) -> None:
        """Lose all that this host sends; what it is sent arrives."""
        neighbor = ("neigh", "replace", ADDRESSES[1 - host], "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        _ip("-n", self._names[host], *neighbor, "dev", self._devices[host])

    def receive_from(self, host: int) -> None:
        """Lose nothing more that this host sends."""
        _ip("-n", self._names[host], "neigh", "del", ADDRESSES[1 - host], "dev", self._devices[host])


@contextmanager
def two_hosts(folder: Path) -> Iterator[Link]:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or missing:
        raise NoNamespaces(f"needs Linux, root and {', '.join(TOOLS)}; missing: {', '.join(missing) or 'root'}")
    link = Link(folder)
    try:
        link.open()
        yield link
    finally:
        link.close()


def wait_until(done: object, limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not done():  # type: ignore[operator]
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.02)
