"""GenEval's rules on things that are given, and the way to real detectors on tiny random ones."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rewards import Samples, load
from rewards.catalogue.geneval import (
    COLOUR_NAMES,
    Colours,
    GenEval,
    coco_class,
    cut_out,
    relations,
    surest,
)
from rewards.checks.self_test import self_test
from rewards.perception.detect import Detection, box_of, detector
from rewards.perception.embedding import Placement
from tests.support.reward_contract import check_contract, images
from tests.support.tiny_rewards import clip_folder

SIDE = 100


def at(name: str, x: float, y: float, score: float = 0.95, size: float = 20) -> Detection:
    half = size / 2
    return Detection(name, score, (x - half, y - half, x + half, y + half))


@dataclass
class Given:
    """A detector that finds what it is told, whatever the picture."""

    found: list[list[Detection]]
    names: frozenset[str] = frozenset({"bear", "bus", "keyboard", "cat"})
    asked: list[float] = field(default_factory=list)

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]:
        self.asked.append(least)
        return self.found[: len(images)]


def by_place(image: Image.Image, things: Sequence[Detection], name: str) -> list[str]:
    """Things on the left are red, the others blue."""
    return ["red" if thing.box[0] + thing.box[2] < SIDE else "blue" for thing in things]


def scores(things: list[Detection], meta: dict) -> dict[str, float]:
    """By kind, of one picture."""
    sample = Samples(torch.zeros(1, 3, SIDE, SIDE), ["p"], torch.zeros(1, dtype=torch.long), [meta])
    kinds = ("graded", "strict", "official")
    return {kind: GenEval(Given([things]), by_place, kind)(sample).item() for kind in kinds}


def bear(**more) -> dict:
    return {"class": "bear", "count": 1, "color": None, "position": None, **more}


LEFT, RIGHT, LOW = at("bear", 20, 50), at("bear", 80, 50), at("bear", 20, 90)
BUS, KEYS = at("bus", 80, 50), at("keyboard", 50, 50)
BESIDE = [{"class": "bus", "count": 1}, bear(position=["left of", 0])]


@pytest.mark.parametrize(
    ("things", "meta", "graded", "strict", "official"),
    [
        ([LEFT], {"include": [bear()]}, 1, 1, 1),
        ([], {"include": [bear()]}, 0, 0, 0),
        ([LEFT, RIGHT], {"include": [bear()]}, 0, 0, 1),  # one too many
        ([LEFT, RIGHT, LOW], {"include": [bear()]}, -1, 0, 1),
        ([BUS], {"include": [bear()]}, 0, 0, 0),
        ([LEFT], {"include": [bear(), {"class": "bus", "count": 1}]}, 0.5, 0, 0),
        ([LEFT, BUS], {"include": [bear(), {"class": "bus", "count": 1}]}, 1, 1, 1),
        # counts, and what must not be there
        ([LEFT, RIGHT, LOW], {"include": [bear(count=4)]}, 0.75, 0, 0),
        ([LEFT, RIGHT], {"include": [bear(count=2)], "exclude": [bear(count=3)]}, 1, 1, 1),
        ([LEFT, RIGHT, LOW], {"include": [bear(count=2)], "exclude": [bear(count=3)]}, 0.5, 0, 0),
        # colours: of the count and of the colour, each a share
        ([LEFT], {"include": [bear(color="red")]}, 1, 1, 1),
        ([LEFT], {"include": [bear(color="blue")]}, 0.5, 0, 0),
        ([], {"include": [bear(color="red")]}, 0, 0, 0),
        ([LEFT, RIGHT], {"include": [bear(count=2, color="red")]}, 0.75, 0, 0),
        ([LEFT, LOW], {"include": [bear(count=2, color="red")]}, 1, 1, 1),
        # places: of the bus, of the bear, and of the relation
        ([BUS, LEFT], {"include": BESIDE}, 1, 1, 1),
        ([at("bus", 20, 50), RIGHT], {"include": BESIDE}, 2 / 3, 0, 0),
        ([LEFT], {"include": BESIDE}, (0 + 1 + 0) / 3, 0, 0),  # nothing to be left of
        ([BUS], {"include": BESIDE}, (1 + 0 + 0) / 3, 0, 0),
        # a colour that is wrong leaves the place unasked
        ([BUS, LEFT], {"include": [BESIDE[0], BESIDE[1] | {"color": "blue"}]}, 2 / 3, 0, 0),
        ([KEYS], {"include": [{"class": "computer keyboard", "count": 1}]}, 1, 1, 1),
    ],
)  # fmt: skip
def test_the_rules(things, meta, graded, strict, official):
    found = scores(things, meta)
    assert found["graded"] == pytest.approx(graded)
    assert (found["strict"], found["official"]) == (strict, official)


def test_the_surest_things_count_and_counting_wants_surer_ones():
    unsure, sure = at("bear", 20, 50, 0.5), at("bear", 80, 50, 0.99)
    assert scores([unsure, sure], {"include": [bear(color="blue")]})["official"] == 1
    assert scores([unsure, sure], {"include": [bear(color="red")]})["official"] == 0
    assert scores([unsure, sure], {"include": [bear(count=2)], "tag": "counting"})["strict"] == 0
    assert scores([unsure, sure], {"include": [bear(count=2)], "tag": "two_object"})["strict"] == 1
    assert scores([at("bear", 9, 9, 0.29)], {"include": [bear()]})["strict"] == 0
    many = [at("bear", 50, 50, 0.5 + i / 100) for i in range(20)]
    kept = surest(many, 0.3)["bear"]
    assert [thing.score for thing in kept] == sorted((t.score for t in many), reverse=True)[:16]


def numpy_relations(a: Detection, b: Detection) -> set[str]:
    """The published rule, in the arrays in which it is published."""
    boxes = np.array([a.box, b.box]).reshape(2, 2, 2)
    centre, size = boxes.mean(1), boxes[:, 1] - boxes[:, 0]
    offset = centre[0] - centre[1]
    left = np.maximum(np.abs(offset) - 0.1 * size.sum(0), 0) * np.sign(offset)
    if np.all(np.abs(left) < 1e-3):
        return set()
    dx, dy = left / np.linalg.norm(offset)
    named = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {name for name, holds in named.items() if holds}


coordinate = st.integers(0, 60)


@given(*[coordinate] * 4, st.integers(1, 40), st.integers(1, 40))
def test_relations_are_the_published_ones(ax, ay, bx, by, size, other):
    a, b = at("bear", ax, ay, size=size), at("bus", bx, by, size=other)
    found = relations(a.box, b.box)
    assert found == numpy_relations(a, b)
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations(b.box, a.box) == {opposite[name] for name in found}
    if ax + size / 2 < bx - other / 2 and ay == by:
        assert found == {"left of"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"class": "beer", "count": 1}, "does not know the class 'beer'; did you mean 'bear'"),
        ({"class": "bear"}, "needs a class and a count of at least 1"),
        ({"class": "bear", "count": 0}, "needs a class and a count of at least 1"),
        (bear(color="mauve"), "'mauve' is not one of red, orange"),
    ],
)
def test_a_row_that_means_nothing_is_told(wanted, message):
    with pytest.raises(ValueError, match=message):
        scores([LEFT], {"include": [wanted]})


def test_rows_without_include_are_unscored():
    media = torch.zeros(3, 3, SIDE, SIDE)
    meta = [{"include": [bear()]}, {"prompt": "p"}, {"include": [bear()]}]
    spy = Given([[LEFT], []])
    sample = Samples(media, ["p"] * 3, torch.arange(3), meta)
    found = GenEval(spy, by_place)(sample)
    assert found[0] == 1 and found[1].isnan() and found[2] == 0
    assert spy.asked == [0.3]
    assert GenEval(spy, by_place)(Samples(media, ["p"] * 3, torch.arange(3))).isnan().all()


RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "black": (0, 0, 0)}


class OneHot:
    """Towers whose space is the colours: a text is its colour's axis, a picture its mean colour."""

    scale = 1.0

    def graded(self, media):
        raise AssertionError("colours are named without gradients")

    def texts(self, prompts):
        assert len(prompts) == 30 and prompts[0] == "a photo of a red bear"
        assert prompts[4:6] == ["a photo of a orange-colored bear", "a photo of a orange object"]
        axes = [next(c for c in COLOUR_NAMES if f" a {c}" in prompt) for prompt in prompts]
        return torch.eye(len(COLOUR_NAMES))[[COLOUR_NAMES.index(axis) for axis in axes]]

    def images(self, pictures):
        rows = torch.full((len(pictures), len(COLOUR_NAMES)), -10.0)
        for row, picture in enumerate(pictures):
            mean = np.asarray(picture).reshape(-1, 3).mean(0) / 255
            for name, value in RGB.items():
                rows[row, COLOUR_NAMES.index(name)] = -float(np.abs(mean - value).sum())
        return rows


def test_a_thing_is_cut_out_before_its_colour_is_named():
    array = np.zeros((40, 60, 3), np.uint8)
    array[:, 30:] = (0, 0, 255)
    array[10:20, 5:25] = (255, 0, 0)
    image = Image.fromarray(array)
    mask = np.zeros((40, 60), bool)
    mask[10:20, 5:15] = True
    masked = Detection("bear", 1.0, (5.0, 10.0, 25.0, 20.0), mask)
    cut = np.asarray(cut_out(image, masked))
    assert cut.shape == (10, 20, 3)
    assert (cut[:, :10] == (255, 0, 0)).all() and (cut[:, 10:] == 0x99).all()
    boxes = [
        Detection("bear", 1.0, (5.2, 9.9, 24.8, 20.1)),
        Detection("bear", 1.0, (40.0, 5.0, 59.0, 35.0)),
    ]
    assert Colours(OneHot())(image, boxes, "bear") == ["red", "blue"]
    assert cut_out(image, Detection("bear", 1.0, (3.2, 3.2, 3.3, 3.3))).size == (1, 1)


def test_the_box_of_a_mask():
    mask = np.zeros((8, 9), bool)
    mask[2:5, 3:8] = True
    assert box_of(mask) == (3, 2, 8, 5)


def loud(model):
    """Weights far enough apart that no two things score the same."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny random weights: a detector of boxes, one of masks, a CLIP; three classes."""
    import transformers as tf

    torch.manual_seed(0)
    labels = {0: "bear", 1: "bus", 2: "cat"}
    named = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    base = tmp_path_factory.mktemp("detectors")
    boxes = tf.YolosConfig(
        hidden_size=16, image_size=[32, 32], patch_size=8, num_detection_tokens=6, **small, **named
    )
    loud(tf.YolosForObjectDetection(boxes)).save_pretrained(base / "boxes")
    size = {"size": {"height": 32, "width": 32}}
    tf.YolosImageProcessor(**size, do_pad=False).save_pretrained(base / "boxes")
    swin = tf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2],
        window_size=4, out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    masks = tf.Mask2FormerConfig(
        backbone_config=swin, feature_size=64, mask_feature_size=64, hidden_dim=64, num_queries=6,
        encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, **named,
    )  # fmt: skip
    loud(tf.Mask2FormerForUniversalSegmentation(masks)).save_pretrained(base / "masks")
    tf.Mask2FormerImageProcessor(**size).save_pretrained(base / "masks")
    clip_folder(base / "clip")
    return base


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_a_detector_is_loaded_and_finds_things(folders, kind):
    found = detector(str(folders / kind), Placement.of("cpu"))
    assert found.names == {"bear", "bus", "cat"}
    sizes = [(40, 30), (40, 30), (24, 32)]
    noise = [np.random.default_rng(i).integers(0, 255, (h, w, 3)) for i, (w, h) in enumerate(sizes)]
    pictures = [Image.fromarray(array.astype(np.uint8)) for array in noise]
    things = found(pictures, 0.0)
    assert [len(row) > 0 for row in things] == [True] * 3
    for (width, height), row in zip(sizes, things, strict=True):
        for thing in row:
            assert thing.name in found.names and 0 <= thing.score <= 1
            assert (thing.mask is None) == (kind == "boxes")
            if thing.mask is not None:
                assert thing.mask.shape == (height, width)
                assert thing.box == box_of(thing.mask)
    middle = sorted(thing.score for thing in things[0])[len(things[0]) // 2]
    fewer = found(pictures[:1], middle)[0]
    assert 0 < len(fewer) < len(things[0])
    alone = [row for picture in pictures for row in found([picture], 0.0)]
    for one, together in zip(alone, things, strict=True):
        np.testing.assert_allclose([t.score for t in one], [t.score for t in together], atol=1e-5)


def test_the_whole_way_from_folders_to_scores(folders):
    own = {"model": str(folders / "masks"), "clip": str(folders / "clip"), "device": "cpu"}
    reward = load("geneval", threshold=0.0, counting=0.0, **own)
    rows = itertools.cycle([[bear()], [bear(count=2, color="red")], [bear(), *BESIDE]])

    def factory(prompts):
        made = images(prompts)
        meta = [{"include": include} for include, _ in zip(rows, prompts, strict=False)]
        return Samples(made.media, made.prompts, made.group, meta)

    assert not check_contract(reward, factory, tolerance=1e-5).isnan().any()
    assert "colours" in self_test("geneval", reward)


# all 80 classes of the 553 prompts of GenEval, in COCO's order
COCO = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
    "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
    "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,"
    "fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,"
    "cake,chair,couch,potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,"
    "computer keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,"
    "scissors,teddy bear,hair drier,toothbrush"
)
OFFICIAL = COCO.split(",")
OTHER = {
    "coco": {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"},
    "mmdet": {
        **{"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"},
        **{"motorcycle": "motorbike", "airplane": "aeroplane", "couch": "sofa"},
        **{"potted plant": "pottedplant", "dining table": "diningtable", "tv": "tvmonitor"},
    },
    "others": {
        **{"tv": "television", "hair drier": "hair dryer", "donut": "doughnut"},
        **{"cell phone": "mobile phone", "dining table": "Dining_Table", "tv remote": "remote"},
    },
}


@pytest.mark.parametrize("labels", OTHER)
def test_every_official_class_is_found_under_every_list_of_labels(labels):
    assert len(set(OFFICIAL)) == 80
    names = [OTHER[labels].get(name, name) for name in OFFICIAL]
    assert len({coco_class(name) for name in names}) == 80, "no two classes become one"
    for name, label in zip(OFFICIAL, names, strict=True):
        finder = Given([[at(label, 50, 50)]], frozenset(names))
        reward = GenEval(finder, by_place, "official")
        meta = [{"tag": "single_object", "include": [{"class": name, "count": 1}]}]
        reward.check_prompts(["p"], meta)
        sample = Samples(torch.zeros(1, 3, SIDE, SIDE), ["p"], torch.zeros(1).long(), meta)
        assert reward(sample).item() == 1, name


def test_a_row_that_the_detector_cannot_judge_is_named_before_the_run():
    reward = GenEval(Given([]), by_place)
    meta = [
        {"include": [bear()]},
        {"include": [bear()], "exclude": [{"class": "sofa", "count": 1}]},
    ]
    with pytest.raises(ValueError, match=r"does not know the class 'sofa'.*row 2, prompt 'b'"):
        reward.check_prompts(["a", "b"], meta)
