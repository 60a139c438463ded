"""Credit for methods that use the reward's own gradient: samples are not compared."""

from dataclasses import dataclass

from flowrl.credit.values import Context, Credit


@dataclass(frozen=True)
class Uncompared:
    """The weighted score without a comparison. Samples learn from the gradients of their own
    scores, so a group may have one sample; unscored samples are left out."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit
