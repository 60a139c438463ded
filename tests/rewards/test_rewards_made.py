"""Rewards made of others, against their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewards import Samples, load, score_all
from rewards.perception.media import to_pil
from tests.support.reward_contract import damaged

NAN = float("nan")
scores_lists = st.lists(st.floats(-3, 3), min_size=2, max_size=5)


def fixed(*values: float):
    """A reward that reads its score off each picture's row number, which is its prompt."""
    return lambda s: torch.tensor([values[int(prompt)] for prompt in s.prompts])


def numbered(n: int, meta=()) -> Samples:
    group = torch.zeros(n, dtype=torch.long)
    return Samples(["x"] * n, [str(i) for i in range(n)], group, meta)


def test_a_gate_lets_through_what_passes_and_asks_about_nothing_else():
    asked = []

    def costly(s: Samples) -> torch.Tensor:
        asked.extend(s.prompts)
        return torch.tensor([10.0 + int(p) for p in s.prompts])

    where = fixed(0.4, 0.5, NAN, 0.9)
    gate = load("gate", reward=costly, where=where, above=0.5, floor=-1.0)
    torch.testing.assert_close(
        gate(numbered(4)), torch.tensor([-1, 11, NAN, 13]).double(), equal_nan=True
    )
    assert asked == ["1", "3"]
    shut = load("gate", reward=costly, where=where, above=2.0)
    assert shut(numbered(2)).tolist() == [0, 0] and len(asked) == 2


def test_members_of_an_ensemble_must_all_score():
    members = [fixed(1.0, NAN, 0.0), fixed(2.0, 1.0, 0.0), fixed(6.0, 1.0, 0.0)]
    for kind, first in (("mean", 3.0), ("worst", 1.0), ("cautious", 3.0 - 2 * (14 / 3) ** 0.5)):
        got = load("ensemble", rewards=members, kind=kind, k=2.0)(numbered(3))
        torch.testing.assert_close(
            got, torch.tensor([first, NAN, 0.0]).double(), equal_nan=True, rtol=1e-6, atol=1e-6
        )
    soft = load("soft_minimum", rewards=members)(numbered(3))
    assert soft[1].isnan() and abs(soft[2]) < 1e-12


@pytest.mark.slow
@given(scores_lists, st.floats(0.05, 5))
def test_a_soft_minimum_lies_between_the_least_and_the_mean(values, temperature):
    members = [fixed(value) for value in values]
    soft = load("soft_minimum", rewards=members, temperature=temperature)
    got = float(soft(numbered(1)))
    assert min(values) - 1e-6 <= got <= sum(values) / len(values) + 1e-6
    moved = [fixed(value + 1.5) for value in values]
    shifted = float(load("soft_minimum", rewards=moved, temperature=temperature)(numbered(1)))
    assert shifted == pytest.approx(got + 1.5, abs=1e-5)


def test_a_soft_minimum_becomes_the_least_and_the_mean():
    members = [fixed(0.2), fixed(0.5), fixed(0.8)]
    cold = load("soft_minimum", rewards=members, temperature=0.001)(numbered(1))
    warm = load("soft_minimum", rewards=members, temperature=1000.0)(numbered(1))
    assert float(cold) == pytest.approx(0.2, abs=0.0012)
    assert float(warm) == pytest.approx(0.5, abs=1e-4)
    by_hand = -0.1 * torch.tensor([-2.0, -5.0, -8.0]).exp().mean().log()
    usual = load("soft_minimum", rewards=members)(numbered(1))
    assert float(usual) == pytest.approx(float(by_hand), rel=1e-5)


def test_clipping_keeps_bounds_and_brings_to_one_scale():
    reward = fixed(18.0, 20.0, 24.0, 30.0, NAN)
    kept = load("clipped", reward=reward, low=19.0, high=26.0)(numbered(5))
    assert kept[:4].tolist() == [19, 20, 24, 26] and kept[4].isnan()
    unit = load("clipped", reward=reward, low=20, high=28, unit=True)(numbered(4))
    assert unit.tolist() == [0, 0, 0.5, 1]
    assert load("clipped", reward=reward, high=19.0)(numbered(2)).tolist() == [18, 19]


def test_a_text_is_centred_on_its_reference():
    length = load("length", most=4, kind="near")
    meta = [{"reference": "one two"}, {"reference": "one two"}, {"reference": None}, {}]
    asked = []

    def counted(s: Samples) -> torch.Tensor:
        asked.append(len(s.prompts))
        return length(s)

    samples = Samples(
        ["one two three", "one", "one", "one"], ["p"] * 4, torch.zeros(4, dtype=torch.long), meta
    )
    got = load("centred", reward=counted)(samples)
    assert got[:2].tolist() == [0.25, -0.25] and got[2:].isnan().all()
    assert asked == [1, 2], "the common reference is scored once"


def test_a_picture_is_centred_on_a_file_and_a_damaged_one_is_named(tmp_path):
    _, bad = damaged(tmp_path)
    to_pil(torch.full((3, 6, 6), 0.2)).save(tmp_path / "dark.png")
    meta = [{"reference": path} for path in (str(tmp_path / "dark.png"), bad[1])]
    media = torch.full((2, 3, 8, 8), 0.7)
    samples = Samples(media, ["a"] * 2, torch.zeros(2, dtype=torch.long), meta)
    reward = load("centred", reward="brightness")
    with pytest.warns(UserWarning, match=r"reference .*cut\.png: not a readable image"):
        scores = score_all({"centred": reward}, samples)
    assert scores.scored[:, 0].tolist() == [True, False]
    assert float(scores.values[0, 0]) == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ValueError, match="add a column 'reference'"):
        reward(Samples(media, ["a"] * 2, samples.group))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ensemble", {"rewards": ["jpeg"]}, "at least two rewards are needed, not 1"),
        (
            "ensemble",
            {"rewards": ["jpeg", "jpeg"], "kind": "best"},
            "kind: expected 'mean', 'worst'",
        ),
        ("ensemble", {"rewards": ["jpeg", "jpeg"], "k": -1}, "greater than or equal to 0"),
        ("soft_minimum", {"rewards": ["jpeg"]}, "at least two rewards"),
        ("soft_minimum", {"rewards": ["jpeg", "jpeg"], "temperature": 0}, "greater than 0"),
        ("clipped", {"reward": "jpeg", "low": 1.0, "high": 1.0}, "low must be below high"),
        ("clipped", {"reward": "jpeg", "low": 1.0, "unit": True}, "unit needs both"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        load(name, **settings)


def test_a_win_rate_goes_through_a_gate_in_groups():
    def judge(s: Samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        prompts = [int(prompt) for prompt in s.prompts]
        return torch.tensor([float(prompts[i] > prompts[j]) for i, j in zip(a, b, strict=True)])

    gate = load("gate", reward=load("win_rate", judge=judge), where=fixed(1.0, 0.0, 1.0, 1.0))
    assert gate(numbered(4)).tolist() == [0, 0, 0.5, 1]
