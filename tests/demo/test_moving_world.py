"""The laws of the world of moving shapes, its splits and its files of prompts."""

import json
import random
from pathlib import Path

import pytest
import torch

from flowrl.demo import moving_world, world
from rewards.catalogue.moving_shapes import MOTIONS

torch.set_num_threads(1)
PAIR = "a red circle moving right and a blue square moving left"


def test_actors_stay_inside_apart_and_on_their_way():
    rng = random.Random(4)
    for prompt in moving_world.draw_moving_prompts(200, rng):
        actors = moving_world.wanted_actors(prompt)
        play = moving_world.play(actors, rng)
        assert len(play) == moving_world.VIDEO_FRAMES
        for frame in play:
            assert [(t.colour, t.shape) for t in frame] == [(a.colour, a.shape) for a in actors]
            for t in frame:
                assert t.radius + 1 <= min(t.x, t.y) + 1e-9
                assert max(t.x, t.y) <= world.SIZE - t.radius - 1 + 1e-9
            if len(frame) == 2:
                a, b = frame
                assert max(abs(a.x - b.x), abs(a.y - b.y)) > a.radius + b.radius + 1
        for i, actor in enumerate(actors):
            dx, dy = MOTIONS[actor.motion]
            x, y = play[-1][i].x - play[0][i].x, play[-1][i].y - play[0][i].y
            low, high = moving_world.TRAVEL if dx or dy else (0.0, 0.0)
            assert low <= x * dx + y * dy + 1e-9 and x * dx + y * dy <= high + 1e-9
            assert abs(x * dy) < 1e-9 and abs(y * dx) < 1e-9


def test_either_actor_may_have_the_upper_lane():
    actors, rng = moving_world.wanted_actors(PAIR), random.Random(1)
    starts = [moving_world.play(actors, rng)[0] for _ in range(60)]
    assert 15 < sum(first.y < second.y for first, second in starts) < 45


def test_films_repeat_by_seed_and_are_in_order():
    prompts = [PAIR, "a black triangle standing still"]
    one, again = (moving_world.render_videos(prompts, random.Random(7)) for _ in range(2))
    assert one.shape == (2, 5, 3, 32, 32) and torch.equal(one, again)
    assert torch.equal(one[1], one[1, :1].expand_as(one[1]))
    assert moving_world.render_videos([], random.Random(0)).shape[0] == 0
    with pytest.raises(ValueError, match="not a prompt of this world"):
        moving_world.wanted_actors("a red circle")


def test_splits_cover_all_prompts_once_and_the_files_are_theirs():
    files = {}
    for name in ("train", "held_out", "test"):
        lines = Path(f"configs/prompts/moving_{name}.jsonl").read_text().splitlines()
        files[name] = [json.loads(line)["prompt"] for line in lines]
        assert files[name] == moving_world.moving_prompts_of(name)
        assert {len(moving_world.wanted_actors(prompt)) for prompt in files[name]} == {1, 2}
    together = [prompt for prompts in files.values() for prompt in prompts]
    assert sorted(together) == sorted(moving_world.all_moving_prompts()) and len(together) == 1170
    assert {len(files["held_out"]) > 100, len(files["test"]) > 100} == {True}


def test_drawn_prompts_are_of_their_split_in_the_stated_shares():
    prompts = moving_world.draw_moving_prompts(2000, random.Random(0))
    assert {world.split(prompt) for prompt in prompts} == {"train"}
    singles = sum(len(moving_world.wanted_actors(prompt)) == 1 for prompt in prompts) / 2000
    assert singles == pytest.approx(moving_world.ACTOR_SHARES[1], abs=0.04)
