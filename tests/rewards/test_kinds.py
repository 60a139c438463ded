"""Rewards say which media they score, and mean it: a table over the catalogue."""

import pytest

from rewards import load
from rewards.checks.self_test import Prompts, probe
from rewards.kinds import check_kinds, declared_kinds
from rewards.load import names, reward_module, rewards_within
from rewards.perception.media import WrongMedia
from rewards.types import Kind
from tests.rewards.test_rewards_contract import WITHOUT_WEIGHTS

KINDS: tuple[Kind, ...] = ("image", "video", "sound", "text")
# they combine others, or learn it from their folder
SAY_NOTHING = {
    "by_row", "clipped", "ensemble", "fitted", "gate", "soft_minimum", "win_rate",
}  # fmt: skip


def test_every_reward_of_the_catalogue_says_its_kinds() -> None:
    silent = {name for name in names() if "SCORED_KINDS" not in vars(reward_module(name)[0])}
    assert silent == SAY_NOTHING


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_reward_scores_what_it_says(name: str) -> None:
    """It refuses the media of every other kind, and those alone."""
    settings, _ = WITHOUT_WEIGHTS[name]
    reward = load(name, **settings)
    said = [set(kinds) for _, kinds in declared_kinds(name, settings)]
    taken = set.intersection(*said)
    prompts = Prompts(meta=({"answer": "7", "reference": "It is 7."},) * 2)
    for kind in KINDS:
        try:
            reward(probe(kind, prompts))
        except WrongMedia:
            assert kind not in taken, f"{name} says that it scores {kind}"
        except ValueError:  # for want of a column: it looked at the media before
            assert kind in taken
        else:
            assert kind in taken, f"{name} scores {kind}, and does not say so"


def test_sound_has_few_rewards_and_the_sentence_names_them(tmp_path) -> None:
    check_kinds("loudness", {}, "sound")
    check_kinds("clip", {}, "video")
    with pytest.raises(ValueError, match=r"'clip' scores images or videos; it was given sound: "
                       r"take clap, loudness, silence, or a function of your own"):  # fmt: skip
        check_kinds("clip", {}, "sound")
    inner = {"reward": "loudness", "where": "brightness", "above": 0.5}
    with pytest.raises(ValueError, match="'brightness' scores images or videos"):
        check_kinds("gate", inner, "sound")
    assert [name for name, _ in rewards_within("gate", inner)] == ["gate", "loudness", "brightness"]
    own = tmp_path / "own.py"
    own.write_text(
        "def seen(images, prompts, metadata): return [0.0] * len(images)\n"
        "def read(prompts, completions, **columns): return [0.0] * len(prompts)\n"
        "def any_media(samples): return [0.0] * len(samples.media)\n"
    )
    for function, kinds in (("seen", "images or videos"), ("read", "text")):
        with pytest.raises(ValueError, match=f"scores {kinds}; it was given sound"):
            check_kinds(f"{own}:{function}", {}, "sound")
    check_kinds(f"{own}:any_media", {}, "sound")
