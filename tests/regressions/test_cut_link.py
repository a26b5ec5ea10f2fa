"""The network between two hosts is cut: both sides raise, say which host cannot be reached, and end; a restart resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import hf_zero as zero
from tests.kit.hosts import ADDRESSES, HOSTS, Link, NoNamespaces, two_hosts, wait_until
from tests.kit.pool import free_port

pytestmark = pytest.mark.gloo
JOB = Path(__file__).parents[1] / "kit" / "jobs" / "cut_link_job.py"
STALL_S = 8.0
LATE_S = 10.0
"""Promised are `stall_s` and these seconds until the error."""
END_S = 30.0
"""For the end of Python: many ranks end at the same time, beside other work."""
SLOW = 20
"""A process that is stopped is given this many times `stall_s`."""
PORT = 29600


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    try:
        with two_hosts(tmp_path) as hosts:
            yield hosts
    except NoNamespaces as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def begin(link: Link, out: Path, cases: list[str], limit_s: float = 120) -> None:
    out.mkdir(exist_ok=True)
    for host in range(2):
        words = [str(out), str(host), ADDRESSES[0], str(PORT), str(STALL_S), str(limit_s), *cases]
        link.start(host, [sys.executable, str(JOB), *words], out / f"{HOSTS[host]}.txt", limit_s=limit_s + 20)


def paused(out: Path, cases: list[str], ranks: int = 2) -> None:
    """Return when every rank is at its place."""
    wanted = {out / case / f"at.{rank}": out / case / f"rank{rank}.json" for case in cases for rank in range(ranks)}

    def are_there() -> bool:
        missing = [path for path in wanted if not path.exists()]
        early = [end.with_suffix(".txt").read_text() for path in missing if (end := wanted[path]).exists()]
        assert not early, "\n".join(early)
        return not missing

    wait_until(are_there, 100, "ranks at their places")


class End(NamedTuple):
    """How a rank has ended."""

    code: int
    last_said: float
    """When it wrote its last line."""
    text: str


def ends(out: Path, cases: list[str], limit_s: float, ranks: int = 2) -> dict[tuple[str, int], End]:
    """By case and rank."""
    paths = [out / case / f"rank{rank}.json" for case in cases for rank in range(ranks)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths), limit_s, "the end of all ranks")
    found = {}
    for path in paths:
        said = path.with_suffix(".txt")
        code = json.loads(path.read_text())["code"]
        found[path.parent.name, int(path.stem[4:])] = End(code, said.stat().st_mtime, said.read_text())
    return found


def released(out: Path) -> float:
    (out / "go").touch()
    return time.time()


def check_said(case: str, text: str, rank: int, host: int) -> None:
    """The last that a rank says is the error: which host, where each rank stands, and what to do."""
    here, there = HOSTS[host], HOSTS[1 - host]
    error = text[text.rindex("StallError: ") :]
    assert re.search(rf"ranks? [-\d]+ on {there}: cannot be reached for \d+ s", error), text
    there += r" \(ranks? [-\d]+\)"
    assert re.match(rf"StallError: {there} cannot be reached from {here}: no answer for \d+ s", error), text
    assert re.search(rf"ranks? [-\d]+( on {here})?: .*cut_link_job.py:\d+ in train", error), text
    assert error.strip().endswith("again from the last checkpoint"), text


def check_all_raise(out: Path, cases: list[str], cut: float, ranks: int = 2) -> None:
    for (case, rank), end in ends(out, cases, STALL_S + LATE_S + END_S, ranks).items():
        assert end.code == 1, (case, rank, end)
        assert end.last_said - cut < STALL_S + LATE_S, (case, rank, end.last_said - cut, end.text)
        check_said(case, end.text, rank, rank * 2 // ranks)


PLACES = ["forward", "backward", "saving", "init", "step-host"]
OTHER_PLACES = [
    "behind",
    "step",
    "loading",
    "evaluation",
    "forward-both",
    "backward0",
    "backward1",
    "step2",
]


@pytest.mark.wide
def test_both_sides_raise_and_a_restart_resumes(link: Link, tmp_path: Path) -> None:
    """The link goes down where ranks are in forward, in backward, …; afterwards all resume over the link that is up again."""
    out = tmp_path / "out"
    begin(link, out, PLACES)
    paused(out, PLACES)
    link.cut(1)
    cut = released(out)
    check_all_raise(out, PLACES, cut)
    whole = [case for case in PLACES if case != "init"]
    for case in whole:
        zero.verify(out / case / "checkpoint-3")
        assert zero.latest_checkpoint(out / case) == out / case / "checkpoint-3", case
    link.heal(1)
    again = tmp_path / "again"
    again.mkdir()
    (out / "forward").rename(again / "resumed")
    (out / "step-host").rename(again / "resumed-host")
    for case in ("resumed", "resumed-host"):
        for old in (again / case).glob("*.json"):
            old.unlink()
    begin(link, again, ["resumed", "resumed-host"])
    for key, end in ends(again, ["resumed", "resumed-host"], 100).items():
        assert end.code == 0, (key, end.text)
        assert "as DDP" in end.text, (key, end.text)


@pytest.mark.wide
def test_a_rank_with_the_store_is_stopped_or_killed(tmp_path: Path) -> None:
    """Needs no namespaces. A stopped process is given `SLOW` times `stall_s`, also where nothing can be asked about it."""
    out, cases, stall_s = tmp_path, ["forward", "backward"], 1.0
    port = free_port()  # the second case uses the next one
    with ExitStack() as processes:
        for host in range(2):
            words = [str(out), str(host), "127.0.0.1", str(port), str(stall_s), "100", *cases]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
            job = subprocess.Popen([sys.executable, str(JOB), *words], env=environment, start_new_session=True)
            processes.callback(job.wait, 10)
            processes.callback(os.killpg, job.pid, signal.SIGKILL)
        paused(out, cases)
        os.kill(int((out / "forward" / "at.0").read_text()), signal.SIGSTOP)
        os.kill(int((out / "backward" / "at.0").read_text()), signal.SIGKILL)
        began = released(out)
        wait_until(lambda: all((out / case / "rank1.json").exists() for case in cases), 80, "the end of rank 1")
    stopped, killed = ((out / case / "rank1.txt") for case in cases)
    text = stopped.read_text()
    assert re.search(r"StallError: rank 0 does not answer, and rank 1 has waited \d+ s", text), text
    assert re.search(r"rank 0: (in .*; no answer for \d+ s|no answer so far)", text), (
        text
    )  # asked before the stop or not
    assert re.search(r"rank 1: in \w+ of step 4, waits for .*cut_link_job.py:\d+ in train", text), text
    assert stopped.stat().st_mtime - began < SLOW * stall_s + 2 * LATE_S
    assert "StallError: rank 1, in " in killed.read_text(), killed.read_text()
    assert "the connection to another rank has broken. rank 0: its process has ended" in killed.read_text()
    assert killed.stat().st_mtime - began < 2 * LATE_S


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["down", "down at the store", "dropped", "dropped at the store"])
def test_other_places_and_faults(link: Link, tmp_path: Path, fault: str) -> None:
    """Rank 0's host has the store. Packets of one direction are lost, or all are; two ranks on each host, too."""
    host = 0 if "store" in fault else 1
    for ranks, cases in ((2, OTHER_PLACES), (4, ["backward", "saving"])):
        out = tmp_path / f"of_{ranks}"
        begin(link, out, cases if ranks == 2 else [f"four_{case}" for case in cases])
        paused(out, cases, ranks)
        (link.cut if "down" in fault else link.drop_from)(host)
        check_all_raise(out, cases, released(out), ranks)
        (link.heal if "down" in fault else link.receive_from)(host)


def test_a_link_that_is_cut_for_a_while(link: Link, tmp_path: Path) -> None:
    """For less than `stall_s`: training continues, with DDP's numbers."""
    out, cases = tmp_path / "out", ["forward", "backward", "step-host"]
    begin(link, out, cases)
    paused(out, cases)
    link.cut(1)
    released(out)
    time.sleep(0.7 * STALL_S)
    link.heal(1)
    for key, end in ends(out, cases, 90).items():
        assert end.code == 0, (key, end.text)
        assert "as DDP" in end.text, (key, end.text)
