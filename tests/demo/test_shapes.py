"""The checker on scenes of known truth, on corrupted ones, and on text."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.demo import world
from flowrl.demo.world import PlacedObject
from rewards import load
from rewards.catalogue import shapes
from rewards.catalogue.shapes import (
    BACKGROUND,
    COLOURS,
    DetectedShape,
    WantedShapes,
    detect,
    grade_shapes,
    is_exact,
    parse_shapes,
)
from rewards.types import Samples

RED_LEFT_OF_BLUE = "a red circle left of a blue square"
SCENE = [
    PlacedObject("red", "circle", 8.0, 16.0, 6.0),
    PlacedObject("blue", "square", 24.0, 17.0, 6.0),
]


def strict(images, prompts, **settings):
    found = detect(images, **settings)
    return [is_exact(f, world.wanted_shapes(p)) for f, p in zip(found, prompts, strict=True)]


def graded(images, prompts):
    return [
        grade_shapes(f, world.wanted_shapes(p))
        for f, p in zip(detect(images), prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def clean():
    """Prompts of all kinds, their scenes and their pictures."""
    rng = random.Random(3)
    prompts = world.draw_prompts(600, rng)
    scenes = [world.arrange(world.wanted_shapes(prompt), rng) for prompt in prompts]
    return prompts, scenes, world.render(scenes)


def test_every_prompt_is_read_as_what_it_says():
    for prompt in world.all_prompts():
        wanted = world.wanted_shapes(prompt)
        words = prompt.replace("triangles", "triangle").replace("squares", "square")
        words = words.replace("circles", "circle").split()
        for colour, shape in wanted.things:
            assert words[words.index(colour) + 1] in (shape, *shapes.SHAPES)
        if wanted.kind == "two":
            (a, b), relation = wanted.things, wanted.relation
            assert prompt == f"a {a[0]} {a[1]} {relation} a {b[0]} {b[1]}"
        elif wanted.kind == "single":
            assert prompt == "a {} {}".format(*wanted.things[0])
        else:
            number = {2: "two", 3: "three"}[len(wanted.things)]
            assert prompt == "{} {} {}s".format(number, *wanted.things[0])
            assert len(set(wanted.things)) == 1


@pytest.mark.parametrize(
    ("prompt", "things", "relation"),
    [
        ("A red circle.", (("red", "circle"),), None),
        ("  a red   circle ", (("red", "circle"),), None),
        ("five black squares", (("black", "square"),) * 5, None),
        (
            "a red circle to the left of a blue square",
            (("red", "circle"), ("blue", "square")),
            "left of",
        ),
    ],
)
def test_other_ways_to_say_it(prompt, things, relation):
    assert parse_shapes(prompt) == WantedShapes(things, relation)


@pytest.mark.parametrize(
    "prompt",
    ["", "a photo of a cat", "a red", "red circle", "two red circle", "a red circle left of", "x"],
)
def test_what_cannot_be_read_has_no_score(prompt):
    assert parse_shapes(prompt) is None
    samples = Samples(world.render([SCENE]), [prompt], torch.zeros(1, dtype=torch.long))
    assert shapes.load()(samples).isnan().all()


def test_detect_finds_colours_shapes_and_places():
    scene = [
        PlacedObject("green", "triangle", 7.0, 8.0, 6.0),
        PlacedObject("black", "square", 22.0, 20.0, 5.0),
    ]
    found = detect(world.render([scene]))[0]
    assert {(f.colour, f.shape) for f in found} == {("green", "triangle"), ("black", "square")}
    by_colour = {f.colour: f for f in found}
    square = by_colour["black"]
    assert square.x * 32 == pytest.approx(22, abs=0.3)
    assert square.y * 32 == pytest.approx(20, abs=0.3)
    assert square.area * 1024 == pytest.approx(
        (2 * 0.9 * 5) ** 2, rel=0.25
    )  # edge pixels belong to none
    assert by_colour["green"].x * 32 == pytest.approx(7, abs=0.3)


def test_images_are_looked_at_anew_once_they_change():
    """The last objects are kept: not beyond other bytes, another bound or a caller's edit."""
    images = world.render([SCENE])
    first = detect(images)
    detect(images)[0].clear()
    assert detect(images) == first and first[0]
    images.mul_(0.0)
    assert detect(images) != first
    images.copy_(world.render([SCENE]))
    assert detect(images, iou=1.01)[0][0].shape is None and detect(images) == first


def test_clean_pictures_are_right(clean):
    prompts, _, images = clean
    assert sum(strict(images, prompts)) >= 0.985 * len(prompts)
    assert sum(strict(images, prompts, iou=0.85, aspect=0.8)) >= 0.90 * len(prompts)


@pytest.mark.parametrize("size", [24, 48, 64, 128, 200])
def test_size_does_not_matter(clean, size):
    prompts, scenes, _ = clean
    images = world.render(scenes[:120], size)
    assert sum(strict(images, prompts[:120])) >= (0.9 if size < 32 else 0.97) * 120


def test_wide_pictures_and_no_pictures():
    wide = torch.cat([world.render([[]], 32), world.render([SCENE], 32)], -1)
    assert strict(wide, [RED_LEFT_OF_BLUE]) == [True]
    assert detect(world.render([])) == []
    assert detect(world.render([[]])) == [[]]
    assert detect(torch.full((1, 3, 32, 32), float("nan")))[0][0].colour is None


def test_wrong_prompts_of_the_same_kind_fail(clean):
    prompts, _, images = clean
    found, right, pairs = detect(images), 0, 0
    for kind in world.PROMPT_KINDS:
        rows = [i for i, prompt in enumerate(prompts) if world.wanted_shapes(prompt).kind == kind]
        for step in (1, 7, 19):
            for i, j in zip(rows, rows[step:] + rows[:step], strict=True):
                if prompts[i] != prompts[j]:
                    pairs += 1
                    right += is_exact(found[i], world.wanted_shapes(prompts[j]))
    assert pairs > 1000
    assert right < 0.005 * pairs


def corrupted(
    rng: random.Random, prompt: str, scene: list[PlacedObject], how: str
) -> list[PlacedObject]:
    if how == "erased":
        return scene[1:]
    if how == "recoloured":
        used = {thing.colour for thing in scene}
        return [replace(scene[0], colour=rng.choice(sorted(set(COLOURS) - used))), *scene[1:]]
    if how == "reshaped":
        others = [shape for shape in shapes.SHAPES if shape != scene[0].shape]
        return [replace(scene[0], shape=rng.choice(others)), *scene[1:]]
    if how == "exchanged":  # places, so that the relation is the opposite one
        a, b = scene
        return [replace(a, x=b.x, y=b.y, radius=b.radius), replace(b, x=a.x, y=a.y)]
    while True:  # one more object, somewhere free
        x, y = rng.uniform(4, 28), rng.uniform(4, 28)
        extra = PlacedObject(rng.choice(list(COLOURS)), "square", x, y, 3.0)
        if all(max(abs(extra.x - t.x), abs(extra.y - t.y)) > t.radius + 5 for t in scene):
            return [*scene, extra]


@pytest.mark.parametrize("how", ["erased", "recoloured", "reshaped", "exchanged", "one more"])
def test_a_corrupted_picture_fails_both_scores(clean, how):
    rng = random.Random(5)
    chosen = [
        (p, s) for p, s in zip(*clean[:2], strict=True) if how != "exchanged" or " a " in p[1:]
    ][:200]
    images = world.render([corrupted(rng, p, s, how) for p, s in chosen])
    prompts = [p for p, _ in chosen]
    assert sum(strict(images, prompts)) <= 0.01 * len(prompts)
    before = graded(world.render([s for _, s in chosen]), prompts)
    after = graded(images, prompts)
    worse = sum(a < b for a, b in zip(after, before, strict=True))
    assert worse >= 0.97 * len(prompts)


def test_noise_and_blur_lower_the_scores(clean):
    prompts, _, images = clean
    prompts, images = prompts[:150], images[:150]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool2d(images, 9, 1, 4, count_include_pad=False)
    assert sum(strict((images + 0.02 * noise).clamp(0, 1), prompts)) >= 0.95 * 150
    assert sum(strict((images + 0.5 * noise).clamp(0, 1), prompts)) <= 0.02 * 150
    assert sum(strict(blurred, prompts)) <= 0.35 * 150


def test_a_smudge_of_no_colour_is_an_object_too_many():
    images = world.render([SCENE, SCENE])
    # as far from every palette colour and the background as from one another
    images[1, :, 24:30, 8:14] = torch.tensor([0.5, 0.55, 0.4])[:, None, None]
    assert strict(images, [RED_LEFT_OF_BLUE] * 2) == [True, False]
    assert graded(images, [RED_LEFT_OF_BLUE] * 2) == [1, pytest.approx(shapes.EXTRA)]


def test_a_speck_does_not_count():
    images = world.render([SCENE, SCENE])
    images[0, :, 27:30, 14:17] = torch.tensor(COLOURS["black"])[:, None, None] / 255
    images[1, :, 26:30, 14:18] = torch.tensor(COLOURS["black"])[:, None, None] / 255
    assert strict(images, [RED_LEFT_OF_BLUE] * 2) == [True, False]  # 9 and 16 pixels of 1024


def test_a_blob_is_no_circle():
    """A plus sign of two bars fits no template at the default, but any shape fits a lax one."""
    image = world.render([[]])
    for rows, columns in ((slice(8, 24), slice(13, 19)), (slice(13, 19), slice(8, 24))):
        image[0, :, rows, columns] = torch.tensor(COLOURS["red"])[:, None, None] / 255
    assert detect(image)[0][0].shape is None
    assert detect(image, iou=0.5)[0][0].shape is not None
    squashed = world.render([[PlacedObject("red", "square", 16.0, 16.0, 8.0)]])
    squashed[:, :, :14] = torch.tensor(BACKGROUND)[:, None, None] / 255
    assert detect(squashed, aspect=0.75)[0][0].shape is None
    assert detect(squashed, aspect=0.5)[0][0].shape == "square"


def at(colour, shape, x=0.5, y=0.5):
    return DetectedShape(colour, shape, x, y, 0.1)


RED, BLUE = at("red", "circle", 0.2), at("blue", "square", 0.8)


@pytest.mark.parametrize(
    ("found", "prompt", "score"),
    [
        ([RED, BLUE], RED_LEFT_OF_BLUE, 1.0),
        ([], RED_LEFT_OF_BLUE, 0.0),
        ([RED], RED_LEFT_OF_BLUE, 0.6 * 0.5),
        ([RED, BLUE], "a red circle right of a blue square", 0.6),
        ([RED, BLUE], "a red circle above a blue square", 0.6),
        ([at("red", "square", 0.2), BLUE], RED_LEFT_OF_BLUE, 0.6 * 0.75 + 0.4),
        ([at("red", None, 0.2), BLUE], RED_LEFT_OF_BLUE, 0.6 * 0.75 + 0.4),
        ([at("green", "circle", 0.2), BLUE], RED_LEFT_OF_BLUE, 0.6 * 0.625),
        ([RED, BLUE, at("black", None)], RED_LEFT_OF_BLUE, 0.7),
        ([RED], "a red circle", 1.0),
        ([RED, RED], "a red circle", 0.7),
        ([RED], "two red circles", 0.5),
        ([RED] * 4, "three red circles", 0.7),
        ([RED, at("red", "square")], "two red circles", 0.75),
    ],
)
def test_graded_score_by_hand(found, prompt, score):
    assert grade_shapes(found, world.wanted_shapes(prompt)) == pytest.approx(score)


things = st.builds(
    DetectedShape,
    st.sampled_from(["red", "blue", None]),
    st.sampled_from(["circle", "square", None]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.just(0.1),
)
some_prompts = st.sampled_from(
    [p for p in world.all_prompts() if not {"green", "yellow", "purple", "black"} & set(p.split())]
)


@given(st.lists(things, max_size=4), some_prompts, st.randoms())
def test_graded_is_one_exactly_where_strict_is(found, prompt, rng):
    wanted = world.wanted_shapes(prompt)
    score = grade_shapes(found, wanted)
    assert 0 <= score <= 1
    assert (score == 1) == is_exact(found, wanted)
    mixed = rng.sample(found, len(found))
    assert is_exact(mixed, wanted) == is_exact(found, wanted)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_relations_are_exclusive_opposites(x, y, u, v):
    a, b = DetectedShape("red", "circle", x, y, 0.1), DetectedShape("blue", "circle", u, v, 0.1)
    opposite = {"left of": "right of", "above": "below"}
    for one, other in opposite.items():
        assert shapes.in_relation(a, b, one) == shapes.in_relation(b, a, other)
        assert not (shapes.in_relation(a, b, one) and shapes.in_relation(a, b, other))
    if shapes.in_relation(a, b, "left of"):
        assert x < u
    if shapes.in_relation(a, b, "above"):
        assert y < v


@pytest.mark.parametrize(
    ("x", "y", "relations"),
    [
        (0.3, 0.0, {"left of"}),
        (0.05, 0.0, set()),  # too near
        (0.3, 0.5, {"above"}),  # more above than left of
        (0.3, 0.35, {"left of", "above"}),  # as much the one as the other
        (-0.5, 0.3, {"right of"}),
        (0.0, -0.2, {"below"}),
    ],
)
def test_relations_by_hand(x, y, relations):
    """Of an object to another that lies x to the right and y below it."""
    a, b = at("red", "circle", 0.4, 0.4), at("blue", "circle", 0.4 + x, 0.4 + y)
    assert {r for r in shapes.RELATIONS if shapes.in_relation(a, b, r)} == relations


def test_the_reward_scores_a_batch_row_by_row(clean):
    prompts, _, images = clean
    prompts = [*prompts[:20], "a cat", prompts[20]]
    images = torch.cat([images[:20], images[:1], images[30:31]])
    samples = Samples(images, prompts, torch.arange(22))
    for kind in ("graded", "strict"):
        score = shapes.load(kind)(samples)
        assert score.shape == (22,) and score.dtype == torch.float32
        assert score[20].isnan() and not score[:20].isnan().any()
        alone = [shapes.load(kind)(Samples(i[None], [p], torch.zeros(1, dtype=torch.long)))
                 for i, p in zip(images, prompts, strict=True)]  # fmt: skip
        torch.testing.assert_close(score, torch.cat(alone), rtol=0, atol=0, equal_nan=True)


def test_settings_that_make_no_sense_are_refused():
    for settings in ({"kind": "fair"}, {"iou": 0.0}, {"aspect": 1.5}):
        with pytest.raises(ValueError, match=f"'shapes': {next(iter(settings))}: expected"):
            load("shapes", **settings)
    with pytest.raises(ValueError, match="images"):
        shapes.load()(Samples(["text"], ["a red circle"], torch.zeros(1, dtype=torch.long)))
