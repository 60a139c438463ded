"""Describe which prompts and rewards of a run's evaluations training never uses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SettingsTree = Mapping[str, Any]


@dataclass(frozen=True)
class Unseen:
    """The prompts and rewards of an evaluation that training does not use.

    prompts  whether the held-out prompts have another source
    judges   labels of held-out rewards that training does not raise
    trained  labels of those that it raises
    """

    prompts: bool
    judges: list[str]
    trained: list[str]

    @classmethod
    def of(cls, settings: SettingsTree) -> "Unseen":
        prompts = settings.get("prompts")
        train, held_out = (
            (prompts.get(place) for place in ("train", "held_out"))
            if isinstance(prompts, Mapping)
            else (prompts, None)
        )
        raised = {_identity(spec) for spec in _specs(settings, "rewards")}
        judged = _specs(settings, "held_out_rewards") or _specs(settings, "rewards")
        labels = {True: list[str](), False: list[str]()}
        for spec in judged:
            labels[_identity(spec) in raised].append(_label(spec))
        return cls(held_out not in (None, train), labels[False], labels[True])

    @property
    def sentence(self) -> str:
        """Describe the prompts and rewards behind held-out scores in a sentence."""
        prompts = "Prompts from another source than training's" if self.prompts else ""
        prompts = prompts or "The prompts of training"
        clauses = []
        if self.judges:
            clauses.append(f"by {_list(self.judges)}, which training does not raise")
        if self.trained:
            also = "also " if self.judges else ""
            clauses.append(f"{also}by {_list(self.trained)}, which training raises")
        scored = f", scored {'; '.join(clauses)}" if clauses else ""
        return f"{prompts}{scored}."

    @property
    def no_judge(self) -> str:
        """A warning if training uses every held-out reward; otherwise empty."""
        if self.judges or not self.trained:
            return ""
        return (
            "No judge: training raises every reward that evaluations score with, so a higher score "
            "alone does not show better samples. Add another reward to held_out_rewards."
        )


def _specs(settings: SettingsTree, key: str) -> list[Any]:
    specs = settings.get(key)
    return list(specs) if isinstance(specs, list | tuple) else []


def _identity(spec: Any) -> str:
    """A reward's name and settings, without label and weight."""
    if not isinstance(spec, Mapping):
        return json.dumps([str(spec), {}])
    outer = {k: v for k, v in spec.items() if k not in ("name", "label", "weight", "settings")}
    inner = spec.get("settings")
    whole = {**inner, **outer} if isinstance(inner, Mapping) else outer
    return json.dumps([str(spec.get("name")), whole], sort_keys=True, default=str)


def _label(spec: Any) -> str:
    return str(spec.get("label") or spec.get("name")) if isinstance(spec, Mapping) else str(spec)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
