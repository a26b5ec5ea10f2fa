"""A repository on the Hub that a folder is uploaded to, and what went wrong on the way there, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, errors
from huggingface_hub.errors import HTTPError  # httpx's own, whichever httpx it is
from huggingface_hub.utils import validate_repo_id

from ..errors import CheckpointError, ConfigError
from ..version import __version__

# What a reader of the repository would take for weights, were it left there from an older upload.
_RIVALS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]


class Hub:
    """One repository."""

    def __init__(self, name: str, token: str | None, revision: str | None) -> None:
        try:
            validate_repo_id(name)
        except errors.HFValidationError as error:
            raise ConfigError(f"push_to_hub: expected 'user/repo', found {name!r}: {error}") from None
        self.name, self.revision = name, revision
        self._api = HfApi(token=token, library_name="hf_zero", library_version=__version__)

    def prepare(self, private: bool | None) -> None:
        """Make the repository and the branch where they are not there."""
        with self._explained("creating"):
            url = self._api.create_repo(self.name, private=private, exist_ok=True)
            self.name = url.repo_id  # with the user's name, where only the repository's was given
            public = private and not self._api.repo_info(self.name).private
        if public:
            raise ConfigError(
                f"{self.name} is there already and public: make it private on the Hub, or choose another name"
            )
        with self._explained("making the branch in"):
            if self.revision is not None:
                self._api.create_branch(self.name, branch=self.revision, exist_ok=True)

    def upload(self, folder: Path, message: str, ignore: Sequence[str]) -> None:
        """All files of `folder` but those; weights that an older upload left under other names go."""
        with self._explained("uploading to"):
            self._api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                revision=self.revision,
                commit_message=message,
                ignore_patterns=list(ignore),
                delete_patterns=_RIVALS,
            )

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        what = f"{doing} {self.name} on {self._api.endpoint}"
        try:
            yield
        except errors.OfflineModeIsEnabled as error:
            raise ConfigError(f"{what}: HF_HUB_OFFLINE is set; unset it to upload") from error
        except (errors.LocalTokenNotFoundError, errors.HFValidationError) as error:
            raise ConfigError(f"{what}: {error}") from error
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            raise _explain(what, error) from error


def _explain(what: str, error: Exception) -> CheckpointError | ConfigError:
    """What went wrong between here and the Hub, and what to do."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HTTPError):  # the client wraps errors of its threads
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, errors.HfHubHTTPError):
        hint = "is the network there, and HF_ENDPOINT right?" if cause is not None else "try again"
        return CheckpointError(f"{what} failed: {cause or error} ({type(cause or error).__name__}); {hint}")
    status = cause.response.status_code
    said = cause.server_message or str(cause).splitlines()[0]
    if status == 401:
        return ConfigError(
            f"{what}: the Hub knows no such token (401: {said}); log in with `hf auth login`, set HF_TOKEN, or pass a token"
        )
    if status == 403:
        return ConfigError(f"{what}: the token may not write there (403: {said}); it needs the role `write`")
    if status < 500 and status not in (408, 429):
        return ConfigError(f"{what}: the Hub refused ({status}: {said}); is the name right, and is it yours?")
    return CheckpointError(f"{what}: the Hub failed ({status}: {said}); the upload is not complete; try again later")
