"""Rewards with gradients: the plain score's own function, with its slope."""

import pytest
import torch
from torch import Tensor

from rewards import Samples, load
from rewards.checks.differentiable import GRADED, Differentiable, differentiable_score, never_graded
from rewards.checks.gradient_test import Agreement, gradient_test, group_of, slope_error
from rewards.checks.self_test import Prompts
from rewards.perception.embedding import image_processor
from rewards.perception.pixels import PixelPreparation
from tests.support.tiny_rewards import SIDE, bytes_of, clip_folder, pixels

PROMPTS = Prompts(("a red ball",))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize(("height", "width"), [(20, 27), (64, 48), (16, 16), (9, 33)])
def test_float_images_are_prepared_as_the_processor_prepares_8_bits(clip, height, width):
    media = pixels(3, height, width)
    media = torch.nn.functional.avg_pool2d(media, 3, 1, 1)  # no noise of single pixels
    edges = (media > media.mean()).float()  # resizing leads beyond 0..1 there, which PIL clips
    media = torch.cat([media, edges])
    processor = image_processor(str(clip))
    theirs = processor([bytes_of(m) for m in media], return_tensors="pt")["pixel_values"]
    ours = PixelPreparation.of(processor)(media)
    assert ours.shape == theirs.shape == (6, 3, SIDE, SIDE)
    step = 1 / 255 / min(processor.image_std)  # of an 8-bit value
    assert (ours - theirs).abs().max() < 2.5 * step


def test_the_longer_side_is_padded_as_hps_pads():
    from rewards.catalogue.hps import Letterbox

    prepare = PixelPreparation(
        (16, 16), (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711),
        "longer", clipped=False,
    )  # fmt: skip
    for height, width in ((20, 31), (16, 9), (8, 8)):
        media = pixels(2, height, width)
        theirs = torch.stack([Letterbox(16)(bytes_of(m)) for m in media])
        assert (prepare(media) - theirs).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["image", "video"])
def test_clips_gradient_passes_its_test(clip, kind):
    reward = load("clip", model=str(clip), frames=2)
    line = gradient_test("clip", reward, Prompts(("a red ball",), kind=kind))
    assert "rank correlation" in line and "finite differences" in line


def test_brightness_and_its_sign(clip):
    for kind, sign in (("bright", 1), ("dark", -1)):
        score = differentiable_score("brightness", load("brightness", kind=kind))
        samples = group_of("image", PROMPTS)
        media = samples.media.clone().requires_grad_()
        (slope,) = torch.autograd.grad(score(media, samples).sum(), media)
        assert slope.sum().item() == pytest.approx(sign * len(media), rel=1e-4)


class Own:
    """A user's reward, right or with a fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, samples: Samples) -> Tensor:
        return samples.media.square().flatten(1).mean(1)

    def differentiable(self, media: Tensor, samples: Samples) -> Tensor:
        if self.fault == "other":
            return -media.square().flatten(1).mean(1)
        if self.fault == "detached":
            return media.detach().square().flatten(1).mean(1)
        if self.fault == "half":  # the second factor has no gradient
            return (media * media.detach()).flatten(1).mean(1)
        if self.fault == "shape":
            return media.square().mean()
        return media.square().flatten(1).mean(1)


def test_a_users_class_passes_and_faults_are_named():
    assert "agrees with finite differences to 0.0%" in gradient_test("own", Own())
    faults = {
        "other": "`differentiable` does not match the reward's own score",
        "detached": "`differentiable` has no gradient",
        "half": "its gradient differs from finite differences of its scores by 100%",
        "shape": "must return a float tensor",
    }
    for fault, sentence in faults.items():
        with pytest.raises(ValueError, match=f"reward own: .*{sentence}"):
            gradient_test("own", Own(fault))


def test_a_reward_without_a_gradient_is_refused_by_name():
    with pytest.raises(ValueError, match="reward size: it offers no gradient"):
        differentiable_score("size", load("jpeg"))


def test_the_table_of_names_is_what_the_rewards_offer(clip):
    assert not any(never_graded(name) for name in GRADED)
    assert never_graded("jpeg") and never_graded("remote") and never_graded("judge")
    assert not never_graded("mine.py:Own") and not never_graded("mine.py")
    assert isinstance(load("brightness"), Differentiable)
    assert isinstance(load("clip", model=str(clip)).reward, Differentiable)


def test_a_class_of_a_users_file_is_a_reward(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "class Power:\n"
        "    def __init__(self, power: float = 1.0) -> None:\n"
        "        self.power = power\n"
        "    def __call__(self, samples):\n"
        "        return self.differentiable(samples.media, samples)\n"
        "    def differentiable(self, media, samples):\n"
        "        return (media**self.power).flatten(1).mean(1)\n"
        "class Mute:\n"
        "    pass\n"
    )
    assert "finite differences" in gradient_test("own", load(f"{file}:Power", power=2.0), PROMPTS)
    with pytest.raises(ValueError, match="has no setting 'powers'; did you mean 'power'"):
        load(f"{file}:Power", powers=2.0)
    with pytest.raises(ValueError, match="is a class without __call__"):
        load(f"{file}:Mute")


def test_agreement_by_hand():
    near = Agreement.of(torch.tensor([1.0, 2.0, 3.0, torch.nan]), torch.tensor([1.0, 3.0, 2.0, 9]))
    assert near.ranks == pytest.approx(0.5) and near.gap == pytest.approx(1 / (2 / 3) ** 0.5)
    assert not near.close and Agreement.of(torch.ones(1), torch.zeros(1)).close


def test_the_slope_of_a_linear_function_is_exact():
    samples = group_of("image", PROMPTS).take([0, 1])
    exact = torch.full_like(samples.media, 2.0)
    assert slope_error(lambda m, _: 2 * m.flatten(1).sum(1), samples, exact) < 1e-3
    assert slope_error(lambda m, _: 2 * m.flatten(1).sum(1), samples, exact * 2) > 0.4
