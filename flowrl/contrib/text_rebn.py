"""REINFORCE with return batch normalisation, of turns."""

from dataclasses import dataclass

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches
from flowrl.credit.turns import Discount
from flowrl.credit.values import Context, Credit, existing
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import sampling_settings, texts
from samplers.number_ranges import AT_LEAST_0


@dataclass(frozen=True)
class WhitenTurns:
    """Values standardised over all decisions of the batch: GEM (arXiv:2510.01051).

        A = (value - batch mean) / (batch std + eps)

    There are no groups, since single turns of different samples are not comparable.
    """

    by_turn = True
    eps: float = 1e-9

    def __post_init__(self) -> None:
        check_number("WhitenTurns's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, mask = credit = existing(credit, context)
        standardize = Standardize("batch", centre="batch", eps=self.eps)
        return credit._replace(value=standardize.rule(value, mask) * mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@rests_on("paper")
@sampling_settings()
def text_rebn(
    *, length: int = 4096, group: int = 8, gamma: float = 0.9, clip: float = 0.2, kl: float = 0.0
) -> Algorithm:
    """REINFORCE with return batch normalisation (GEM, arXiv:2510.01051): returns of turns,
    discounted by `gamma`, minus their mean over all turns of the batch, divided by their std. There
    are no groups: the `group` completions of a prompt are merely sampled together. 0.9 is GEM's own
    example. Needs `model.environment`.

    The outcome is a reward of the last turn; the environment may reward any turn.

    Differences: the ratio is clipped (with `train.updates: 1` it is REINFORCE). The other numbers
    are our choice.

    group  completions per prompt that are sampled together, at least 2; they are not compared with
           each other
    gamma  discount of later rewards per turn, in [0, 1]; smaller credits a turn more for what
           directly follows it
    """
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, group, (Discount(gamma), WhitenTurns()), loss)
