"""Files of models, checked before anything loads."""

from diffusers import guiders

from flowrl.settings.checks.model_files import NO_MODEL


def test_no_guider_is_taken_for_a_network() -> None:
    """A guider's folder has a guider_config.json, and neither a config.json nor weights."""
    kinds = [
        name
        for name, kind in vars(guiders).items()
        if isinstance(kind, type) and issubclass(kind, guiders.ClassifierFreeGuidance.__base__)
    ]
    assert len(kinds) > 5 and all(NO_MODEL.search(kind) for kind in kinds)
