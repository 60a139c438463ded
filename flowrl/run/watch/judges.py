"""The judges of a run: held-out rewards that are not trained on."""

from collections.abc import Iterator

from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.prompts.source import GIVEN_FILE, of_given
from flowrl.settings import RunSettings

CANNOT_TELL = (
    "the training reward rises, and without a judge this run cannot tell whether the samples are "
    "better or the reward is hacked. Look at the samples, and add a reward that is not trained on "
    "to held_out_rewards"
)


def judges(run: RunSettings) -> tuple[str, ...]:
    """Labels of the held-out rewards that are not trained on."""
    trained = [(spec.name, spec.settings) for spec in run.rewards]
    untrained = (s for s in run.held_out_rewards if (s.name, s.settings) not in trained)
    return tuple(spec.label for spec in untrained)


def no_judge(run: RunSettings) -> Iterator[str]:
    """A warning for a run whose samples are scored only by its training rewards."""
    if judges(run) and run.prompts.held_out is not None:
        return
    lacks = "a reward that is not trained on (held_out_rewards)"
    if run.prompts.held_out is None:
        lacks = f"prompts.held_out and {lacks}"
    yield (
        "no judge: a hacked reward rises like a learned one, and nothing else scores this run's "
        f"samples; set {lacks}"
    )


def seen_in_training(prompts: PromptSet, held_out: PromptSet | None) -> Iterator[str]:
    """A warning if every held-out prompt is also a training prompt."""
    training_texts = {str(text) for text in prompts.texts}
    if held_out is not None and all(str(text) in training_texts for text in held_out.texts):
        first = next(iter(prompts.meta), None)
        in_given = isinstance(first, PromptRow) and of_given(first.place)
        place = GIVEN_FILE if in_given else "prompts.train"
        yield (
            f"warning: every prompt of prompts.held_out is also in {place}, so held-out "
            "scores say nothing about new prompts"
        )
