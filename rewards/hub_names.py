"""Names of repositories on the hub, by their form alone."""


def names_repository(text: str) -> bool:
    """Whether a text has the form of a repository's name on the hub, owner/name. Asks nobody."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if text.count("/") != 1:
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
