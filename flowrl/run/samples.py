"""From a rollout to what rewards see."""

from collections.abc import Sequence

from flowrl.models.policy import Batch, RolloutLike
from flowrl.prompts import PromptSet
from rewards import Samples


def decode_samples_of(
    batch: Batch, rollout: RolloutLike, prompts: PromptSet, rows: Sequence[int]
) -> Samples:
    """Leaves to media; `rows` are those of the draws in the prompt file."""
    media = batch.media(rollout)
    at = rollout.prompt.cpu()
    texts, meta = prompts.take([rows[i] for i in at.tolist()])
    return Samples(media, texts, at, meta)
