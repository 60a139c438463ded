"""Runs on the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from flowrl.errors import UserError
from rewards.perception.hub import answer_of_hub, of_network


def downloaded_run(repository: str) -> Path:
    """The folder of a run in a repository, owner/name, downloaded into the hub's cache. UserError
    for a repository that cannot be read or has no run."""
    place = "flowrl.Run.from_pretrained"
    try:
        folder = Path(snapshot_download(repository))
    except HFValidationError as error:
        raise UserError(
            f"{place}: {repository[:100]!r} is neither a folder nor owner/name of a repository"
        ) from error
    except Exception as error:  # whatever the installed HTTP library raises
        if not of_network(error):
            raise
        reason = answer_of_hub(error, repository) or " ".join(str(error).split())[:200]
        raise UserError(f"{place}: {repository} cannot be read from the hub: {reason}") from error
    if not (folder / "run.yaml").is_file():
        raise UserError(
            f"{place}: {repository} has no run.yaml, so it is not the folder of a run. Weights "
            "that a run exported are loaded as its model card says: "
            f"pipe.load_lora_weights({repository!r}), or from_pretrained of diffusers or "
            "transformers"
        )
    return folder
