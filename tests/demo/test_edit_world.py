"""The editing world and its reward: drawn edits are right, all others wrong."""

import json
import random
from pathlib import Path

import pytest
import torch

from flowrl.demo import edit_world, world
from rewards import Samples, load
from rewards.catalogue import edit_shapes
from rewards.catalogue.edit_shapes import DIRECTIONS, ShapeEdit, grade_edit, parse_edit
from rewards.catalogue.shapes import DetectedShape, detect
from rewards.checks.self_test import self_test
from rewards.perception.files import open_image_file
from rewards.perception.media import to_tensor
from tests.support.reward_contract import images

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def drawn():
    """(pairs, objects of the sources, objects of the targets)."""
    pairs = list(edit_world.draw_pairs(120, random.Random(3)))
    scenes = [p.source for p in pairs] + [p.target for p in pairs]
    found = detect(world.render(scenes))
    return pairs, found[:120], found[120:]


def strict(source, result, instruction):
    return grade_edit(source, result, edit_world.wanted_edit(instruction)) == 1


def test_a_drawn_edit_scores_1_and_the_unchanged_source_0(drawn):
    rows = list(zip(*drawn, strict=True))
    assert sum(strict(s, t, p.instruction) for p, s, t in rows) >= 0.98 * len(rows)
    for pair, source, _ in rows:
        assert grade_edit(source, source, edit_world.wanted_edit(pair.instruction)) in (0, None)


def test_another_edit_of_the_same_source_is_wrong(drawn):
    for pair, source, target in zip(*drawn, strict=True):
        assert not strict(source, target, pair.other), (pair.instruction, pair.other)


def test_a_right_edit_that_changes_another_object_is_wrong(drawn):
    """Recoloured, moved by a fifth of the side, another shape, half the size, gone, doubled."""
    checked = 0
    for pair, source, target in zip(*drawn, strict=True):
        edit = edit_world.wanted_edit(pair.instruction)
        if not strict(source, target, pair.instruction):
            continue
        others = {thing.colour for thing in pair.source} - {edit.colour}
        at = next(i for i, thing in enumerate(target) if thing.colour in others)
        for change in (
            {"colour": "no colour"}, {"shape": None}, {"area": target[at].area / 2},
            {"x": target[at].x + 0.2}, {"y": target[at].y - 0.2},
        ):  # fmt: skip
            one = DetectedShape(**{**vars(target[at]), **change})
            result = [*target[:at], one, *target[at + 1 :]]
            assert 0 < grade_edit(source, result, edit) < 1
        assert 0 < grade_edit(source, target[:at] + target[at + 1 :], edit) < 1
        assert grade_edit(source, [*target, target[at]], edit) == pytest.approx(0.7)
        checked += 1
    assert checked > 100


RED = DetectedShape("red", "circle", 0.3, 0.5, 0.1)
BLACK = DetectedShape("black", "square", 0.7, 0.2, 0.1)


def moved(thing, **change):
    return DetectedShape(**{**vars(thing), **change})


@pytest.mark.parametrize(
    ("instruction", "result", "score"),
    [
        ("move the red circle to the right", [moved(RED, x=0.5), BLACK], 1.0),
        ("move the red circle to the right", [moved(RED, x=0.41), BLACK], 0.5),  # half the way
        ("move the red circle to the right", [moved(RED, x=0.36), BLACK], 0.0),  # within place
        ("move the red circle to the left", [moved(RED, x=0.5), BLACK], 0.0),
        ("move the red circle to the right", [moved(RED, x=0.5, y=0.6), BLACK], 0.6),
        ("move the red circle down", [moved(RED, y=0.7), BLACK], 1.0),
        ("move the red circle up", [moved(RED, y=0.3), BLACK], 1.0),
        ("make the red circle blue", [moved(RED, colour="blue"), BLACK], 1.0),
        ("make the red circle blue", [moved(RED, colour="blue", x=0.5), BLACK], 0.6),
        ("make the red circle blue", [moved(RED, colour="blue"), RED, BLACK], 0.7),
        ("make the red circle blue", [moved(RED, colour="blue")], 0.25),
        ("make the red circle blue", [moved(RED, colour="green"), BLACK], 0.0),
        ("remove the red circle", [BLACK], 1.0),
        ("remove the red circle", [], 0.25),
        ("remove the red circle", [RED, BLACK], 0.0),
        ("add a blue square", [RED, BLACK, moved(BLACK, colour="blue", x=0.2)], 1.0),
        ("add a blue circle", [RED, BLACK, moved(BLACK, colour="blue", x=0.2)], 0.6),
        ("add a blue circle", [RED, BLACK], 0.0),
        ("remove the green circle", [RED, BLACK], None),  # the source has none
    ],
)
def test_grades_by_hand(instruction, result, score):
    found = grade_edit([RED, BLACK], result, edit_world.wanted_edit(instruction))
    assert found == (score if score is None else pytest.approx(score))


def test_instructions_are_read():
    assert parse_edit("  Move the RED circle to the left. ") == ShapeEdit(
        "move", "red", "circle", "to the left"
    )
    assert parse_edit("add an blue square") == ShapeEdit("add", "blue", "square")
    assert parse_edit("make the red circle red") is None
    assert parse_edit("a red circle") is None
    assert all(parse_edit(text) for text in edit_world.all_instructions())
    assert len({parse_edit(text) for text in edit_world.all_instructions()}) == 198


def test_edits_leave_the_other_objects_where_they_are():
    rng = random.Random(1)
    for pair in edit_world.draw_pairs(60, rng):
        edit = edit_world.wanted_edit(pair.instruction)
        assert edit_world.stands(pair.source) and edit_world.stands(pair.target)
        colours = [thing.colour for thing in pair.source]
        assert len(set(colours)) == len(colours) >= 1
        kept = [t for t in pair.source if t.colour != edit.colour]
        assert set(kept) <= set(pair.target)
        assert len(pair.target) == len(pair.source) + {"add": 1, "remove": -1}.get(edit.kind, 0)
        assert world.split(pair.instruction) == world.split(pair.other) == "train"
        if edit.kind == "move":
            (before,) = (t for t in pair.source if t.colour == edit.colour)
            (after,) = (t for t in pair.target if t.colour == edit.colour)
            dx, dy = DIRECTIONS[edit.to]
            low, high = edit_world.MOVED_PIXELS
            assert low <= (after.x - before.x) * dx + (after.y - before.y) * dy <= high


def test_files_have_the_instructions_of_their_split_with_sources_that_allow_them():
    folder = Path("configs/prompts")
    for name, each in edit_world.SOURCES.items():
        lines = (folder / f"edits_{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        texts = [row["prompt"] for row in rows]
        assert sorted(texts) == sorted(edit_world.instructions_of(name) * each)
        sources = [to_tensor(open_image_file(folder / row["image"])) for row in rows]
        found = detect(torch.stack(sources))
        for text, source in zip(texts, found, strict=True):
            assert grade_edit(source, source, edit_world.wanted_edit(text)) == 0, text


def test_the_reward_reads_the_source_of_its_column(tmp_path):
    pairs = [edit_world.draw_pair("make the red circle blue", random.Random(i)) for i in range(2)]
    names = edit_world.write_sheet(world.render([p.source for p in pairs]), tmp_path / "s.png")
    results = world.render([p.target for p in pairs] + [pairs[0].source])
    meta = [{"image": str(tmp_path / names[i])} for i in (0, 1, 0)]
    prompts = ["make the red circle blue"] * 3
    samples = Samples(results, prompts, torch.arange(3), meta)
    assert load("edit_shapes", kind="strict")(samples).tolist() == [1, 1, 0]
    swapped = Samples(results[[1, 0, 2]], prompts, torch.arange(3), meta)
    assert (load("edit_shapes", kind="strict")(swapped) == 0).all()
    one = [load("edit_shapes")(samples.take([i])).item() for i in range(3)]
    assert load("edit_shapes")(samples).tolist() == one == [1, 1, 0]
    other = Samples(results, ["a cat", prompts[0], prompts[0]], torch.arange(3), meta)
    assert load("edit_shapes")(other).isnan().tolist() == [True, False, False]
    opened = [
        {"image": open_image_file(row["image"])} for row in meta
    ]  # as `sample(image=...)` has
    as_images = Samples(results, prompts, torch.arange(3), opened)
    assert load("edit_shapes", kind="strict")(as_images).tolist() == [1, 1, 0]
    several = Samples(results[:1], prompts[:1], torch.arange(1), [{"image": ["a.png", "b.png"]}])
    with pytest.raises(ValueError, match=r"'image' must name one image, not \['a.png', 'b.png'\]"):
        load("edit_shapes")(several)
    with pytest.raises(ValueError, match="row 1 of the prompts: the column 'image' must name one"):
        edit_shapes.load().check_prompts(["a"], several.meta)
    missing = Samples(results[:1], prompts[:1], torch.arange(1), [{"image": "none.png"}])
    with pytest.warns(UserWarning, match=r"none.png: no such file; its samples are unscored"):
        assert load("edit_shapes")(missing).isnan().all()


def test_the_self_test_passes_and_a_row_without_a_source_is_named():
    said = self_test("edit_shapes", load("edit_shapes"))
    assert "1 for the better of its examples, 0" in said
    with pytest.raises(ValueError, match="row 2 of the prompts lacks the column 'image'"):
        edit_shapes.load().check_prompts(["a", "b"], [{"image": "a.png"}, {}])
    assert load("edit_shapes")(images(["make the red circle blue"])).isnan().all()
