"""The influence of an image's shape, or of a sound's length, on the shape of the latents."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import SHORT_PROMPT
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.prompts.prompt_set import VIDEO_COLUMNS


def fit_images(loop: Loop, extras: Sequence[Extra], places: Sequence[str]) -> None:
    """Set the shape of latents from the first row's images or sounds, if only they determine it.

    UserError, with the row's place, for a row whose images or sounds lead to another shape.
    """
    if not sized_by_images(loop):
        return
    shapes = latent_shapes(loop, extras)
    for i, (extra, place, shape) in enumerate(zip(extras, places, shapes, strict=True)):
        names, run_shape = columns.shaping(extra), loop.start(loop.traits.steps).shape
        if shape in ((), run_shape):
            continue
        if any(shapes[:i]) or not set(names) >= set(loop.traits.required):
            raise UserError(
                f"{place}: {loop.name} makes latents {list(shape)} from this image, video or sound "
                f"but {list(run_shape)} from others: use images of one size, and videos and sounds "
                "of one length"
            )
        loop.fit({name: extra[name] for name in names})


def latent_shapes(loop: Loop, extras: Sequence[Extra]) -> list[tuple[int, ...]]:
    """The shape of latents that each row's images or sounds lead to; empty without any. Found once
    for each form of them."""
    shapes: list[tuple[int, ...]] = []
    for extra in extras:
        form = tuple((name, _form(extra[name])) for name in columns.shaping(extra))
        if form and form not in loop.image_shapes:
            begun = loop.encode([SHORT_PROMPT], (extra,))
            loop.image_shapes[form] = loop.first_shape(begun)
        shapes.append(loop.image_shapes[form] if form else ())
    return shapes


def sized_by_images(loop: Loop) -> bool:
    """Whether an image or a sound alone may determine the shape of latents, because no argument
    does: their side, the number of their frames by that of a video's, or their length."""
    parameters = loop.driver.parameters
    names = columns.shaping(parameters)
    moving = any(VIDEO_COLUMNS.fullmatch(name) for name in names)
    return bool(names) and (
        not {"height", "width"} & set(parameters) or (moving and "num_frames" not in loop.call)
    )


def _form(value: Any) -> Any:
    """Size and mode of an image, or shape of an array, or a list of these for a list."""
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return (value.size, value.mode) if isinstance(value, Image.Image) else tuple(value.shape)


def check_several(loop: Loop, extras: Sequence[Extra], places: Sequence[str]) -> None:
    """UserError, with the row's place, for a row with several images in a column of which the
    pipeline takes one. Its signature does not tell, since it takes lists for batches too: it takes
    one if it can be called with the first image, and not with the list. Found once for each form of
    the images, on the stub of the denoiser."""
    for extra, place in zip(extras, places, strict=True):
        pictures = {n: extra[n] for n in columns.images(extra) if not VIDEO_COLUMNS.fullmatch(n)}
        lists = columns.several(extra)
        form = tuple((name, _form(value)) for name, value in pictures.items())
        if not lists or form in loop.several_images:
            continue
        try:
            _first_state(loop, extra)
            loop.several_images.add(form)
        except UserError as error:
            try:
                _first_state(loop, {**extra, **{name: value[0] for name, value in lists.items()}})
            except UserError:
                raise error from None  # of another cause
            shared = all(value is loop.traits.shared.get(n) for n, value in lists.items())
            at = columns.IN_CALL if shared else place
            raise UserError(columns.one_there(at, lists, loop.name)) from error


def _first_state(loop: Loop, extra: Extra) -> None:
    """Call the pipeline with a row's arguments up to its denoiser."""
    loop.first_shape(loop.encode([SHORT_PROMPT], (extra,)))


def follows_pictures(loop: Loop, extra: Extra) -> bool:
    """Whether images of other shapes lead to latents of other shapes; never if a size is given.

    Tried with `columns.RATIOS`, since lists of allowed sizes distinguish wide images from tall
    ones.
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
