"""What is replaced in other libraries is what docs/DESIGN.md lists. "Nothing is patched" stood there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

from accelerate import Accelerator, ParallelismConfig
from transformers import Trainer

import hf_zero as zero
from tests.test_architecture import ROOT, trees

TITLE = "What is replaced in other libraries"


def section() -> str:
    text = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {TITLE}\n(.*?)^## ", text, re.S | re.M)
    return str(found)


def listed(text: str) -> set[str]:
    """Every name in code, also the last part of a dotted one."""
    names = {name.removesuffix("()") for name in re.findall(r"`([\w.]+(?:\(\))?)`", text)}
    return names | {name.rpartition(".")[2] for name in names}


def set_for_a_while() -> Iterator[str]:
    """The second of (owner, name, value), as `huggingface.patches.replaced` takes them."""
    for module, tree in trees().items():
        if module == "sequence.activation_offload":
            (table,) = (
                node.value
                for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_SAVING"
            )
            yield from map(".".join, ast.literal_eval(table))
        if not module.startswith("huggingface."):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple) and len(node.elts) == 3 and not isinstance(node.elts[0], ast.Constant):
                name = node.elts[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                    yield name.value


def put_on_instances() -> Iterator[str]:
    """`patches.method(target, "name", …)`, also as `method(…)`, and `target.__dict__["name"] = …`."""
    for module, tree in trees().items():
        for node in ast.walk(tree):
            names: list[ast.expr] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition("patches.")[2] == "method":
                names = node.args[1:2]
            elif isinstance(node, ast.Assign) and module == "huggingface.models":
                names = [
                    target.slice
                    for target in node.targets
                    if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith(".__dict__")
                ]
            yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


def private_overrides() -> set[str]:
    found = set()
    for cls, stock in (
        (zero.ZeroTrainer, Trainer),
        (zero.ZeroAccelerator, Accelerator),
        (zero.ZeroPlugin, ParallelismConfig),
    ):
        ours = {name for base in cls.__mro__ if base.__module__.startswith("hf_zero") for name in vars(base)}
        found |= {name for name in ours & set(dir(stock)) if name.startswith("_") and not name.startswith("__")}
    return found


def test_the_list_is_complete() -> None:
    names = listed(section())
    replaced = set(set_for_a_while())
    assert {"_load_pretrained_model", "spawn_materialize", "get_peft_model_state_dict", "upload_folder"} <= replaced, (
        "blind"
    )
    assert replaced <= names
    on_instances = set(put_on_instances())
    assert {"_apply", "zero_grad", "save_pretrained"} <= on_instances, "blind"
    assert on_instances <= names
    overrides = private_overrides()
    assert {"_save_checkpoint", "_validate_accelerator"} <= overrides, "blind"
    assert overrides <= names


def test_the_list_has_nothing_else() -> None:
    functions, _, rest = section().partition("Classes:")
    mentioned = {
        name.rpartition(".")[2]
        for name in re.findall(r"^\| (.*?) \|", functions, re.M)
        for name in re.findall(r"`([\w.]+)`", name)
    }
    real = {name.rpartition(".")[2] for name in set_for_a_while()}
    assert mentioned - real <= {"core_model_loading", "peft_model", "logging", "HfApi"}
    overridden = set(re.findall(r"`(_\w+)`", rest.partition("Private methods")[2]))
    assert overridden == private_overrides()


def test_the_versions_are_those_of_the_tests() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    (line,) = re.findall(r"^Tested with (.*)\.$", section(), re.M)
    for name, version in (word.split() for word in line.split(", ")):
        assert pinned[name] == version
        assert importlib.import_module(name).__version__.partition("+")[0] == version
