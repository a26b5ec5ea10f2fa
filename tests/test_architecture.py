"""The shape of the library, held by reading its sources: layers, what is used only where, and names that are fixed."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import hf_zero

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_zero"

# docs/DESIGN.md says what each folder is for. A folder imports only folders to its left; lazy imports and those for type
# checkers count. The public `__init__` imports what it likes.
FOLDERS = ("", "core", "comm", "tiers", "optimizers", "checkpoint", "plan", "engine", "compat", "diagnostics",
           "sequence", "params", "huggingface", "cli")  # fmt: skip
"""The empty one: `config`, `errors` and `version`, beside the folders."""

# What may be imported, by whom alone. Keys are matched as whole dotted prefixes.
ONLY_HERE = {
    "torch.distributed": ("comm.group_wire", "comm.process_group"),
    "accelerate": ("huggingface",),
    "transformers": ("huggingface", "sequence"),  # its attention interface
    "peft": ("huggingface",),
    "huggingface_hub": ("checkpoint.cards", "checkpoint.hub", "checkpoint.weights", "cli.models"),  # names of models
    # `process_group`: how many processes the launcher started, which torch reports only once a group is open. `position`:
    # gloo's network interface, which torch does not report. `tiers.host`: the settings of malloc, which glibc does not report.
    # `plan.machine`: the user's cache.
    "os.environ": ("huggingface", "cli", "comm.process_group", "comm.position", "tiers.host", "plan.machine"),
    "os.getenv": ("huggingface", "cli"),
}
STREAMS = ("comm.group_wire", "comm.inflight", "tiers.host")
STREAM_NAMES = {"Stream", "Event", "StreamContext", "current_stream", "record_stream", "record_event", "wait_stream"}


def name_of(path: Path) -> str:
    """`hf_zero/huggingface/trainer.py` -> `huggingface.trainer`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name: path for name, path in SOURCES.items() if path.name not in ("__init__.py", "__main__.py")}
IMPORTABLE = {"hf_zero", *(f"hf_zero.{name.removesuffix('.__init__')}" for name in SOURCES)}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Not while pytest collects: every process of it would parse all sources."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def trees() -> dict[str, ast.Module]:
    """By module."""
    return {name: parsed(path) for name, path in SOURCES.items()}


def parsed_in(*folders: str) -> dict[Path, ast.Module]:
    return {path: parsed(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


def imports(module: str, tree: ast.AST, *, types: bool = True) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that is imported anywhere in `tree`, dotted and absolute, with the statement.

    Args:
        types: with the imports for type checkers alone.
    """
    package = ["hf_zero", *module.split(".")[:-1]]
    skipped = set()
    for node in () if types else ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(map(id, node.body))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", node) for alias in node.names)


def own_imports(module: str, tree: ast.AST, *, types: bool = True) -> Iterator[str]:
    """The modules of this package that `tree` imports; of a folder's own `__init__`, the folder."""
    for name, _ in imports(module, tree, types=types):
        if name.startswith("hf_zero."):
            inner = name.removeprefix("hf_zero.")
            candidates = [inner, inner.rpartition(".")[0]]
            yield next((candidate for candidate in candidates if candidate in MODULES), inner)


def folder_of(module: str) -> str:
    return module.partition(".")[0] if "." in module else ""


def rank_of(module: str) -> int:
    return FOLDERS.index(folder_of(module))


@functools.cache
def graph(*, types: bool = True) -> dict[str, set[str]]:
    """By module, what it imports of this package: at the top, inside functions, and (`types`) for type checkers."""
    chosen = {module: tree for module, tree in trees().items() if module not in ("__init__", "__main__")}
    return {module: set(own_imports(module, tree, types=types)) for module, tree in chosen.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, if there are any."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Event` for the expression of that form, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def at(module: str, node: ast.AST) -> str:
    return f"{SOURCES[module].relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_every_module_is_in_a_folder() -> None:
    assert {folder_of(module) for module in MODULES} == set(FOLDERS), "a new folder: where is it in the order?"
    beside = {module for module in MODULES if not folder_of(module)}
    assert beside == {"config", "errors", "version"}, "a module beside the folders: whose job is it?"


def test_imports_point_down() -> None:
    up = {
        (module, target)
        for module, targets in graph().items()
        for target in targets
        if rank_of(target) > rank_of(module)
    }
    assert not up, "imports of folders further up"


def test_no_circles() -> None:
    """In `engine/` imports for type checkers do not count: a part of a unit names the type of what it is a part of."""
    within = {
        module: {target for target in targets if folder_of(target) == folder_of(module)}
        for module, targets in [
            *((name, targets) for name, targets in graph().items() if folder_of(name) != "engine"),
            *((name, targets) for name, targets in graph(types=False).items() if folder_of(name) == "engine"),
        ]
    }
    assert circle(within) == [], "files that import each other"


def test_the_engine_stands_alone() -> None:
    """It imports neither `compat` nor `diagnostics`, and no file of `compat` imports another one."""
    assert not {
        (module, target)
        for module, targets in graph().items()
        for target in targets
        if (folder_of(module) == "engine" and folder_of(target) in ("compat", "diagnostics"))
        or (folder_of(module) == folder_of(target) == "compat" and not module.endswith("__init__"))
    }


def test_the_graph_is_seen() -> None:
    """The rules above are not passed by being blind."""
    assert "engine.unit" in graph()["engine.schedule"]
    assert "comm.watch" in graph()["cli.doctor"]  # inside a function
    assert "torch.distributed" in [name for name, _ in imports("comm.group_wire", trees()["comm.group_wire"])]


@pytest.mark.parametrize("name", ONLY_HERE)
def test_used_only_here(name: str) -> None:
    found = []
    for module, tree in trees().items():
        if any(is_under(module, place) for place in ONLY_HERE[name]):
            continue
        found += [at(module, node) for imported, node in imports(module, tree) if is_under(imported, name)]
        if "." in name:  # else a local variable of that name would do
            found += [at(module, node) for node in ast.walk(tree) if is_under(dotted(node), name)]
    assert not found, f"{name} belongs in {', '.join(ONLY_HERE[name])} alone, also used at {', '.join(found)}"


@pytest.mark.parametrize("folder", ["hf_zero", "tests", "scripts", "benchmarks"])
def test_what_is_imported_of_this_package_is_there(folder: str) -> None:
    """Imports inside functions, too. mypy takes a module that is gone for one that is not installed."""
    gone = []
    for path, tree in parsed_in(folder).items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("hf_zero.")
        for name, node in imports(module, tree):
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            if is_under(name, "hf_zero") and not (relative and folder != "hf_zero") and name not in IMPORTABLE:
                origin, _, last = name.rpartition(".")
                if origin not in IMPORTABLE or not hasattr(importlib.import_module(origin), last):
                    gone.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert not gone


def test_streams_only_where_bytes_move() -> None:
    found = [
        at(module, node)
        for module, tree in trees().items()
        if module not in STREAMS
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr in STREAM_NAMES or dotted(node) in ("torch.cuda.stream", "torch.accelerator.stream"))
    ]
    assert not found, f"streams and events belong in {', '.join(STREAMS)}, also used at {', '.join(found)}"


def test_stages_are_compared_only_in_config() -> None:
    """Everything else asks the stage's policy what it means."""

    def is_stage(node: ast.AST) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return name == "stage" or name.endswith("_stage")

    found = [
        at(module, node)
        for module, tree in trees().items()
        if module != "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(is_stage(side) for side in (node.left, *node.comparators))
        and not all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
    ]
    assert not found, f"a stage is compared at {', '.join(found)}; ask config.STAGES or ZeroConfig.policy"


FACTORIES = frozenset(
    ("empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace", "logspace", "tensor", "as_tensor")
    + ("asarray", "scalar_tensor", "rand", "randn", "randint", "randperm")
)
"""What `torch.set_default_device` directs elsewhere."""


def test_new_tensors_name_their_device() -> None:
    """A program may have called `torch.set_default_device`: what the package creates for itself is where it says."""
    found = [
        at(module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in {f"torch.{name}" for name in FACTORIES}
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not found, f"tensors on the default device at {', '.join(found)}"


@pytest.mark.parametrize("module", SOURCES)
def test_house_rules(module: str) -> None:
    tree = trees()[module]
    assert ast.get_docstring(tree), f"{at(module, tree)}: say in a docstring what the file is for"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), (
            f"{at(module, node)}: python -O removes it; raise one of hf_zero.errors"
        )
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), (
            f"{at(module, node)}: name what is expected"
        )


def test_nothing_is_dead() -> None:
    """The library, a script or a benchmark names every function, class and constant of a module; what is written is read.

    Names are compared, not what they stand for: what is dead under the name of something alive is not found.
    """
    used: set[str] = {*hf_zero.__all__, "_at_exit"}  # that one is called by atexit
    read: set[str] = {"_tensor", "__array_interface__"}  # numpy
    read |= {
        "daemon",
        "atexit",
        "should_training_stop",
        "should_evaluate",
        "_n_gpu",
        "sp_backend",
        "sp_handler",
    }  # threading, weakref, transformers, accelerate
    for path, tree in parsed_in("hf_zero", "scripts", "benchmarks", "tests").items():
        tests = ROOT / "tests" in path.parents
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
                used |= set() if tests else {node.attr}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not tests:
                used.add(node.id)
            elif isinstance(node, ast.alias) and not tests:
                used.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # getattr
    found = []
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in used | {"__getattr__", "__dir__"}:
                found.append(f"{at(module, node)} {node.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in read:
                found.append(f"{at(module, node)} {node.attr}")
    assert not found, f"nobody uses {', '.join(found)}: remove it"


SYSTEM_ONLY = ROOT / "tests" / "kit" / "injection.py"
"""Answers in place of the system's calls: a full disk, a `kill -9` between two of them."""
OF_OTHERS = {"_load_from_checkpoint", "_dataloaders", "_cdata"}
"""Where the stock Trainer lets a subclass in, and the only way to weights of a checkpoint without training; what an Accelerator
has prepared, which it only forgets together with the model; the address of a torch storage."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def owner(node: ast.AST) -> str:
    """The first name of `a.b[c].d`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_ones_own(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) == "super()" or owner(node) in ("self", "cls")


def test_tests_reach_for_no_private_name() -> None:
    """Of this package's; a test that does breaks with what nobody else sees. What torch's modules have is torch's."""
    ours = {
        name
        for tree in trees().values()
        for node in ast.walk(tree)
        if private(name := getattr(node, "name", "") or (node.attr if isinstance(node, ast.Attribute) else ""))
        and (not isinstance(node, ast.Attribute) or owner(node) in ("self", "cls"))
    }
    ours -= {*dir(nn.Module()), *OF_OTHERS}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path, tree in parsed_in("tests").items()
        for node in ast.walk(tree)
        for name in (
            [node.attr] * (not is_ones_own(node))
            if isinstance(node, ast.Attribute)
            else [each.name for each in node.names] * (node.module or "").startswith("hf_zero")
            if isinstance(node, ast.ImportFrom)
            else []
        )
        if name in ours
    ]
    assert not found, found


def test_tests_patch_nothing() -> None:
    """No attribute of an imported module or class is set, but those of the system by `tests.kit.injection`.

    What a test wants otherwise it gives: as an argument, in the environment, or as `Roads`.
    """
    found = []
    for path, tree in parsed_in("tests").items():
        if path == SYSTEM_ONLY:
            continue
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        } - {
            "sys",
            "tempfile",
        }  # `sys.argv` of a rank that is forked, `sys.path` for scripts; `tempfile.tempdir` is a setting
        for node in ast.walk(tree):
            targets = [
                target
                for each in getattr(node, "targets", [getattr(node, "target", None)])
                for target in (each.elts if isinstance(each, ast.Tuple) else [each])
                if isinstance(target, ast.Attribute)
            ]
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "setattr" and isinstance(node, ast.Call):
                targets.append(ast.Attribute(node.args[0], "", ast.Store()))
            if any(owner(target) in imported for target in targets) or called.endswith(
                ("monkeypatch.setattr", "mock.patch")
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if called == "instead" and isinstance(node, ast.Call):
                module = ast.unparse(node.args[0])
                if module.partition(".")[0] not in sys.stdlib_module_names:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {module}")
    assert not found, found


def test_requirements_are_what_is_imported() -> None:
    """What the package does not import is an extra, or no requirement at all."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.S | re.M)
    required = set(re.findall(r'^ *"([A-Za-z0-9_-]+)', listed[1], re.M)) if listed else set()
    found = {name.partition(".")[0] for module, tree in trees().items() for name, _ in imports(module, tree)}
    found -= {"hf_zero", *sys.stdlib_module_names}
    assert found - {"matplotlib", "peft", "plotly"} == {"yaml" if name == "pyyaml" else name for name in required}


def test_the_design_lists_every_folder() -> None:
    """With files that exist. What a file is for is in its own docstring."""
    text = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", text.partition("## The folders")[2], re.M)
    assert {folder for folder, _ in rows} == set(FOLDERS) - {""}
    named = [ROOT / "hf_zero" / folder / file for folder, files in rows for file in re.findall(r"`(.*?)`", files)]
    assert named
    assert not [path for path in named if not path.is_file()]
