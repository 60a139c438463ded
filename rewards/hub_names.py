"""Names of repositories on the hub, by their form alone."""


def names_repository(text: str) -> bool:
    """Whether a text has the form of a repository's name on the hub, owner/name. Asks nobody."""
    return text.count("/") == 1 and possible_repository(text)


def possible_repository(text: str) -> bool:
    """Whether a repository on the hub can have this name, with its owner or, as some of the first
    ones have it, without. Asks nobody."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
