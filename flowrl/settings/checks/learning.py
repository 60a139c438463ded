"""Settings that keep a run from learning whatever its data is, as far as they alone show it. The
first update shows the others: flowrl/iteration/learning_check.py."""

from flowrl.errors import UserError
from flowrl.settings.sections.run import RunSettings

NO_CHANGE = 1e-7  # a weight of 1 in float32 rounds smaller changes away
UNMOVED = 0.99  # share of the base in an average at the end of the run


ONE_STEP = frozenset(("text_opo",))  # recipes whose estimator is proven for exact on-policy steps


def check_single_step(run: RunSettings) -> None:
    """UserError for several optimizer steps per iteration of a recipe that is for one."""
    name = run.recipe.name  # type: ignore[attr-defined]
    for setting in ("updates", "epochs"):
        if name in ONE_STEP and getattr(run.train, setting) > 1:
            raise UserError(
                f"train.{setting}: {name} has neither ratio nor clip, and its proof is for one "
                f"on-policy step per iteration: set train.{setting}: 1, or use text_grpo"
            )


def check_learning(run: RunSettings) -> None:
    """UserError for rates that move no weight, and for an evaluated average that stays the base."""
    t = run.train
    steps, warm = t.iterations * t.optimizer_steps, t.schedule.warmup
    rates = {"train.lr": t.lr} if run.learns else {}
    if t.rewriter_lr is not None:
        rates["train.rewriter_lr"] = t.rewriter_lr
    for name, rate in rates.items():
        reach = rate * steps * min(1.0, t.iterations / (warm + 1))
        if reach < NO_CHANGE:
            warm_up = f" and a warm-up of {warm} iterations" if warm >= t.iterations else ""
            raise UserError(
                f"{name}: at {rate:g}{warm_up}, {steps} optimizer steps move no weight by more "
                f"than {reach:.0e}, so the run cannot learn; 3e-4 is usual for adapters, 1e-5 for "
                "all weights"
            )
    decay = run.evaluate.average
    if decay is not None and decay**t.iterations > UNMOVED:
        raise UserError(
            f"evaluate.average: after {t.iterations} iterations at {decay}, the average that is "
            f"evaluated and saved is still {decay**t.iterations:.1%} of the base; lower it, to "
            "0.99 for instance, or leave it out"
        )
