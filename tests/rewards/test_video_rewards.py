"""Rewards of videos without heavy weights, against plain loops and known motions."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import CLIPModel, ViTConfig, ViTModel

from rewards import Samples, load
from rewards.perception.motion import block_motion, middle_error, reduced_luma
from tests.support.reward_contract import check_contract, videos

CLIP = "flowrl/demo/shapes-clip"
CLOSE = {"rtol": 0, "atol": 1e-5}


def texture(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Smooth noise [3 h w], whole 255ths."""
    rng = torch.Generator().manual_seed(seed)
    rough = torch.rand(1, 3, height // 4 + 1, width // 4 + 1, generator=rng)
    smooth = functional.interpolate(rough, (height, width), mode="bicubic").clamp(0, 1)
    return (smooth[0] * 255).round() / 255


def moving(step: int, frames: int = 6, side: int = 64, seed: int = 0) -> torch.Tensor:
    """A texture that moves to the left by `step` pixels a frame."""
    whole = texture(side, side + step * frames, seed)
    return torch.stack([whole[:, :, step * i : step * i + side] for i in range(frames)])


def of(*media: torch.Tensor) -> Samples:
    return Samples(list(media), ["a"] * len(media), torch.arange(len(media)))


def test_flicker_is_vbenchs_sum_over_bytes():
    video = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    whole = np.rint(video.numpy() * 255).astype(np.uint8)
    pairs = [np.abs(a.astype(int) - b.astype(int)).mean() for a, b in pairwise(whole)]
    score = load("flicker")(of(video, video[:1].expand(3, -1, -1, -1)))
    assert score.tolist() == pytest.approx([(255 - np.mean(pairs)) / 255, 1.0])
    wide = torch.rand(3, 3, 140, 300, generator=torch.Generator().manual_seed(1))
    assert reduced_luma(wide).shape == (3, 128, 272), "whole blocks of the reduced image"
    with pytest.raises(ValueError, match="'flicker' needs at least 2 frames, but a video has 1"):
        load("flicker")(of(video[:1]))


def test_blocks_find_whole_steps():
    for down, right in ((0, 0), (3, -5), (-8, 8), (1, 0)):
        whole = texture(64, 64)
        first = whole[:, 16:48, 16:48].mean(0)[None]
        second = whole[:, 16 - down : 48 - down, 16 - right : 48 - right].mean(0)[None]
        found = block_motion(first, second)[0].view(4, 4, 2)[1:3, 1:3].reshape(-1, 2)
        assert found.tolist() == [[down, right]] * 4
    flat = torch.full((1, 32, 32), 0.5)
    assert block_motion(flat, flat + 0.001).abs().max() == 0, "a flat block stands still"


def test_the_middle_of_an_even_motion_is_known():
    even, jump = moving(4, 3).mean(1), moving(4, 3).mean(1)
    jump[1] = jump[1].roll(3, 0)
    first, middle, last = (even[i : i + 1, :, 8:56] for i in range(3))
    assert middle_error(first, middle, last) < 0.02
    assert middle_error(first, jump[1:2, :, 8:56], last) > 0.05
    assert ((first + last) / 2 - middle).abs().mean() > 0.05, "the mean of both is blurred"


def test_smoothness_prefers_even_steps_and_mean_falls_with_speed():
    even = moving(2, 7)
    stop = even[[0, 0, 2, 2, 4, 4, 6]]  # every odd frame repeats the one before
    still = even[:1].expand(7, -1, -1, -1)
    score = load("smoothness")(of(still, even, stop))
    assert score[0] == 1 and score[1] > score[2] and score[1] > 0.98
    mean = load("smoothness", kind="mean")(of(still, even, moving(4, 7)))
    assert mean[0] == 1 and mean[1] > mean[2]
    plain = 1 - np.mean(
        [((even[i - 1] + even[i + 1]) / 2 - even[i]).abs().mean() for i in (1, 3, 5)]
    )
    assert float(mean[1]) == pytest.approx(plain, abs=1e-6)
    even_count = load("smoothness", kind="mean")(of(even[:6]))
    plain = [((even[i - 1] + even[i + 1]) / 2 - even[i]).abs().mean() for i in (1, 3)]
    assert float(even_count) == pytest.approx(1 - np.mean(plain), abs=1e-6), "no partner, no part"


def test_motion_is_the_largest_steps_over_vbenchs_threshold():
    side, step = 64, 3
    threshold = 6 / 256 * side
    score = load("motion")(of(moving(step), moving(0), moving(1)))
    assert score.tolist() == pytest.approx([step / threshold, 0, 1 / threshold])
    assert load("motion", kind="vote")(of(moving(step), moving(0), moving(1))).tolist() == [1, 0, 0]
    assert load("motion", most=1.5)(of(moving(step))).tolist() == [1.5]
    every = load("motion", every=2)(of(moving(step), moving(step)[[0, 3, 0, 3, 0, 3]]))
    assert every[0] == pytest.approx(2 * step / threshold, rel=0.01)
    one = torch.cat([moving(0, 16), moving(step, 16)[15:]])  # one of 16 pairs moves
    assert load("motion", kind="vote")(of(one)).tolist() == [0]


def test_consistency_compares_with_the_frame_before_and_the_first(tmp_path):
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(image_size=16, patch_size=4, **small), add_pooling_layer=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.eval().save_pretrained(tmp_path)
    clip = CLIPModel.from_pretrained(CLIP).eval()
    size = clip.config.vision_config.image_size
    for kind, folder, side in (("dino", tmp_path, 16), ("clip", CLIP, size)):
        video = torch.rand(4, 3, 2 * side, 3 * side, generator=torch.Generator().manual_seed(1))
        mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        if kind == "clip":
            mean, std = clip_mean_std()
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (mean, std))
        mode = "bilinear" if kind == "dino" else "bicubic"
        frames = functional.interpolate(video, scale_factor=0.5, mode=mode)  # no antialias
        with torch.no_grad():
            if kind == "dino":
                seen = model((frames - mean) / std, interpolate_pos_encoding=True)
                vectors = seen.last_hidden_state[:, 0]
            else:
                cut = frames[..., round(side / 4) : round(side / 4) + side]
                vectors = clip.visual_projection(
                    clip.vision_model((cut - mean) / std).pooler_output
                )
        cosine = functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1).clamp(min=0)
        wanted = sum(float(cosine[i, i - 1] + cosine[i, 0]) / 2 for i in (1, 2, 3)) / 3
        reward = load("consistency", kind=kind, model=str(folder), device="cpu", batch=3)
        score = reward(of(video, video[:1].expand(4, -1, -1, -1)))
        assert score.tolist() == pytest.approx([wanted, 1.0], abs=1e-5)
        assert wanted < 0.999


def clip_mean_std() -> tuple[list[float], list[float]]:
    return [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def test_consistency_keeps_the_contract():
    reward = load("consistency", kind="clip", model=CLIP, device="cpu")
    assert check_contract(reward, videos, tolerance=1e-5).std() > 1e-4
