"""Credit of methods that follow a reward's own gradient: samples are not compared."""

from dataclasses import dataclass

from flowrl.credit.values import Context, Credit


@dataclass(frozen=True)
class Uncompared:
    """The weighted score itself. Samples learn from the slope of their own scores, so a group may
    have one sample; samples without a score are left out."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit
