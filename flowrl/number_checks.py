"""Refusal of numbers that can mean nothing, for parts of credit, likelihoods and losses."""

from flowrl.errors import UserError
from samplers.number_ranges import NumberRange


def check_number(setting: str, value: float | None, within: NumberRange) -> None:
    """UserError, naming the setting and the range, for a value outside of it, NaN or infinity.
    None stands for a setting that is left out, and passes."""
    if sentence := within.refusal(setting, value):
        raise UserError(sentence)
