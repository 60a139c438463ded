"""A warning about learning rates that destroy a pretrained language model."""

from flowrl.settings import Run

HIGHEST, USUAL = 1e-5, 1e-6  # of full fine-tuning by policy gradients; the second is TRL's
SMALL = 10_000_000  # weights of models that are made for tests and demos, and learn at 1e-3


def learning_rate_warning(run: Run, weights: int) -> str | None:
    """Return a sentence if all `weights` of a language model train at a rate meant for adapters.

    For a tiny model, a rate that the settings name is accepted.
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
