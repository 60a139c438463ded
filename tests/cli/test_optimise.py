"""A better noise for each sample, by gradients and by proposals."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl.cli.optimise import (
    NoiseScores,
    NoiseSearch,
    naturalness_slope,
    optimised_samples,
)
from flowrl.cli.steer import SampleScorer, SteeredSampler, steered_samples
from flowrl.errors import UserError
from flowrl.run.evaluate.evaluate import Trial, draw_trial
from flowrl.session.learner import load_policy
from flowrl.session.session import load_rewards
from flowrl.settings import RewardSpec
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.advice import advice
from tests.support.runs import flowrl


@pytest.fixture
def scorer(pipeline, tmp_path) -> SampleScorer:
    run = run_from(runs.tree(pipeline, tmp_path, runs.NFT), "test")
    policy = load_policy(run, torch.device("cpu"))
    policy.rows_per_call = 3
    trial = Trial(run.prompts.read("train"), (0, 1), 2, 3, 5)
    rewards = load_rewards(run.rewards)
    return SampleScorer(policy, rewards, {"brightness": 1.0}, trial, 1.0, torch.device("cpu"))


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("search", "best")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradient", *SLOW])
def test_the_score_rises_from_that_of_the_plain_samples(scorer, method):
    plain = scorer.score(draw_trial(scorer.policy, scorer.trial).samples)
    samples, told = optimised_samples(scorer, NoiseSearch(method, rounds=4))
    found = scorer.score(samples)
    assert (found >= plain - 1e-6).all() and found.mean() > plain.mean()
    assert f"{plain.mean():.4g} -> " in told and samples.prompts[0] == samples.prompts[1]
    assert told.endswith(f"{4 * 3 * 6 if method != 'gradient' else 4 * 3 * 11} network evaluations")


@pytest.mark.slow
def test_the_slope_in_the_noise_is_that_of_finite_differences(scorer):
    scores = NoiseScores.of(scorer)
    noise = scores.noise("root")
    graded, slope = scores.slopes(noise)
    torch.testing.assert_close(graded.double(), scores.score(noise), rtol=0, atol=1e-5)
    unit = slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    ends = [scores.score(noise + way * unit) for way in (0.1, -0.1)]
    measured = ((ends[0] - ends[1]) / 0.2).tolist()
    assert measured == pytest.approx(slope.flatten(1).norm(dim=1).tolist(), rel=0.05)


@pytest.mark.slow
def test_a_negative_weight_lowers_the_reward(scorer):
    plain = scorer.score(draw_trial(scorer.policy, scorer.trial).samples)
    darker = replace(scorer, weights={"brightness": -1.0})
    for method in ("gradient", "best"):
        samples, _ = optimised_samples(darker, NoiseSearch(method, rounds=2))
        assert scorer.score(samples).mean() < plain.mean()


@pytest.mark.slow
def test_weights_scale_scores_and_slopes(scorer):
    half = NoiseScores.of(replace(scorer, weights={"brightness": 0.5}))
    scores = NoiseScores.of(scorer)
    noise = scores.noise("root")
    torch.testing.assert_close(half.score(noise), scores.score(noise) / 2)
    for whole, part in zip(scores.slopes(noise), half.slopes(noise), strict=True):
        torch.testing.assert_close(part, whole / 2)


def test_unscored_samples_are_left_out_and_a_pairwise_reward_is_refused(scorer):
    alone = scorer.rewards["brightness"]

    def first_unscored(samples):
        scores = list(alone(samples))
        return [None, *scores[1:]]

    scorer.rewards["brightness"] = first_unscored
    _, told = optimised_samples(scorer, NoiseSearch("best", rounds=1))
    assert "inf" not in told
    said = {
        math.nan: r"scored none of the first samples\..*use --steer best",
        None: r"no reward applies to any of the first samples \(brightness returned None",
    }
    for value, sentence in said.items():
        scorer.rewards["brightness"] = lambda samples, v=value: [v] * len(samples.prompts)
        with pytest.raises(UserError, match=sentence):
            optimised_samples(scorer, NoiseSearch("best", rounds=1))


def test_a_reward_of_a_group_chooses_the_best_of_more_samples(scorer):
    """Steering compares the particles of a prompt, which are a group; a search scores each sample
    alone, where a win rate has no opponent."""
    steered = SteeredSampler("best", particles=3)

    def optimised():
        return optimised_samples(scorer, NoiseSearch("best", rounds=1))

    alone = scorer.rewards["brightness"]
    grouped = load_rewards((RewardSpec(name="win_rate", settings={"judge": "brightness"}),))
    (label,) = grouped
    for follow in (lambda: steered_samples(scorer, steered), lambda: left_out(scorer, label)):
        scorer.rewards.update(grouped)
        scorer.weights[label] = 1.0
        advice(
            "compares the samples of a group (per = 'group'), but each sample is scored alone "
            "here: leave it out, or use --steer best instead",
            optimised,
            follow,
        )

    scorer.rewards["brightness"] = lambda samples: [
        float(score) if len(samples.prompts) > 4 else math.nan for score in alone(samples)
    ]
    advice(
        "scored none of the first samples. Each is scored alone, so groupwise rewards cannot be "
        "used: use --steer best instead",
        optimised,
        lambda: steered_samples(scorer, steered),
    )


def left_out(scorer, label):
    del scorer.rewards[label], scorer.weights[label]
    return optimised_samples(scorer, NoiseSearch("best", rounds=1))


def test_the_regulariser_pulls_to_the_length_of_a_normal_noise():
    z = torch.tensor([[3.0, 4.0, 0.0]])
    wide = z.double().requires_grad_()
    norm = wide.norm()
    (want,) = torch.autograd.grad(norm**2 / 2 - 2 * norm.log(), wide)
    torch.testing.assert_close(naturalness_slope(z), want.float())


def test_refusals_name_the_way_out(scorer, pipeline, tmp_path, capsys):
    scorer.rewards.update(load_rewards((RewardSpec(name="jpeg"),)))
    with pytest.raises(UserError, match="reward jpeg has no gradient: use --optimise search"):
        optimised_samples(scorer, NoiseSearch("gradient"))
    words = ("sample", "--model", pipeline, "--optimise", "best")
    assert flowrl(*words, "a red ball") == 2
    assert "--optimise needs rewards" in capsys.readouterr().err


@pytest.mark.slow
def test_other_prompts_or_another_reward_give_scores(scorer):
    bright = scorer.rewards["brightness"]
    unscored = scorer.trial.prompts.texts[:2]
    others = replace(scorer.trial, rows=(2, 3))

    def of_other_prompts(samples):
        scores = bright(samples).tolist()
        pairs = zip(samples.prompts, scores, strict=True)
        return [None if prompt in unscored else score for prompt, score in pairs]

    def optimised(rewards, trial):
        how = NoiseSearch("best", rounds=1)
        return optimised_samples(replace(scorer, rewards=rewards, trial=trial), how)

    abstaining = {"brightness": of_other_prompts}
    for rewards, trial in ((abstaining, others), ({"brightness": bright}, scorer.trial)):
        _, told = advice(
            "no reward applies to any of the first samples ({} returned None for each): give other "
            "prompts, or name a reward that returns a score for them",
            lambda: optimised(abstaining, scorer.trial),
            lambda working=rewards, rows=trial: optimised(working, rows),
        )
        assert "nan" not in told


@pytest.mark.slow
def test_a_reward_that_fails_is_mended_or_set_otherwise(scorer):
    """One that scores only images that are large enough, as its setting says."""
    bright = scorer.rewards["brightness"]

    def of_images_above(least):
        def scores(samples):
            if samples.media.shape[-1] < least:
                return [math.nan] * len(samples.prompts)
            return bright(samples)

        return {"brightness": scores}

    def steered(least):
        how = SteeredSampler("best", particles=2)
        return steered_samples(replace(scorer, rewards=of_images_above(least)), how)

    samples, _ = advice(
        "--steer: the reward {} scored none of the {} samples to which it applies; fix the reward",
        lambda: steered(10_000),
        lambda: steered(1),
    )
    assert len(samples.prompts) == 4
