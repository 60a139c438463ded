"""Whether rows with different conditioning images of one size may share a call.

A call takes one image for all its rows, or a list with one per row; some pipelines read a list as
several references of every row. So a call of two rows with two images is compared, to the bit, with
two calls of the same size, each with one of the images: equal shapes lead to the same kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.scheduler_standin import FAILURES
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import Extra
from flowrl.models.diffusers.call.inputs.conditioning import Conditioning
from flowrl.models.diffusers.call.levels.schedule import Way
from flowrl.models.diffusers.call.loop.loop import Loop
from flowrl.models.diffusers.call.results.proof_checks import largest_difference
from flowrl.models.out_of_memory import raise_memory


@dataclass(frozen=True)
class OtherImages:
    """Two rows with the same images. `extras` are their arguments; `states` are states [2 *d] of
    the loop, with their levels."""

    loop: Loop
    prompts: Sequence[str]
    extras: Sequence[Extra]
    states: Sequence[tuple[Tensor, float]]
    way: Way

    def shared(self) -> tuple[str, ...]:
        """The columns of images if rows with different images can share a call; otherwise none,
        and each image needs its own calls.

        Predictions and media must equal the results of calls with one image. Predictions must also
        depend on the image: where they do not (a loop that only starts from it), equality proves
        nothing.
        """
        names = tuple(name for name in self.extras[0] if not columns.TEXT_COLUMNS.fullmatch(name))
        noise = {name: columns.another_image(self.extras[0][name]) for name in names}
        if not names or any(noise[name] is self.extras[0][name] for name in names):
            return ()
        try:
            outputs = self._made([{**extra, **noise} for extra in self.extras])
        except (*FAILURES, UserError) as error:
            raise_memory(error)
            return ()
        same = all(
            _away(together[row], alone[row]) == 0
            for together, *a in outputs
            for row, alone in enumerate(a)
        )
        matters = any(_away(first, second) != 0 for _, first, second in outputs[:-1])
        return names if same and matters else ()

    def _made(self, other_extras: Sequence[Extra]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Predictions at each state, then media: for both images, for the first, for the second."""
        first, second = (
            self.loop.encode(self.prompts, extras) for extras in (self.extras, other_extras)
        )
        together = Conditioning.cat([first.take([0]), second.take([1])])
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for x, level in self.states:
                sigma = torch.full((len(x),), level)
                received = [
                    self.loop.received(x, sigma, r, self.way) for r in (together, first, second)
                ]
                outputs.append((received[0].output, received[1].output, received[2].output))
            x, _ = self.states[-1]
            media = [
                self.loop.decode(x, rows, self.way).values for rows in (together, first, second)
            ]
        return [*outputs, (media[0], media[1], media[2])]


def _away(a: Tensor, b: Tensor) -> float:
    return largest_difference(a[None], b[None])
