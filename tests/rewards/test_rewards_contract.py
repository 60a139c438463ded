"""Every reward without weights keeps the contract; what does not is found; the self-test too."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

import rewards
from rewards import Samples, check_reward, load, score_all
from rewards.checks.self_test import Prompts, check_sum, self_test
from rewards.load import names
from rewards.perception.files import read_images
from rewards.perception.media import WrongMedia, each_size, to_pil, to_tensor
from tests.support.reward_contract import (
    ODD,
    check_contract,
    damaged,
    images,
    mixed_images,
    sounding,
    texts,
    videos,
)

ROOT = Path(rewards.__file__).parents[1]
STILL = (images, mixed_images)
MOVING = (*STILL, videos)
VIDEO, SOUND = (videos,), (sounding,)
WITHOUT_WEIGHTS = {  # name: (settings, what it scores)
    "brightness": ({}, MOVING),
    "colour": ({"kind": "colourfulness"}, MOVING),
    "jpeg": ({"kind": "small"}, STILL),
    "shapes": ({}, STILL),
    "flicker": ({}, VIDEO),
    "motion": ({"most": 50.0}, VIDEO),
    "smoothness": ({}, VIDEO),
    "loudness": ({}, SOUND),
    "silence": ({}, SOUND),
    "synchrony": ({}, SOUND),
    "exact_answer": ({"find": "last_number"}, (texts,)),
    "format": ({}, (texts,)),
    "length": ({"most": 20, "soft": 10}, (texts,)),
    "gate": ({"reward": "brightness", "where": "jpeg", "above": 1.0}, STILL),
    "ensemble": ({"rewards": ["brightness", "colour"], "kind": "cautious"}, MOVING),
    "soft_minimum": ({"rewards": ["brightness", {"name": "colour", "kind": "hue"}]}, STILL),
    "clipped": ({"reward": "brightness", "low": 0.4, "high": 0.6, "unit": True}, MOVING),
    "centred": ({"reward": {"name": "length", "most": 4, "kind": "near"}}, (texts,)),
}
ELSEWHERE = {  # what needs weights, an engine, a server or prompts of its own
    *("aesthetic", "clip", "distance", "geneval", "hps", "imagereward", "pickscore", "similarity"),
    *("judge", "ocr", "remote"),
    *("editreward", "hpsv3", "videoalign"),
    *("consistency", "dreamsim", "safety"),
    *("deqa", "editscore", "soft_tifa", "unified_reward", "vqascore"),
    *("clip_flant5", "compbench", "dpg_bench", "mps", "unigenbench"),
    *("code_tests", "math_answer", "sequence_classifier"),
    "fitted",  # tests/rewards/test_fitted.py
    "clap",  # tests/rewards/test_sound_rewards.py
    "vlm_yes_no",  # tests/rewards/test_vlm_yes_no.py
    "process_reward",  # tests/rewards/test_process_reward.py
    "by_row",  # which needs columns: tests/rewards/test_by_row.py
    *("edit_shapes", "moving_shapes"),  # which score their own worlds' prompts alone
}
CASES = [(name, factory) for name, (_, kinds) in WITHOUT_WEIGHTS.items() for factory in kinds]


@pytest.mark.parametrize(("name", "factory"), CASES)
def test_a_reward_keeps_the_contract(name, factory):
    reward = load(name, **WITHOUT_WEIGHTS[name][0])
    scores = check_contract(reward, factory)
    known = scores[~scores.isnan()]
    assert len(known) > 0
    if name not in ("gate", "shapes"):
        assert len(known.unique()) > 1, "it tells nothing apart, so the test says little"


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_reward_passes_its_self_test_and_refuses_other_media(name):
    settings, kinds = WITHOUT_WEIGHTS[name]
    reward = load(name, **settings)
    text = kinds == (texts,)
    meta = [{"reference": "It is."}]
    moving = kinds in (VIDEO, SOUND)
    kind = "text" if text else "video" if moving else "image"
    assert "the same" in self_test(name, reward, Prompts(meta=meta, kind=kind))
    wrong = (images if text or moving else texts)(["a"])
    if name == "centred":
        return  # takes both
    with pytest.raises(WrongMedia, match=r"scores .*; it was given"):
        reward(wrong)


def test_half_precision_pictures_are_scored_as_what_they_show():
    samples = images(["a red square"] * 3)
    half = Samples(samples.media.to(torch.bfloat16), samples.prompts, samples.group)
    for name in ("brightness", "colour", "jpeg", "shapes"):
        reward = load(name)
        torch.testing.assert_close(reward(half), reward(samples), atol=0.02, rtol=0.1)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda s: s.media.flatten(1).mean(1).half(), "float scores"),
        (lambda s: s.media.flatten(1).mean(1), "no gradient"),
        (lambda s: s.media.detach().flatten(1).mean(1)[:, None], "a score a sample"),
        (lambda s: s.media.data.mul_(0.5).flatten(1).mean(1), "were changed"),
        (lambda s: torch.arange(len(s.prompts)).float(), "in another order"),
        (lambda s: s.media.detach().mean().expand(len(s.prompts)), "one by one"),
        (lambda s: s.media.detach().flatten(1).mean(1) + s.group, "in one group"),
        (lambda s: torch.rand(len(s.prompts)), "twice the same"),
    ],
)
def test_the_contract_finds_what_breaks_it(fault, what):
    with pytest.raises(AssertionError, match=what):
        check_contract(fault, images)


@dataclass(frozen=True)
class Shown:
    """A reward with examples: `values` of the two, and more settings of a fault."""

    values: tuple[float, ...]
    one_call: bool = False

    def __call__(self, samples: Samples) -> torch.Tensor:
        return torch.tensor([self.values[int(image.mean() < 0.5)] for image in samples.media])

    def examples(self) -> Samples:
        media = torch.stack([torch.ones(3, 4, 4), torch.zeros(3, 4, 4)])
        return Samples(media, ["a"] * 2, torch.arange(2))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Shown((1.0, 1.0)), "both of its examples score 1"),
        (Shown((0.0, 1.0)), "is the sign wrong"),
        (Shown((float("nan"), 1.0)), "leaves its own examples unscored"),
        (lambda s: torch.zeros(len(s.prompts)), "all score 0; if that is right"),
        (lambda s: [float("nan")] * len(s.prompts), "scores none of noise"),
        (lambda s: [None] * len(s.prompts), "applies to none of 2 prompts"),
        (lambda s: torch.arange(len(s.prompts)).float(), "depend on the batch.*one by one"),
        (lambda s: s.media.flatten(1).mean(1) / len(s.prompts) + s.media[0, 0, 0, 0], "depend"),
        (lambda s: torch.zeros(3), r"shape \[3\]; expected 4 finite numbers"),
    ],
)
def test_the_self_test_says_what_is_wrong(reward, message):
    with pytest.raises(ValueError, match=message):
        self_test("mine", reward)


@pytest.mark.parametrize("bias", [0.001, 0.0003, -0.0008])
def test_a_score_that_grows_with_the_place_in_the_batch_is_found(bias):
    """Less than 1 % of the largest score, and as large as the spread of a group."""

    def biased(samples: Samples) -> torch.Tensor:
        return samples.media.flatten(1).mean(1) + bias * torch.arange(len(samples.prompts))

    with pytest.raises(ValueError, match="with the batch in reverse order"):
        self_test("mine", biased)
    self_test("mine", lambda s: s.media.flatten(1).mean(1))


def test_rewards_that_cancel_are_found_by_their_sum():
    def light(samples: Samples) -> torch.Tensor:
        return samples.media.flatten(1).mean(1)

    both = {"light": light, "dark": lambda s: 1 - light(s)}
    for weights in ({"light": 1.0, "dark": 1.0}, {"light": 0.3, "dark": 0.3}):
        with pytest.raises(ValueError, match=r"light, dark: they cancel: their weighted sum is"):
            check_sum(both, weights, Prompts())
    check_sum(both, {"light": 1.0, "dark": 0.9}, Prompts())
    both["dark"] = Shown((1.0, 0.0), one_call=True)
    check_sum(both, {"light": 1.0, "dark": 1.0}, Prompts())


def test_videos_of_the_self_test_move_so_that_a_reward_of_motion_can_be_told():
    def motion(samples: Samples) -> torch.Tensor:
        assert samples.media.shape[1:3] == (8, 3)
        return (samples.media[:, 1:] - samples.media[:, :-1]).abs().flatten(1).mean(1)

    said = self_test("motion", motion, Prompts(kind="video"))
    assert said.startswith("motion: 0, 0, 0.0") and "1 for 4 different samples" in said
    with pytest.raises(ValueError, match=r"videos \(noise.*; the last two move\) all score 1"):
        self_test("frames", lambda s: s.media.flatten(1).mean(1) * 0 + 1, Prompts(kind="video"))


def test_a_groupwise_reward_is_tested_in_another_order():
    def rank(samples: Samples) -> torch.Tensor:
        mean = samples.media.flatten(1).std(1)
        same = samples.group[:, None] == samples.group[None, :]
        beaten = ((mean[:, None] > mean[None, :]) & same).sum(1).double()
        return torch.where(same.sum(1) > 1, beaten, torch.nan)

    assert "in another order the same" in self_test("rank", rank)


def test_a_costly_reward_is_called_once():
    asked = []

    class Costly(Shown):
        def __call__(self, samples: Samples) -> torch.Tensor:
            asked.append(len(samples.prompts))
            return super().__call__(samples)

    assert self_test("judge", Costly((1.0, 0.0), one_call=True)).endswith("called once")
    assert asked == [2]


def test_parts_of_a_reward_are_tested_and_named():
    gate = load("gate", reward="brightness", where=lambda s: torch.ones(len(s.prompts)))
    with pytest.raises(ValueError, match=r"reward mine: where: .* all score 1"):
        self_test("mine", gate)


def test_a_corrupted_file_names_itself_and_the_others_are_scored(tmp_path):
    good, bad = damaged(tmp_path)
    paths = [good[0], *bad, good[1]]
    found = read_images(paths)
    assert set(found.broken) == set(bad)
    assert all(path in sentence for path, sentence in found.broken.items())
    assert "no such file" in found.broken[bad[3]] and "an empty file" in found.broken[bad[0]]
    samples = Samples(found.media, ["a"] * 6, torch.zeros(6, dtype=torch.long))
    loaded = {"brightness": load("brightness"), "jpeg": load("jpeg")}
    scores = score_all(loaded, samples)
    assert scores.scored.tolist() == [[True] * 2, *[[False] * 2] * 4, [True] * 2]
    alone = score_all(loaded, Samples(read_images(good).media, ["a"] * 2, torch.arange(2)))
    assert torch.equal(scores.values[[0, 5]], alone.values)
    nothing = score_all(loaded, samples.take([1, 2]))
    assert not nothing.scored.any()


def test_pictures_of_all_modes_become_three_channels():
    def of(image: Image.Image) -> list[float]:
        tensor = to_tensor(image)
        assert tensor.shape == (3, 2, 4) and tensor.dtype == torch.float32
        return [round(float(v), 3) for v in tensor[:, 0, 0]]

    size = (4, 2)
    assert of(Image.new("RGB", size, (255, 0, 51))) == [1, 0, 0.2]
    assert of(Image.new("L", size, 51)) == [0.2] * 3
    assert of(Image.new("I;16", size, 13107)) == [0.2] * 3
    assert of(Image.new("1", size, 1)) == [1] * 3
    assert of(Image.new("RGBA", size, (255, 0, 0, 0))) == [1, 1, 1], "transparent is white"
    assert of(Image.new("RGBA", size, (0, 0, 0, 51))) == [0.8] * 3
    assert of(Image.new("LA", size, (0, 255))) == [0] * 3
    palette = Image.new("P", size, 1)
    palette.putpalette([0, 0, 0, 0, 255, 51])
    assert of(palette) == [0, 1, 0.2]
    palette.info["transparency"] = 1
    assert of(palette) == [1, 1, 1]
    assert of(Image.new("CMYK", size, (0, 255, 255, 0))) == [1, 0, 0]


def test_exif_turns_a_picture(tmp_path):
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right
    image.save(tmp_path / "turned.png", exif=exif)
    (media,) = read_images([tmp_path / "turned.png"]).media
    assert media.shape == (3, 4, 2) and media[0].argmax() == 1, "its first pixel is at the right"


def test_a_picture_comes_back_as_it_went():
    whole = torch.randint(0, 256, (3, 5, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal((to_tensor(to_pil(whole / 255)) * 255).round().long(), whole)
    odd = torch.tensor([-1.0, 2.0, torch.nan]).view(3, 1, 1)
    assert to_pil(odd).getpixel((0, 0)) == (0, 255, 0)


def test_sizes_are_batched_and_put_back_in_order():
    sizes = [4, 8, 4, 8, 4]
    media = [torch.full((3, side, 4), i / 10) for i, side in enumerate(sizes)]
    samples = Samples(media, list("abcde"), torch.arange(5), [{"i": i} for i in range(5)])
    seen = []

    def score(part: Samples) -> torch.Tensor:
        seen.append("".join(part.prompts))
        assert [m["i"] for m in part.meta] == ["abcde".index(p) for p in part.prompts]
        return part.media.flatten(1).mean(1)

    torch.testing.assert_close(each_size(samples, score), torch.arange(5).double() / 10)
    assert seen == ["ace", "bd"]


def test_samples_know_what_they_are():
    group = torch.zeros(2, dtype=torch.long)
    assert Samples(torch.rand(2, 3, 4, 4), ["a"] * 2, group).kind == "image"
    assert Samples(torch.rand(2, 5, 3, 4, 4), ["a"] * 2, group).kind == "video"
    assert Samples([None, torch.rand(5, 3, 4, 4)], ["a"] * 2, group).kind == "video"
    assert Samples(["", None], ["a"] * 2, group).kind == "text"
    for media, message in (
        ([torch.rand(3, 4, 4), "a"], "image and text in one batch"),
        (torch.rand(2, 1, 4, 4), "not a tensor of shape"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "uint8"),
        ([1, 2], "not int"),
    ):
        with pytest.raises(ValueError, match=message):
            Samples(media, ["a"] * 2, group).kind  # noqa: B018


def test_every_reward_is_known_to_a_contract_test():
    """A new file of rewards/ gets its line above, or is named among those tested elsewhere."""
    assert set(names()) == {*WITHOUT_WEIGHTS, *ELSEWHERE, "win_rate"}
    for name, (settings, _) in WITHOUT_WEIGHTS.items():
        check_reward(name, settings)


def test_a_groupwise_reward_keeps_the_contract_but_for_standing_alone():
    scores = check_contract(load("win_rate", judge="brightness"), images, pointwise=False)
    assert scores.view(3, 2).sum(1).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_rewards_stand_alone_and_import_nothing_heavy():
    code = (
        "import sys, rewards, rewards.checks.self_test;"
        "from rewards.load import check_reward, names;"
        "check_reward('ocr', {}); check_reward('gate', {'reward': 'ocr', 'where': 'ocr'});"
        "heavy = {'transformers', 'diffusers', 'open_clip', 'onnxruntime', 'rapidocr', 'cv2',"
        " 'datasets', 'accelerate', 'torchvision', 'httpx', 'fastapi', 'scipy', 'samplers',"
        " 'flowrl'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    root = Path(rewards.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_the_page_names_every_image_reward_that_refuses_videos():
    """Each file of the catalogue that expects images expects videos too, or stands in the page."""
    page = (ROOT / "docs" / "rewards.md").read_text()
    listed = page.partition("score videos too, frame by frame, but for ")[2].partition(", which")[0]
    still = set()
    for path in (ROOT / "rewards" / "catalogue").glob("*.py"):
        code = path.read_text()
        kinds = re.findall(r"expect\(\s*samples,\s*\"\w+\",([^)]*)\)", code)
        if any('"image"' in kind and '"video"' not in kind for kind in kinds):
            if not re.search(r"over_frames|OverFrames", code):
                still.add(path.stem)
    assert set(re.findall(r"`(\w+)`", listed)) == still
    moving = videos(ODD)
    for name in still & WITHOUT_WEIGHTS.keys() - {"centred"}:
        with pytest.raises(WrongMedia):
            load(name)(moving)


KINDS = {images: "image", mixed_images: "image", videos: "video", sounding: "video", texts: "text"}


@pytest.mark.parametrize("name", sorted({*WITHOUT_WEIGHTS} - {"centred", "soft_minimum"}))
def test_a_run_refuses_rewards_of_another_kind_of_samples(name: str) -> None:
    """Also those whose examples are of the kind that they score. The two that are left out take
    what their members take."""
    settings, scores = WITHOUT_WEIGHTS[name]
    meta = [{"answer": "7"}, {"answer": "8"}]
    for kind in {*KINDS.values()} - {KINDS[each] for each in scores}:
        with pytest.raises(ValueError, match=r"scores .*it was given"):
            self_test(name, load(name, **settings), Prompts(meta=meta, kind=kind), one_kind=True)
