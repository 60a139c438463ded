"""Adapters as peft's configuration describes them, as settings of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from peft import LoraConfig

from flowrl.errors import UserError

# what peft writes into a configuration for its own records, which changes no adapter
RECORDS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "runtime_config", "megatron_core",
}  # fmt: skip


def lora_section(lora: Any) -> Any:
    """The settings of `model.lora` for a rank, a mapping, or peft's LoraConfig.

    UserError for a configuration with a field that a run's adapters do not have, by its name.
    """
    if not isinstance(lora, LoraConfig):
        if isinstance(lora, bool | int | Mapping | None):
            return lora
        raise UserError(
            "lora must be a rank, a mapping of settings, False or peft.LoraConfig, not "
            f"{type(lora).__name__}"
        )
    plain = LoraConfig()
    translated = {"r", "lora_alpha", "target_modules", "use_dora", *RECORDS}
    if lora.init_lora_weights == "gaussian":  # as a run's adapters begin
        translated.add("init_lora_weights")
    other = [f.name for f in fields(LoraConfig) if f.name not in translated]
    changed = [name for name in other if getattr(lora, name) != getattr(plain, name)]
    if changed:
        values = ", ".join(f"{name}={getattr(lora, name)!r:.60}" for name in changed)
        raise UserError(
            f"lora: peft.LoraConfig({values}): a run's adapters have a rank (r), lora_alpha, "
            f"target_modules and use_dora: leave {', '.join(changed)} out, or merge such adapters "
            "before the run, and train new ones"
        )
    return {
        "rank": lora.r,
        "alpha": lora.lora_alpha,
        "targets": _targets(lora.target_modules),
        "dora": lora.use_dora,
    }


def _targets(targets: Any) -> list[str] | None:
    """Names of layers, in an order of their own, since peft keeps a set. UserError for a pattern,
    such as "all-linear", which stands for layers by the rules of peft."""
    if targets is None:
        return None
    if isinstance(targets, str | bytes) or not isinstance(targets, Iterable):
        raise UserError(
            f"lora: peft.LoraConfig(target_modules={targets!r}): name the layers in a list, such "
            "as ['to_q', 'to_k']; without it, adapters are on the attention and feed-forward "
            "layers"
        )
    return sorted(targets)
