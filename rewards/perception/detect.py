"""Object detection by models of transformers: boxes, and masks if the model has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from rewards.perception.embedding import Placement, complete, image_processor
from rewards.perception.hub import model_path

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class Detection:
    """A detected object: class, confidence in 0..1, box, and mask [h w] of the whole image, or
    None."""

    name: str
    score: float
    box: Box
    mask: np.ndarray | None = None


@runtime_checkable
class Detector(Protocol):
    """Finds all objects that score above `least` in each image, in any order."""

    @property
    def names(self) -> frozenset[str]: ...

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]: ...


@dataclass(frozen=True)
class ModelDetector:
    """A transformers model as a detector; `read` takes (detector, outputs, least, image sizes)."""

    model: Any
    processor: Any
    placement: Placement
    read: Callable[["ModelDetector", Any, float, list[tuple[int, int]]], list[list[Detection]]]
    batch: int = 8

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.model.config.id2label.values())

    def __call__(self, images: Sequence[Image.Image], least: float) -> list[list[Detection]]:
        """Detect objects. A batch has images of one size, so that no padding is needed."""
        detections: list[list[Detection]] = [[] for _ in images]
        by_size: dict[tuple[int, int], list[int]] = {}
        for row, image in enumerate(images):
            by_size.setdefault((image.height, image.width), []).append(row)
        for size, rows in by_size.items():
            for start in range(0, len(rows), self.batch):
                part = rows[start : start + self.batch]
                inputs = self.processor([images[row] for row in part], return_tensors="pt")
                pixels = inputs["pixel_values"].to(self.placement.device, self.placement.dtype)
                with torch.no_grad():
                    outputs = self.model(pixel_values=pixels)
                objects = self.read(self, outputs, least, [size] * len(part))
                for row, objects_of_row in zip(part, objects, strict=True):
                    detections[row] = objects_of_row
        return detections


def read_boxes(
    detector: ModelDetector, outputs: Any, least: float, sizes: list[tuple[int, int]]
) -> list[list[Detection]]:
    """Read the objects of a model of AutoModelForObjectDetection, such as YOLOS."""
    names = detector.model.config.id2label
    results = detector.processor.post_process_object_detection(outputs, least, sizes)
    columns = [[r[key].tolist() for key in ("labels", "scores", "boxes")] for r in results]
    return [
        [Detection(names[label], score, tuple(box)) for label, score, box in zip(*c, strict=True)]
        for c in columns
    ]


def read_masks(
    detector: ModelDetector, outputs: Any, least: float, sizes: list[tuple[int, int]]
) -> list[list[Detection]]:
    """Read the objects of a Mask2Former or a related model; boxes surround the masks."""
    names = detector.model.config.id2label
    results = detector.processor.post_process_instance_segmentation(
        outputs, threshold=least, target_sizes=sizes, return_binary_maps=True
    )
    detections: list[list[Detection]] = [[] for _ in results]
    for objects, result in zip(detections, results, strict=True):
        for segment in result["segments_info"]:
            mask = result["segmentation"][segment["id"]].bool().cpu().numpy()
            objects.append(
                Detection(names[segment["label_id"]], segment["score"], box_of(mask), mask)
            )
    return detections


def box_of(mask: np.ndarray) -> Box:
    """Smallest box around a mask's pixels; right and bottom are exclusive."""
    rows, columns = np.nonzero(mask)
    left, right = columns.min(), columns.max() + 1
    return float(left), float(rows.min()), float(right), float(rows.max() + 1)


def detector(model: str, placement: Placement) -> Detector:
    """Load a detector from a hub name or folder; its configuration states whether it predicts
    masks."""
    import transformers

    model = model_path(model)
    kinds = {
        "mask2former": (transformers.AutoModelForUniversalSegmentation, read_masks),
        "maskformer": (transformers.AutoModelForInstanceSegmentation, read_masks),
    }
    boxes = (transformers.AutoModelForObjectDetection, read_boxes)
    config = transformers.AutoConfig.from_pretrained(model)
    kind, read = kinds.get(config.model_type, boxes)
    return ModelDetector(
        placement.put(complete(kind.from_pretrained, model)),
        image_processor(model),
        placement,
        read,
    )
