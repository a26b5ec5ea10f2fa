"""Uploads from checkpoints and from training, and back, with the real client and a Hub on the loopback interface."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load

import hf_zero as zero
from hf_zero.cli.main import main as cli
from tests.kit.hub_server import TOKEN, Hub
from tests.kit.jobs.harness import Tokens, arguments, assert_refused, files_under, flip, fresh, gpt2, raised
from tests.kit.pool import ENVIRONMENT, RankPool

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(multipart_bytes=64 << 10) as server:
        yield server


@pytest.fixture(scope="module")
def clients(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    """Ranks whose client knows of that Hub: it takes the address from the environment when it is imported."""
    own = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    own |= {"HF_HOME": str(tmp_path_factory.mktemp("cache")), "HF_TOKEN": TOKEN}
    pools = {world: RankPool(world, executed=True, environment={**ENVIRONMENT, **own}) for world in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def on_client(clients: dict[int, RankPool], place: Path) -> Callable[..., Any]:
    """Calls a function with a folder that all such calls share, in a process that uploads."""
    return lambda work, *args: clients[1].run(_called, work, place, *args)[0]


def _called(rank: int, world: int, work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def model_at(where: str | Path, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(where, **how)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def holds(repo: str, folder: Path) -> bool:
    """Whether the model that is loaded from the Hub is that of the folder."""
    return same(model_at(repo, force_download=True), model_at(folder))


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


@functools.cache
def trained(place: Path) -> Path:
    """A checkpoint that nothing but its own test changes."""
    folder, model = place / "run" / "checkpoint-3", gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero.shard(model, optimizer, zero.ZeroConfig(stage=2))
    ids = torch.arange(12).reshape(1, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    engine.save(folder)
    engine.detach()
    return folder


def private(place: Path) -> None:
    """A temporary folder is used and removed; the file goes in parts."""
    from huggingface_hub import snapshot_download

    folder = trained(place)
    assert zero.export(folder, push_to_hub="user/tiny", private=True, token=TOKEN, commit_message="the end") is None
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}
    fetched = Path(snapshot_download("user/tiny"))
    assert files_under(fetched) == [
        ".gitattributes",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert (fetched / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert holds("user/tiny", folder)
    card = (fetched / "README.md").read_text()
    assert 'from_pretrained("user/tiny")' in card
    assert "stage 2 on 1 rank" in card
    said = raised(lambda: snapshot_download("user/tiny", token=False, cache_dir=place / "other"))
    assert said.startswith("RepositoryNotFoundError") or "401" in said, said


def branch(place: Path) -> None:
    """Cast, to a branch, with a folder kept; `main` stays as it was."""
    from huggingface_hub import snapshot_download

    before = snapshot_download("user/tiny")
    kept = zero.export(
        trained(place), place / "half", dtype="bfloat16", push_to_hub="user/tiny", revision="half/precision"
    )
    fetched = Path(snapshot_download("user/tiny", revision="half/precision"))
    for name in files_under(fetched, [".gitattributes"]):
        assert (fetched / name).read_bytes() == (Path(str(kept)) / name).read_bytes(), name
    model = model_at(fetched, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert same(model, model_at(trained(place)).to(torch.bfloat16))
    assert snapshot_download("user/tiny") == before


@pytest.mark.wide
def test_private_repository_and_branch(hub: Hub, on_client: Callable[..., Any]) -> None:
    on_client(private)
    assert hub.repos["user/tiny"].private
    assert ("main", "the end") in hub.repos["user/tiny"].commits
    assert sum(request.startswith("PUT /lfs/") and request.count("/") == 3 for request in hub.requests) > 2
    assert any(request.endswith("/complete") for request in hub.requests)
    on_client(branch)


def command_line(place: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert cli(["export", str(trained(place)), "--push-to-hub", "typed"]) == 0
    assert "uploaded to" in said.getvalue()


@pytest.mark.wide
def test_command_line(hub: Hub, on_client: Callable[..., Any]) -> None:
    on_client(command_line)
    assert not hub.repos["user/typed"].private


def push(place: Path, name: str, token: str | None) -> str:
    """In a type that was not sent before: the Hub is not asked to take again what it has."""
    with mock.patch.dict(os.environ):
        del os.environ["HF_TOKEN"]
        return raised(lambda: zero.export(trained(place), push_to_hub=name, token=token, dtype="float16"))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "part", "given", "fails"),
    [
        ("ConfigError", "'user/repo'", ("a/b/c", TOKEN), {}),
        ("ConfigError", "hf auth login", ("user/other", "hf_bad"), {}),
        ("ConfigError", "hf auth login", ("user/other", None), {}),
        ("ConfigError", "may not write", ("user/other", TOKEN), {"POST /api/repos/create": 403}),
        # one that the client does not try again after a pause
        ("CheckpointError", "507", ("user/other", TOKEN), {"PUT /lfs/": 507}),
        ("CheckpointError", "507", ("user/other", TOKEN), {"POST /api/models/user/other/commit": 507}),
    ],
)
def test_refusals(
    hub: Hub, on_client: Callable[..., Any], kind: str, part: str, given: Any, fails: dict[str, int]
) -> None:
    hub.fail = fails
    try:
        said = on_client(push, *given)
    finally:
        hub.fail = {}
    assert said.startswith(f"{kind}: ")
    assert part in said
    assert "hf_bad" not in said


def unreachable(place: Path) -> None:
    command = [sys.executable, "-m", "hf_zero.cli.main", "export", str(trained(place)), "--push-to-hub", "user/other"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stderr
    assert said.startswith("hf-zero: "), said
    assert "Check the network and HF_ENDPOINT" in said


@pytest.mark.wide
def test_unreachable(on_client: Callable[..., Any]) -> None:
    on_client(unreachable)


def damaged(place: Path) -> None:
    """Nothing is made on the Hub of a checkpoint that is not whole; and no other machine is asked."""
    contacted: set[str] = set()

    def contact(event: str, given: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(given[1], tuple):
            contacted.add(str(given[1][0]))
        elif event == "socket.getaddrinfo":
            contacted.add(str(given[0]))

    sys.addaudithook(contact)
    zero.export(trained(place), push_to_hub="user/before")
    assert contacted <= {"127.0.0.1"}, contacted  # none where an earlier upload has left its connection open
    path = trained(place) / "model.safetensors"
    flip(path)
    assert_refused(
        lambda: zero.export(trained(place), push_to_hub="user/damaged"), "model.safetensors", kind="CheckpointError"
    )
    flip(path)


@pytest.mark.wide
def test_a_damaged_checkpoint_makes_nothing(hub: Hub, on_client: Callable[..., Any]) -> None:
    on_client(damaged)
    assert "user/before" in hub.repos
    assert "user/damaged" not in hub.repos


# ---- over what a repository already holds ----------------------------------------------------------------------------

USER = {
    "model.fp16.safetensors": "a variant",
    "model-00001-of-00002.fp16.safetensors": "a variant's shard",
    "model-best-of-3.safetensors": "mine",
    "other/model.safetensors": "in a folder",
    "tokenizer.json": "{}",
    "notes.md": "mine",
    "README.md": "# My words\n",
}


def put(repo: str, **files: str) -> None:
    """Files that a user has uploaded."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo, exist_ok=True)
    for name, content in files.items():
        HfApi().upload_file(path_or_fileobj=content.encode(), path_in_repo=name, repo_id=repo)


def listed(repo: str) -> dict[str, bytes]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, force_download=True))
    return {name: (folder / name).read_bytes() for name in files_under(folder)}


def full(place: Path, scale: float = 1.0, **how: Any) -> Path:
    folder = place / f"full{scale}{''.join(map(str, how.values()))}"
    model = gpt2()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    model.save_pretrained(folder, **how)
    return folder


def adapter(place: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = place / "adapter"
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    get_peft_model(model_at(full(place)), config).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def weights_in(repo: str) -> list[str]:
    return sorted(name for name in listed(repo) if name.startswith("model") and name not in USER)


def shards(place: Path) -> None:
    """One file, then shards, then other shards, then one file; everything else of the repository survives."""
    repo = "user/shards"
    put(repo, **USER)
    before = listed(repo)
    for number, size in enumerate(("50GB", "30KB", "60KB", "50GB")):
        source = full(place, 1.0 + number, max_shard_size=size)
        zero.export(source, push_to_hub=repo)
        assert holds(repo, source)
    assert before.items() <= listed(repo).items()
    assert weights_in(repo) == ["model.safetensors"]


def refused_then_overwritten(repo: str, source: Path, part: str) -> set[str]:
    """The repository's files afterwards."""
    before = listed(repo)
    assert_refused(lambda: zero.export(source, push_to_hub=repo), part, "overwrite=True")
    assert listed(repo) == before
    assert cli(["export", str(source), "--push-to-hub", repo]) == 2
    zero.export(source, push_to_hub=repo, overwrite=True)
    assert holds(repo, source)
    return set(listed(repo))


def adapter_over_full(place: Path) -> None:
    zero.export(full(place), push_to_hub="user/full")
    assert_refused(
        lambda: zero.export(full(place), push_to_hub="user/full", private=True),
        "user/full exists on the Hub and is public",
    )
    files = refused_then_overwritten("user/full", adapter(place), "model.safetensors")
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files


def full_over_adapter(place: Path) -> None:
    theirs = {"critic/adapter_config.json": "{}", "critic/adapter_model.safetensors": "x", "adapter_notes.txt": "mine"}
    put("user/lora", **theirs)
    zero.export(adapter(place), push_to_hub="user/lora")
    files = refused_then_overwritten("user/lora", full(place, 3.0), "adapter_config.json")
    assert theirs.keys() <= files
    assert not {"adapter_model.safetensors", "adapter_config.json"} & files


def full_over_pickles(place: Path) -> None:
    put(
        "user/pickled", **{"pytorch_model.bin": "old", "pytorch_model.fp16.bin": "variant", "training_args.bin": "mine"}
    )
    files = refused_then_overwritten("user/pickled", full(place), "pytorch_model.bin")
    assert "pytorch_model.bin" not in files
    assert {"training_args.bin", "pytorch_model.fp16.bin", "model.safetensors"} <= files


def branches(place: Path) -> None:
    """A new branch starts with what `main` holds: it is refused before it is made."""
    from huggingface_hub import HfApi

    repo = "user/branched"
    zero.export(full(place), push_to_hub=repo)
    assert_refused(lambda: zero.export(adapter(place), push_to_hub=repo, revision="lora"))
    assert not HfApi().revision_exists(repo, "lora")
    zero.export(adapter(place), push_to_hub=repo, revision="lora", overwrite=True)
    assert holds(repo, full(place))


def cards(place: Path) -> None:
    """One that a user edited stays, also one that was begun as a program's; the folder's own comes first."""
    repo = "user/cards"
    zero.export(full(place), push_to_hub=repo)
    card = listed(repo)["README.md"].decode()
    for theirs in (card.replace("# ", "# Edited: ", 1), "# Begun\n[More Information Needed]\n"):
        put(repo, **{"README.md": theirs})
        zero.export(full(place), push_to_hub=repo)
        assert listed(repo)["README.md"].decode() == theirs
    own = full(place, 4.0)
    (own / "README.md").write_text("# Of the folder\n")
    zero.export(own, push_to_hub=repo)
    assert listed(repo)["README.md"] == b"# Of the folder\n"


def run_at(repo: str, folder: Path, stage: int = 2, **more: Any) -> Any:
    from transformers import Trainer

    fresh()
    plugin = zero.ZeroPlugin(stage=stage, async_save=True)
    args = arguments(
        folder, None, parallelism_config=plugin, hub_model_id=repo, hub_token=TOKEN, **{"max_steps": 1, **more}
    )
    return Trainer(gpt2(), args, train_dataset=Tokens(), callbacks=[zero.ZeroCallback(report=False)])


def trainer(place: Path) -> None:
    """`Trainer.push_to_hub`: older shards go, the user's card and files stay, another kind is refused before training.

    Neither what a save has staged is pushed, nor the manifest of older weights.
    """
    from huggingface_hub import HfApi
    from transformers import Trainer

    repo, lora = "user/run", "user/lora_run"
    put(repo, **USER)
    zero.export(full(place, 5.0, max_shard_size="30KB"), push_to_hub=repo)
    put(repo, **USER)
    before = {name: data for name, data in listed(repo).items() if name in USER}
    staged = place / "pushing" / ".checkpoint-9.zero_saving" / "model.safetensors"
    staged.parent.mkdir(parents=True)
    (place / "pushing" / "zero_manifest.json").write_text("{}")
    run = run_at(repo, place / "pushing", push_to_hub=True)
    run.train()
    assert "zero_manifest.json" not in listed(repo)
    staged.parent.mkdir(exist_ok=True)
    staged.write_bytes(b"not whole yet")
    run.push_to_hub()
    assert not [name for name in listed(repo) if "zero_saving" in name]
    assert before.items() <= listed(repo).items()
    assert weights_in(repo) == ["model.safetensors"]
    assert holds(repo, place / "pushing")
    zero.export(adapter(place), push_to_hub=lora)
    late = run_at(lora, place / "late")
    late.train()
    for work in (late.push_to_hub, run_at(lora, place / "refused", push_to_hub=True).train):
        assert_refused(work, "adapter_config.json")
    late.hub_model_id, late.args.hub_model_id, late.args.hub_token = None, "user/hidden", "hf_bad"
    if "private" in inspect.signature(Trainer.push_to_hub).parameters:  # not in transformers 5.17
        late.push_to_hub("by position", True, TOKEN, None, True)
        assert HfApi().model_info("user/hidden").private
    late.hub_model_id, late.args.hub_model_id = None, lora
    assert_refused(lambda: late.push_to_hub("by position", True, TOKEN), "adapter_config.json")


@pytest.mark.parametrize(
    "work", [shards, adapter_over_full, full_over_adapter, full_over_pickles, branches, cards, trainer]
)
def test_over_what_is_there(on_client: Callable[..., Any], work: Callable[[Path], None]) -> None:
    on_client(work)


# ---- in training -----------------------------------------------------------------------------------------------------


def pushed(rank: int, world: int, place: Path, stage: int) -> dict[str, Any]:
    settings = {
        "max_steps": 4,
        "save_steps": 2,
        "push_to_hub": True,
        "hub_strategy": "checkpoint",
        "hub_always_push": True,
    }
    run = run_at(f"user/tiny{stage}", place / f"run{stage}", stage, **settings)
    run.train()
    run.push_to_hub(commit_message="the end")
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.wide
@pytest.mark.parametrize("stage", range(4))
def test_saves_and_the_end(hub: Hub, clients: dict[int, RankPool], place: Path, stage: int) -> None:
    """Rank 0 sends what all ranks gathered.

    A Trainer sends a save's two commits from two threads, and leaves out a save that comes while the one before is being sent.
    """
    final, _ = clients[2].run(pushed, place, stage)
    steps = [f"Training in progress, step {step}" for step in (2, 4)]
    repo = hub.repos[f"user/tiny{stage}"]
    files = repo.branches["main"]
    assert repo.commits[-1] == ("main", "the end")
    assert len({*repo.commits}) == len(repo.commits) >= 3
    assert {*repo.commits[:-1]} <= {("main", name) for step in steps for name in (step, f"{step}, checkpoint")}
    assert {"README.md", "config.json", "model.safetensors", "last-checkpoint/zero_manifest.json"} <= set(files)
    assert not [name for name in files if "zero_saving" in name]
    weights = load(files["model.safetensors"])
    assert weights
    assert all(torch.equal(value, final[name]) for name, value in weights.items())
    assert f"zero-stage-{stage}".encode() in files["README.md"]
