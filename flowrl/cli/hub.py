"""Uploads of an exported folder to the Hugging Face hub."""

from pathlib import Path
from shlex import quote

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from flowrl.errors import UserError


def check_upload(repository: str) -> None:
    """UserError, before any work, for a name that the hub refuses or a missing token."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"--push-to-hub: {repository[:100]!r} is not owner/name: {why}") from error
    if get_token() is None:
        raise UserError(
            "--push-to-hub: there is no token for the hub here: run `hf auth login`, or set "
            "HF_TOKEN"
        )


def upload(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder to a repository, which is created if necessary. Returns its address.

    UserError, which says that the files are complete here, for anything that the hub or the
    network refuses.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of a flowrl run"
        )
    except Exception as error:  # whatever the hub's client and its HTTP library raise
        why = " ".join(str(error).split())[:200]
        again = f"hf upload {quote(repository)} {quote(str(folder))}"
        raise UserError(
            f"--push-to-hub: {repository} was not uploaded ({type(error).__name__}: {why}); the "
            f"files are in {folder}, and `{again}` tries again"
        ) from error
    return str(url)
