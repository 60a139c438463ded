"""Credit of trees beside plain loops that grow the tree node by node and ask each for its parent.

The loops hold every state of a draw as an object that knows the state it was drawn from; nothing in
them divides one number of nodes by another.
"""

import itertools
import json
from dataclasses import dataclass, field

import pytest
import torch

from flowrl.budget.groups import Groups
from flowrl.credit.advantages import Standardize, Sum
from flowrl.credit.choices import independent
from flowrl.credit.comparisons import ParentDifference, PruneWidth, TwoLevel
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.values import Context, Credit, node_values
from flowrl.recipes import RECIPES
from flowrl.session.start_record import StartRecord, changes
from flowrl.settings.read import run_from
from rewards import Scores
from samplers import Chain, Columns, FlowSDE, Fork, Plan, Random, Tree, Window
from samplers.completions import TextPlan
from tests.support import runs

SIGMAS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
KERNEL = FlowSDE(0.7)
PLANNERS = {
    "splits of two roots": Tree(KERNEL, (0, 2), roots=2),
    "splits of three roots in three": Tree(KERNEL, (0, 1), (3, 2), roots=3),
    "one early split of two roots": Tree(KERNEL, (0,), branch=3, roots=2),
    "late splits of two roots": Tree(KERNEL, (1, 3), roots=2),
    "splits of one root": Tree(KERNEL, (0, 2)),
    "splits of roots with one noise": Tree(KERNEL, (0, 2), roots=2, shared_noise=True),
    "a chain": Chain(KERNEL, 4),
    "a chain with one noise": Chain(KERNEL, 4, shared_noise=True),
    "a window with one noise": Window(KERNEL, 4, 1, Random(1, 2), shared_noise=True),
    "forks of four roots": Fork(KERNEL, 3, roots=4, at=(0,)),
    "later forks": Fork(KERNEL, 3, roots=2, at=(2,)),
}


@dataclass(eq=False)
class Node:
    parent: "Node | None"
    leaves: list[int] = field(default_factory=list)


def grown(plan: Plan) -> list[list[Node]]:
    """For each step, the node of each leaf after it; roots that share their noise stay one state
    until a step draws noise."""
    start = Node(None)
    at = [start] * plan.roots if plan.shared_noise else [Node(None) for _ in range(plan.roots)]
    levels: list[list[Node]] = []
    for step in plan.steps:
        if step.noisy:
            at = [Node(node) for node in at for _ in range(step.branch)]
        else:
            onward = {id(node): Node(node) for node in at}
            at = [onward[id(node)] for node in at]
        levels.append(at)
    whole: list[list[Node]] = []
    for level in levels:
        share = len(levels[-1]) // len(level)
        nodes = [node for node in level for _ in range(share)]
        for leaf, node in enumerate(nodes):
            node.leaves.append(leaf)
        whole.append(nodes)
    return whole


def family_of(leaf: int, k: int, tree: list[list[Node]]) -> list[Node]:
    """Distinct nodes of column k that come from the same state as this leaf's, at the last step
    where nodes came apart; all of them where none did."""
    node, step = tree[k][leaf], k
    while True:
        same = {id(n): n for n in tree[step] if n.parent is node.parent}
        if node.parent is not None and len(same) > 1:
            leaves = {i for n in same.values() for i in n.leaves}
            return list({id(tree[k][i]): tree[k][i] for i in sorted(leaves)}.values())
        if step == 0:
            return list({id(n): n for n in tree[k]}.values())
        node, step = tree[step - 1][leaf], step - 1


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def standard(values: list[float]) -> list[float]:
    middle = mean(values)
    return [v - middle for v in values]


def columns_of(name: str) -> tuple[Plan, Columns, list[list[Node]]]:
    (plan,) = PLANNERS[name](SIGMAS, 0, 0)
    return plan, plan.columns, grown(plan)


def credit_of(transform, columns: Columns, scores: torch.Tensor) -> Credit:
    context = Context(columns, torch.ones(1))
    given = Scores(scores[:, None], torch.ones(len(scores), 1, dtype=torch.bool), ("r",))
    return transform(Sum()(node_values(given, context), context), context)


def scored(n: int, draws: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n * draws, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", PLANNERS)
def test_siblings_are_the_nodes_of_one_state(name):
    plan, columns, tree = columns_of(name)
    scores = scored(plan.group, 2)
    rule = Standardize(None)
    got = credit_of(TwoLevel(0.4, 0.6, rule), columns, scores).value[..., 0]
    for draw, k, leaf in itertools.product(range(2), range(len(tree)), range(plan.group)):
        if not plan.steps[k].noisy:
            continue
        own = scores.tolist()[draw * plan.group : (draw + 1) * plan.group]
        value = {id(n): mean([own[i] for i in n.leaves]) for n in tree[k]}
        node, family = tree[k][leaf], family_of(leaf, k, tree)
        near = value[id(node)] - mean([value[id(n)] for n in family])
        far = value[id(node)] - mean(list(value.values()))
        assert float(got[draw * plan.group + leaf, k]) == pytest.approx(0.4 * near + 0.6 * far)


@pytest.mark.parametrize("name", PLANNERS)
def test_a_gain_is_over_the_state_that_a_node_was_drawn_from(name):
    """Where a root has but one child, the draw stands in for it."""
    plan, columns, tree = columns_of(name)
    scores = scored(plan.group, 2)
    got = credit_of(ParentDifference(), columns, scores).value[..., 0]
    local = credit_of(GlobalLocal(power=0.0, first=True), columns, scores).value[..., 0]
    for draw, k, leaf in itertools.product(range(2), range(len(tree)), range(plan.group)):
        if not plan.steps[k].noisy:
            continue
        own = scores.tolist()[draw * plan.group : (draw + 1) * plan.group]
        node = tree[k][leaf]
        siblings = {id(n): n for n in tree[k] if n.parent is node.parent}
        below = {i for n in siblings.values() for i in n.leaves}
        alone = k == 0 and len(siblings) == 1 and not plan.shared_noise
        above = mean(own) if alone else mean([own[i] for i in sorted(below)])
        value = mean([own[i] for i in node.leaves])
        at = draw * plan.group + leaf
        assert float(got[at, k]) == pytest.approx(value - above, abs=1e-12)
        assert float(local[at, k]) == pytest.approx(2 * value - above - mean(own), abs=1e-12)


@pytest.mark.parametrize("name", PLANNERS)
def test_pruning_keeps_the_best_half_of_each_family(name):
    plan, columns, tree = columns_of(name)
    scores = scored(plan.group, 2)
    kept = credit_of(PruneWidth("branch", 0.5), columns, scores).mask[:, -1, 0].tolist()
    last = len(tree) - 1
    for draw in range(2):
        own = scores.tolist()[draw * plan.group : (draw + 1) * plan.group]
        for leaf in range(plan.group):
            family = [i for n in family_of(leaf, last, tree) for i in n.leaves]
            family = sorted(family, key=lambda i: -own[i])
            best = family[: max(1, len(family) // 2)]
            assert kept[draw * plan.group + leaf] == (leaf in best)


def test_two_roots_that_branch_at_once_keep_a_leaf_each():
    """The example that was found: one root's samples are better than the other's."""
    _, columns, _ = columns_of("splits of two roots")
    scores = torch.tensor([9.0, 8, 7, 6, 4, 3, 2, 1]).double()
    columns = Columns((4, 4), (True,) * 2, (1.0,) * 2, (1.0,) * 2, parents=(2, 4))
    kept = credit_of(PruneWidth("branch", 0.5), columns, scores[[0, 1, 4, 5]]).mask[:, -1, 0]
    assert kept.tolist() == [True, False, True, False]


def test_roots_that_branch_at_once_are_not_independent():
    """Neither a gate of samples nor draws merged into one group can take them for a chain."""
    for name, planner in PLANNERS.items():
        plans = planner(SIGMAS, 0, 0)
        assert independent(planner, plans) == ("chain" in name or "window" in name), name


def test_merged_draws_keep_their_own_noise():
    """Two draws of a prompt, each with one noise for its samples: siblings are a draw's."""
    (plan,) = PLANNERS["a chain with one noise"](SIGMAS, 0, 0)
    merged = Groups((2,), plan.group).context(
        Context(plan.columns, torch.ones(1)), torch.tensor([0, 1])
    )
    assert merged.columns.families[0] == 2
    texts = TextPlan(8, (4,)).columns
    merged = Groups((2,), 4).context(Context(texts, torch.ones(1)), torch.tensor([0, 1]))
    assert merged.columns.families == (1,), "they share their prompt"


def test_text_trees_hang_on_the_prompt():
    assert TextPlan(8, (2, 4, 8), (2, 4)).columns.families == (1, 2, 4)
    assert TextPlan(8, (4,), turns=3).columns.families == (1, 1, 1)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"at": [0, 2], "roots": 2, "siblings": 0.4}, True),
        ({"at": [0, 2], "roots": 2, "prune": "branch"}, False),
        ({"at": [0], "roots": 2, "prune": "branch"}, True),
        ({"at": [0, 2], "roots": 1, "siblings": 0.4}, False),
        ({"at": [0, 2], "roots": 2}, False),
    ],
)
def test_a_tree_that_an_older_version_began_resumes_with_a_line(tmp_path, recipe, said):
    """Where credit asks for parents and gets others now, and only there."""
    tree = runs.tree(tmp_path / "none", tmp_path, {"name": "branch_grpo", "steps": 5, **recipe})
    run = run_from(tree, "test")
    record = StartRecord.of(run, 1).state()
    checkpoint = tmp_path / "000001"
    checkpoint.mkdir()

    def lines(record):
        (checkpoint / "state.json").write_text(json.dumps({"origin": record}))
        return changes(run, tmp_path, checkpoint, 1)

    assert lines(record) == []
    del record["parents_as_data"]
    assert [("drawn from the same noise" in line) for line in lines(record)] == [True] * said


def test_every_recipes_text_plans_name_their_parents():
    for name, recipe in RECIPES.items():
        for plan in recipe().plans if name != "joint" else ():
            assert len(plan.columns.families) == len(plan.columns.nodes), name
