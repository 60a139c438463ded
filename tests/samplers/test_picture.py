import xml.etree.ElementTree as xml

import pytest

from samplers import Chain, Fork, Frozen, Looking, Tree, Window, picture
from tests.samplers.test_plans import COUNTED, SDE, SIGMAS


@pytest.mark.parametrize("planner", COUNTED, ids=str)
def test_a_picture_has_every_edge_and_branch_point(planner):
    plans = planner(SIGMAS, 0, 0)
    root = xml.fromstring(picture.tree_svg(plans))
    kinds = [e.get("stroke") for e in root if e.tag.endswith("line")][3:]  # after the legend
    assert len(kinds) == sum(sum(p.nodes) for p in plans)
    edges = [(n, s) for p in plans for n, s in zip(p.nodes, p.steps, strict=True)]
    assert kinds.count(picture.TRAINED) == sum(n for n, s in edges if s.train)
    assert kinds.count(picture.NOISE) == sum(n for n, s in edges if s.noisy and not s.train)
    dots = len([e for e in root if e.tag.endswith("circle")]) - 1
    splits = sum(n // s.branch for n, s in edges if s.branch > 1)
    assert dots == splits + sum(p.group for p in plans)


def test_everything_is_drawn_within_the_picture():
    root = xml.fromstring(picture.tree_svg(Tree(SDE, (0, 3), (2, 3), roots=2)(SIGMAS, 0, 0)))
    _, _, *size = map(float, root.get("viewBox").split())
    for axis, most in zip("xy", size, strict=True):
        names = [axis, f"{axis}1", f"{axis}2", f"c{axis}"]
        places = [float(e.get(name)) for e in root for name in names if e.get(name) is not None]
        assert places and 0 <= min(places) <= max(places) <= most


def test_a_tree_is_drawn_without_crossings():
    """Edges of a level, from top to bottom by their ends, start from top to bottom too."""
    (plan,) = Tree(SDE, (0, 3), (2, 3), roots=2)(SIGMAS, 0, 0)
    lines = [e for e in xml.fromstring(picture.tree_svg((plan,))) if e.tag.endswith("line")][3:]
    for column in {e.get("x1") for e in lines}:
        level = [(float(e.get("y2")), float(e.get("y1"))) for e in lines if e.get("x1") == column]
        assert [y1 for _, y1 in sorted(level)] == sorted(y1 for _, y1 in level)


def test_the_table_adds_up():
    (plan,) = Window(SDE, 4, 3, Frozen(4), shared_noise=True)(SIGMAS, 0, 0)
    rows = picture.describe_plan((plan,)).splitlines()[4:]
    looks = [int(row.split()[-2 if row.endswith("ode") else -3]) for row in rows]
    assert looks == [1, 1, 1, 1, 1, 4, 4, 4, 4, 4] and sum(looks) == plan.evaluations


def test_a_description_counts_what_a_draw_costs():
    text = picture.describe_plan(Fork(SDE, 3, roots=2)(SIGMAS, 0, 0))
    first = text.splitlines()[0]
    assert "9 plans" in first and f"{2 * 9 + 6 * 45} network evaluations" in first
    assert "54 decoded samples" in first and "54 trained rows" in first
    assert "plans 0 to 8" in text and "branch 3, trained" in text
    assert "noisy steps of the others are 1; 2; 3; 4; 5; 6; 7; 8)" in text
    single = picture.describe_plan(Chain(SDE, 1)(SIGMAS, 0, 0))
    assert "1 plan," in single and "1 leaf" in single
    assert len([line for line in single.splitlines() if "trained" in line]) == 10


@pytest.mark.parametrize(
    ("group", "steps", "said"),
    [
        (1, 1, "1 state scored by its projection"),
        (3, 1, "3 states scored by its projection"),
        (3, 2, "3 states scored by its completion of 2 steps"),
    ],
)
def test_a_description_says_how_an_intermediate_state_is_scored(group, steps, said):
    text = picture.describe_plan(Looking(Chain(SDE, group), steps)(SIGMAS, 0, 0))
    assert text.splitlines()[4].endswith(said)
