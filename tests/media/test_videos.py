"""Films as files to look at: what a GIF shows is what the film is."""

import random

import pytest
import torch
from PIL import Image, ImageSequence

from flowrl.demo import moving_world
from flowrl.errors import UserError
from flowrl.media import videos
from flowrl.pages.sample_files import Page
from rewards import Samples
from rewards.catalogue.moving_shapes import grade_motion, watch

PROMPTS = ("a red circle moving right and a blue square moving left", "a green square moving up")


def painted(prompts=PROMPTS):
    return moving_world.render_videos(prompts, random.Random(0))


def samples(media, prompts=PROMPTS):
    return Samples(media, prompts, torch.arange(len(prompts)))


def shown(path, size=None):
    """The frames of a GIF [f 3 h w] in 0..1, and how long each is shown in milliseconds."""
    with Image.open(path) as gif:
        pages = [(frame.convert("RGB"), frame.info["duration"]) for frame in _frames(gif)]
        assert gif.info["loop"] == 0
    if size is not None:
        pages = [(page.resize(size, Image.Resampling.NEAREST), time) for page, time in pages]
    arrays = [torch.frombuffer(bytearray(page.tobytes()), dtype=torch.uint8) for page, _ in pages]
    width, height = pages[0][0].size
    frames = torch.stack(arrays).view(-1, height, width, 3).permute(0, 3, 1, 2) / 255
    return frames, [time for _, time in pages]


def _frames(gif):
    return [frame.copy() for frame in ImageSequence.Iterator(gif)]


def test_a_saved_film_is_still_right(tmp_path):
    (original, _) = painted()
    videos.save_gif(videos.frames(original), tmp_path / "some" / "film.gif")
    large, times = shown(tmp_path / "some" / "film.gif")
    assert large.shape == (5, 3, 128, 128)
    assert times == [200, 200, 200, 200, 600]  # the last one waits
    frames, _ = shown(tmp_path / "some" / "film.gif", (32, 32))
    assert (frames - original).abs().max() < 0.1
    assert (
        grade_motion(watch(frames[None], 0.80, 0.75)[0], moving_world.wanted_actors(PROMPTS[0]))
        == 1
    )


def test_a_large_film_keeps_its_size_and_a_long_one_its_frames(tmp_path):
    row = torch.linspace(0, 1, 200).expand(3, 144, 200)
    film = torch.stack([row.roll(5 * i, 2) for i in range(40)])
    videos.save_gif(videos.frames(film), tmp_path / "film.gif")
    frames, times = shown(tmp_path / "film.gif")
    assert frames.shape == film.shape and times[0] == 60
    assert (frames - film).abs().max() < 0.1


def test_a_page_of_films_moves_and_has_prompts_and_scores(tmp_path):
    page = Page(samples(painted()), (1.0, None), "two films")
    assert page.save(tmp_path, "grid") == tmp_path / "grid.gif"
    assert (tmp_path / "grid.png").is_file()  # three frames of each, for what shows no GIF
    frames, _ = shown(tmp_path / "grid.gif")
    assert len(frames) == 5
    for i, film in enumerate(painted()):
        x = 8 + i * (128 + 8)
        tiles = frames[:, :, 36 : 36 + 128, x : x + 128][:, :, ::4, ::4]
        assert (tiles - film).abs().max() < 0.15
    words = frames[:, :, 36 + 128 :]
    assert (words == words[0]).all() and words.std() > 0.01
    one = Page(samples(painted()), (0.5, None), "two films")
    one.save(tmp_path, "other")
    assert (shown(tmp_path / "other.gif")[0][0] - frames[0]).abs().max() > 0.5  # its score


def test_films_of_several_lengths_share_a_page(tmp_path):
    one, two = painted()
    Page(samples([one, two[:3]]), (1.0, 1.0), "").save(tmp_path, "grid")
    frames, _ = shown(tmp_path / "grid.gif")
    tiles = frames[:, :, 36 : 36 + 128 : 4, 144 : 144 + 128 : 4]
    assert (tiles[4] - two[2]).abs().max() < 0.15  # it stays at its end


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (32, 32), (33, 17), (100, 26)])
def test_a_page_of_long_films_has_some_of_their_frames_and_the_last(length, pages):
    film = torch.linspace(0, 1, length).view(-1, 1, 1, 1).repeat(1, 3, 4, 4)
    found = videos.video_page(film[None], ["x"], [0.0], "")
    assert len(found) == pages
    levels = [page.getpixel((60, 60))[0] for page in found]
    assert levels == sorted(levels) and levels[-1] == round(255 * float(film[-1, 0, 0, 0]))


def test_before_and_after_are_next_to_each_other(tmp_path):
    films = painted()
    Page(samples(films), (1.0, 1.0), "before").save(tmp_path, "before")
    Page(samples(films.flip(1)), (0.0, 0.0), "after").save_beside(tmp_path, "before", "both")
    both, _ = shown(tmp_path / "both.gif")
    half = both.shape[3] // 2
    left, right = (part[:, :, 36 : 36 + 128, 8 : 8 + 128] for part in both.split(half, 3))
    assert len(both) == 5
    assert (left - right.flip(0)).abs().max() < 0.15
    with Image.open(tmp_path / "both.png") as strip:
        assert strip.width % 2 == 0 and strip.width > 2 * 3 * 128


def test_damaged_pages_stand_beside_nothing(tmp_path):
    """They may not end a run whose weights are not exported yet."""
    Page(samples(painted()), (1.0, 1.0), "before").save(tmp_path, "before")
    whole = {kind: (tmp_path / f"before.{kind}").read_bytes() for kind in ("png", "gif")}
    for length in (0, 6, 20):
        for kind, content in whole.items():
            (tmp_path / f"before.{kind}").write_bytes(content[:length])
        Page(samples(painted()), (0.0, 0.0), "after").save_beside(tmp_path, "before", "both")
    assert not list(tmp_path.glob("both.*"))


def test_each_sample_is_a_file(tmp_path):
    Page(samples(painted()), (1.0, 1.0), "").save_each(tmp_path / "films")
    assert sorted(f.name for f in (tmp_path / "films").iterdir()) == ["000.gif", "001.gif"]
    Page(samples(painted()[:, 0]), (1.0, 1.0), "").save_each(tmp_path / "images")
    assert sorted(f.name for f in (tmp_path / "images").iterdir()) == ["000.png", "001.png"]


def test_a_film_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the video"):
        videos.save_gif(videos.frames(painted()[0]), tmp_path / "file" / "film.gif")
