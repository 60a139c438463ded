"""A*-PO: V* from samples of the start, taken once, and whole optimizer steps beside plain torch."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from flowrl.credit.advantages import Context, Estimator
from flowrl.credit.trackers import TRACKER, StartValues
from flowrl.credit.turns import Baseline
from flowrl.errors import UserError
from flowrl.iteration.open import open_stages
from flowrl.iteration.records import Drawn
from flowrl.iteration.sample import SampleStage
from flowrl.likelihoods.rows import Evaluation, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.losses.base import Counts, reduced
from flowrl.losses.off_policy import AdvantageRegression
from flowrl.prompts import Draws
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, run_from
from rewards import Scores
from samplers import Columns
from tests.support import runs, text_runs
from tests.support.iterations import collect, iterate, update

RECIPE = {"name": "text_a_star_po", "length": 8, "samples": 5, "soft": 0.3, "beta": 0.05}


def sampled_totals(session, draws, by):
    """Scores of these draws by the weights of a policy, without learning from them."""
    stages = open_stages(session, Progress())
    sample = stages.sample.sample
    assert isinstance(sample, SampleStage)
    asked = Drawn.of(session.parallel, 1, draws, by)
    return stages.score(sample(asked)).plans[0].totals


def context(prompts: list[int]) -> Context:
    columns = Columns((1,), (True,), (1.0,), (1.0,))
    return Context(columns, torch.ones(1), prompts=torch.tensor(prompts))


def test_the_value_is_the_soft_maximum_of_the_start_s_scores():
    tracker = StartValues(3, 0.5)
    assert tracker.unknown([4, 7, 4, 2]) == [4, 7, 2]
    own = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, math.nan, 1.0]])
    tracker.learn([4, 7, 2], own)
    value = 0.5 * math.log((math.exp(2) + 2) / 3)
    other = 0.5 * math.log((math.exp(4) + math.exp(2)) / 2)
    assert tracker.known[4] == pytest.approx(value, abs=1e-12)
    assert tracker.known[2] == pytest.approx(other, abs=1e-12)
    scores = Scores(torch.tensor([[1.0], [1.0], [0.0]]), torch.ones(3, 1).bool(), ("r",))
    advantage, mask = Estimator((Baseline(),))(scores, tracker.before(context([4, 7, 2])))
    assert mask[:, 0].tolist() == [True, False, True], "the start never solves prompt 7"
    want = torch.tensor([1 - value, 0.0, -other], dtype=torch.float64)
    torch.testing.assert_close(advantage[:, 0], want)
    again = StartValues(3, 0.5)
    again.restore(tracker.state())
    assert again.state() == tracker.state() and again.unknown([4, 7, 2]) == []
    every = StartValues(3, None, solvable=False)
    every.learn([7, 1], torch.tensor([[0.0, 0.0, 0.0], [math.nan] * 3]))
    assert every.known == {7: 0.0} and every.unknown([7, 1]) == [1], "an unscored one comes again"


def log_probabilities(policy, rows, contexts):
    sums = []
    for prompt, ids, length in zip(rows.prompt, rows.ids, rows.lengths, strict=True):
        context = contexts[int(prompt)]
        text = torch.tensor([[*context, *ids[:length].tolist()]])
        logp = policy(input_ids=text).logits[0].double().log_softmax(-1)
        places = torch.arange(len(context), text.shape[1])
        sums.append(logp[places - 1, text[0, places]].sum())
    return torch.stack(sums)


def opened(model, folder, **recipe):
    settings = RECIPE | recipe
    tree = text_runs.tree(model, folder, settings, updates=1, epochs=2, lr=0.004, seed=1)
    tree["model"]["dtype"] = "float64"
    return runs.opened(tree, folder)


@pytest.mark.parametrize("solvable", [True, False])
def test_whole_steps_are_those_of_plain_torch(model, tmp_path, solvable):
    """Two iterations: the second one takes no samples of the start, and regresses to it still."""
    session = opened(model, tmp_path, solvable=solvable)
    policy = session.learner.policy
    other, start = copy.deepcopy(policy.model), copy.deepcopy(policy.model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.004, weight_decay=1e-4)
    for iteration, samples in ((0, 15), (1, 0)):
        experience = collect(session, iteration)
        assert experience.metrics["count/start"] == samples
        (rows,) = experience.rows
        values = [
            session.table[TRACKER].known[p] for p in session.prompts.draw(iteration, 3, 1).rows
        ]
        target = experience.scores.values[:, 0].double() - torch.tensor(values)
        kept = target.isfinite()
        contexts = [policy.encode(p) for p in experience.samples.prompts]
        with torch.no_grad():
            was = log_probabilities(start, rows, contexts)
        for _ in range(2):
            moved = 0.05 * (log_probabilities(other, rows, contexts) - was)
            loss = (moved - target)[kept].square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
        metrics = update(session.learner, experience, Progress(iteration)).metrics
        assert metrics["loss"] > 0
    for ours, theirs in zip(policy.model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_start_samples_although_the_policy_has_moved(model, tmp_path):
    """A prompt that first comes later is valued as if it had come first."""
    first = opened(model, tmp_path, solvable=False)
    collect(first, 3)
    moved = opened(model, tmp_path, solvable=False)
    iterate(moved, Progress())
    assert moved.table[TRACKER].known != first.table[TRACKER].known, (
        "the noise belongs to the iteration"
    )
    moved.table[TRACKER].known.clear()
    collect(moved, 3)
    assert moved.table[TRACKER].known == first.table[TRACKER].known


def test_loss_and_gradient_are_trl_s():
    trainer = pytest.importorskip("trl.experimental.a2po.a2po_trainer", reason="no extra trl")
    rng = torch.Generator().manual_seed(0)
    new, ref = (-torch.rand(4, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    new.requires_grad_()
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    rewards, v_star = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.3, 0.7, 0.1, 0.4])
    own = SimpleNamespace(
        model=SimpleNamespace(training=True), args=SimpleNamespace(beta2=0.05),
        _metrics={"train": {"implicit_reward": [], "advantage": []}},
        _get_sequence_logps=lambda *_: (new * mask).sum(1),
    )  # fmt: skip
    given = {
        "input_ids": None, "attention_mask": None, "logits_to_keep": None,
        "ref_logps": (ref * mask).sum(1), "rewards": rewards, "v_star": v_star,
    }  # fmt: skip
    want = trainer.A2POTrainer.compute_loss(own, None, given)
    a = (rewards - v_star).double()[:, None].expand(mask.shape) * mask
    rows = TokenRows(
        torch.arange(4), a, mask, None, torch.zeros(4, 6, dtype=torch.long), mask.sum(1), 1.0, None
    )
    says = {"new": Evaluation(new, None), "ref": Evaluation(ref, None)}
    entries = AdvantageRegression(0.05)(Token("product"), says, rows)
    got = reduced(entries, mask, Counts.of([mask]))
    torch.testing.assert_close(got, want, atol=1e-7, rtol=0)
    pair = [torch.autograd.grad(each, new, retain_graph=True)[0] for each in (got, want)]
    torch.testing.assert_close(*pair, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"model": {"server": {"url": "http://x/v1", "model": "m", "sync": "none"}}},
            "also samples",
        ),
        ({"recipe": {"likelihood": {"ratio": "token"}}}, "ratio: product"),
        ({"recipe": {"samples": 0}}, "samples must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(model, tmp_path, section, message):
    tree = text_runs.tree(model, tmp_path, RECIPE)
    for name, own in section.items():
        tree[name] = tree[name] | own
    with pytest.raises(UserError, match=message):
        check_plan(run_from(tree, "test"))


@pytest.mark.slow
def test_images_take_the_values_too(tmp_path):
    pipeline = runs.write_pipeline(tmp_path / "pipe")
    tracker = {"name": "start_values", "samples": 2, "soft": None}
    recipe = runs.FLOW_GRPO | {"group": 2, "advantage": "baseline", "tracker": tracker}
    session = runs.session(pipeline, tmp_path, recipe)
    iterate(session, Progress())  # the adapters move
    made = collect(session, 1)  # of two other prompts
    assert made.metrics["count/start"] == 4
    rows = session.prompts.draw(1, 2, session.run.train.seed).rows
    start = [session.table[TRACKER].known[row] for row in rows]
    each = torch.tensor(start, dtype=torch.float64).repeat_interleave(2)
    want = made.scores.values[:, 0].double() - each
    for step in made.rows:
        torch.testing.assert_close(step.advantage[:, 0].double(), want, atol=1e-6, rtol=0)
    draws = Draws.each([-1 - row for row in rows], rows)
    own, moved = (sampled_totals(session, draws, by) for by in ("ref", "current"))
    assert own.view(2, 2).mean(1).tolist() == pytest.approx(start)
    assert moved.view(2, 2).mean(1).tolist() != pytest.approx(start)
