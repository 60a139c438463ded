"""The checker of films on films of known truth, on spoilt ones, and by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.demo import moving_world, world
from flowrl.demo.world import PlacedObject
from rewards import load
from rewards.catalogue import moving_shapes
from rewards.catalogue.moving_shapes import (
    BACK,
    LEAST_TRAVEL,
    MOST_SIDEWAYS,
    MOTIONS,
    grade_motion,
    identity,
    motion,
    watch,
)
from rewards.catalogue.shapes import COLOURS, SHAPES, DetectedShape
from rewards.perception.media import WrongMedia
from rewards.types import Samples
from tests.support.reward_contract import check_contract, videos

torch.set_num_threads(1)
PAIR = "a red circle moving right and a blue square moving left"


def graded(films, prompts, iou=0.80, aspect=0.75):
    found = watch(films, iou, aspect)
    return [
        grade_motion(film, moving_world.wanted_actors(p))
        for film, p in zip(found, prompts, strict=True)
    ]


def strict(films, prompts, **settings):
    return [score == 1 for score in graded(films, prompts, **settings)]


@pytest.fixture(scope="module")
def clean():
    rng = random.Random(11)
    prompts = moving_world.draw_moving_prompts(160, rng)
    plays = [moving_world.play(moving_world.wanted_actors(prompt), rng) for prompt in prompts]
    return prompts, plays, draw(plays)


def draw(plays, size=world.SIZE):
    frames = world.render([frame for play in plays for frame in play], size)
    return frames.unflatten(0, (len(plays), -1))


def test_prompts_are_read():
    assert moving_shapes.parse_motion("A red  circle moving right.") == (
        moving_shapes.Actor("red", "circle", "moving right"),
    )
    two = moving_shapes.parse_motion(PAIR)
    assert [actor.motion for actor in two or ()] == ["moving right", "moving left"]
    for text in ("a red circle", "a cat moving up", "a red circle moving", f"{PAIR} again", ""):
        assert moving_shapes.parse_motion(text) is None
    alike = "a red circle moving up and a red square moving down"
    assert moving_shapes.parse_motion(alike) is None  # colours tell actors apart


def test_clean_films_are_right(clean):
    prompts, _, films = clean
    assert sum(strict(films, prompts)) >= 0.99 * len(prompts)
    assert sum(strict(films, prompts, iou=0.85, aspect=0.8)) >= 0.8 * len(prompts)


@pytest.mark.parametrize("size", [48, 96])
def test_size_does_not_matter(clean, size):
    prompts, plays, _ = clean
    assert sum(strict(draw(plays[:40], size), prompts[:40])) >= 39


def test_films_of_other_prompts_are_wrong(clean):
    prompts, _, films = clean
    found, pairs, right = watch(films, 0.80, 0.75), 0, 0
    for number in (1, 2):
        rows = [i for i, p in enumerate(prompts) if len(moving_world.wanted_actors(p)) == number]
        for step in (1, 5, 13):
            for i, j in zip(rows, rows[step:] + rows[:step], strict=True):
                if prompts[i] != prompts[j]:
                    pairs += 1
                    right += grade_motion(found[i], moving_world.wanted_actors(prompts[j])) == 1
    assert pairs > 400
    assert right == 0


def change(frame, **what):
    return [replace(frame[0], **what), *frame[1:]]


def spoil(play, how):
    """A play in which one thing is wrong; the first actor moves."""
    half, first = len(play) // 2, play[0][0]
    colour = next(c for c in COLOURS if all(c != thing.colour for thing in play[0]))
    shape = next(s for s in SHAPES if s != first.shape)
    match how:
        case "backwards":
            return play[::-1]
        case "frozen":
            return [play[half]] * len(play)
        case "there and back":
            return [*play[::2], *play[::-2][1:]]
        case "recoloured":
            return [*play[:half], *(change(frame, colour=colour) for frame in play[half:])]
        case "reshaped":
            return [*play[:half], *(change(frame, shape=shape) for frame in play[half:])]
        case "gone":
            return [*play[:half], play[half][1:], *play[half + 1 :]]
        case "leap":
            return [*([play[0]] * (half + 1)), *([play[-1]] * half)]
        case "shuffled":
            return [play[i] for i in (0, 2, 1, 3, 4)]
        case "visited":
            visitor = PlacedObject(colour, "square", 28.0, 28.0, 3.0)
            visitor = replace(visitor, x=4.0) if max(first.x, first.y) > 14 else visitor
            return [*play[:half], [*play[half], visitor], *play[half + 1 :]]
        case "colours exchanged":
            a, b = (thing.colour for thing in play[0])
            return [[replace(f[0], colour=b), replace(f[1], colour=a)] for f in play]
    raise ValueError(how)


HOW = (
    "backwards", "frozen", "there and back", "recoloured", "reshaped", "gone", "leap", "shuffled",
    "visited", "colours exchanged",
)  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_a_spoilt_film_fails_both_scores(clean, how):
    chosen = [
        (prompt, play)
        for prompt, play in zip(*clean[:2], strict=True)
        if "still" not in prompt and (len(play[0]) == 2 or "exchanged" not in how)
    ][:40]
    prompts = [prompt for prompt, _ in chosen]
    films = draw([spoil(play, how) for _, play in chosen])
    scores, before = graded(films, prompts), graded(draw([play for _, play in chosen]), prompts)
    assert max(scores) < 1
    assert all(a < b - 0.01 for a, b in zip(scores, before, strict=True))


def test_what_stands_still_may_be_shown_backwards_but_not_move(clean):
    rng = random.Random(2)
    prompts = [f"a {colour} square standing still" for colour in COLOURS]
    moved = [f"a {colour} square moving down" for colour in COLOURS]
    films = moving_world.render_videos(prompts, rng)
    assert all(strict(films, prompts)) and all(strict(films.flip(1), prompts))
    assert not any(strict(moving_world.render_videos(moved, rng), prompts))
    assert not any(strict(films, moved))


def test_one_frame_of_a_strange_shape_is_forgiven_but_not_two(clean):
    prompts, plays, _ = clean
    other = {"circle": "square", "square": "triangle", "triangle": "circle"}
    for bad, right in ((1, True), (2, False)):
        spoilt = [
            [change(f, shape=other[f[0].shape]) if i < bad else f for i, f in enumerate(play)]
            for play in plays[:20]
        ]
        count = sum(strict(draw(spoilt), prompts[:20]))
        assert count >= 18 if right else count == 0


@pytest.mark.parametrize(
    ("path", "name", "score"),
    [
        ([(0.2, 0.5), (0.4, 0.5), (0.6, 0.5)], "moving right", 1.0),
        ([(0.2, 0.5), (0.4, 0.5), (0.6, 0.5)], "moving left", 0.0),
        ([(0.2, 0.5), (0.4, 0.5), (0.6, 0.5)], "moving up", 0.0),
        ([(0.5, 0.6), (0.5, 0.4), (0.5, 0.2)], "moving up", 1.0),
        ([(0.5, 0.2), (0.5, 0.3), (0.5, 0.4)], "moving down", 1.0),
        ([(0.5, 0.2), (0.5, 0.245), (0.5, 0.29)], "moving down", 0.5),  # half the least travel
        ([(0.2, 0.5), (0.4, 0.5), (0.35, 0.5), (0.5, 0.5)], "moving right", 2 / 3),  # a step back
        ([(0.2, 0.5), (0.4, 0.625), (0.6, 0.705)], "moving right", 0.5),  # slanting by 0.205
        ([(0.2, 0.5), None, (0.6, 0.5), None], "moving right", 0.5),  # seen in half the frames
        ([(0.2, 0.5), None, None], "moving right", 0.0),
        ([(0.5, 0.5)] * 4, "standing still", 1.0),
        ([(0.5, 0.5)] * 4, "moving right", 0.0),
        ([(0.3, 0.5), (0.5, 0.5), (0.7, 0.5)], "standing still", 1 - (0.2 - 0.06) / 0.25),
    ],
)
def test_motion_by_hand(path, name, score):
    assert motion(path, name) == pytest.approx(score, abs=1e-9)


def at(colour, shape):
    return DetectedShape(colour, shape, 0.5, 0.5, 0.1)


RED, BLUE = at("red", "circle"), at("blue", "square")


@pytest.mark.parametrize(
    ("film", "share"),
    [
        ([[RED, BLUE]] * 4, 1.0),
        ([[BLUE, RED]] * 4, 1.0),
        ([[RED, BLUE]] * 3 + [[RED, at("blue", None)]], 1.0),  # three of four are steady
        ([[RED, BLUE]] * 2 + [[RED, at("blue", None)]] * 2, (2 + 2 * 0.75) / 4),
        ([[RED, BLUE]] * 7 + [[RED]], (7 + 0.5) / 8),  # gone for one frame of eight
        ([[RED, BLUE]] * 7 + [[RED, BLUE, RED]], (7 + 0.7) / 8),  # doubled in one
        ([[RED, BLUE]] * 7 + [[RED, at("green", "square")]], (7 + 0.625) / 8),
        ([[]] * 3, 0.0),
    ],
)
def test_identity_by_hand(film, share):
    assert identity(film, moving_world.wanted_actors(PAIR)) == pytest.approx(share)


places = st.tuples(st.floats(0, 1), st.floats(0, 1))


@given(st.lists(places, min_size=2, max_size=9))
def test_motions_are_one_another_mirrored_turned_and_reversed(path):
    right = motion(path, "moving right")
    assert 0 <= right <= 1
    assert motion(path[::-1], "moving left") == pytest.approx(right)
    assert motion([(-x, y) for x, y in path], "moving left") == pytest.approx(right)
    assert motion([(y, x) for x, y in path], "moving down") == pytest.approx(right)
    assert motion([(y, -x) for x, y in path], "moving up") == pytest.approx(right)
    assert sum(motion(path, name) == 1 for name in MOTIONS) <= 1
    if right == 1:
        xs, ys = zip(*path, strict=True)
        assert xs[-1] - xs[0] >= LEAST_TRAVEL and max(ys) - min(ys) <= MOST_SIDEWAYS
        assert all(b - a >= -BACK for a, b in pairwise(xs))


things = st.builds(
    DetectedShape,
    st.sampled_from(["red", "blue", None]),
    st.sampled_from(["circle", "square", None]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.just(0.1),
)


@given(st.lists(st.lists(things, max_size=3), min_size=1, max_size=5))
def test_any_film_has_a_grade(film):
    assert 0 <= grade_motion(film, moving_world.wanted_actors(PAIR)) <= 1


def test_the_reward_scores_films_one_by_one(clean):
    prompts, _, films = clean
    prompts, films = [*prompts[:9], "a cat", prompts[3]], films[:11]
    samples = Samples(films, prompts, torch.arange(11))
    for kind in ("graded", "strict"):
        score = moving_shapes.load(kind)(samples)
        assert score[9].isnan() and (score[:9] == 1).all() and score[10] < 1
        mixed = [draw([clean[1][0]], 48)[0], *films[1:]]  # another size: scored apart
        torch.testing.assert_close(
            moving_shapes.load(kind)(Samples(mixed, prompts, torch.arange(11))).float(),
            score, equal_nan=True,
        )  # fmt: skip
    check_contract(moving_shapes.load(), videos)


def test_films_are_looked_at_in_parts(clean, monkeypatch):
    whole = graded(clean[2][:7], clean[0][:7])
    monkeypatch.setattr(moving_shapes, "CHUNK_SIZE", 2 * clean[2][0].numel())
    assert graded(clean[2][:7], clean[0][:7]) == whole


def test_the_examples_differ():
    reward = moving_shapes.load()
    better, worse = reward(reward.examples())
    assert better == 1 and worse < 0.2


def test_settings_and_media_that_make_no_sense_are_refused():
    for settings in ({"kind": "fair"}, {"iou": 0.0}, {"aspect": 1.5}):
        with pytest.raises(ValueError, match=f"'moving_shapes': {next(iter(settings))}: expected"):
            load("moving_shapes", **settings)
    with pytest.raises(WrongMedia, match="videos"):
        moving_shapes.load()(Samples(torch.rand(1, 3, 32, 32), [PAIR], torch.arange(1)))
