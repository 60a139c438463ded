"""Laws of rewards."""

from flowrl.errors import UserError
from rewards.checks.self_test import Prompts, check_declared
from rewards.types import Reward


def check_scoring(name: str, reward: Reward, prompts: Prompts | None = None) -> None:
    """Check what a reward says that a score depends on, on test samples of the run's kind.

    per = "sample"   samples scored one by one have the same scores
    per = "group"    so have the samples of a group in another order, and beside another group

    A reward that says nothing, or that may be called only once, is not called; the self-test at a
    run's start checks it. UserError for a reward that breaks what it says.
    """
    try:
        check_declared(name, reward, prompts)
    except ValueError as error:
        raise UserError(str(error)) from error
