"""Upload to the Hub: choose the remote files that an upload replaces or keeps, and explain its errors.

An upload deletes only older weights of the kind that it uploads. huggingface_hub is imported when it
is needed: checking and exporting folders start without it.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError
from ..version import __version__
from .cards import CARD, is_generated, is_machine_written, read_card
from .weight_kinds import refuse_other_weights, stale_weights

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class Hub:
    """A repository on the Hub.

    Attributes:
        name: `user/repo`.
        revision: a branch, or None for the default one.
    """

    def __init__(self, name: str, token: str | None, revision: str | None) -> None:
        from huggingface_hub import HfApi, errors
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except errors.HFValidationError as error:
            raise ConfigError(f"push_to_hub: expected 'user/repo', found {name!r}: {error}") from None
        self.name, self.revision = name, revision
        self._api = HfApi(token=token, library_name="hf_zero", library_version=__version__)

    def prepare(self, private: bool | None, new: Collection[str], overwrite: bool) -> None:
        """Create the repository and the branch if they are missing.

        Args:
            private: create the repository as a private one.
            new: names of the files that will be uploaded.
            overwrite: weights of another kind may be removed.

        Raises:
            ConfigError: the repository holds weights of another kind, or is public although `private` is set.
        """
        with self._explained("creating"):
            url = self._api.create_repo(self.name, private=private, exist_ok=True)
            self.name = url.repo_id  # with the user's name, also if the caller gave only the repository's
            public = private and not self._api.repo_info(self.name).private
        if public:
            raise ConfigError(
                f"{self.name} exists on the Hub and is public. Make it private there, or choose another name"
            )
        with self._explained("listing the files of"):
            present = list_files(self._api, self.name, self.revision)
        if not overwrite:
            branch = "" if self.revision is None else f" (branch {self.revision})"
            refuse_other_weights(present, new, f"{self.name} on the Hub{branch}")
        if self.revision is not None:
            with self._explained("creating the branch in"):
                self._api.create_branch(self.name, branch=self.revision, exist_ok=True)

    def upload(self, folder: Path, names: Collection[str], message: str, overwrite: bool) -> None:
        """Upload files of a folder in one commit, with the deletions that `changes` finds.

        Args:
            folder: holds the files.
            names: relative to it.
            message: the commit message.
            overwrite: delete weights of another kind too.
        """
        only = [glob.escape(name) for name in names]
        what: dict[str, Any] = {"repo_id": self.name, "folder_path": folder, "revision": self.revision}
        with self._explained("uploading to"):
            delete, keep = changes(
                self._api, **what, allow_patterns=only, overwrite=overwrite, is_replaced=is_generated
            )
            self._api.upload_folder(
                **what,
                commit_message=message,
                allow_patterns=only,
                ignore_patterns=keep,
                delete_patterns=delete or None,
            )

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        from huggingface_hub import errors

        what = f"{doing} {self.name} on {self._api.endpoint}"
        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            raise ConfigError(f"{what}: HF_HUB_OFFLINE is set. Unset it to upload") from error
        except (errors.LocalTokenNotFoundError, errors.HFValidationError) as error:
            raise ConfigError(f"{what}: {error}") from error
        except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
            raise _explain(what, error) from error


def changes(
    api: HfApi,
    *,
    repo_id: str,
    folder_path: str | os.PathLike[str],
    path_in_repo: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    allow_patterns: list[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    overwrite: bool = False,
    is_replaced: Callable[[str], bool] = is_machine_written,
    **_: Any,
) -> tuple[list[str], list[str]]:
    """Return patterns of remote files that an upload of a folder deletes, and of local files that it leaves out.

    Older weights of the same kind are deleted, with `overwrite` those of another kind too. A remote card is kept unless
    `is_replaced(its text)`. All other arguments are those of `HfApi.upload_folder`.
    """
    from huggingface_hub.utils import filter_repo_objects

    root, folder = Path(folder_path), f"{path_in_repo.strip('/')}/" if path_in_repo else ""
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    new = list(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=list(ignore_patterns)))
    listed = list_files(api, repo_id, revision, token)
    present = [name.removeprefix(folder) for name in listed if name.startswith(folder)]
    keep: list[str] = []
    if not folder and CARD in present and CARD in new and is_machine_written(read_card(root / CARD)):
        with tempfile.TemporaryDirectory() as local:
            path = api.hf_hub_download(repo_id, CARD, revision=revision, token=token, local_dir=local)
            keep = [] if is_replaced(read_card(Path(path))) else [CARD]
    same, other = stale_weights(present, new)
    return [glob.escape(name) for name in (*same, *(other if overwrite else ()))], keep


def list_files(api: HfApi, name: str, revision: str | None, token: str | None = None) -> list[str]:
    """Return the files of a repository; of the default branch if `revision` is missing, which starts from it."""
    from huggingface_hub import errors

    try:
        return api.list_repo_files(name, revision=revision, token=token)
    except errors.RevisionNotFoundError:
        return api.list_repo_files(name, token=token)


def _explain(what: str, error: Exception) -> CheckpointError | ConfigError:
    """Return an error that says what failed and what to do."""
    from huggingface_hub import errors

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, errors.HTTPError):  # the client wraps errors of its threads
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, errors.HfHubHTTPError):
        hint = "Check the network and HF_ENDPOINT" if cause is not None else "Try again"
        return CheckpointError(f"{what} failed: {cause or error} ({type(cause or error).__name__}). {hint}")
    status = cause.response.status_code
    said = cause.server_message or str(cause).splitlines()[0]
    if status == 401:
        return ConfigError(
            f"{what}: invalid Hub token (401: {said}). Log in with `hf auth login`, set HF_TOKEN, or pass a token"
        )
    if status == 403:
        return ConfigError(f"{what}: the token may not write there (403: {said}). Use a token with the role `write`")
    if status < 500 and status not in (408, 429):
        return ConfigError(f"{what}: the Hub refused ({status}: {said}). Check the name, and that you own it")
    return CheckpointError(f"{what}: the Hub failed ({status}: {said}). The upload is incomplete: try again later")
