"""Object detection by models of transformers: boxes, and masks if the model has them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from rewards.perception.embedding import Placement, image_processor
from rewards.perception.hub import model_path

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Detection:
    """One object: class, certainty in 0..1, box; mask [h w] of the whole image, or None."""

    name: str
    score: float
    box: Box
    mask: np.ndarray | None = None


@runtime_checkable
class Detector(Protocol):
    """All objects above `least` in each image, in any order."""

    @property
    def names(self) -> frozenset[str]: ...

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]: ...


@dataclass(frozen=True)
class Boxes:
    """A model of AutoModelForObjectDetection, such as a YOLOS."""

    model: Any
    processor: Any
    place: Placement
    batch: int = 8

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.model.config.id2label.values())

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]:
        things: list[list[Detection]] = [[] for _ in images]
        for rows, outputs, sizes in _batches(self, images):
            results = self.processor.post_process_object_detection(outputs, least, sizes)
            for row, result in zip(rows, results, strict=True):
                columns = (result["labels"], result["scores"], result["boxes"])
                things[row] = [
                    Detection(self.model.config.id2label[label], score, tuple(box))
                    for label, score, box in zip(*(c.tolist() for c in columns), strict=True)
                ]
        return things


@dataclass(frozen=True)
class Masks:
    """An instance segmentation model of the Mask2Former family; boxes are those of the masks."""

    model: Any
    processor: Any
    place: Placement
    batch: int = 8

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.model.config.id2label.values())

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]:
        things: list[list[Detection]] = [[] for _ in images]
        for rows, outputs, sizes in _batches(self, images):
            results = self.processor.post_process_instance_segmentation(
                outputs, threshold=least, target_sizes=sizes, return_binary_maps=True
            )
            for row, result in zip(rows, results, strict=True):
                for segment in result["segments_info"]:
                    mask = result["segmentation"][segment["id"]].bool().cpu().numpy()
                    name = self.model.config.id2label[segment["label_id"]]
                    things[row].append(Detection(name, segment["score"], box_of(mask), mask))
        return things


def box_of(mask: np.ndarray) -> Box:
    """The smallest box around a mask's pixels; right and bottom are exclusive."""
    rows, columns = np.nonzero(mask)
    left, right = columns.min(), columns.max() + 1
    return float(left), float(rows.min()), float(right), float(rows.max() + 1)


def _batches(
    detector: Boxes | Masks, images: Sequence[Image.Image]
) -> Iterator[tuple[list[int], Any, list[tuple[int, int]]]]:
    """Rows, the model's outputs and (height, width); a batch has one size, so nothing is padded."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for row, image in enumerate(images):
        by_size.setdefault((image.height, image.width), []).append(row)
    for size, rows in by_size.items():
        for start in range(0, len(rows), detector.batch):
            part = rows[start : start + detector.batch]
            inputs = detector.processor([images[row] for row in part], return_tensors="pt")
            pixels = inputs["pixel_values"].to(detector.place.device, detector.place.dtype)
            with torch.no_grad():
                outputs = detector.model(pixel_values=pixels)
            yield part, outputs, [size] * len(part)


def detector(model: str, place: Placement) -> Detector:
    """Load a detector from a hub name or folder; its configuration decides if it has masks."""
    import transformers

    model = model_path(model)
    config = transformers.AutoConfig.from_pretrained(model)
    if config.model_type in ("mask2former", "maskformer"):
        loaded = (
            transformers.AutoModelForInstanceSegmentation
            if (config.model_type == "maskformer")
            else transformers.AutoModelForUniversalSegmentation
        )
        return Masks(place.put(loaded.from_pretrained(model)), image_processor(model), place)
    loaded = transformers.AutoModelForObjectDetection.from_pretrained(model)
    return Boxes(place.put(loaded), image_processor(model), place)
