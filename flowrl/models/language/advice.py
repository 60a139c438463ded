"""A warning about learning rates that destroy a pretrained language model."""

from flowrl.settings import Run

HIGHEST, USUAL = 1e-5, 1e-6  # of full fine-tuning by policy gradients; the second is TRL's
SMALL = 10_000_000  # weights of models that are made for tests and demos, and learn at 1e-3


def learning_rate_warning(run: Run, weights: int) -> str | None:
    """A sentence if all `weights` of a language model are trained at a rate meant for adapters.

    A rate that the settings name is taken for what is wanted where the model is tiny.
    """
    rate, model = run.train.lr, run.model
    if model.language is None or model.lora is not None or rate <= HIGHEST:
        return None
    if weights < SMALL and "lr" in run.train.model_fields_set:
        return None
    return (
        f"train.lr: {rate:g} trains all weights of the language model; TRL's default for GRPO is "
        f"{USUAL:g}, and a rate so far above it destroys a pretrained model within a few steps. "
        f"Set train.lr: {USUAL:g}, or train adapters (model.lora)"
    )
