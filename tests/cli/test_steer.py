"""Steering: more samples instead of training."""

import pytest
import torch
import yaml

from flowrl.cli.steer import SampleScorer, SteeredSampler, steered_samples
from flowrl.run.evaluate.evaluate import Trial, draw_trial
from flowrl.session.learner import load_policy
from flowrl.session.session import load_rewards
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.runs import flowrl


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["best", *(pytest.param(n, marks=pytest.mark.slow) for n in ("importance", "particles"))],
)
def test_steering_raises_the_reward_of_what_is_generated(pipeline, tmp_path, method, capsys):
    """Bright ones of eight: no training, only more samples."""
    run = run_from(runs.tree(pipeline, tmp_path, runs.NFT), "test")
    policy = load_policy(run, torch.device("cpu"))
    prompts = run.prompts.read("train")
    trial = Trial(prompts, (0, 1), 4, 4, 5)
    rewards = load_rewards(run.rewards)
    scorer = SampleScorer(policy, rewards, {"brightness": 1.0}, trial, 1.0, torch.device("cpu"))
    plain = scorer.score(draw_trial(policy, trial).samples)
    samples, evaluations = steered_samples(
        scorer, SteeredSampler(method, particles=8, strength=3000.0)
    )
    assert samples.prompts == [t for t in prompts.texts[:2] for _ in range(4)]
    assert evaluations == 2 * 4 * 8 * 4
    assert scorer.score(samples).mean() > plain.mean() + 0.5 * plain.std()


def test_the_command_line_steers(pipeline, tmp_path, capsys):
    tree = runs.tree(pipeline, tmp_path, runs.NFT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump(tree))
    words = ("sample", tmp_path / "run", "a red ball", "--weights", "base", "--count", "1")
    steer = ("--steer", "best", "--particles", "3", "--rewards", "{name: brightness, kind: dark}")
    assert flowrl(*words, *steer, "--out", tmp_path / "out") == 0
    assert "steered by brightness.dark: 9 network evaluations" in capsys.readouterr().out
