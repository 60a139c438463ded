"""Check a run that asks people, before any weights are read."""

from flowrl.algorithm import Algorithm
from flowrl.credit.trackers import NoTracker
from flowrl.errors import UserError
from flowrl.settings.sections.ask import ASKED_REWARD
from flowrl.settings.sections.run import RunSettings, asks_intermediate
from flowrl.settings.sections.workers import WorkerSettings


def check_asking(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for a run whose votes have no reward to fit, or which compares scores of different
    fits."""
    if run.ask is None:
        return
    fitted = [spec for spec in run.rewards if spec.name == ASKED_REWARD]
    if len(fitted) != 1 or fitted[0].sets:
        raise UserError(
            "ask: its votes renew the run's reward {name: fitted, path: FOLDER}; name one of "
            "them in rewards, for all prompts (`flowrl fit-reward` makes its folder)"
        )
    if not run.held_out_rewards:
        raise UserError(
            "ask: each iteration has its own fit of the reward, so evaluations, checkpoint.best "
            "and alarms need a reward that stays the same: name one in held_out_rewards; "
            "{name: fitted, path: FOLDER} there stays the fit of its folder"
        )
    remembered = {
        "budget.replay": run.budget.replay > 0,
        "budget.rates": run.budget.rates is not None,
        "budget.order: uncertain": run.budget.order == "uncertain",
        "budget.repeat": run.budget.repeat > 1,
    }
    for place, used in remembered.items():
        if used:
            raise UserError(
                f"{place} remembers scores of earlier iterations, and a run that asks scores each "
                "iteration by another fit of the reward, so they cannot be compared: leave it out"
            )
    elsewhere = {
        "workers": run.workers != WorkerSettings(),
        "budget.flat: resample": run.budget.flat == "resample",
        "given": run.given is not None,
        "steer": run.steer is not None,
    }
    for place, used in elsewhere.items():
        if used:
            raise UserError(
                f"{place} scores samples before the votes on them are in, and a run that asks "
                "scores an iteration by one fit of the reward: leave it out"
            )
    _check_recipe(run, algorithm)


def _check_recipe(run: RunSettings, algorithm: Algorithm) -> None:
    """UserError for a recipe that compares scores of iterations, or needs scores before all samples
    are there."""
    settings = run.recipe.model_dump()
    name, other = settings["name"], "text_grpo" if algorithm.text else "nft"
    if algorithm.tracker is not NoTracker:
        raise UserError(
            f"ask: recipe {name} remembers scores of earlier iterations, and a run that asks "
            "scores each iteration by another fit of the reward, so they cannot be compared: "
            + (
                "set recipe.credit: group"
                if settings.get("credit") == "aapo"
                else "leave recipe.tracker out"
                if settings.get("tracker") is not None
                else f"use a recipe that does not, such as {other}"
            )
        )
    if run.prompt_writer is not None or asks_intermediate(algorithm):
        raise UserError(
            f"ask: recipe {name} scores samples before the votes on all of them are in, and a run "
            "that asks scores an iteration by one fit of the reward: use a recipe that does not, "
            f"such as {other}"
        )
    if len(algorithm.plans) != 1:
        raise UserError(
            f"ask: recipe {name} has several plans for a prompt: use one with one plan, such as "
            f"{other}"
        )
