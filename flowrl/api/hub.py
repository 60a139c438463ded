"""Runs on the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from flowrl.errors import UserError
from rewards.hub_names import possible_repository
from rewards.perception.hub import (
    answer_of_hub,
    check_cached,
    from_hub,
    hub_silence,
    of_network,
    present_place,
    waiting,
)
from rewards.perception.hub_cache import CachedRepository


def downloaded_run(repository: str) -> Path:
    """The folder of a run in a repository, owner/name, downloaded into the hub's cache. UserError
    for a repository that cannot be read or has no run."""
    place = "flowrl.Run.from_pretrained"
    if not possible_repository(repository):
        raise UserError(
            f"{place}: {repository[:100]!r} is neither a folder nor owner/name of a repository"
        )
    stored = CachedRepository(repository, whole=True)
    try:
        with waiting(f"the run {repository}"), from_hub(place, stored, UserError):
            check_cached(place, stored, UserError)
            local = present_place(repository) != repository
            if not local and (silence := hub_silence(repository)) is not None:
                raise UserError(f"{place}: {repository} cannot be read: the hub {silence}")
            folder = Path(snapshot_download(repository, local_files_only=local))
            lacks_run = not (folder / "run.yaml").is_file()
            check_cached(place, stored, UserError)  # it may have lost files meanwhile
            if lacks_run:
                raise UserError(
                    f"{place}: {repository} has no run.yaml, so it is not the folder of a run. "
                    "Weights that a run exported are loaded as its model card says: "
                    f"pipe.load_lora_weights({repository!r}), or from_pretrained of diffusers or "
                    "transformers"
                )
            return folder
    except UserError:
        raise
    except Exception as error:  # whatever the installed HTTP library raises
        if not of_network(error):
            raise
        reason = answer_of_hub(error, repository) or " ".join(str(error).split())[:200]
        raise UserError(f"{place}: {repository} cannot be read from the hub: {reason}") from error
