"""Rewards inside rewards, judges, and a user's own file: loaded, and refused in clear words."""

from pathlib import Path

import pytest
import torch

from rewards import Judge, Reward, Samples, check_reward, load
from rewards.checks.self_test import self_test
from rewards.combine import ByScore
from rewards.load import load_judge, user_function_of
from rewards.user_function import Own
from tests.support.advice import advice
from tests.support.reward_contract import check_contract, images

OWN = """
import torch
from rewards import Reward, Samples


def sharpness(samples, power: float = 1.0, axis: int = 3):
    return samples.media.diff(dim=axis).abs().flatten(1).mean(1).detach() ** power


def listed(samples):
    return [None if prompt == "" else float(len(prompt)) for prompt in samples.prompts]


def twice(samples, base: Reward):
    return 2 * base(samples)


def nothing():
    return 0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(OWN)
    return str(path)


def test_a_function_of_a_users_file_is_a_reward(own):
    reward = load(f"{own}:sharpness", power=0.5)
    assert isinstance(reward, Own) and isinstance(reward, Reward)
    scores = check_contract(reward, images)
    media = images(["a"] * 6).media
    by_hand = (media[..., 1:] - media[..., :-1]).abs().mean((1, 2, 3)).sqrt()
    torch.testing.assert_close(scores, by_hand)
    assert "different samples; one by one the same" in self_test("sharpness", reward)


def test_a_users_file_like_ours_has_load_and_examples(tmp_path):
    path = tmp_path / "like_ours.py"
    path.write_text(
        "from rewards import load as other\n"
        "def load(kind: str = 'bright'):\n    return other('brightness', kind=kind)\n"
    )
    assert load(str(path), kind="dark")(images(["a"])) < 0
    shown = tmp_path / "shown.py"
    shown.write_text(
        "import torch\nfrom rewards import Samples\n"
        "def red(samples):\n    return samples.media[:, 0].flatten(1).mean(1)\n"
        "def examples():\n    media = torch.zeros(2, 3, 4, 4)\n    media[0, 0] = 1\n"
        "    return Samples(media, ['a'] * 2, torch.arange(2))\n"
    )
    assert "1 for the better of its examples, 0" in self_test("red", load(f"{shown}:red"))


def test_what_a_users_function_takes_may_be_a_reward(own):
    twice = load(f"{own}:twice", base={"name": "brightness", "kind": "dark"})
    samples = images(["a"] * 2)
    torch.testing.assert_close(twice(samples), 2 * load("brightness", kind="dark")(samples))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("{own}:sharpnes", {}, "no function or class 'sharpnes'; did you mean 'sharpness'"),
        ("{own}:sharpness", {"powr": 1}, "no setting 'powr'; did you mean 'power'"),
        ("{own}:twice", {}, "needs the setting 'base'"),
        ("{own}:twice", {"base": "brightnes"}, "base: there is no reward 'brightnes'; did you"),
        ("{own}:nothing", {}, "takes no arguments, but a reward takes"),
        ("{own}", {}, "has no 'load'; name one: .*:FUNCTION"),
        ("{own}x.py:f", {}, "no such file: .*; paths are relative to"),
        ("gate", {"reward": "brightness"}, "'gate' needs the setting 'where'"),
        (
            "gate",
            {"reward": {"nam": 1}, "where": "jpeg"},
            "reward is a reward, such as {name: brightness}, not",
        ),
        ("gate", {"reward": 3, "where": "jpeg"}, "reward 'gate': reward is a reward, such as"),
        (
            "ensemble",
            {"rewards": ["jpeg", {"name": "clipped", "reward": {"name": "ocr", "knd": 1}}]},
            "'ensemble': rewards: reward 'clipped': reward: .*'ocr' has no setting 'knd'; .*'kind'",
        ),
    ],
)
def test_slips_are_told_by_check_and_by_load(own, name, settings, message):
    name = name.format(own=own)
    for act in (lambda: check_reward(name, settings), lambda: load(name, **settings)):
        with pytest.raises(ValueError, match=message):
            act()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(samples:\n    pass\n", "broken.py, line 1: "),
        ("import no_such_library\n", "broken.py, line 1: No module named 'no_such_library'"),
    ],
)
def test_a_broken_file_is_told_with_its_name_and_again_after_mending(tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        check_reward(f"{path}:f", {})
    path.write_text("def f(samples):\n    return [1.0] * len(samples.prompts)\n")
    check_reward(f"{path}:f", {})


def test_a_file_beside_and_a_module_are_answered_with_what_to_write(tmp_path):
    (tmp_path / "own.py").write_text("from helper import k\n")
    with pytest.raises(ValueError, match=r"own\.py, line 1: No module named 'helper'$"):
        load(f"{tmp_path / 'own.py'}:warm")
    (tmp_path / "helper.py").write_text("k = 1\n")
    way = rf"'helper'; helper\.py lies beside it: export PYTHONPATH={tmp_path}$"
    with pytest.raises(ValueError, match=way):
        load(f"{tmp_path / 'own.py'}:warm")
    with pytest.raises(ValueError, match=r"no reward 'a\.b:warm'; your own is named FILE\.py:warm"):
        load("a.b:warm")


def test_rewards_inside_rewards_are_built_at_any_depth():
    inner = {"name": "brightness", "settings": {"kind": "dark"}}
    clipped = {"name": "clipped", "reward": inner, "low": -0.5, "high": 0.0}
    made = load("ensemble", rewards=[clipped, "brightness"], kind="worst")
    samples = images(["a"] * 4)
    bright = load("brightness")(samples).double()
    torch.testing.assert_close(made(samples), (-bright).clamp(-0.5, 0.0).minimum(bright))
    ready = load("clipped", reward=load("brightness"), high=0.5)
    torch.testing.assert_close(ready(samples), bright.clamp(max=0.5))


def test_a_pointwise_reward_serves_as_a_judge():
    judge = load_judge("brightness", kind="bright")
    assert isinstance(judge, ByScore) and isinstance(judge, Judge)
    media = torch.tensor([0.2, 0.8, 0.2, 0.5]).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    samples = Samples(media, ["a"] * 4, torch.zeros(4, dtype=torch.long))
    a, b = torch.tensor([0, 1, 0]), torch.tensor([1, 0, 2])
    assert judge(samples, a, b).tolist() == [0, 1, 0.5]
    assert load("win_rate", judge=judge)(samples).tolist() == [1 / 6, 1, 1 / 6, 2 / 3]
    blind = ByScore(lambda s: [None, 1.0, 0.0, 2.0])
    assert blind(samples, a, b).isnan().tolist() == [True, True, True]
    assert blind(samples, torch.tensor([1]), torch.tensor([2])).tolist() == [1]


def test_a_file_that_only_judges_is_no_reward(tmp_path):
    path = tmp_path / "only.py"
    path.write_text("def judge(side: int):\n    return lambda s, a, b: a.new_full(a.shape, side)\n")
    samples = images(["a"] * 2)
    verdict = load_judge(str(path), side=1)(samples, torch.tensor([0]), torch.tensor([1]))
    assert verdict.tolist() == [1]
    with pytest.raises(ValueError, match="only 'judge'"):
        check_reward(str(path), {"side": 1})
    with pytest.raises(ValueError, match="needs the setting 'side'"):
        check_reward(str(path), {}, "judge")


TASTE = """
import torch
from rewards import Samples


def taste(samples, a, b, margin: float = 0.0):
    bright = samples.media.flatten(1).mean(1)
    gaps = [float(bright[i] - bright[j]) for i, j in zip(a, b)]
    return [None if abs(gap) <= margin else float(gap > 0) for gap in gaps]


class Taste:
    def __init__(self, side: float):
        self.side = side

    def __call__(self, samples, a, b):
        return [self.side] * len(a)


def too_sure(samples, a, b):
    return [2.0] * len(a)


def judge(samples, a, b):
    return taste(samples, a, b)
"""


def greys() -> Samples:
    media = torch.tensor([0.2, 0.8, 0.2, 0.5]).view(4, 1, 1, 1).expand(4, 3, 4, 4)
    return Samples(media, ["a"] * 4, torch.zeros(4, dtype=torch.long))


def test_a_function_of_pairs_in_a_users_file_is_a_judge(tmp_path):
    (tmp_path / "taste.py").write_text(TASTE)
    file = f"{tmp_path / 'taste.py'}"
    samples = greys()
    assert load("win_rate", judge=f"{file}:judge")(samples).tolist() == [0, 1, 0, 2 / 3]
    shy = {"name": f"{file}:taste", "margin": 0.4}
    assert load("win_rate", judge=shy)(samples).tolist()[:3] == [0, 1, 0]
    ahead = load("win_rate", judge={"name": f"{file}:Taste", "side": 1})(samples)
    assert ahead.tolist() == [1, 2 / 3, 1 / 3, 0]
    for name, settings, message in (
        ("win_rate", {"judge": file}, "write .*taste.py:judge"),
        ("win_rate", {"judge": {"name": f"{file}:taste", "sharp": 1}}, "no setting 'sharp'"),
        ("win_rate", {"judge": f"{file}:Taste"}, "needs the setting 'side'"),
        (f"{file}:taste", {}, "judges pairs; as a reward it is {name: win_rate, judge"),
    ):
        with pytest.raises(ValueError, match=message):
            check_reward(name, settings)
    with pytest.raises(ValueError, match="returned 2, which is not a probability"):
        load("win_rate", judge=f"{file}:too_sure")(samples)
    advice(
        "{}: its function `judge` is already a judge: write {}:judge",
        lambda: check_reward("win_rate", {"judge": file}),
        lambda: check_reward("win_rate", {"judge": f"{file}:judge"}),
    )
    function = advice(
        "names no function; write FILE.py:FUNCTION",
        lambda: user_function_of(file),
        lambda: user_function_of(f"{file}:judge"),
    )
    assert function.__name__ == "judge"


def test_ready_judges_and_rewards_judge_pairs():
    samples = greys()
    listed = load("win_rate", judge=lambda s, a, b: [1.0] * len(a))
    assert listed(samples).tolist() == [1, 2 / 3, 1 / 3, 0]
    bright = load("win_rate", judge=lambda s: s.media.flatten(1).mean(1))
    assert torch.equal(bright(samples), load("win_rate", judge="brightness")(samples))
    with pytest.raises(ValueError, match=r"judge 'judge' returned shape .*one per pair"):
        load("win_rate", judge=lambda s, a, b: [0.5])(samples)
