"""Models that put pictures and prompts into one space, and the cosine between the two.

Pictures go through PIL in 8 bits, as the published processors do: resizing a float tensor gives
other numbers. Two libraries load such models, transformers and open_clip; both give `Towers`.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.media import items, to_pil
from rewards.types import Samples

REWARD_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Placement:
    """Where a reward model computes, wherever the samples are; `auto` is the process's GPU if there
    is one. ValueError for a device that is not there."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, device: str, dtype: str = "float32") -> "Placement":
        if dtype not in REWARD_DTYPES:
            raise ValueError(f"dtype is one of {', '.join(REWARD_DTYPES)}, not {dtype!r}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(_device(device), REWARD_DTYPES[dtype])

    def put(self, model: Any) -> Any:
        """The model here, for inference only."""
        return model.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is auto, cpu, cuda or cuda:0, not {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name}: {torch.cuda.device_count()} GPUs are visible")
    return device


@runtime_checkable
class Towers(Protocol):
    """Unit vectors of pictures and prompts [n e], float32; `scale` is the trained exp(logit)."""

    @property
    def scale(self) -> float: ...

    def images(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "n e"]: ...

    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]: ...


@dataclass(frozen=True)
class TransformersTowers:
    """A CLIPModel of transformers. A prompt beyond `limit` tokens is cut, with a warning."""

    model: Any
    tokenizer: Any
    processor: Any
    place: Placement

    @property
    def scale(self) -> float:
        return float(self.model.logit_scale.exp())

    @property
    def limit(self) -> int:
        longest = self.model.config.text_config.max_position_embeddings
        return min(longest, self.tokenizer.model_max_length)

    @torch.no_grad()
    def images(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        pixels = self.processor(list(pictures), return_tensors="pt")["pixel_values"]
        pixels = pixels.to(self.place.device, self.place.dtype)
        pooled = self.model.vision_model(pixel_values=pixels).pooler_output
        return functional.normalize(self.model.visual_projection(pooled).float(), dim=-1)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]:
        tokens = tokenize(self.tokenizer, prompts, self.limit, self.place.device)
        pooled = self.model.text_model(**tokens).pooler_output
        return functional.normalize(self.model.text_projection(pooled).float(), dim=-1)


@dataclass(frozen=True)
class OpenClipTowers:
    """A model of open_clip. `prepare` makes a picture [3 s s] of a PIL image."""

    model: Any
    tokenizer: Any
    prepare: Callable[[Image.Image], Tensor]
    place: Placement

    @property
    def scale(self) -> float:
        return float(self.model.logit_scale.exp())

    @torch.no_grad()
    def images(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        pixels = torch.stack([self.prepare(picture) for picture in pictures])
        pixels = pixels.to(self.place.device, self.place.dtype)
        return functional.normalize(self.model.encode_image(pixels).float(), dim=-1)

    @torch.no_grad()
    def texts(self, prompts: Sequence[str]) -> Float[Tensor, "n e"]:
        limit = self.tokenizer.context_length
        warn_if_cut([len(self.tokenizer.encode(p)) + 2 for p in prompts], limit)
        tokens = self.tokenizer(list(prompts)).to(self.place.device)
        return functional.normalize(self.model.encode_text(tokens).float(), dim=-1)


def tokenize(
    tokenizer: Any, prompts: Sequence[str], limit: int, device: torch.device
) -> dict[str, Tensor]:
    """Ids and mask [n limit] of a transformers tokenizer, padded so that no batch matters."""
    whole = tokenizer(list(prompts), truncation=False, verbose=False)["input_ids"]
    warn_if_cut([len(ids) for ids in whole], limit)
    padded = tokenizer(
        list(prompts), truncation=True, max_length=limit, padding="max_length", return_tensors="pt"
    )
    return {name: padded[name].to(device) for name in ("input_ids", "attention_mask")}


def warn_if_cut(lengths: Sequence[int], limit: int) -> None:
    """Said once a process and place: Python's default filter drops a repeated warning."""
    if max(lengths, default=0) > limit:
        warnings.warn(
            f"prompts of more than {limit} tokens are cut there: the reward does not see the rest",
            stacklevel=3,
        )


def model_path(model: str) -> str:
    """A folder as written, or below the project's own folder; anything else is a hub name."""
    own = Path(__file__).resolve().parents[2] / model
    return str(own) if own.is_dir() and not Path(model).exists() else model


def weights_file(who: str, setting: str, given: str | None, published: tuple[str, str]) -> str:
    """The file `given` for a reward's `setting`, or the `published` one: repository and name on the
    hub. ValueError where there is none."""
    from huggingface_hub import hf_hub_download

    if given is None:
        repository, name = published
        try:
            return hf_hub_download(repository, name)
        except OSError as error:
            raise ValueError(
                f"{who}: {name} of {repository} could not be fetched; name a file of yours with "
                f"`{setting}` ({error})"
            ) from error
    if not Path(given).is_file():
        raise ValueError(f"{who}: no such file: {given}")
    return given


def transformers_towers(model: str, place: Placement, processor: str | None = None) -> Towers:
    """`model` and its `processor` (the same unless told) are hub names or folders."""
    from transformers import AutoTokenizer, CLIPModel

    model, source = model_path(model), model_path(processor or model)
    return TransformersTowers(
        place.put(CLIPModel.from_pretrained(model)),
        AutoTokenizer.from_pretrained(source),
        image_processor(source),
        place,
    )


def image_processor(source: str) -> Any:
    """The processor of a hub name or folder, on PIL whether or not torchvision is installed."""
    import transformers

    modern = int(transformers.__version__.split(".")[0]) >= 5
    option: dict[str, Any] = {"backend": "pil"} if modern else {"use_fast": False}
    return transformers.AutoImageProcessor.from_pretrained(source, **option)


def open_clip_library() -> Any:
    """The module open_clip; ValueError with the way out where it is not installed."""
    if importlib.util.find_spec("open_clip") is None:
        raise ValueError("this reward needs open_clip: pip install 'flowrl[rewards]'")
    return importlib.import_module("open_clip")


def open_clip_towers(model: str, place: Placement) -> Towers:
    """`model` is `ViT-L-14/openai` (architecture and weights), `hf-hub:...` or `local-dir:...`."""
    open_clip = open_clip_library()
    name, weights = model, None
    if ":" not in model:
        name, _, weights = model.partition("/")
        if not weights:
            raise ValueError(
                f"open_clip's {model!r} has no weights: write {model}/<weights>, such as "
                "ViT-L-14/openai, or hf-hub:<name>, or local-dir:<folder>"
            )
    loaded, _, prepare = open_clip.create_model_and_transforms(name, pretrained=weights)
    return OpenClipTowers(place.put(loaded), open_clip.get_tokenizer(name), prepare, place)


def pictures(samples: Samples) -> list[Image.Image]:
    """The samples as PIL images, 8 bits a channel, whatever their sizes."""
    return [to_pil(pixels) for pixels in items(samples)]


def embed_pictures(
    towers: Towers, images: Sequence[Image.Image], batch: int
) -> Float[Tensor, "n e"]:
    """Unit vectors on the CPU, `batch` pictures at a time."""
    parts = [
        towers.images(images[start : start + batch]).cpu() for start in range(0, len(images), batch)
    ]
    return torch.cat(parts)


def embed_prompts(towers: Towers, prompts: Sequence[str], batch: int) -> Float[Tensor, "n e"]:
    """Unit vectors on the CPU; a prompt that comes often is computed once."""
    unique = list(dict.fromkeys(prompts))
    parts = [
        towers.texts(unique[start : start + batch]).cpu() for start in range(0, len(unique), batch)
    ]
    place = {prompt: row for row, prompt in enumerate(unique)}
    return torch.cat(parts)[[place[prompt] for prompt in prompts]]


@dataclass(frozen=True)
class Cosine:
    """factor * cos(picture, prompt); with `floor` the cosine is at least that."""

    towers: Towers
    factor: float = 1.0
    floor: float = -1.0
    batch: int = 32

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        if not samples.prompts:
            return torch.zeros(0)
        images = embed_pictures(self.towers, pictures(samples), self.batch)
        words = embed_prompts(self.towers, samples.prompts, self.batch)
        return self.factor * (images * words).sum(-1).clamp(min=self.floor)
