"""What every reward must keep to, as one function: `check_contract(reward, factory)`.

`factory(prompts)` makes samples for those prompts, one each, all different. Ready ones: `images`,
`mixed_images`, `videos`, `sounding`, `texts`.
"""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from rewards import Reward, Samples
from rewards.audio import Audio
from rewards.perception.files import read_images

Factory = Callable[[Sequence[str]], Samples]
ODD = (
    "a red square",
    'a sign that says "Grand Opening" and “50 %”',
    "two lines\nand a third\r\n\tof \\ and 'quotes\"",
    "a café 🎈 on the \U0001f6b2, 漢字, עברית, e\u0301",
    "a long story of a ball. " * 84,  # 2,000 characters and more
    "",
)


def images(prompts: Sequence[str], side: int = 32) -> Samples:
    """Smooth pictures of one size, as one tensor."""
    return _batch(torch.stack([_picture(i, side, side) for i in range(len(prompts))]), prompts)


def mixed_images(prompts: Sequence[str]) -> Samples:
    """Pictures of several sizes that were files: gray, with alpha, with a palette, of 16 bits."""
    made = []
    for i in range(len(prompts)):
        whole = (_picture(i, 24 + 4 * (i % 3), 40) * 255).to(torch.uint8)
        image = Image.fromarray(whole.permute(1, 2, 0).numpy())
        made.append(image.convert(("RGB", "L", "RGBA", "P", "1", "LA")[i % 6]))
    files = [io.BytesIO() for _ in made]
    for file, image in zip(files, made, strict=True):
        image.save(file, format="PNG")
    return _batch([tensor_of(file) for file in files], prompts)


def tensor_of(file: io.BytesIO) -> Tensor:
    from rewards.perception.media import to_tensor

    with Image.open(file) as image:
        return to_tensor(image)


def videos(prompts: Sequence[str], frames: int = 5) -> Samples:
    media = [
        torch.stack([_picture(7 * i + f, 32, 32) for f in range(frames)])
        for i in range(len(prompts))
    ]
    return _batch(torch.stack(media), prompts)


def sounding(prompts: Sequence[str]) -> Samples:
    """Videos with sound: noise of a level and a pause of its own each."""
    n, rate = len(prompts), 4000
    noise = torch.randn(n, 1, rate, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    loud = 0.3 * (1 + torch.arange(n).view(-1, 1, 1)) / n
    pause = torch.arange(rate) < rate * (1 + torch.arange(n).view(-1, 1, 1)) / (n + 1)
    return replace(videos(prompts), audio=Audio(noise * loud * pause, rate))


def texts(prompts: Sequence[str]) -> Samples:
    """Completions with brackets, emoji and none at all; meta gives each the answer 7."""
    forms = ("7", "", "It is \\boxed{7}.", "<think>3 🎈</think>\n<answer>7</answer>", "8 " * 400)
    media = [f"{forms[i % len(forms)]}" for i in range(len(prompts))]
    return _batch(media, prompts, [{"answer": "7", "reference": "It is 7."} for _ in prompts])


def _picture(seed: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]


def _batch(media, prompts, meta=()) -> Samples:
    return Samples(media, list(prompts), torch.arange(len(prompts)) // 2, meta)


def check_contract(
    reward: Reward, factory: Factory, *, pointwise: bool = True, tolerance: float = 1e-6
) -> Tensor:
    """Asserts all of it; gives the scores. `pointwise=False` for rewards that compare in groups."""
    samples = factory(ODD)
    before = _copy(samples.media)
    if isinstance(samples.media, Tensor):
        samples.media.requires_grad_()
    scores = reward(samples)
    n = len(ODD)
    assert isinstance(scores, Tensor) and scores.shape == (n,), "a score a sample"
    assert scores.dtype in (torch.float32, torch.float64), f"float scores, not {scores.dtype}"
    assert scores.device.type == "cpu", "scores on the CPU"
    assert not scores.requires_grad and scores.grad_fn is None, "no gradient"
    assert not scores.isinf().any(), "NaN is unscored, infinite is nothing"
    assert _equal(before, samples.media), "the samples were changed"
    _same(reward(samples), scores, 0.0, "twice the same")
    back = list(range(n))[::-1]  # groups stay contiguous
    _same(reward(samples.take(back)), scores[back], tolerance, "in another order")
    if pointwise:
        alone = torch.cat([reward(samples.take([row])) for row in range(n)])
        _same(alone, scores, tolerance, "one by one")
        _same(reward(samples.take([1, 4])), scores[[1, 4]], tolerance, "in a smaller batch")
        other = replace(samples, group=torch.zeros(n, dtype=torch.long))
        _same(reward(other), scores, tolerance, "in one group")
    return scores


def _same(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def _copy(media):
    if isinstance(media, Tensor):
        return media.detach().clone()
    return [item.clone() if isinstance(item, Tensor) else item for item in media]


def _equal(before, after) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


def damaged(folder: os.PathLike) -> tuple[list[str], list[str]]:
    """(good, bad) paths: two pictures, and files that are empty, cut off, no picture, missing."""
    good = [os.path.join(folder, name) for name in ("one.png", "two.jpg")]
    for i, path in enumerate(good):
        whole = (_picture(i, 16, 24) * 255).to(torch.uint8)
        Image.fromarray(whole.permute(1, 2, 0).numpy()).save(path)
    bad = [os.path.join(folder, name) for name in ("empty.png", "cut.png", "words.png", "none.png")]
    with open(good[0], "rb") as file:
        bytes_ = file.read()
    for path, content in zip(bad, (b"", bytes_[: len(bytes_) // 2], b"hello"), strict=False):
        with open(path, "wb") as file:
            file.write(content)
    assert read_images(good).broken == {}
    return good, bad
