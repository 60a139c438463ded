"""The files of docs/own_rewards.md load, pass the self-test and score what the page says."""

import re
from pathlib import Path

import pytest
import torch

from flowrl.paths import PROJECT
from rewards import Reward, Samples, load
from rewards.checks.gradient_test import gradient_test
from rewards.checks.self_test import Prompts, self_test
from rewards.types import Kind

PAGE = (PROJECT / "docs" / "own_rewards.md").read_text()
FILES = re.findall(r"```python\n(# my_reward\.py.*?)```", PAGE, re.DOTALL)


def own(tmp_path: Path, file: int, name: str, kind: Kind, **settings: object) -> Reward:
    """A reward of one of the page's files, after its self-test."""
    path = tmp_path / f"my_reward_{file}.py"
    path.write_text(FILES[file])
    reward = load(f"{path}{name}", **settings)
    assert "one by one the same" in self_test(name or "load", reward, Prompts(kind=kind))
    return reward


def samples(media: object, meta: list[dict] | tuple = ()) -> Samples:
    return Samples(media, ["a prompt"] * 2, torch.zeros(2, dtype=torch.long), meta)


def test_images_and_videos(tmp_path: Path) -> None:
    warm = torch.tensor([1.0, 0.5, 0.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    images = torch.cat([warm, warm.flip(1)])
    warmth = own(tmp_path, 0, ":warmth", "image")
    light = own(tmp_path, 0, ":light", "image", above=0.6)
    for media in (images, images[:, None].expand(2, 5, 3, 4, 4)):
        assert warmth(samples(media)) == [1.0, -1.0]
        assert light(samples(media)).tolist() == pytest.approx([1 / 3, 1 / 3])
    assert warmth(samples([images[0], images[1, :, :2]])) == [1.0, -1.0]  # of two sizes
    with pytest.raises(ValueError, match="has no setting 'below'"):
        own(tmp_path, 0, ":light", "image", below=1)


def test_texts_columns_frames_and_models(tmp_path: Path) -> None:
    rows = [{"words": ["Stone", "sea"]}, {"prompt": "no words"}]
    named = own(tmp_path, 1, ":named", "text")
    assert named(samples(["by the sea", "sea"], rows)) == [0.5, None]
    motion = own(tmp_path, 2, ":motion", "video")
    still = torch.zeros(4, 3, 8, 8)
    moving = still + torch.arange(4).view(4, 1, 1, 1) / 4
    assert motion(samples(torch.stack([moving, still]))).tolist() == [0.25, 0.0]
    network = own(tmp_path, 3, "", "image", channels=2)
    assert network(samples(torch.stack([still[0] + 0.5, still[0]]))).tolist() == pytest.approx(
        [0.5, 0]
    )
    warmth = own(tmp_path, 4, ":Warmth", "video", power=2.0)
    assert "finite differences" in gradient_test("warmth", warmth, Prompts(kind="video"))
    assert len(FILES) == 5
