"""Whether an image is safe to show: a gate before other rewards, by a published classifier.

* `kind: classifier`: 1 - P(`label`) of a ViT that classifies images. The default,
  Falconsai/nsfw_image_detection, has the labels normal and nsfw; the label is found by its name.
* `kind: concepts`: the checker that comes with Stable Diffusion. Each of 17 concepts has
  s = cos(image, concept) - threshold, .01 more if one of three special concepts exceeds its own
  threshold; an image is flagged if a rounded s (3 digits) is above 0. The score is minus the
  largest rounded s, so scores of at least 0 are safe. Unlike the original, nothing is blacked out.

    {name: gate, reward: pickscore, where: {name: safety}, above: 0.5, floor: -1}

Use it as a gate, not as a term of the sum: a classifier inside the reward gets exploited like any
other. `calls/.../flagged` in the metrics is the share of flagged samples (P of at least 0.5, or s
above 0). Both formulas were read in the code; the licences are from memory. Older versions of
diffusers started the adjustment at .05. ShieldGemma 2, which is gated, is not included.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.perception.embedding import (
    Placement,
    complete,
    image_processor,
    in_batches,
    pil_images,
)
from rewards.perception.hub import HubName, model_path
from rewards.perception.image_model import ImageModelSettings
from rewards.perception.reachable import reachable
from rewards.perception.weight_files import weights_of_file
from rewards.types import Inline, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

CHECKERS = {
    "classifier": "Falconsai/nsfw_image_detection",
    "concepts": "CompVis/stable-diffusion-safety-checker",
}
SPECIAL = 0.01  # added to every concept's score if a special one is above its threshold
PARTS = ("concept_embeds", "concept_embeds_weights", "special_care_embeds")
PARTS = (*PARTS, "special_care_embeds_weights", "visual_projection.weight")
Judged = Callable[[Sequence[Image.Image]], Float[Tensor, " m"]]


@dataclass(frozen=True)
class Safety:
    """Scores the safety of images; higher is safer. `report` counts an image as flagged unless
    `safe` accepts its score."""

    score: Judged
    safe: Callable[[Tensor], Tensor]
    batch: int
    seen: Counter[str] = field(default_factory=Counter, repr=False)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        scores = in_batches(self.score, pil_images(samples), self.batch)
        self.seen["samples"] += len(scores)
        self.seen["flagged"] += int((~self.safe(scores)).sum())
        return scores

    def report(self) -> dict[str, float]:
        """Share of flagged images since the last report."""
        share = self.seen["flagged"] / self.seen["samples"] if self.seen["samples"] else None
        self.seen.clear()
        return {} if share is None else {"flagged": share}


def classifier(model: str, label: str, placement: Placement) -> Judged:
    """1 - P(label). ValueError if the model has no such label."""
    from transformers import AutoModelForImageClassification

    loaded: Any = placement.put(complete(AutoModelForImageClassification.from_pretrained, model))
    labels = {name.lower(): int(index) for index, name in loaded.config.id2label.items()}
    if label.lower() not in labels:
        raise ValueError(f"safety: {model} has no label {label!r}; it has {', '.join(labels)}")
    processor = image_processor(model)

    @torch.no_grad()
    def judged(images: Sequence[Image.Image]) -> Float[Tensor, " m"]:
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
        logits = loaded(pixel_values=pixels.to(placement.device, placement.dtype)).logits.float()
        return 1 - logits.softmax(-1)[:, labels[label.lower()]]

    return judged


def concepts(model: str, placement: Placement) -> Judged:
    """Minus the largest rounded concept score."""
    from transformers import CLIPConfig, CLIPVisionModel

    state = checker_weights(model)
    lacking = [name for name in PARTS if name not in state]
    if lacking:
        raise ValueError(f"safety: {model} is not a safety checker: it lacks {', '.join(lacking)}")
    parts = {name: state.pop(name).to(placement.device).float() for name in PARTS}
    config: Any = CLIPConfig.from_pretrained(model)
    tower = CLIPVisionModel(config.vision_config)
    placement.put(load_tower(model, tower, state))
    processor = image_processor(model)

    def above(vectors: Tensor, name: str) -> Tensor:
        cosine = vectors @ functional.normalize(parts[name], dim=-1).mT
        return cosine - parts[f"{name}_weights"]

    @torch.no_grad()
    def judged(images: Sequence[Image.Image]) -> Float[Tensor, " m"]:
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
        pooled = tower(pixels.to(placement.device, placement.dtype)).pooler_output.float()
        vectors = functional.normalize(pooled @ parts["visual_projection.weight"].mT, dim=-1)
        special = above(vectors, "special_care_embeds").round(decimals=3).amax(1) > 0
        scores = above(vectors, "concept_embeds") + SPECIAL * special[:, None]
        return -scores.round(decimals=3).amax(1)

    return judged


def checker_weights(model: str) -> dict[str, Tensor]:
    """Read `model.safetensors` or `pytorch_model.bin`."""
    from transformers.utils.hub import cached_file

    with reachable("safety", Path(model)):
        for name in ("model.safetensors", "pytorch_model.bin"):
            file = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                return weights_of_file("safety", Path(file))
        raise ValueError(f"safety: {model} has neither model.safetensors nor pytorch_model.bin")


def load_tower(model: str, tower: Any, state: dict[str, Tensor]) -> Any:
    """Load the vision tower, whose entries start with one or two `vision_model.`.

    transformers dropped one of the two in version 5. ValueError unless all entries fit.
    """

    def plain(name: str) -> str:
        return name.replace("vision_model.", "")

    entries = {plain(n): v for n, v in state.items() if not n.endswith("position_ids")}
    wanted = {plain(name): name for name, _ in tower.named_parameters()}
    if differ := sorted(set(entries) ^ set(wanted)):
        raise ValueError(f"safety: {model}: {', '.join(differ[:4])} missing or unexpected")
    tower.load_state_dict({wanted[name]: value for name, value in entries.items()}, strict=False)
    return tower


def load(
    kind: Literal["classifier", "concepts"] = "classifier",
    model: HubName | None = None,
    label: str = "nsfw",
    common: Inline[ImageModelSettings] = ImageModelSettings(aggregate="min"),
) -> Reward:
    """Load the reward.

    kind   classifier: 1 - P(`label`), in 0..1; concepts: minus the largest score of Stable
           Diffusion's checker, where at least 0 is safe
    model  classifier or checker: a folder or a name on the hub; null takes
           Falconsai/nsfw_image_detection or CompVis/stable-diffusion-safety-checker
    label  the classifier's unsafe class; no effect with concepts; written within `settings: {...}`,
           since beside `name` it names the scores
    """
    source = model_path(model or CHECKERS[kind])
    if kind == "classifier":
        judged, safe = classifier(source, label, common.placement), lambda scores: scores > 0.5
    else:
        judged, safe = concepts(source, common.placement), lambda scores: scores >= 0
    return common.over_frames("safety", Safety(judged, safe, common.batch))
