"""A run that asks people: which pairs, what a vote tells, the alarm, and what is refused."""

import numpy as np
import pytest

from flowrl.errors import UserError
from flowrl.settings.read import check_plan, run_from
from flowrl.votes.asking import WATCHED, VotesUsed, disagreement
from flowrl.votes.choice import (
    candidate_pairs,
    most_uncertain,
    random_pairs,
    uncertain_pairs,
    vote_information,
)
from rewards.fitted.davidson import Votes, fit_votes

FITTED = {"name": "fitted", "path": "flowrl/demo/shapes-taste"}
RUN = {
    "recipe": {"name": "nft", "steps": 3, "group": 4, "levels_per_sample": 1},
    "model": {"pipeline": "flowrl/demo/shapes-sd3", "lora": None, "sigmas": {"shift": 1.0}},
    "prompts": {"train": "configs/prompts/shapes_train.jsonl", "per_iteration": 2},
    "rewards": [FITTED],
    "held_out_rewards": [{"name": "shapes", "kind": "strict"}],
    "ask": {"votes": 4},
}


def a_model(d=5, votes=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(votes, d))
    label = rng.choice([0.0, 0.5, 1.0], votes)
    return fit_votes(Votes.of(x, label), 1.0)


def test_random_pairs_are_within_groups_of_different_ones_first_and_fixed_by_the_seed():
    groups = [row // 4 for row in range(24)]
    found = random_pairs(groups, 6, (3, 1))
    assert all(groups[a] == groups[b] and a != b for a, b in found)
    assert len({groups[a] for a, _ in found}) == 6, "one of each group"
    assert found == random_pairs(groups, 6, (3, 1)) != random_pairs(groups, 6, (3, 2))
    assert len(random_pairs(groups, 99, (0,))) == len(candidate_pairs(groups)) == 36


def test_the_information_of_a_vote_is_that_of_a_sum_over_outcomes():
    """Against a plain Monte Carlo over the weights, and its limits."""
    rng, log_nu = np.random.default_rng(0), 0.3
    mean, deviation = np.array([0.0, 1.0, -2.0]), np.array([1.5, 0.5, 3.0])
    found = vote_information(mean, deviation, log_nu)
    for k in range(3):
        m = mean[k] + deviation[k] * rng.normal(size=400_000)
        three = np.stack([m / 2, -m / 2, np.full_like(m, log_nu)], 1)
        p = np.exp(three) / np.exp(three).sum(1, keepdims=True)
        mixed = p.mean(0)
        wanted = -(mixed * np.log(mixed)).sum() + (p * np.log(p)).sum(1).mean()
        assert abs(found[k] - wanted) < 2e-3
    assert vote_information(np.ones(1), np.zeros(1), log_nu)[0] < 1e-12, "nothing left to learn"
    without_ties = vote_information(np.zeros(1), np.full(1, 50.0), -np.inf)[0]
    assert without_ties == pytest.approx(np.log(2), abs=0.05), "a sure vote tells one bit"


def test_the_greedy_choice_updates_the_posterior_after_each_pair():
    model, rng = a_model(), np.random.default_rng(1)
    x = rng.normal(size=(30, 5))
    x[1] = x[0]  # the same pair again tells less
    chosen, informations = most_uncertain(model, x, 6)
    assert len(set(chosen)) == 6
    within = model.basis @ model.spread @ model.spread.T @ model.basis.T
    covariance = within + (np.eye(5) - model.basis @ model.basis.T) / model.ridge
    done = []
    for place, told in zip(chosen, informations, strict=True):
        variance = np.einsum("kd,de,ke->k", x, covariance, x)
        gain = vote_information(x @ model.weight, np.sqrt(variance), model.log_nu)
        gain[done] = -1
        assert place == int(np.argmax(gain)) and told == pytest.approx(gain[place], rel=1e-9)
        p = model.verdicts(x[[place]])[0]
        fisher = (p[0] + p[1] - (p[0] - p[1]) ** 2) / 4
        precision = np.linalg.inv(covariance) + fisher * np.outer(x[place], x[place])
        covariance = np.linalg.inv(precision)
        done.append(place)


def test_a_quarter_of_uncertain_pairs_is_at_random_and_none_is_asked_twice():
    model, rng = a_model(), np.random.default_rng(2)
    groups = [row // 6 for row in range(24)]
    rows, at_random = uncertain_pairs(model, rng.normal(size=(24, 5)), groups, 16, (0, 1))
    assert at_random == [True] * 4 + [False] * 12
    assert len({frozenset(pair) for pair in rows}) == 16
    assert all(groups[a] == groups[b] for a, b in rows)


def test_the_alarm_is_rare_on_twenty_healthy_runs_and_rings_where_people_turn_away():
    rings = heard = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        agreed = (rng.random(400) < 0.72).astype(float).tolist()  # a look after each 24 votes
        rings += any(disagreement(agreed[:n]) for n in range(24, 401, 24))
        apart = [*agreed[:200], *(rng.random(60) < 0.4).astype(float)]
        heard += "people no longer agree" in disagreement(apart)
    assert rings <= 1 and heard >= 18  # of 400 such runs: 4 and 359
    assert disagreement([1.0] * (2 * WATCHED - 1)) == "", "too few to compare"


def test_used_votes_come_after_earlier_ones():
    used = VotesUsed(np.arange(8.0).reshape(4, 2), [1.0, 0.5], [1.0, -1.0], ["x", "y"])
    alone = used.pairs(None)
    both = used.pairs(alone)
    assert both.prompts == ["x", "y", "x", "y"] and both.label.tolist() == [1, 0.5, 1, 0.5]
    assert (both.features[both.a[2:]] == alone.features[alone.a]).all()
    assert (both.features[both.b[2:]] == alone.features[alone.b]).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rewards": [{"name": "shapes"}]}, "ask: its votes renew the run's reward"),
        ({"held_out_rewards": []}, "need a reward that stays the same"),
        ({"budget": {"rates": [0.2, 0.8]}}, "budget.rates remembers scores of earlier"),
        ({"budget": {"order": "uncertain"}}, "budget.order: uncertain remembers scores"),
        ({"budget": {"replay": 4}}, "budget.replay remembers scores"),
        ({"budget": {"repeat": 2}}, "budget.repeat remembers scores"),
        *(
            (
                {"recipe": {"name": "flow_grpo", "steps": 3, "group": 4, "tracker": tracker}},
                r"recipe.tracker \(prompt_values, score_quantiles\) remembers scores",
            )
            for tracker in ("prompt_values", "score_quantiles")
        ),
        ({"budget": {"flat": "resample"}}, "scores samples before the votes on them are in"),
        ({"workers": {"unit": 1}}, "workers scores samples before the votes"),
        ({"ask": {"votes": 0}}, "votes"),
    ],
)
def test_what_remembers_scores_is_refused_with_the_reason(change, sentence):
    check_plan(run_from(RUN, "the run"))
    with pytest.raises(UserError, match=sentence):
        check_plan(run_from({**RUN, **change}, "the run"))
