"""Each setting of each reward is described: its meaning, and a range that is the one enforced."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.api.commands import rewards_command
from flowrl.cli.make_schema import run_schema
from flowrl.cli.reward_text import all_rewards, reward_needs, reward_rows, reward_text
from flowrl.errors import UserError
from flowrl.settings.sections.data import RewardSpec
from rewards import Samples, check_reward
from rewards.catalogue.dpg_bench import DpgBench
from rewards.catalogue.geneval import GenEval
from rewards.catalogue.unigenbench import UniGenBench
from rewards.checks.described import without_settings
from rewards.checks.settings import inline_groups
from rewards.load import Want, names, reward_parameters
from rewards.meanings import COMMON_MEANINGS, reward_meanings, reward_wants
from scripts.generate.rewards_page import PAGE, reward_section, rewards_page
from tests.recipes.test_setting_meanings import outside_of

CASES: list[tuple[str, Want]] = [(name, want) for name in names() for want in reward_wants(name)]
NUMBERS = ("int", "float", "int or null", "float or null", "str or int", "str or float")
REQUIRED: dict[str, Any] = {  # a value of each setting that some reward needs
    "reward": "brightness", "where": "brightness", "judge": "brightness",
    "rewards": ["brightness", "jpeg"], "url": "http://127.0.0.1:1", "model": "a", "most": 3,
    "video_fps": 8.0, "label": 1, "path": "a", "question": "a", "checkpoint": "a", "folder": "a",
}  # fmt: skip


@pytest.mark.parametrize(("name", "want"), CASES)
def test_each_setting_has_a_meaning(name: str, want: Want) -> None:
    missing = [row.name for row in reward_rows(name, want) if not row.meaning]
    assert not missing, f"{name}: write lines that begin with the name and two spaces: {missing}"


@pytest.mark.parametrize("name", names())
def test_no_line_describes_what_is_no_setting(name: str) -> None:
    """A misspelt name would leave its line as prose."""
    module = importlib.import_module(f"rewards.catalogue.{name}")
    for maker in reward_wants(name):
        known = reward_parameters(name, maker)
        for described in (vars(module)[maker], *inline_groups(vars(module)[maker])):
            lines = without_settings(described.__doc__, known).splitlines()
            assert not [line for line in lines if re.match(r"\w+  +\S", line)]


def test_each_common_meaning_is_read() -> None:
    shown = {meaning for case in CASES for meaning in reward_meanings(*case).values()}
    assert [name for name, meaning in COMMON_MEANINGS.items() if meaning not in shown] == []


def needed(name: str, want: Want) -> dict[str, Any]:
    """Settings that a reward needs."""
    parameters = reward_parameters(name, want)
    values = {s: REQUIRED[s] for s, p in parameters.items() if p.default is p.empty}
    if name == "by_row":
        values["rewards"] = {"a": "brightness"}
    return values


@pytest.mark.parametrize(("name", "want"), CASES)
def test_a_number_outside_of_its_stated_range_is_refused(name: str, want: Want) -> None:
    """By the check that a plan makes, before anything loads."""
    least = needed(name, want)
    check_reward(name, least, want)
    for row in reward_rows(name, want):
        if row.kind not in NUMBERS:
            continue
        whole = row.kind.endswith("int") or row.kind.startswith("int")
        wrong = outside_of(row.meaning, whole)
        assert wrong or "any number" in row.meaning, f"{name}: {row.name}: say its range"
        for number in wrong:
            value = int(number) if whole else number
            with pytest.raises(ValueError, match=rf"{row.name}: "):
                check_reward(name, {**least, row.name: value}, want)
                pytest.fail(f"{name}: {row.name}: {value} is taken: {row.meaning}")


def test_no_default_is_outside_of_its_stated_range() -> None:
    for name, want in CASES:
        defaults = {
            s: p.default
            for s, p in reward_parameters(name, want).items()
            if isinstance(p.default, int | float) and not isinstance(p.default, bool)
        }
        check_reward(name, {**needed(name, want), **defaults}, want)


def test_the_command_the_page_and_editors_say_the_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    meaning = reward_meanings("clap")["model"]
    assert meaning.startswith("CLAP model with its tokenizer")
    assert rewards_command(["clap"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert meaning in said and "Scores: sound, alone or of videos." in said
    assert "Needs: `laion/clap-htsat-unfused` from the hub, if `model` names no other." in said
    assert f"`laion/clap-htsat-unfused` | {meaning} |" in reward_section("clap")
    of_editors = run_schema()["$defs"]["RewardSpec"]["allOf"]
    (of_clap,) = [c["then"] for c in of_editors if c["if"]["properties"]["name"]["const"] == "clap"]
    assert of_clap["properties"]["model"]["description"] == meaning
    assert of_clap["properties"]["settings"]["properties"]["model"]["description"] == meaning


def test_the_label_of_scores_is_not_mistaken_for_a_setting() -> None:
    of_editors = run_schema()["$defs"]["RewardSpec"]["allOf"]
    (of_safety,) = [c for c in of_editors if c["if"]["properties"]["name"]["const"] == "safety"]
    described = of_safety["then"]["properties"]
    assert "label" not in described and "label" in described["settings"]["properties"]
    beside = {name for name in names() if {"label", "weight", "sets"} & set(reward_meanings(name))}
    assert beside == {"process_reward", "safety", "sequence_classifier"}
    for name in beside:
        assert "within `settings: {...}`" in reward_meanings(name)["label"]
        for label in ("drawings", 1):
            with pytest.raises(
                ValueError, match=rf"{name} has a setting `label` too: write that as"
            ):
                RewardSpec.model_validate({"name": name, "label": label})
        whole = RewardSpec.model_validate({"name": name, "settings": {"label": "a"}})
        assert whole.label == name and whole.settings == {"label": "a"}
        assert RewardSpec.model_validate(whole.model_dump()) == whole
        named = {"name": name, "label": "risk", "settings": {"label": "a"}}
        assert RewardSpec.model_validate(named).label == "risk"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == rewards_page(), "run: python scripts/generate/rewards_page.py"


def test_all_rewards_are_listed() -> None:
    listed = all_rewards()
    assert re.findall(r"(?m)^  (\w+)  ", listed) == sorted(
        names(), key=lambda name: listed.index(f"  {name} ")
    )


def test_a_judge_has_settings_of_its_own() -> None:
    text = " ".join(reward_text("judge").split("As a judge of pairs")[1].split())
    assert "kind verdict (verdict or probability) verdict: the answer's" in text
    assert "both_orders true (bool) whether each pair is judged twice" in text
    assert "column null (str or null) column of the prompt file" in " ".join(
        reward_text("unified_reward").split("As a judge of pairs")[1].split()
    )


def test_columns_that_are_named_as_needed_are() -> None:
    sample = Samples(torch.zeros(1, 3, 8, 8), ["a cat"], torch.zeros(1).long(), [{"other": 1}])
    panel: Any = None
    detector: Any = None
    assert GenEval(detector, detector)(sample).isnan().all()
    with pytest.raises(ValueError, match="no column 'dpg_questions'"):
        DpgBench(panel).check_prompts(sample.prompts, sample.meta)
    with pytest.raises(ValueError, match="no column 'testpoints'"):
        UniGenBench(panel, (), True).check_prompts(sample.prompts, sample.meta)
    assert "the column `include` of the prompt file" in reward_needs("geneval")
    assert "the column `dpg_questions` of the prompt file" in reward_needs("dpg_bench")
    columns = "the columns `testpoints` and `testpoint_descriptions` of the prompt file"
    assert columns in reward_needs("unigenbench")


OWN = '''
class Unwritable:
    """No YAML."""


def sharp(samples, power: float = 2.0, blur: "float | None" = None, kernel=Unwritable()):
    """How sharp an image is.

    power  exponent of the gradient, above 0;
           larger counts edges more
    """
    return [0.0] * len(samples.prompts)


def bare(images, prompts, metadata):
    return [0.0] * len(prompts)


class Taste:
    """Prefers what I prefer.

    side  the one that wins
    """

    def __init__(self, side: str):
        """
        side  the side that wins: a or b
        """

    def __call__(self, samples, a, b):
        return [0.5] * len(a)
'''


def test_a_reward_of_your_own_is_described_in_the_same_way(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    text = reward_text(f"{file}:sharp")
    assert text.startswith(f"{file}:sharp: How sharp an image is.\n\nScores: what its code takes")
    assert "Needs: nothing else." in text
    assert "power  2.0  (float)\n      exponent of the gradient, above 0; larger counts" in text
    assert "blur  null  (float | None)" in text or "blur  null  (float or null)" in text
    assert "\n  kernel  <" in text  # a default that no file can hold
    assert "Scores: images, videos." in reward_text(f"{file}:bare")
    assert "your own reward, without a docstring" in reward_text(f"{file}:bare")
    assert "side  required  (str)\n      the side that wins: a or b" in reward_text(f"{file}:Taste")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["clop"], "rewards: there is no reward 'clop'; did you mean 'clip'?"),
        (["no.py:f"], "rewards: "),
        (["clip", "hps"], "rewards: give a single reward, not clip hps"),
    ],
)
def test_a_wrong_name_is_told(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        rewards_command(words)
