"""Models that embed images and prompts in one space, and the cosine of the two.

Images pass through PIL in 8 bits, as in the published processors: resizing a float tensor gives
other numbers. Two libraries load such models as `Towers`: transformers and open_clip.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.hub_names import possible_repository
from rewards.perception.hub import (
    check_cached,
    from_hub,
    hub_silence,
    model_path,
    named_repository,
    present_place,
)
from rewards.perception.hub_cache import CachedRepository
from rewards.perception.media import items, to_pil
from rewards.perception.packages import needs_open_clip
from rewards.perception.pixels import Fit, PixelPreparation, standardised
from rewards.perception.reachable import reachable
from rewards.perception.weight_files import READ_ERRORS, check_loaded_weights
from rewards.types import Samples

DtypeName = Literal["float32", "float16", "bfloat16"]
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Device and dtype of a reward model, independent of those of the samples.

    `auto` is the process's GPU if it has one. ValueError for a device that does not exist.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, device: str, dtype: DtypeName = "float32") -> "Placement":
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(_device(device), getattr(torch, dtype))

    def put(self, model: Any) -> Any:
        """Move the model to this placement, for inference only."""
        return model.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)


def loaded_with_info(load: Callable[..., Any], source: str) -> tuple[Any, Mapping[str, Any]]:
    """Load a model by its `from_pretrained`, with what it says of its weights. ValueError if its
    files are damaged, or belong to another model."""
    with ExitStack() as stack:
        stack.enter_context(reachable(source, folder := Path(source)))
        if (repository := named_repository(source)) is not None:
            stack.enter_context(from_hub(source, repository))
        if folder.is_dir():
            check_loaded_weights(folder)
        try:
            return load(source, output_loading_info=True)
        except (*READ_ERRORS, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{source} cannot be loaded: {reason}") from error


def complete(load: Callable[..., Any], source: str) -> Any:
    """Load a model by its `from_pretrained`.

    ValueError if its files are damaged, or lack weights, which transformers fills in with random
    numbers.
    """
    model, info = loaded_with_info(load, source)
    learned = dict(model.named_parameters())
    missing = sorted(key for key in info["missing_keys"] if key in learned)
    if missing:
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        raise ValueError(
            f"{source} lacks weights of {type(model).__name__}, so scores would be random: "
            f"{', '.join(missing[:2])}{more}"
        )
    return model


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:0, not {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name}: only {torch.cuda.device_count()} GPUs are visible")
    return device


@runtime_checkable
class Towers(Protocol):
    """Image and prompt embeddings as unit vectors [n e], float32; `scale` is the trained
    exp(logit)."""

    @property
    def scale(self) -> float: ...

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n e"]: ...

    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]: ...

    def graded(self, media: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n e"]:
        """Embed float tensors of images, with gradients with respect to the pixels."""
        ...


@dataclass(frozen=True)
class TransformersTowers:
    """A model of transformers with a tower of images and one of texts.

    limit       tokens of a prompt; the rest of a longer one is cut, with a warning
    read_image  the model and pixels [n 3 s s], as its processor prepares them, to vectors [n e]
    read_text   the model and a tokenizer's `input_ids` and `attention_mask` [n limit], to [n e]
    """

    model: Any
    tokenizer: Any
    processor: Any
    placement: Placement
    limit: int
    read_image: Callable[[Any, Tensor], Tensor]
    read_text: Callable[[Any, Mapping[str, Tensor]], Tensor]

    @property
    def scale(self) -> float:
        return float(self.model.logit_scale.exp())

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        return self._seen(self.processor(list(images), return_tensors="pt")["pixel_values"])

    def graded(self, media: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n e"]:
        return self._seen(PixelPreparation.of(self.processor)(media))

    def _seen(self, pixels: Tensor) -> Float[Tensor, "n e"]:
        pixels = pixels.to(self.placement.device, self.placement.dtype)
        return functional.normalize(self.read_image(self.model, pixels).float(), dim=-1)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]:
        tokens = tokenize(self.tokenizer, prompts, self.limit, self.placement.device)
        return functional.normalize(self.read_text(self.model, tokens).float(), dim=-1)


@dataclass(frozen=True)
class OpenClipTowers:
    """An open_clip model. `prepare` turns a PIL image into a tensor [3 s s]; `pixels` does so for
    float tensors, with gradients."""

    model: Any
    tokenizer: Any
    prepare: Callable[[Image.Image], Tensor]
    placement: Placement
    pixels: PixelPreparation

    @property
    def scale(self) -> float:
        return float(self.model.logit_scale.exp())

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        return self._seen(torch.stack([self.prepare(image) for image in images]))

    def graded(self, media: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n e"]:
        return self._seen(self.pixels(media))

    def _seen(self, pixels: Tensor) -> Float[Tensor, "n e"]:
        pixels = pixels.to(self.placement.device, self.placement.dtype)
        return functional.normalize(self.model.encode_image(pixels).float(), dim=-1)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]:
        limit = self.tokenizer.context_length
        warn_if_cut([len(self.tokenizer.encode(p)) + 2 for p in prompts], limit)
        tokens = self.tokenizer(list(prompts)).to(self.placement.device)
        return functional.normalize(self.model.encode_text(tokens).float(), dim=-1)


def tokenize(
    tokenizer: Any, prompts: Sequence[str], limit: int, device: torch.device
) -> dict[str, Tensor]:
    """Ids and mask [n limit] from a transformers tokenizer, padded the same way in every batch."""
    whole = tokenizer(list(prompts), truncation=False, verbose=False)["input_ids"]
    warn_if_cut([len(ids) for ids in whole], limit)
    padded = tokenizer(
        list(prompts), truncation=True, max_length=limit, padding="max_length", return_tensors="pt"
    )
    return {name: padded[name].to(device) for name in ("input_ids", "attention_mask")}


def warn_if_cut(lengths: Sequence[int], limit: int) -> None:
    """Warn if a prompt is longer than `limit` tokens. Python's filter drops repeated warnings."""
    if max(lengths, default=0) > limit:
        warnings.warn(
            f"prompts of more than {limit} tokens are truncated; the reward ignores the rest",
            stacklevel=3,
        )


def transformers_towers(model: str, placement: Placement, processor: str | None = None) -> Towers:
    """Load a CLIPModel from `model` and its `processor` (by default the same), hub names or
    folders."""
    from transformers import AutoTokenizer, CLIPModel

    model, source = model_path(model), model_path(processor or model)
    clip = placement.put(complete(CLIPModel.from_pretrained, model))
    tokenizer = AutoTokenizer.from_pretrained(source)
    longest = clip.config.text_config.max_position_embeddings
    return TransformersTowers(
        clip,
        tokenizer,
        image_processor(source),
        placement,
        limit=min(longest, tokenizer.model_max_length),
        read_image=_clip_image,
        read_text=_clip_text,
    )


def _clip_image(clip: Any, pixels: Tensor) -> Tensor:
    return clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output)


def _clip_text(clip: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    return clip.text_projection(clip.text_model(**tokens).pooler_output)


def image_processor(source: str) -> Any:
    """Load the processor of a hub name or folder; it uses PIL even if torchvision is installed."""
    import transformers

    modern = int(transformers.__version__.split(".")[0]) >= 5
    option: dict[str, Any] = {"backend": "pil"} if modern else {"use_fast": False}
    return transformers.AutoImageProcessor.from_pretrained(source, **option)


def open_clip_library() -> Any:
    """Import open_clip. ValueError if it is missing or torchvision does not match torch."""
    needs_open_clip({})
    try:
        return importlib.import_module("open_clip")
    except (ImportError, RuntimeError) as error:  # torchvision's operators are not in torch
        raise ValueError(
            f"open_clip cannot be imported ({error}); usually the builds of torchvision and torch "
            f"{torch.__version__} differ: pip install --force-reinstall --no-deps "
            "torchvision from the index that torch came from"
        ) from error


def open_clip_towers(model: str, placement: Placement) -> Towers:
    """Load towers of open_clip. `model` is `ViT-L-14/openai` (architecture and weights),
    `hf-hub:...` or `local-dir:...`."""
    open_clip = open_clip_library()
    name, weights = model, None
    if ":" not in model:
        name, _, weights = model.partition("/")
        if not weights:
            raise ValueError(
                f"open_clip's {model!r} does not name weights: write {model}/<weights>, such as "
                "ViT-L-14/openai, or hf-hub:<name>, or local-dir:<folder>"
            )
    name = open_clip_place(name)
    loaded, _, prepare = open_clip.create_model_and_transforms(name, pretrained=weights)
    pixels = open_clip_pixels(loaded.visual)
    return OpenClipTowers(
        placement.put(loaded), open_clip.get_tokenizer(name), prepare, placement, pixels
    )


def open_clip_place(model: str) -> str:
    """A name of open_clip, `hf-hub:...` as long as the hub answers for it, and otherwise the folder
    of its files in the hub's cache: open_clip's own client waits long for a silent hub. ValueError
    if the files in the cache are damaged, locked or gone, or there are none and the hub is
    silent."""
    prefix, _, name = model.partition(":")
    if prefix != "hf-hub" or not possible_repository(name):
        return model
    repository = CachedRepository(name, whole=True)
    with from_hub("open_clip", repository):
        check_cached("open_clip", repository)
        if (place := present_place(name)) != name:
            return f"local-dir:{place}"
        if (silence := hub_silence(name)) is not None:
            raise ValueError(f"open_clip: {name} is not in the hub's cache, and the hub {silence}")
    return model


def open_clip_pixels(visual: Any) -> PixelPreparation:
    """The image preprocessing of an open_clip model, from `visual.preprocess_cfg`."""
    config = vars(visual).get("preprocess_cfg") or {}
    side = config.get("size", visual.image_size)
    size = (side, side) if isinstance(side, int) else tuple(side)
    fits: dict[str, Fit] = {"shortest": "shorter", "longest": "longer", "squash": "both"}
    return PixelPreparation(
        size=size,
        mean=tuple(config.get("mean") or OPENAI_MEAN),
        std=tuple(config.get("std") or OPENAI_STD),
        fit=fits[config.get("resize_mode") or "shortest"],
        mode=config.get("interpolation") or "bicubic",
        rounded=True,
    )


def clip_normalised(pixels: Float[Tensor, "3 h w"]) -> Float[Tensor, "3 h w"]:
    """Normalise colours in 0..1 by the mean and standard deviation of CLIP's training images."""
    return standardised(pixels, OPENAI_MEAN, OPENAI_STD)


def pil_images(samples: Samples) -> list[Image.Image]:
    """Samples as PIL images with 8 bits per channel, of any sizes."""
    return [to_pil(pixels) for pixels in items(samples)]


def in_batches(
    compute: Callable[[Sequence[T]], Float[Tensor, "m ..."]], inputs: Sequence[T], batch: int
) -> Float[Tensor, "n ..."]:
    """Apply `compute` to n > 0 inputs, `batch` at a time, and join the rows on the CPU."""
    starts = range(0, len(inputs), batch)
    return torch.cat([compute(inputs[start : start + batch]).cpu() for start in starts])


def in_pair_batches(
    compute: Callable[[Sequence[tuple[Image.Image, str]]], Float[Tensor, " m"]],
    samples: Samples,
    batch: int,
) -> Float[Tensor, " n"]:
    """Apply `compute` to the images of n > 0 samples with their prompts, `batch` at a time."""
    return in_batches(compute, list(zip(pil_images(samples), samples.prompts, strict=True)), batch)


@dataclass(frozen=True)
class Cosine:
    """The score factor * max(cos(image, prompt), floor). Repeated prompts are encoded once."""

    towers: Towers
    factor: float = 1.0
    floor: float = -1.0
    batch: int = 32

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        images = in_batches(self.towers.images, pil_images(samples), self.batch)
        return self._score(images, self._words(samples.prompts))

    def differentiable(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, " n"]:
        images = torch.cat([self.towers.graded(part) for part in media.split(self.batch)])
        return self._score(images, self._words(samples.prompts).to(images.device))

    def features(self, samples: Samples) -> Float[Tensor, "n 2*e"]:
        """An image's vector, and its product with its prompt's, entry by entry. A prompt's own
        vector is the same for all of its samples, so it says nothing about a pair."""
        images = in_batches(self.towers.images, pil_images(samples), self.batch)
        return torch.cat([images, images * self._words(samples.prompts)], 1)

    def graded_features(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, "n 2*e"]:
        images = torch.cat([self.towers.graded(part) for part in media.split(self.batch)])
        words = self._words(samples.prompts).to(images.device)
        return torch.cat([images, images * words], 1)

    def _words(self, texts: Sequence[str]) -> Float[Tensor, "n e"]:
        prompts = list(dict.fromkeys(texts))
        words = in_batches(self.towers.texts, prompts, self.batch)
        row = {prompt: i for i, prompt in enumerate(prompts)}
        return words[[row[prompt] for prompt in texts]]

    def _score(self, images: Tensor, words: Tensor) -> Float[Tensor, " n"]:
        return self.factor * (images * words).sum(-1).clamp(min=self.floor)
