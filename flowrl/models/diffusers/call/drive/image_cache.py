"""A cache of encoded conditioning images and sounds with one fixed sample per posterior.

A pipeline encodes its image in every call, and several pipelines draw a new sample of the posterior
each time, so the ratio of new to old would not be 1. While a pipeline is driven (and in the call
that the proof compares with), `vae.encode` and image encoders cache their outputs per image; a
posterior's noise is seeded by the image's content, so it is the same in every process and run.

The content is read once for each set of images: reading a tensor waits for its device.
"""

import hashlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_oobleck import OobleckDiagonalGaussianDistribution
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flowrl.models.diffusers.call.drive.patches import Patch
from samplers.noise import generator

CACHED_ENCODINGS = 512  # encodings
CACHED_BYTES = 2**31  # of them: the latents of a video are many times those of an image
IMAGE_SETS = 512  # whose content is remembered
# what is remembered is compared at first, mostly in the proof: so often for each of the encodings
# of a call, since some of them may be of the images alone and others of the state
COMPARED_ENCODINGS = 48
# components, beside a vae, that see conditioning images
SEERS = ("image_encoder", "image_encoder_2", "feature_encoder", "vision_encoder", "siglip")


class _OneSample:
    """A posterior that always returns the same sample."""

    mean: Tensor
    std: Tensor
    parameters: Tensor

    def __init__(self, parameters: Tensor, noise: Tensor):
        super().__init__(parameters)  # type: ignore[call-arg] of the distribution
        self.noise = noise

    @classmethod
    def of(cls, distribution: Any, key: str) -> Self:
        noise = torch.randn(distribution.mean.shape, generator=generator("posterior", key))
        return cls(distribution.parameters, noise.to(distribution.mean))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        del generator  # it would draw another sample in each call
        return self.mean + self.std * self.noise


class Posterior(_OneSample, DiagonalGaussianDistribution):
    """The posterior of an image or a video."""


class SoundPosterior(_OneSample, OobleckDiagonalGaussianDistribution):
    """The posterior of a sound."""


# by the class of the distribution that an encoder returns
POSTERIORS: tuple[tuple[type, type[_OneSample]], ...] = (
    (DiagonalGaussianDistribution, Posterior),
    (OobleckDiagonalGaussianDistribution, SoundPosterior),
)


class ImageSet:
    """The images among a call's arguments, by identity, with its numbers."""

    def __init__(self, arguments: Mapping[str, Any]):
        leaves = tree_flatten(dict(arguments))[0]
        images = [leaf for leaf in leaves if isinstance(leaf, Image | Tensor | np.ndarray)]
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, int | float))
        self.objects = tuple(weakref.ref(image) for image in images)
        self.key = tuple(map(id, images)), numbers

    def same(self, other: "ImageSet") -> bool:
        """Whether both hold the same living objects: an identity may be used again."""
        mine = [reference() for reference in self.objects]
        theirs = [reference() for reference in other.objects]
        pairs = zip(mine, theirs, strict=True)
        return all(one is not None and one is another for one, another in pairs)


class Memo:
    """Cached encodings of one pipeline."""

    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.kept: OrderedDict[str, Any] = OrderedDict()
        self.bytes = 0
        self.known: OrderedDict[Any, tuple[ImageSet, list[str]]] = OrderedDict()
        self.images: ImageSet | None = None
        self.encoded = 0  # images so far in this call
        self.compared = Counter[int]()  # by the place of an encoding in its call
        self.trusted = True  # the images decide what is encoded

    def begin(self, images: "ImageSet | None") -> None:
        """Begin a call. `images` identifies all that its encodings depend on; None if unknown, as
        where a pipeline may add noise to its images."""
        self.images, self.encoded = images, 0

    def patches(self) -> list[Patch]:
        patches = []
        vae = vars(self.pipe).get("vae")
        if isinstance(vae, nn.Module) and callable(getattr(vae, "encode", None)):
            patches.append(Patch(vae, "encode", self._remembering("vae", vae.encode)))  # type: ignore
        for name in SEERS:
            module = vars(self.pipe).get(name)
            if isinstance(module, nn.Module):
                patches.append(Patch(module, "forward", self._remembering(name, module.forward)))
        return patches

    def _remembering(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def remembering(*args: Any, **named: Any) -> Any:
            leaves, form = tree_flatten((args, named))
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            if len(tensors) != 1 or leaves[tensors[0]].ndim < 3:
                return real(*args, **named)
            at = tensors[0]
            context = f"{name} {[leaf for i, leaf in enumerate(leaves) if i != at]}"
            rows = []
            contents = self._contents(context, leaves[at])
            for row, content in zip(leaves[at].split(1), contents, strict=True):
                key = f"{context} {content}"
                if key not in self.kept:
                    inputs = [*leaves[:at], row, *leaves[at + 1 :]]
                    again, keywords = tree_unflatten(inputs, form)
                    with torch.no_grad():
                        self.kept[key] = tree_map(
                            lambda leaf, key=key: _fixed(leaf, key), real(*again, **keywords)
                        )
                    self.bytes += _size(self.kept[key])
                self.kept.move_to_end(key)
                rows.append(self.kept[key])
            self._bound(len(rows))
            return rows[0] if len(rows) == 1 else _stack(rows)

        return remembering

    def _contents(self, context: str, rows: Tensor) -> list[str]:
        """Digests of the rows of an encoder's input; remembered if the same images were met."""
        if self.images is None or not self.images.objects or not self.trusted:
            return _digests(rows)
        self.encoded += 1
        place = self.images.key, self.encoded, context, tuple(rows.shape), rows.dtype
        met, contents = self.known.get(place, (None, []))
        if met is None or not met.same(self.images):
            contents = _digests(rows)
            self.known[place] = self.images, contents
            if len(self.known) > IMAGE_SETS:
                self.known.popitem(last=False)
        elif self.compared[self.encoded] < COMPARED_ENCODINGS:
            self.compared[self.encoded] += 1
            digests = _digests(rows)
            self.trusted, contents = digests == contents, digests
        return contents

    def _bound(self, used: int) -> None:
        """Drop the least recently used encodings, except this call's."""
        while len(self.kept) > used and (
            len(self.kept) > CACHED_ENCODINGS or self.bytes > CACHED_BYTES
        ):
            _, old = self.kept.popitem(last=False)
            self.bytes -= _size(old)


def _size(encoding: Any) -> int:
    """Bytes of an encoding's tensors."""
    size = 0
    for leaf in tree_flatten(encoding)[0]:
        parts = (leaf.parameters, leaf.noise) if isinstance(leaf, _OneSample) else (leaf,)
        size += sum(p.numel() * p.element_size() for p in parts if isinstance(p, Tensor))
    return size


def _digests(rows: Tensor) -> list[str]:
    """Digest of each row, after one copy of all to the host."""
    form = f"{(1, *rows.shape[1:])} {rows.dtype}"
    digests = []
    for row in rows.detach().cpu().contiguous().split(1):
        data = row.contiguous().view(torch.uint8).numpy().tobytes()
        digests.append(f"{form} {hashlib.blake2b(data, digest_size=16).hexdigest()}")
    return digests


def _fixed(leaf: Any, key: str) -> Any:
    for kind, fixed in POSTERIORS:
        if isinstance(leaf, kind):
            return fixed.of(leaf, key)
    return leaf


def _stack(rows: list[Any]) -> Any:
    """Join the outputs of single rows into one output."""
    flat = [tree_flatten(row) for row in rows]
    leaves = [_joined(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(leaves, flat[0][1])


def _joined(column: tuple[Any, ...]) -> Any:
    if isinstance(column[0], _OneSample):
        parameters = torch.cat([posterior.parameters for posterior in column])
        noise = torch.cat([posterior.noise for posterior in column])
        return type(column[0])(parameters, noise)
    return torch.cat(column) if isinstance(column[0], Tensor) else column[0]
