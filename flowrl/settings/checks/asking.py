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
        "recipe.tracker (prompt_values, score_quantiles)": algorithm.tracker is not NoTracker,
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
        "recipe joint": run.before is not None,
        "given": run.given is not None,
        "steer, and recipes that score intermediate samples": asks_intermediate(algorithm),
    }
    for place, used in elsewhere.items():
        if used:
            raise UserError(
                f"{place} scores samples before the votes on them are in, and a run that asks "
                "scores an iteration by one fit of the reward: leave it out"
            )
    if len(algorithm.plans) != 1:
        raise UserError("ask: this recipe has several plans for a prompt: use one with one plan")
