"""Every recipe of language models must teach a table of logits; so must what budgets and trackers
add to them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.selection import DropFlat, MaxVariance
from flowrl.credit.trackers import ReadsStart
from flowrl.credit.values import SampleTurns, Transform
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, TokenRows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.token_ratios import row_mean
from flowrl.losses.base import Counts, RatioLoss, reduced
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import GMPO, SAPO
from flowrl.recipes.table import IMAGE_RECIPES, TEXT_RECIPES
from flowrl.settings import recipe_kind
from flowrl.settings.parts.names import parts_named
from rewards import Scores
from samplers.completions import Completions, SegmentPoints, TextPlan, TextRollout
from samplers.generate import TokenRequest, Writer, WrittenTokens
from samplers.tokens import draw_tokens, entropy, token_noise, warp
from tests.support.credit_context import context_of as context_with

PROMPTS, LENGTH, WORDS, STOP = 5, 4, 5, 0  # word 0 ends a text

TREE = {"length": LENGTH, "roots": 3, "branch": 2, "at": (1, 2)}
SMALL = {name: {"length": LENGTH, "group": 8} for name in TEXT_RECIPES} | {
    "text_tree": TREE,
    "text_spo_tree": TREE,
    "text_tempo": TREE,
    "text_treerl": {"length": LENGTH, "roots": 3, "temperature": 1.0, "top_p": 1.0},
    "text_gspo": {"length": LENGTH, "group": 8, "low": 0.1, "high": 0.1},
    "text_luspo": {"length": LENGTH, "group": 8, "low": 0.1, "high": 0.1},
    "text_stream": {"length": LENGTH, "group": 1, "uncertain": False},
    "text_a_star_po": {"length": LENGTH, "group": 8, "solvable": False, "beta": 0.05},
    "text_opo": {"length": LENGTH, "group": 8, "temperature": 1.0},
    "text_forking": {"length": LENGTH, "group": 8, "share": 0.5, "entropy": 0.01},
    "text_dpo": {"length": LENGTH, "group": 8, "beta": 1.0},
    "text_process": {"length": LENGTH, "group": 8, "outcome": True},
}


@dataclass
class Table:
    """Logits by prompt and position: the least that writes."""

    logits: Tensor  # [prompts t v]

    def say(self, temperature: float) -> Tensor:
        return warp(self.logits, temperature)

    def __call__(self, rows: TokenRows, entropy: bool) -> Evaluation:
        every = self.say(rows.temperature)[rows.prompt]
        own = every.gather(2, rows.ids[..., None])[..., 0]
        spread = -(every.exp() * every).sum(-1)
        written = rows.written
        return Evaluation(own * written, spread * written if entropy else None)

    def write(self, plan: TextPlan, draws: range, rng: torch.Generator, seed: int) -> TextRollout:
        """Draw word by word; leaves of a node copy its words."""
        if plan.forking is not None:
            contexts = [[row] for row in draws]
            return Writer(Words(self), contexts, tuple(draws), 0, seed).write(plan)
        n, step = len(draws) * plan.group, seed
        prompt = torch.arange(len(draws)).repeat_interleave(plan.group)
        said = self.say(plan.temperature).detach()
        ids = torch.zeros(n, plan.length, dtype=torch.long)
        logp = torch.zeros(n, plan.length, dtype=said.dtype)
        stopped, lengths = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
        for k, (first, end) in enumerate(plan.segments):
            leaves = plan.group // plan.nodes[k]
            for t in range(first, end):
                probabilities = said[prompt[::leaves], t].exp()
                word = torch.multinomial(probabilities, 1, generator=rng)
                if plan.greedy:
                    last = slice(plan.group - 1, None, plan.group)
                    word[last] = probabilities[last].argmax(-1, keepdim=True)
                word = word[:, 0].repeat_interleave(leaves)
                ids[:, t] = torch.where(stopped, 0, word)
                logp[:, t] = torch.where(
                    stopped, 0.0, said[prompt, t].gather(1, word[:, None])[:, 0]
                )
                lengths += (~stopped).long()
                stopped = stopped | (word == STOP)
        return TextRollout(
            plan, ids, logp, lengths, stopped, None, prompt, tuple(draws), seed, step, 0,
            SegmentPoints(), torch.zeros_like(stopped),
        )  # fmt: skip


@dataclass
class Words:
    """The table as a sampler of tokens: a context is the prompt's row and the words so far."""

    table: Table
    exact: bool = True
    elsewhere: bool = False

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        said = self.table.say(asked.temperature).detach()
        row = torch.tensor([context[0] for context in asked.contexts])
        at = torch.tensor([len(context) - 1 for context in asked.contexts])
        ids, logp, spread = [], [], []
        for u in range(int(asked.room.max())):
            here = said[row, (at + u).clamp(max=LENGTH - 1)]
            ids.append(draw_tokens(here.exp(), token_noise(asked.noise, u, WORDS)[0]))
            logp.append(here.gather(1, ids[-1][:, None])[:, 0])
            spread.append(entropy(here))
        words = torch.stack(ids, 1)
        stops = words == STOP
        lengths = ((stops.cumsum(1) - stops.long()) == 0).sum(1).minimum(asked.room)
        ends = words.gather(1, lengths[:, None] - 1)[:, 0] == STOP
        return WrittenTokens(
            words, torch.stack(logp, 1), lengths, ends, None, torch.stack(spread, 1)
        )


def solved(rollout: TextRollout) -> Scores:
    """1 for texts that begin with their prompt's word and then stop."""
    want = rollout.prompt % (WORDS - 1) + 1
    right = (rollout.ids[:, 0] == want) & (rollout.ids[:, 1] == STOP)
    value = right.double()[:, None]
    return Scores(value, torch.ones_like(value, dtype=torch.bool), ("solved",))


class Loop:
    """Sample, score, credit, update: the least that trains a recipe of texts."""

    def __init__(self, algorithm: Algorithm, dtype: torch.dtype = torch.float32) -> None:
        self.algorithm, self.step = algorithm, 0
        self.rng = torch.Generator().manual_seed(0)
        start = 0.3 * torch.randn(PROMPTS, LENGTH, WORDS, generator=self.rng, dtype=dtype)
        self.table = Table(start.clone().requires_grad_())
        self.start = Table(start)
        self.tracker = algorithm.tracker()
        self.optimizer = torch.optim.Adam([self.table.logits], lr=0.1)

    def rollouts(self) -> Iterator[TextRollout]:
        plans = self.algorithm.plan([0.0] * (self.algorithm.steps + 1), self.step, 0)
        for plan in plans:
            yield self.table.write(plan, range(PROMPTS), self.rng, self.step)

    def rows(self, rollout: TextRollout) -> list[TokenRows]:
        scores = solved(rollout)
        if isinstance(self.tracker, ReadsStart) and self.tracker.unknown(range(PROMPTS)):
            plan = replace(rollout.plan, nodes=(8,))
            start = self.start.write(plan, range(PROMPTS), self.rng, self.step)
            self.tracker.learn(range(PROMPTS), solved(start).values.view(PROMPTS, -1))
        context = context_with(
            rollout.columns, torch.ones(1), lengths=rollout.lengths, prompts=torch.arange(PROMPTS),
            turns=SampleTurns(
                torch.ones_like(rollout.lengths[:, None]).bool(), rollout.prompt[:, None]
            ),
        )  # fmt: skip
        context = self.tracker.before(context)
        credit = self.algorithm.advantage(scores, context)
        self.tracker.after(scores, context)
        return self.algorithm.likelihood.rows(rollout, *credit)

    def says(self, rows: TokenRows) -> dict[str, Evaluation]:
        evaluate = self.algorithm.likelihood.evaluate
        return {
            "new": evaluate(self.table, rows),
            "old": rows.old,
            "ref": evaluate(self.start, rows),
        }

    def iterate(self, updates: int = 2) -> float:
        rollouts = list(self.rollouts())
        batches = [rows for rollout in rollouts for rows in self.rows(rollout)]
        counts = Counts.of([rows.mask for rows in batches])
        for _ in range(updates):
            self.optimizer.zero_grad()
            for rows in batches:
                entries = self.algorithm.loss(self.algorithm.likelihood, self.says(rows), rows)
                reduced(entries, rows.mask, counts).backward()
            self.optimizer.step()
        self.step += 1
        return float(torch.cat([solved(r).values for r in rollouts]).mean())


QUICK = ("text_grpo", "text_rloo", "text_treerl", "text_stream")


@pytest.mark.quick_cases("text_grpo", "text_rloo")
@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in TEXT_RECIPES]
)
def test_learns(name):
    loop = Loop(TEXT_RECIPES[name](**SMALL[name]))
    length = 150 if name == "text_stream" else 60  # it has one text a prompt, not eight
    log = [loop.iterate(1 if name == "text_opo" else 2) for _ in range(length)]
    first, last = sum(log[:5]) / 5, sum(log[-5:]) / 5
    print(f"{name}: {first:.3f} -> {last:.3f}")
    assert last > first + 0.35


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", TEXT_RECIPES)
def test_the_sampler_and_the_trainer_agree(name, temperature):
    loop = Loop(TEXT_RECIPES[name](**SMALL[name] | {"temperature": temperature}), torch.float64)
    likelihood = loop.algorithm.likelihood
    for rollout in loop.rollouts():
        for rows in loop.rows(rollout):
            new = likelihood.evaluate(loop.table, rows)
            ratio = likelihood.log_ratio(new, rows.old, rows)
            torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=1e-12, rtol=0)
            assert rows.advantage.isfinite().all() and rows.mask.any()


def plain(loss: object) -> bool:
    """On a ratio, with nothing that weighs tokens."""
    return isinstance(loss, RatioLoss) and not loss.weights


RATIOS = [n for n in TEXT_RECIPES if plain(TEXT_RECIPES[n](**SMALL[n]).loss)]


@pytest.mark.parametrize("name", RATIOS)
def test_the_first_gradient_is_reinforces(name):
    """Of every row's mean log-probability where the completion is one action, else of tokens'."""
    loop = Loop(TEXT_RECIPES[name](**SMALL[name]), torch.float64)
    loss, likelihood = loop.algorithm.loss, loop.algorithm.likelihood
    for rollout in loop.rollouts():
        for rows in loop.rows(rollout):
            counts = Counts.of([rows.mask])
            entries = loss(likelihood, loop.says(rows), rows)
            (got,) = torch.autograd.grad(reduced(entries, rows.mask, counts), loop.table.logits)
            logp = likelihood.evaluate(loop.table, rows).logp
            if isinstance(loss, GMPO) or likelihood.ratio == "sequence":
                logp = row_mean(logp, rows.mask).expand_as(logp)
            if likelihood.ratio == "product":
                logp = (logp * rows.mask).sum(1, keepdim=True).expand_as(logp)
            want = reduced(entries._replace(value=-rows.advantage * logp), rows.mask, counts)
            (want,) = torch.autograd.grad(want, loop.table.logits)
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


GROUPS = Completions(8)


def parts(*transforms, tracker=None) -> Algorithm:
    return Algorithm(LENGTH, GROUPS, Estimator(transforms), Token(), Surrogate(0.2, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [(DropFlat(), Standardize()), (Standardize(), MaxVariance(4))],
    ids=["drop flat", "max variance"],
)
def test_budgets_still_learn(budget):
    loop = Loop(parts(*budget))
    log = [loop.iterate() for _ in range(60)]
    assert sum(log[-5:]) / 5 > sum(log[:5]) / 5 + 0.35


def test_a_dropped_group_is_in_no_denominator():
    """The same mean over what is left, whatever was dropped."""
    loop = Loop(parts(DropFlat(), Standardize()), torch.float64)
    (rollout,) = loop.rollouts()
    (rows,) = loop.rows(rollout)
    flat = solved(rollout).values.view(PROMPTS, 8).std(1) == 0
    assert flat.any() and not flat.all(), "the toy has both"
    kept = rows.mask.any(1).view(PROMPTS, 8)
    assert torch.equal(kept.any(1), ~flat) and torch.equal(kept.all(1), ~flat)


PLANS = {
    "completions": {"group": 8},
    "segments": {"roots": 3, "branch": 2, "at": [1, 2]},
    "forks": {"roots": 3, "forking": {"top": 2, "branch": 2, "by": "surprise"}},
}
NEEDED = {
    "pass_at_k": {"k": 4}, "greedy_baseline": {"samples": 9}, "penalize": {"weight": 0.1},
    "risk_po": {"bundle": 5}, "prune_width": {"keep": "extremes"}, "scale_steps": {"by": "std"},
    "preference": {"beta": 1.0},
}  # fmt: skip
COMPARED = [
    "standardize", "leave_one_out", "augmented", "parent_difference", "two_level", "best_worst",
    "max_rl", "pass_at_k", "best_gap", "beta_normalize", "risk_po", "global_local",
    "length_baseline", "whiten_tokens", "baseline", "greedy_baseline", "turns", "states",
]  # fmt: skip
OF_TOKENS = ("surrogate", "gppo", "cispo", "sapo", "vespo", "gmpo", "reinforce", "preference")


def mixed(**settings: Any) -> Algorithm:
    return recipe_kind("text")(name="text", **settings).algorithm()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", OF_TOKENS)
@pytest.mark.parametrize("advantage", COMPARED)
def test_a_mixture_trains_or_is_refused(plan, advantage, loss):
    """Any advantage with any loss under any plan: finite, non-zero gradients, or one sentence."""
    tracked = {"tracker": "prompt_values"} if advantage in ("baseline", "augmented") else {}
    greedy = {"greedy": True} if advantage == "greedy_baseline" and plan == "completions" else {}
    try:
        mixture = mixed(
            length=LENGTH, plan={"name": plan, **PLANS[plan], **greedy},
            advantage={"name": advantage, **NEEDED.get(advantage, {})},
            loss={"name": loss, **NEEDED.get(loss, {})},
            likelihood={"paired": loss == "preference"}, **tracked,
        )  # fmt: skip
    except UserError as refusal:
        assert str(refusal).count(". ") == 0
        assert plan != "completions" or loss == "preference" or "parent" in str(refusal)
        return
    loop = Loop(mixture)
    before = loop.table.logits.detach().clone()
    loop.iterate(1)
    moved = (loop.table.logits.detach() - before).abs()
    assert moved.isfinite().all() and moved.max() > 0


def test_every_transform_of_texts_is_mixed():
    of_images = [
        *(f"flowrl.credit.{name}" for name in ("intermediate", "novelty", "steps", "proxies")),
        *(f"flowrl.contrib.{name}" for name in IMAGE_RECIPES),
    ]
    rest = {n for n, kind in parts_named(Transform).items() if kind.__module__ not in of_images}
    plain = {"sum", "clip", "rescale", "drop_flat", "max_variance", "uncompared", "penalize"} | {
        "best_and",
        "group_baseline",
        "prompt_weight",
    }
    only_images = {"scale_steps", "exponential", "prune_width"}
    later = {"discount", "whiten_turns", "group_returns", "min_returns"}  # of turns and steps
    assert rest == {*COMPARED} | plain | only_images | later


def test_a_mixture_may_be_gspo_with_dr_grpos_advantage():
    made = mixed(
        likelihood={"ratio": "sequence"}, loss={"low": 3e-4, "high": 4e-4},
        advantage={"name": "standardize", "scale": None, "correction": 0},
    )  # fmt: skip
    assert made.likelihood == Token(ratio="sequence")
    assert made.advantage == TEXT_RECIPES["text_dr_grpo"]().advantage
    assert made.loss == Surrogate(3e-4, 4e-4)


def test_every_recipe_is_tested_and_names_its_paper():
    assert SMALL.keys() == TEXT_RECIPES.keys()
    for name, recipe in TEXT_RECIPES.items():
        text = recipe.__doc__ or ""
        assert "arXiv:" in text, name
    assert isinstance(TEXT_RECIPES["text_sapo"]().loss, SAPO)
