"""The pages that users read: links lead somewhere, commands name what there is, and every setting is described."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hf_zero

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """Without fenced code, in which `#` is no heading and brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def anchors_of(page: Path) -> set[str]:
    """Headings as GitHub makes link targets of them."""
    headings = re.findall(r"^#+ (.*)", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue  # of another site
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.is_dir() or anchor not in anchors_of(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """The test above is not passed by being blind."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `heading`, here\n[a](gone.md) [b](#a-heading-here) [c](#a-heading) [d](page.md#a-heading-here)\n"
    )
    assert broken_links(page) == ["gone.md", "#a-heading"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_what_there_is(page: Path) -> None:
    """Scripts and targets of make, in code blocks and in code between the words."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    text = page.read_text(encoding="utf-8")
    scripts = set(re.findall(r"\b(?:scripts|benchmarks|tests)/[\w/]+\.py\b", text))
    assert not {script for script in scripts if not (ROOT / script).is_file()}
    lines = [line for block in blocks_of(page, "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`]+)`", prose_of(page))
    made = [shlex.split(line, comments=True)[1] for line in lines if re.match(r"make [a-z]", line)]
    assert not set(made) - targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_are_named_exist(page: Path) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    assert not named - set(re.findall(r"^def (test_\w+)", sources, re.M))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_are_python(page: Path) -> None:
    for block in blocks_of(page, "python"):
        ast.parse(block)


def test_every_setting_is_described() -> None:
    (table,) = re.findall(r"^## All settings\n(.*?)^## ", (ROOT / "docs" / "USAGE.md").read_text("utf-8"), re.S | re.M)
    described = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert described == [field.name for field in dataclasses.fields(hf_zero.ZeroConfig)]


def test_the_reference_has_every_public_name() -> None:
    described = re.findall(r"^::: hf_zero\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M)
    errors = {name for name in hf_zero.__all__ if hasattr(hf_zero.errors, name)}
    assert {*described, *errors, "__version__"} == {*hf_zero.__all__, "errors"}


def test_the_site_has_every_page() -> None:
    named = set(re.findall(r"[\w.-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_a_broken_link_stops_the_site(tmp_path: Path) -> None:
    """`--quiet` kept warnings from mkdocs' strict mode, too: `make docs` passed with any link."""
    pytest.importorskip("mkdocs")
    (command,) = re.findall(r"^\t\$\(BIN\)/(mkdocs build.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    settings = {name: settings[name] for name in ("site_name", "strict", "validation")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()
    for link, works in (("nowhere", False), ("a-heading", True)):
        (tmp_path / "docs" / "index.md").write_text(f"# A heading\n\n[a link](#{link})\n")
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode == 0) is works, done.stderr


def messages() -> str:
    """Every text of the package that is no docstring, one a line; a value inside an f-string is `…`."""
    found = []
    for path in (ROOT / "hf_zero").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                found.append(node.value)
    return "\n".join(found)


def test_messages_that_are_explained_exist() -> None:
    """The left columns of docs/ERRORS.md quote messages, where `…`, numbers and quoted names stand for values."""
    text = (ROOT / "docs" / "ERRORS.md").read_text("utf-8")
    quoted = [quote for row in re.findall(r"^\| (`.*?) \|", text, re.M) for quote in re.findall(r"`([^`]+)`", row)]
    pieces = {piece.strip(" :") for quote in quoted for piece in re.split(r"…|\b\d+\b|'\w+'|^\w+Error:", quote)}
    pieces = {piece for piece in pieces if len(piece.split()) > 2} - {"Gloo connectFullMesh failed"}  # torch's
    assert len(pieces) > 15
    known = messages()
    assert not {piece for piece in pieces if piece not in known}
