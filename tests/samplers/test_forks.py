"""Trees that fork where the model is unsure: who wrote a token, who passes it, what it is worth."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.credit.trees import GlobalLocal
from flowrl.iteration import ratio_check
from flowrl.likelihoods.token import Token
from flowrl.models.language.policy import CausalPolicy
from flowrl.session.progress import Progress
from rewards import Scores
from samplers.completions import Completions, Forks, TextRollout
from samplers.forks import Forking, Grown, choose, grow, owned, passed, points
from samplers.noise import row_keys
from samplers.picture import describe_text_plan
from samplers.tokens import draw_tokens, token_noise
from tests.credit.test_golden_credit import paths
from tests.support import text_runs, tiny_lm
from tests.support.golden_tools import arrays, close, columns, scores
from tests.support.iterations import collect, iterate

PROMPTS = ["a:", "cab dig:", "bead :"]
LENGTH = 7
RULE = Forking(top=2, branch=2, rounds=2)
TREERL = {"name": "text_treerl", "length": 6, "roots": 2, "top": 2, "branch": 1}


@pytest.fixture(scope="module")
def policy() -> CausalPolicy:
    return CausalPolicy(tiny_lm.llama(), tiny_lm.tokenizer())


def rollout(policy: CausalPolicy, plan, **key) -> TextRollout:
    prompts = key.pop("prompts", PROMPTS)
    batch = policy.open(prompts, [], LENGTH)
    draws = key.pop("draws", range(len(prompts)))
    (found,) = batch.rollouts(plan, draws, **({"seed": 0, "iteration": 0} | key))
    return found


Written = tuple[int, int]  # the leaf that wrote a token, and its position


def grown_by_hand(rule: Forking, roots: int, length: int, seed: int):
    """Random trees, and beside them every leaf's path as the tokens that it passes."""
    rng = torch.Generator().manual_seed(seed)
    draws = 2
    grown = Grown.roots(draws, roots, length)
    ends = torch.randint(1, length + 1, (draws, roots), generator=rng)
    walks = [
        [[(leaf, t) for t in range(end)] for leaf, end in enumerate(row)] for row in ends.tolist()
    ]
    forked: set[tuple[int, int, int]] = set()
    for _ in range(rule.rounds):
        group = grown.first.shape[1]
        score = torch.rand(draws, group, length, generator=rng)
        written = torch.arange(length) < ends[..., None]
        leaf, place = choose(grown, score, written, rule)
        pairs = zip(leaf.tolist(), place.tolist(), strict=True)
        here = {(d, i, t) for d, (a, b) in enumerate(pairs) for i, t in zip(a, b, strict=True)}
        assert not here & forked, "no round forks where one before it did"
        forked |= here
        grown = grow(grown, leaf, place, rule.branch)
        more = torch.zeros(draws, 0, dtype=torch.int64)
        leaves, places = (x.repeat_interleave(rule.branch, 1).T for x in (leaf, place))
        for copied, at in zip(leaves, places, strict=True):
            end = at + 1 + (torch.rand(draws, generator=rng) * (length - at)).long()
            more = torch.cat([more, end[:, None]], 1)
            for draw, walk in enumerate(walks):
                name, start = len(walk), int(at[draw])
                new = [(name, t) for t in range(start, int(end[draw]))]
                walk.append(walk[int(copied[draw])][:start] + new)
        ends = torch.cat([ends, more], 1)
    return grown, walks, ends


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_nodes_are_the_runs_of_tokens_that_the_same_leaves_pass(seed, roots, top, branch):
    rule = Forking(top, branch, rounds=2)
    length = 6
    grown, walks, ends = grown_by_hand(rule, roots, length, seed)
    group = roots * rule.leaves
    assert grown.common.shape == (2, group, group)
    for draw, walk in enumerate(walks):
        common = grown.common[draw]
        point, node = points(common, length), passed(common, length, rule.points)
        own = owned(common, length) & (torch.arange(length) < ends[draw][:, None])
        assert int(own.sum()) == len({token for path in walk for token in path})
        through: dict[Written, set[int]] = {}
        for leaf, path in enumerate(walk):
            for token in path:
                through.setdefault(token, set()).add(leaf)
        for leaf, path in enumerate(walk):
            for t, token in enumerate(path):
                k = int(point[leaf, t])
                same = {i for i in range(group) if node[i, k] == node[leaf, k]}
                assert same == through[token], (leaf, t)
                assert bool(own[leaf, t]) == (leaf == min(through[token]))
            for t, (a, b) in enumerate(pairwise(path)):
                assert (through[a] == through[b]) == bool(point[leaf, t] == point[leaf, t + 1])


def test_forks_are_where_the_model_was_least_sure_and_draw_that_token_anew(policy):
    """Entropies from the model's own full logits, one token at a time, and noise from its key."""
    found = rollout(policy, Forks(2, Forking(2, 2), temperature=0.7))
    assert found.plan.group == 10 and len(found.ids) == 30
    roots = rollout(policy, Completions(2, temperature=0.7))
    ids, group = found.ids.view(3, 10, LENGTH), found.points.common.view(3, 10, 10)
    assert torch.equal(ids[:, :2], roots.ids.view(3, 2, LENGTH)), "of the same noise"
    lengths = found.lengths.view(3, 10)
    for draw, prompt in enumerate(PROMPTS):
        context = policy.encode(prompt)
        for root in range(2):
            own = ids[draw, root, : lengths[draw, root]].tolist()
            spread, says = [], []
            for t in range(len(own)):
                with torch.no_grad():
                    said = policy.model(input_ids=torch.tensor([context + own[:t]])).logits[0, -1]
                logp = (said.double() / 0.7).log_softmax(-1)
                spread.append(float(-(logp.exp() * logp).sum()))
                says.append(logp)
            best = sorted(range(len(own)), key=lambda t: -spread[t])[:2]
            new = [2 + 4 * root + i for i in range(4)]
            at = [int(group[draw, root, leaf]) for leaf in new]
            assert at == [best[0]] * 2 + [best[min(1, len(own) - 1)]] * 2
            for leaf, t in zip(new, at, strict=True):
                assert ids[draw, leaf, :t].tolist() == own[:t]
                assert int(group[draw, 1 - root, leaf]) == 0
                key = row_keys([(0, 0, draw, "token", 0, 1, leaf - 2)])
                (noise,) = token_noise(key, 0, len(says[t]))
                anew = draw_tokens(says[t].exp().float()[None], noise)
                assert int(ids[draw, leaf, t]) == int(anew)


def test_the_published_choice_is_the_token_of_least_probability(policy):
    found = rollout(policy, Forks(3, Forking(1, 1, by="surprise")))
    logp = found.logp.view(3, 6, LENGTH)[:, :3].masked_fill(~found.written.view(3, 6, -1)[:, :3], 0)
    at = found.points.common.view(3, 6, 6)[:, range(3), range(3, 6)]
    assert torch.equal(at, logp.argmin(2))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_trainer_finds_the_sampler_s_log_probabilities_and_each_token_once(policy, top_p):
    plan = Forks(2, RULE, temperature=0.7, top_p=top_p)
    batch = policy.open(PROMPTS, [], LENGTH)
    (found,) = batch.rollouts(plan, range(3), seed=0, iteration=0)
    n, k = len(found.ids), RULE.points
    credit = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None].expand(n, k)
    (made,) = Token().rows(found, credit, torch.ones(n, k, dtype=torch.bool))
    with torch.no_grad():
        said = batch.policy(made).logp
    torch.testing.assert_close(said, found.logp, atol=2e-5, rtol=0)
    assert int(made.mask.sum()) == int(found.own.sum()) == batch.meter.frozen
    assert int(made.mask.sum()) < int(found.written.sum()) and found.own.any(1).all()


def test_forks_depend_on_neither_batch_nor_chunk_nor_order(policy):
    plan = Forks(2, RULE, top_p=0.9)
    whole = rollout(policy, plan)
    policy.rows_per_call = 5
    chunked = rollout(policy, plan)
    policy.rows_per_call = None
    turned = rollout(policy, plan, prompts=PROMPTS[::-1], draws=(2, 1, 0))
    assert torch.equal(whole.ids, chunked.ids) and torch.equal(
        whole.points.common, chunked.points.common
    )
    assert torch.equal(whole.ids.view(3, -1), turned.ids.view(3, -1).flip(0))
    assert not torch.equal(whole.ids, rollout(policy, plan, iteration=1).ids)


def test_credit_of_a_ragged_tree_is_that_of_its_nodes(policy):
    """TreeRL's formula for every token, from the sets of leaves that pass it."""
    found = rollout(policy, Forks(2, RULE), prompts=PROMPTS[:2])
    group, n = found.plan.group, len(found.ids)
    value = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = Scores(value[:, None], torch.ones(n, 1, dtype=torch.bool), ("toy",))
    context = Context(found.columns, torch.ones(1), nodes=found.nodes)
    rows = Token().rows(found, *Estimator((GlobalLocal(first=True),))(given, context))[0]
    common = found.points.common

    def mean(leaf: int, t: int) -> tuple[float, float]:
        """Of the leaves that share token t, and their number; of the draw before the first."""
        first = leaf // group * group
        leaves = [first + j for j in range(group) if t < 0 or common[leaf, j] > t]
        return float(value[leaves].mean()), len(leaves)

    for leaf in range(n):
        length, values = int(found.lengths[leaf]), [mean(leaf, -1)]
        values += [mean(leaf, t) for t in range(length)]
        gained = 0.0
        for t, (before, here) in enumerate(pairwise(values)):
            new = here[1] != before[1] or t == 0
            gained = here[0] - before[0] if new else gained
            want = (here[0] - values[0][0] + gained) * here[1] ** 0.5
            if found.own[leaf, t]:
                assert float(rows.advantage[leaf, t]) == pytest.approx(want, abs=1e-5), (leaf, t)
    assert not rows.advantage[~rows.mask].any()


def shared(found: list[list[int]]) -> Tensor:
    """Tokens in common of leaves that pass one node a token."""
    depth = len(found[0])
    rows = [
        [next((k for k in range(depth) if a[k] != b[k]), depth + 1) for b in found] for a in found
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("p", ["tiny", "lat", "ties"])
def test_a_uniform_tree_that_is_told_by_its_common_tokens_has_the_published_credit(p):
    """BranchGRPO's own arrays, through nodes that are found and not given by a plan."""
    z = arrays("branch_tree_advantage")
    order, found = paths(z, p)
    depth, group = len(found[0]), len(found) // int((z[f"{p}_parent"] < 0).sum())
    common = torch.cat([shared(found[i : i + group]) for i in range(0, len(found), group)])
    nodes, point = passed(common, depth, depth), points(common, depth)
    context = Context(columns((group,) * depth), torch.ones(1), nodes=nodes)
    got, _ = Estimator((Standardize(correction=1, eps=1e-8),))(
        scores(z[f"{p}_leaf_reward"][order]), context
    )
    want = torch.stack([z[f"{p}_adv_mean"][path] for path in found])
    close(got.gather(1, point), want, 5e-4)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_with_forks_has_ratio_one_and_learns(policy, tmp_path):
    model = tiny_lm.write(tmp_path / "lm")
    kept = text_runs.session(model, tmp_path, TREERL, lr=2e-2)
    experience = collect(kept, 0)
    floor = ratio_check.check_ratio(kept.learner, experience, kept.terminal)
    assert floor is not None and floor < 2e-5
    (rows,) = experience.rows
    assert len(rows.ids) == 3 * 6 and rows.advantage.any()
    progress = Progress()
    log = [iterate(kept, progress).metrics["reward"] for _ in range(12)]
    assert sum(log[-3:]) / 3 > sum(log[:3]) / 3 + 0.2, log


def test_trees_of_few_tokens_fork_at_some_of_them_twice():
    grown = Grown.roots(1, 1, 4)
    score = torch.tensor([[[0.1, 0.2, 0.9, 0.9]]])
    leaf, place = choose(grown, score, torch.arange(4)[None, None] < 2, Forking(3, 1))
    assert place.tolist() == [[1, 0, 1]] and not leaf.any(), "what is not written is not chosen"
    grown = grow(grown, leaf, place, 1)
    assert grown.common[0].tolist() == [[5, 1, 0, 1], [1, 5, 0, 1], [0, 0, 5, 0], [1, 1, 0, 5]]


def test_a_plan_of_forks_tells_itself():
    (plan,) = Forks(6, Forking(2, 2))([0.0] * 6, 0, 0)
    assert (plan.group, plan.tokens, plan.columns.nodes) == (30, 150, (30,) * 3)
    said = describe_text_plan((plan,))
    assert "30 completions of at most 5 tokens" in said and "6 trees; each forks 1 times" in said
