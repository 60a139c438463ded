"""None of a reward stays an abstention, and NaN a failure, through everything around the reward."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowrl.session.session import OfSets
from rewards import Samples, load, score_all
from rewards.catalogue.by_row import ByRow
from rewards.catalogue.centred import Centred
from rewards.catalogue.clipped import Clipped
from rewards.catalogue.ensemble import Ensemble
from rewards.catalogue.gate import Gate
from rewards.catalogue.remote import RemoteReward
from rewards.catalogue.soft_minimum import SoftMinimum
from rewards.catalogue.win_rate import Tournament
from rewards.checks.self_test import Prompts, Untested, check_sum, self_test
from rewards.combine import ByScore, reward_scores
from rewards.judging.pairs import PairBudget
from rewards.serving.server import Served
from rewards.types import Reward, RewardScores
from rewards.user_function import user_reward
from tests.rewards.test_remote import serving

NAN = math.nan
# of five samples: a score, an abstention, a failure, a score, an abstention
LISTED: list[float | None] = [0.25, None, NAN, 0.75, None]
STATES = ["score", "abstains", "failed", "score", "abstains"]


def samples() -> Samples:
    rows = [{"task": "a", "data_set": "own", "reference": "text"}] * 5
    return Samples(["x"] * 5, ["p"] * 5, torch.zeros(5, dtype=torch.long), rows)


def listed(_: Samples) -> list[float | None]:
    return LISTED


def typed(_: Samples) -> RewardScores:
    applies = torch.tensor([value is not None for value in LISTED])
    numbers = torch.tensor([7.0 if value is None else value for value in LISTED])
    return RewardScores(numbers, applies)


def by_task(prompts: list[str], completions: list[str], task: list[str]) -> list[float | None]:
    assert task == ["a"] * len(completions)
    return LISTED


async def later(completions: list[str], **columns: Any) -> list[float | None]:
    return LISTED


def one(samples: Samples) -> list[float]:
    return [1.0] * len(samples.prompts)


def centred() -> Reward:
    return Centred(
        lambda s: [0.0] * len(s.prompts) if s.media[0] == "text" else LISTED, "reference"
    )


FORMS: dict[str, Callable[[], Reward]] = {
    "a list": lambda: listed,
    "RewardScores": lambda: typed,
    "a generator": lambda: lambda s: (value for value in LISTED),
    "TRL's signature": lambda: user_reward(by_task, {}),
    "TRL's, asynchronous": lambda: user_reward(later, {}),
    "clipped": lambda: Clipped(listed, 0.0, 1.0, True),
    "gate behind": lambda: Gate(listed, one, 0.5, 0.0),
    "gate before": lambda: Gate(one, listed, 0.0, 0.0),
    "by_row": lambda: ByRow({"own": listed}, {"own": 2.0}, "data_set", None),
    "centred": centred,
    "ensemble": lambda: Ensemble((listed, listed), "worst", 1.0),
    "soft_minimum": lambda: SoftMinimum((listed, listed), 0.1),
    "data sets": lambda: OfSets(listed, "listed", ("own",)),
}


def states(scores: RewardScores) -> list[str]:
    pairs = zip(scores.values.tolist(), scores.applies.tolist(), strict=True)
    return ["score" if v == v else "failed" if applies else "abstains" for v, applies in pairs]


@pytest.mark.parametrize("form", FORMS)
def test_the_three_states_pass_through(form):
    assert states(reward_scores("r", FORMS[form](), samples())) == STATES
    scores = score_all({"r": FORMS[form]()}, samples())
    assert scores.unscored == {"r": 1} and scores.complete.tolist() == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_and_through_a_server():
    with serving(Served.of("fussy", {}, listed)) as url:
        reward = load("remote", url=url)
        assert isinstance(reward, RemoteReward)
        assert states(reward_scores("r", reward, samples())) == STATES
    with serving(Served.of("sure", {}, one)) as url:
        plain = load("remote", url=url)(samples())
        assert isinstance(plain, torch.Tensor) and plain.tolist() == [1.0] * 5


def test_none_alone_applies_nowhere_and_media_that_cannot_be_read_are_failures():
    assert states(reward_scores("r", lambda s: None, samples())) == ["abstains"] * 5
    given = Samples([None, "x"], ["p"] * 2, torch.zeros(2, dtype=torch.long))
    assert states(reward_scores("r", lambda s: [None], given)) == ["failed", "abstains"]


def test_members_are_joined_where_they_apply():
    first: list[float | None] = [1.0, 2.0, None, None, NAN]
    second: list[float | None] = [3.0, None, 5.0, None, 1.0]
    members = (lambda s: first, lambda s: second)
    wanted = {"mean": [2.0, 2.0, 5.0], "worst": [1.0, 2.0, 5.0], "cautious": [1.0, 2.0, 5.0]}
    for kind, values in wanted.items():
        found = reward_scores("r", Ensemble(members, kind, 1.0), samples())
        assert states(found) == ["score", "score", "score", "abstains", "failed"]
        assert found.values[:3].tolist() == values
    soft = reward_scores("r", SoftMinimum(members, 0.5), samples()).values[:3].tolist()
    both = -0.5 * math.log((math.exp(-1 / 0.5) + math.exp(-3 / 0.5)) / 2)
    assert soft == pytest.approx([both, 2.0, 5.0])


def test_a_tournament_of_a_reward_leaves_out_where_it_does_not_apply():
    found = reward_scores("r", Tournament(ByScore(listed), PairBudget("all", 0, 0)), samples())
    assert states(found) == STATES
    assert found.values[[0, 3]].tolist() == [0.0, 1.0]


def test_rows_without_a_reward_may_be_left_to_others():
    rows = [{"data_set": "own"}, {"data_set": "other"}]
    given = Samples(["x"] * 2, ["p"] * 2, torch.zeros(2, dtype=torch.long), rows)
    half = {"own": {"name": "length", "most": 8}}
    alone = load("by_row", rewards=half, otherwise="abstain")
    assert states(reward_scores("r", alone, given)) == ["score", "abstains"]
    scored = load("by_row", rewards=half, otherwise=0)
    assert reward_scores("r", scored, given).values[1] == 0
    with pytest.raises(ValueError, match="`abstain` if other rewards score them"):
        load("by_row", rewards=half)(given)


def test_a_reward_is_tested_on_prompts_to_which_it_applies():
    meta = [{"task": "a"}] * 300 + [{"task": "b"}] * 100
    prompts = Prompts(["p"] * 400, meta, "text")

    def of_task(task: str) -> Reward:
        def reward(samples: Samples) -> list[float | None]:
            pairs = zip(samples.media, samples.meta, strict=True)
            return [float(len(text)) if row["task"] == task else None for text, row in pairs]

        return reward

    assert "for 4 different samples" in self_test("b", of_task("b"), prompts)
    with pytest.raises(Untested, match=r"it applies to none of 256 prompts, spread over all"):
        self_test("c", of_task("c"), prompts)
    check_sum({"a": of_task("a"), "b": of_task("b")}, {"a": 1.0, "b": 1.0}, prompts)

    def constant(samples: Samples) -> list[float | None]:
        return [1.0 if row["task"] == "b" else None for row in samples.meta]

    with pytest.raises(Untested, match="texts all score 1"):
        self_test("constant", constant, prompts)
