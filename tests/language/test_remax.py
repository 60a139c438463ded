"""ReMax: a greedy completion beside the sampled ones, as their baseline and for nothing else."""

import pytest
import torch

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.credit.turns import Baseline, GreedyBaseline
from flowrl.credit.values import TrackedStatistics
from flowrl.errors import UserError
from flowrl.iteration import ratio_check
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Surrogate
from flowrl.models.language.policy import CausalPolicy
from flowrl.recipes.table import TEXT_RECIPES
from flowrl.session.progress import Progress
from rewards import Scores
from samplers import Columns
from samplers.completions import Completions
from tests.support import text_runs, tiny_lm
from tests.support.credit_context import context_of as context_with
from tests.support.iterations import collect, iterate

DRAWS, GROUP = 5, 4


def context(group: int, baseline: torch.Tensor | None = None) -> Context:
    columns = Columns((group,), (True,), (1.0,), (1.0,))
    return context_with(columns, torch.ones(2), tracked=TrackedStatistics(baseline))


def test_the_greedy_sample_is_the_baseline_and_is_masked():
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(DRAWS, GROUP, 2, generator=rng)
    greedy = torch.randn(DRAWS, 1, 2, generator=rng)
    whole = torch.cat([values, greedy], 1).flatten(0, 1)
    scored = torch.ones_like(whole, dtype=torch.bool)
    scored[1] = False  # a sample of the first draw
    scored[2 * (GROUP + 1) - 1] = False  # the second draw's greedy one
    scores = Scores(whole * scored, scored, ("a", "b"))
    rule = Estimator((GreedyBaseline(GROUP + 1),))
    got, mask = rule(scores, context(GROUP + 1))
    merged = rule(scores, context((GROUP + 1) * DRAWS))  # all draws of one prompt, in one group
    assert torch.equal(merged[0], got) and torch.equal(merged[1], mask)
    got, mask = got.view(DRAWS, GROUP + 1), mask.view(DRAWS, GROUP + 1)
    kept = torch.ones(DRAWS, GROUP + 1, dtype=torch.bool)
    kept[:, -1], kept[0, 1], kept[1] = False, False, False
    assert torch.equal(mask, kept) and not got[~kept].any()
    plain = Scores(values.flatten(0, 1), torch.ones(DRAWS * GROUP, 2, dtype=torch.bool), ("a", "b"))
    given = context(GROUP, greedy.sum(2)[:, 0].double())
    want, _ = Estimator((Baseline(),))(plain, given)
    want = want.view(DRAWS, GROUP)
    torch.testing.assert_close(got[:, :GROUP][kept[:, :GROUP]], want[kept[:, :GROUP]])


@pytest.mark.parametrize("warp", [(1.0, 1.0), (0.7, 0.9)], ids=["plain", "warped"])
def test_the_last_completion_is_greedy_and_the_others_are_what_they_were(warp):
    policy = CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())
    batch = policy.open(["a:", "cab :", "bead"], [], 6)

    def ids(plan: Completions) -> torch.Tensor:
        (rollout,) = batch.rollouts(plan, (0, 1, 2), seed=0, iteration=0)
        return rollout.ids.view(3, -1, 6)

    both = ids(Completions(3, *warp, greedy=True))
    assert both.shape == (3, 4, 6)
    assert torch.equal(both[:, :3], ids(Completions(3, *warp)))
    assert torch.equal(both[:, 3:], ids(Completions(1, 0.0)))
    assert not torch.equal(both[:, 3:], both[:, :1])


@pytest.mark.slow
def test_a_run_scores_the_greedy_completions_and_trains_on_the_others(tmp_path):
    model = tiny_lm.write(tmp_path)
    recipe = {"name": "text_remax", "length": 6, "group": 3, "temperature": 0.7, "top_p": 0.9}
    kept = text_runs.session(model, tmp_path, recipe, lr=2e-2, rows_per_call=32)
    experience = collect(kept, 0)
    (rows,) = experience.rows
    assert rows.prompt.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert experience.metrics["count/scored"] == 12 == len(experience.samples.prompts)
    scores = experience.scores.values.view(3, 4).double()
    want = (scores[:, :3] - scores[:, 3:]).flatten()
    torch.testing.assert_close(rows.advantage[:, 0].double(), want)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5
    progress = Progress()
    rewards = [iterate(kept, progress).metrics["reward"] for _ in range(15)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_whitens_over_tokens_with_or_without_the_mean_of_the_group(baseline):
    made = TEXT_RECIPES["text_reinforce"](length=6, group=3, baseline=baseline)
    values = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    scores = Scores(values[:, None], torch.ones(6, 1, dtype=torch.bool), ("a",))
    given = Context(Columns((3,), (True,), (1.0,), (1.0,)), torch.ones(1), lengths=lengths)
    got = made.advantage(scores, given)[0][:, 0]
    centred = values - values.view(2, 3).mean(1).repeat_interleave(3) * baseline
    tokens = centred.repeat_interleave(lengths)
    torch.testing.assert_close(got, (centred - tokens.mean()) / (tokens.var() + 1e-8).sqrt())


@pytest.mark.parametrize("greedy", [False, True])
def test_a_plan_without_a_greedy_completion_and_a_baseline_from_it_go_together(greedy):
    rule = Standardize() if greedy else GreedyBaseline(4)
    plan = Completions(4, greedy=greedy)
    with pytest.raises(UserError, match="require each other"):
        Algorithm(6, plan, Estimator((rule,)), Token(), Surrogate(0.2, 0.2))
    with pytest.raises(UserError, match="counts as one of"):
        Algorithm(6, plan, Estimator((GreedyBaseline(3),)), Token(), Surrogate(0.2, 0.2))
