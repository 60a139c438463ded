"""Warnings about language models: destructive learning rates, and mixtures of experts."""

from typing import Any

from flowrl.settings import LanguageSettings, RunSettings

HIGHEST, USUAL = 1e-5, 1e-6  # of full fine-tuning by policy gradients; the second is TRL's
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # counts
SMALL = 10_000_000  # weights of models that are made for tests and demos, and learn at 1e-3


def learning_rate_warning(run: RunSettings, weights: int) -> str | None:
    """Return a warning if all `weights` of a language model train at a learning rate meant for
    adapters.

    For a tiny model, a rate that is set explicitly is accepted.
    """
    rate, model = run.train.lr, run.model
    if not isinstance(model, LanguageSettings) or model.lora is not None or rate <= HIGHEST:
        return None
    if weights < SMALL and "lr" in run.train.model_fields_set:
        return None
    return (
        f"train.lr: {rate:g} trains all weights of the language model; TRL's default for GRPO is "
        f"{USUAL:g}, and a rate so far above that destroys a pretrained model within a few steps. "
        f"Set train.lr: {USUAL:g}, or train adapters (model.lora)"
    )


def experts_warning(config: Any) -> str | None:
    """Return a sentence for a transformers configuration of a mixture of experts."""
    settings = config.get_text_config().to_dict()
    counts = [settings.get(name) for name in EXPERTS]
    count = max((n for n in counts if isinstance(n, int)), default=0)
    if count < 2:
        return None
    return (
        f"the model is a mixture of {count} experts: the router's auxiliary loss is not "
        "added, and tokens may be routed differently in training and in sampling, which changes "
        "their ratios; watch `mismatch`, prefer sequence-level ratios (text_gspo), and keep the "
        "router "
        "frozen (model.lora)"
    )
