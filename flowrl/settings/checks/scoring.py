"""Check what a user's rewards say of themselves, before any of the model's weights are read."""

from collections.abc import Mapping

from flowrl.errors import UserError
from flowrl.laws import check_scoring
from flowrl.settings.model.own_model import OwnSettings
from flowrl.settings.parts.own_parts import is_code
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.run import RunSettings
from rewards import load
from rewards.checks.self_test import Prompts
from rewards.load import check_reward, user_function_of
from rewards.types import Kind, Reward, SaysPer

_PLACES = ("rewards", "held_out_rewards", "intermediate_rewards")


def check_own_scoring(run: RunSettings, objects: Mapping[str, Reward]) -> None:
    """UserError for a reward of the user's (of a file, or one of the Python `objects` by label)
    that says what a score depends on, but whose scores depend on more.

    Rewards that say nothing are not called, nor those of a user's model, whose samples have
    no known form yet: the self-test at the start checks them.
    """
    if run.train.self_test == "off" or isinstance(run.model, OwnSettings):
        return
    prompts = None
    for place in _PLACES:
        for spec in getattr(run, place):
            if (reward := _said(spec, objects)) is not None:
                prompts = _prompts(run) if prompts is None else prompts
                check_scoring(spec.label, reward, prompts)


def _said(spec: RewardSpec, objects: Mapping[str, Reward]) -> Reward | None:
    """A user's reward, if it says what a score depends on."""
    if spec.label in objects:
        return objects[spec.label]
    if not is_code(spec.name):
        return None
    try:
        check_reward(spec.name, spec.settings)
        function = user_function_of(spec.name)
    except ValueError:  # a file that cannot be imported, or a setting: `check_rewards` names it
        return None
    if not isinstance(function, SaysPer):
        return None
    try:
        return load(spec.name, **spec.settings)
    except ValueError as error:
        raise UserError(f"reward {spec.label}: {error}") from error


def _prompts(run: RunSettings) -> Prompts:
    kind: Kind = "text" if run.writes_texts else "image"
    if run.prompts.on_hub("train"):
        return Prompts(kind=kind)
    read = run.prompts.read("train")
    return Prompts(read.texts, read.meta, kind)
