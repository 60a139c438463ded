"""Names of scores on held-out prompts."""

TRAINED = "trained/"
"""Begins the name of a training reward that evaluations measure beside the held-out rewards."""


def is_trained(name: str) -> bool:
    """Whether a held-out score is that of a training reward, measured beside the judges."""
    return name.startswith(TRAINED)


def shown_score(name: str) -> str:
    """The name as terminals and pages show it: `warmth (trained)`."""
    return f"{name.removeprefix(TRAINED)} (trained)" if is_trained(name) else name
