"""The influence of an image's shape on the shape of the latents."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.models.diffusers.call import columns
from flowrl.models.diffusers.call.columns import Extra
from flowrl.models.diffusers.call.conditioning import SHORT_PROMPT
from flowrl.models.diffusers.call.signature import Loop


def check_image_sizes(loop: Loop, meta: Sequence[Mapping[str, Any]]) -> None:
    """For a pipeline whose call takes no size (image to image): UserError for a row whose image
    gives latents of another shape than the placeholder's."""
    names = columns.images(loop.driver.parameters)
    if {"height", "width"} & set(loop.driver.parameters) or not names:
        return
    seen: set[Any] = set()
    for extra, place in zip(
        loop.extras(meta, [""] * len(meta)), columns.places(meta), strict=False
    ):
        form = tuple(columns.image_form(extra[name]) for name in columns.images(extra))
        if not form or form in seen:
            continue
        seen.add(form)
        begun = loop.encode([SHORT_PROMPT], (extra,))
        steps = loop.traits.steps
        own, known = tuple(loop.first(begun, steps).shape[1:]), loop.start(steps).shape
        if own != known:
            raise UserError(
                f"{place}: {loop.name} takes no height and width, and makes latents "
                f"{list(own)} of this image, {list(known)} of others: give all images one "
                "size, and one of them as model.call.image too, which sets it"
            )


def follows_pictures(loop: Loop, extra: Extra) -> bool:
    """Whether images of other shapes give latents of other shapes; never if a size is given.

    Tried with `columns.RATIOS`: lists of allowed sizes tell wide images from tall ones.
    """
    names = columns.images(extra)
    sized = {"height", "width"} <= set(loop.call)
    if sized or not names or not {"height", "width"} <= set(loop.driver.parameters):
        return False
    shapes = set()
    for ratio in columns.RATIOS:
        other = {name: columns.reshaped(extra[name], ratio) for name in names}
        conditioning = loop.encode([SHORT_PROMPT], ({**extra, **other},))
        shapes.add(loop.first(conditioning, loop.traits.steps).shape)
    return len(shapes) > 1
