"""Models that have features and no score of their own, for rewards fitted to votes.

siglip       a SiglipModel of transformers: an image's vector, and its product with its prompt's;
             arXiv:2303.15343
dinov2       a Dinov2Model: an image's vector, which says nothing of the prompt; arXiv:2304.07193
patches      the image tower of a CLIPModel, a SiglipModel or a Dinov2Model: the means of its
             patches' vectors inside the tower, which say nothing of the prompt either
last_hidden  a language model: the last hidden state of a prompt with its answer, at the last token
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import (
    Cosine,
    DtypeName,
    Placement,
    TransformersTowers,
    complete,
    image_processor,
    in_batches,
    pil_images,
)
from rewards.perception.features import FeatureModel
from rewards.perception.frames import Frames
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect, items
from rewards.perception.pixels import PixelPreparation
from rewards.types import OneOrMore, Samples

SIGLIP_TOKENS = 64  # to which the published models pad every prompt


@dataclass(frozen=True)
class ImageTower:
    """A vision model: what `read` takes of it for prepared images."""

    model: Any
    processor: Any
    placement: Placement
    batch: int
    read: Callable[[Any, Tensor], Tensor]

    def features(self, samples: Samples) -> Float[Tensor, "n e"]:
        return in_batches(self._images, pil_images(samples), self.batch)

    def graded_features(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, "n e"]:
        del samples  # the prompts have no part in it
        prepare = PixelPreparation.of(self.processor)
        return torch.cat([self._seen(prepare(part)) for part in media.split(self.batch)])

    @torch.no_grad()
    def _images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n e"]:
        return self._seen(self.processor(list(images), return_tensors="pt")["pixel_values"])

    def _seen(self, pixels: Tensor) -> Float[Tensor, "n e"]:
        return self.read(self.model, pixels.to(self.placement.device, self.placement.dtype))


def pooled_vectors(model: Any, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n e"]:
    """Unit vectors of images, from the model's pooled output."""
    return functional.normalize(model(pixel_values=pixels).pooler_output.float(), dim=-1)


def patch_means(model: Any, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 2*e"]:
    """The means over an image of its patches' vectors, after half of the tower's blocks and after
    all of them.

    An image's own vector is trained to tell what is in it, and loses much of how it looks: sizes,
    places, colours. Inside the tower this is still there, and is linear in such a mean.
    """
    states = model(pixel_values=pixels, output_hidden_states=True).hidden_states
    side = model.config.patch_size
    patches = (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
    blocks = len(states) - 1  # the first state is what the blocks begin with
    # a class token, where there is one, stands before the patches
    chosen = [states[block][:, -patches:].mean(1) for block in (-(-blocks // 2), blocks)]
    return torch.cat(chosen, 1).float()


@dataclass(frozen=True)
class LastHidden:
    """A language model of transformers, which reads a prompt and its answer. Texts of more than
    `tokens` tokens lose their beginning."""

    model: Any
    tokenizer: Any
    placement: Placement
    batch: int
    tokens: int

    def features(self, samples: Samples) -> Float[Tensor, "n e"]:
        expect(samples, "last_hidden", "text")
        pairs = list(zip(samples.prompts, items(samples), strict=True))
        return in_batches(self._read, pairs, self.batch)

    @torch.no_grad()
    def _read(self, pairs: Sequence[tuple[str, str]]) -> Float[Tensor, "n e"]:
        rows = [self._ids(prompt, answer)[-self.tokens :] for prompt, answer in pairs]
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, row_ids in enumerate(rows):  # after the text, where a causal model does not look
            ids[row, : len(row_ids)], mask[row, : len(row_ids)] = torch.tensor(row_ids), 1
        device = self.placement.device
        states = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
        last = mask.sum(1) - 1
        return states.last_hidden_state[torch.arange(len(rows)), last.to(device)].float()

    def _ids(self, prompt: str, answer: str) -> list[int]:
        if self.tokenizer.chat_template:
            chat = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.tokenizer(f"{prompt}\n\n{answer}", verbose=False)["input_ids"]


def load_siglip(
    model: HubName = "google/siglip-base-patch16-224",
    frames: Frames = "all",
    batch: OneOrMore = 32,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> FeatureModel:
    """Load the features of a SigLIP model, a hub name or a folder."""
    from transformers import AutoTokenizer, SiglipModel

    path, placement = model_path(model), Placement.of(device, dtype)
    loaded = placement.put(complete(SiglipModel.from_pretrained, path))
    towers = TransformersTowers(
        loaded,
        AutoTokenizer.from_pretrained(path),
        image_processor(path),
        placement,
        limit=min(loaded.config.text_config.max_position_embeddings, SIGLIP_TOKENS),
        read_image=_siglip_image,
        read_text=_siglip_text,
    )
    return FeatureModel(Cosine(towers, batch=batch), frames)


def _siglip_image(siglip: Any, pixels: Tensor) -> Tensor:
    return siglip.vision_model(pixel_values=pixels).pooler_output


def _siglip_text(siglip: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    """The text tower attends to the padding, as in training."""
    return siglip.text_model(input_ids=tokens["input_ids"]).pooler_output


def load_dinov2(
    model: HubName = "facebook/dinov2-base",
    frames: Frames = "all",
    batch: OneOrMore = 32,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> FeatureModel:
    """Load the features of a DINOv2 model, a hub name or a folder."""
    from transformers import Dinov2Model

    path, placement = model_path(model), Placement.of(device, dtype)
    loaded = placement.put(complete(Dinov2Model.from_pretrained, path))
    return FeatureModel(
        ImageTower(loaded, image_processor(path), placement, batch, pooled_vectors), frames
    )


def load_patches(
    model: HubName = "openai/clip-vit-large-patch14",
    frames: Frames = "all",
    batch: OneOrMore = 32,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> FeatureModel:
    """Load the patches' means of an image tower, a hub name or a folder of a CLIPModel, a
    SiglipModel or a Dinov2Model. ValueError for another model."""
    from transformers import AutoConfig, AutoModel

    path, placement = model_path(model), Placement.of(device, dtype)
    kind = AutoConfig.from_pretrained(path).model_type
    if kind not in ("clip", "siglip", "dinov2"):
        raise ValueError(
            f"patches: {model} is a model of type {kind!r:.50}: use one of type clip, siglip or "
            "dinov2"
        )
    loaded = complete(AutoModel.from_pretrained, path)
    tower = placement.put(loaded if kind == "dinov2" else loaded.vision_model)
    return FeatureModel(
        ImageTower(tower, image_processor(path), placement, batch, patch_means), frames
    )


def load_last_hidden(
    model: HubName,
    tokens: OneOrMore = 2048,
    batch: OneOrMore = 8,
    device: str = "auto",
    dtype: DtypeName = "float32",
) -> FeatureModel:
    """Load the features of texts by a language model, a hub name or a folder."""
    from transformers import AutoModel, AutoTokenizer

    path, placement = model_path(model), Placement.of(device, dtype)
    loaded = placement.put(complete(AutoModel.from_pretrained, path))
    tower = LastHidden(loaded, AutoTokenizer.from_pretrained(path), placement, batch, tokens)
    return FeatureModel(tower, kinds=("text",))
