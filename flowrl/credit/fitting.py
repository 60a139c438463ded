"""Refusals that transforms share: plans of texts that they cannot compare, a missing tracker."""

from flowrl.credit.choices import Choices, text_plans
from flowrl.credit.trackers import NoTracker


def _branched(choices: Choices) -> bool:
    """Whether completions of the plan share tokens."""
    plans = text_plans(choices)
    return any(plan.forking or len(set(plan.columns.nodes)) > 1 for plan in plans)


def refuse_branches(transform: object, choices: Choices) -> str | None:
    """Refuse completions that branch, for a transform that compares whole ones."""
    if not _branched(choices):
        return None
    return (
        f"{type(transform).__name__} compares whole completions, but this plan branches; use the "
        "plan completions, or an advantage per node (standardize, leave_one_out, "
        "parent_difference, global_local, two_level)"
    )


def refuse_independent(transform: object, choices: Choices) -> str | None:
    """Refuse completions that do not branch, for a transform that compares nodes with parents."""
    if not text_plans(choices) or _branched(choices):
        return None
    return (
        f"{type(transform).__name__} compares a node with its parent, which independent "
        "completions do not have; use the plan segments or forks"
    )


def refuse_untracked(transform: object, choices: Choices) -> str | None:
    """Refuse a run without a tracker, for a transform that reads expected scores of prompts."""
    if choices.tracker is not NoTracker:
        return None
    return (
        f"{type(transform).__name__} needs the expected score of each prompt, which a tracker "
        "computes; set tracker: prompt_values"
    )
