"""The pipeline's own call, as a user would make it: what a replay is compared with."""

from collections.abc import Sequence

from flowrl.models.diffusers.call.drive.received import Received
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES, its_own
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.out_of_memory import raise_memory


def record(
    loop: Loop,
    prompts: Sequence[str],
    extras: Sequence[Extra],
    steps: int,
    guidance: float | None,
) -> tuple[list[Received], Decoded, bool]:
    """Make the pipeline's own call.

    Return its steps, its media, and whether its scheduler's step draws no noise.
    """
    if loop.traits.single and len(prompts) > 1:
        rows = [([p], extras[i : i + 1]) for i, p in enumerate(prompts)]
        records, media, repeatable = zip(
            *(record(loop, *row, steps, guidance) for row in rows), strict=True
        )
        joined = [Received.joined(step) for step in zip(*records, strict=True)]
        return joined, Decoded.joined(media), all(repeatable)
    with its_own(loop.name, loop.call):
        arguments = loop.arguments(prompts, steps, guidance, extras)
        try:
            records, result, repeatable = loop.driver.recorded(arguments)
            media = Decoded.of(loop.pipe, result)
        except FAILURES as error:
            raise_memory(error)
            if len(prompts) < 2:
                raise
            _split_rows(loop)
            return record(loop, prompts, extras, steps, guidance)
        return [r.folded(len(prompts)) for r in records], media, repeatable


def _split_rows(loop: Loop) -> None:
    """Fall back to one row per call: the decoder (HunyuanVideo 1.5), else the call."""
    if loop.sliced is False:
        loop.slice_decoder()
    else:
        loop.show(single=True)
