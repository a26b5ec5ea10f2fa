"""The shape of the library, held by reading its sources: layers, what is used only where, and names that are fixed."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_zero

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_zero"

# docs/DESIGN.md says what each layer is for. A module imports from its own layer or from those above it in this list.
LAYERS = {
    "0 words": ("version", "errors", "config", "layout", "inflight", "report"),
    "1 mechanisms": (
        "comm",
        "tiers",
        "link",
        "roads",
        "transfer",
        "disk",
        "ondisk",
        "records",
        "storage",
        "prints",
        "machine",
        "precision",
        "discover",
        "graph",
        "on_read",
        "safetensors_io",
        "manifest",
        "staging",
        "weights",
        "placement",
        "objects",
    ),
    "2 decision": ("passes", "costs", "work", "activations", "outline", "solve", "plan"),
    "3 runtime": (
        "birth",
        "guard",
        "init",
        "ownership",
        "agree",
        "shard",
        "initial",
        "guards",
        "gradients",
        "flat",
        "edits",
        "on_read",
        "unit",
        "arrangement",
        "twin",
        "stepping",
        "graph",
        "schedule",
        "supported",
        "optim",
        "wholes",
        "clipping",
        "gradwork",
        "lookout",
        "overrides",
        "overflow",
        "autocast",
        "buffers",
        "statedict",
        "held",
        "writer",
        "reader",
        "saving",
        "loading",
        "checkpoint",
        "assembly",
        "copies",
        "usage",
        "highs",
        "recorder",
        "monitor",
        "offload",
        "engine",
        "holder",
        "access",
    ),
    "4 files": ("recast", "cards", "hub", "export"),
    "5 wiring": (
        "integrations.serving",
        "integrations.recording",
        "integrations.weights",
        "integrations.loading",
        "integrations.accelerate",
        "integrations.models",
        "integrations.transformers",
        "integrations.accelerate_state",
        "integrations.checkpoints",
        "integrations.facts",
        "integrations.references",
        "integrations.trainer",
        "cli_plan",
        "cli_report",
        "cli",
    ),
}
LAYER_OF = {module: number for number, modules in enumerate(LAYERS.values()) for module in modules}

# What may be imported, by whom alone. Keys are matched as whole dotted prefixes.
ONLY_HERE = {
    "torch.distributed": ("comm",),
    "accelerate": ("integrations.accelerate", "integrations.accelerate_state"),
    "transformers": (
        "integrations.transformers",
        "integrations.models",
        "integrations.weights",
        "integrations.loading",
        "integrations.facts",
        "integrations.trainer",
    ),
    "peft": ("integrations.accelerate", "integrations.models", "integrations.weights"),
    "huggingface_hub": ("export", "hub"),
    "os.environ": ("integrations.accelerate", "integrations.transformers", "cli"),
    "os.getenv": ("integrations.accelerate", "integrations.transformers", "cli"),
}
STREAMS = ("inflight", "comm", "link")
STREAM_NAMES = {"Stream", "Event", "StreamContext", "current_stream", "record_stream", "record_event", "wait_stream"}

PUBLIC = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "GatheredParameters",
    "Init",
    "LayoutError",
    "OutOfMemoryError",
    "RankMismatchError",
    "Report",
    "StateError",
    "TierError",
    "UnsupportedOptimizerError",
    "ZeroAccelerator",
    "ZeroCallback",
    "ZeroConfig",
    "ZeroError",
    "ZeroPlugin",
    "ZeroTrainer",
    "ZeroTrainingArguments",
    "__version__",
    "card_for",
    "engine_of",
    "export",
    "full_gradient",
    "full_optimizer_state",
    "full_parameter",
    "local_gradient",
    "local_optimizer_state",
    "local_parameter",
    "set_full_gradient",
    "set_full_optimizer_state",
    "set_full_parameter",
    "set_local_gradient",
    "set_local_optimizer_state",
    "set_local_parameter",
    "shard",
    "verify",
    "zero_trainer_cls",
]
SETTINGS = (
    "stage",
    "reduce_dtype",
    "full_precision",
    "async_save",
    "offload_optimizer",
    "offload_params",
    "offload_dir",
    "device_memory",
    "host_memory",
    "step_in_backward",
)


def name_of(path: Path) -> str:
    """`hf_zero/integrations/accelerate.py` -> `integrations.accelerate`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


SOURCES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name: path for name, path in SOURCES.items() if path.name != "__init__.py"}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in SOURCES.items()}


def imports(module: str, tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that is imported anywhere in `tree`, dotted and absolute, with the statement."""
    package = ["hf_zero", *module.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", node) for alias in node.names)


def own_imports(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of this package that `tree` imports."""
    for name, _ in imports(module, tree):
        if name.startswith("hf_zero."):
            inner = name.removeprefix("hf_zero.")
            candidates = [inner, inner.rpartition(".")[0]]
            yield next((candidate for candidate in candidates if candidate in MODULES), inner)


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


def test_every_module_has_a_layer() -> None:
    assert set(MODULES) == set(LAYER_OF), (
        "give the new module a layer here and in docs/DESIGN.md (or take the old one out)"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for target in own_imports(module, TREES[module]):
        assert target in LAYER_OF, f"{module} imports {target}, which is no module with a layer"
        assert LAYER_OF[target] <= LAYER_OF[module], f"{module} imports {target}, which is in a higher layer"


def test_no_import_cycles() -> None:
    """Imports at the top of files form no cycle, within a layer neither."""
    graph = {}
    for module in MODULES:
        top = ast.Module([node for node in TREES[module].body if isinstance(node, ast.stmt)], [])
        top.body = [node for node in top.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[module] = set(own_imports(module, top))
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


@pytest.mark.parametrize("name", ONLY_HERE)
def test_used_only_here(name: str) -> None:
    found = []
    for module, tree in TREES.items():
        if module in ONLY_HERE[name]:
            continue
        found += [at(module, node) for imported, node in imports(module, tree) if is_under(imported, name)]
        if "." in name:  # else a local variable of that name would do
            found += [at(module, node) for node in ast.walk(tree) if is_under(dotted(node), name)]
    assert not found, f"{name} belongs in {', '.join(ONLY_HERE[name])} alone, also used at {', '.join(found)}"


def test_torch_distributed_is_found() -> None:
    """The rule above is not passed by being blind."""
    assert any(is_under(name, "torch.distributed") for name, _ in imports("comm", TREES["comm"]))


def test_streams_only_where_bytes_move() -> None:
    found = [
        at(module, node)
        for module, tree in TREES.items()
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
        for module, tree in TREES.items()
        if module != "config"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(is_stage(side) for side in (node.left, *node.comparators))
        and not all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
    ]
    assert not found, f"a stage is compared at {', '.join(found)}; ask config.STAGES or ZeroConfig.policy"


@pytest.mark.parametrize("module", SOURCES)
def test_house_rules(module: str) -> None:
    tree = TREES[module]
    assert ast.get_docstring(tree), f"{at(module, tree)}: say in a docstring what the file is for"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), (
            f"{at(module, node)}: python -O removes it; raise one of hf_zero.errors"
        )
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), (
            f"{at(module, node)}: name what is expected"
        )


def test_nothing_is_dead() -> None:
    """Every function, class and constant of a module is named by the library or a script; what is written is read somewhere.

    Names are compared, not what they stand for: what is dead under the name of something alive is not found.
    """
    paths = [path for folder in ("hf_zero", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    used: set[str] = {*hf_zero.__all__, "_at_exit"}  # that one is called by atexit
    read: set[str] = {"_tensor", "__array_interface__"}  # numpy
    read |= {"daemon", "atexit", "should_training_stop", "_n_gpu"}  # threading, weakref, transformers
    for path in paths:
        tests = ROOT / "tests" in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in used | {"__getattr__", "__dir__"}:
                found.append(f"{at(module, node)} {node.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in read:
                found.append(f"{at(module, node)} {node.attr}")
    assert not found, f"nobody uses {', '.join(found)}: remove it"


def test_public_names() -> None:
    assert sorted(hf_zero.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(hf_zero, name) is not None


def test_settings() -> None:
    """The fields of ZeroConfig are what people type: few, fixed, and the same in all three places."""
    fields = tuple(field.name for field in dataclasses.fields(hf_zero.ZeroConfig))
    assert fields == SETTINGS
    assert len(fields) <= 14
    flags = {
        field.name for field in dataclasses.fields(hf_zero.ZeroTrainingArguments) if field.name.startswith("zero_")
    }
    assert flags == {f"zero_{name}" for name in SETTINGS}
    plugin = {field.name for field in dataclasses.fields(hf_zero.ZeroPlugin)}
    assert plugin >= set(SETTINGS)


def test_readme_lists_every_file() -> None:
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    trees = [block for block in blocks if re.search(r"^\S*hf_zero/", block, re.M)]
    assert trees, "README.md has no code block with the tree of hf_zero/"
    listed = set(re.findall(r"[\w.-]+\.py\b", "\n".join(trees)))
    paths = [*MODULES.values(), *(ROOT / "scripts").glob("*.py")]
    absent = sorted(str(path.relative_to(ROOT)) for path in paths if path.name not in listed)
    assert not absent, f"not in the README's tree: {', '.join(absent)}"
