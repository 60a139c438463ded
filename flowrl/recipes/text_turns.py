"""Recipes of language models with credit for single turns, or for steps of a completion.

The common rules and settings of `flowrl/recipes/text.py` hold here too.
"""

from flowrl.algorithm import Algorithm
from flowrl.credit.process import GroupReturns, MinReturns
from flowrl.credit.turns import States, Turns
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import GROUP, sampling_settings, texts


@rests_on("code")
@sampling_settings()
def text_gigpo(
    *, length: int = 4096, group: int = 8, weight: float = 1.0, gamma: float = 0.95,
    scale: bool = False, clip: float = 0.2, kl: float = 0.01,
) -> Algorithm:  # fmt: skip
    """GiGPO, arXiv:2505.10978, eqs. 3 to 8: the group's advantage plus `weight` times the advantage
    among all turns of a prompt in the same state, with returns discounted by 0.95 per turn. 8
    completions per prompt, KL 0.01 to the initial policy (k3). Needs `model.environment`.

    The environment names states, or its reply is the state; its turn rewards are part of returns
    and, summed, of the outcome. `scale` divides both parts by their std; the published code has
    both forms, and by default does not divide.

    Differences: a trajectory counts once in its group's mean, as in the paper, whose code counts it
    once per turn; states must be identical, not similar; there is no penalty for invalid actions (a
    reward may add one). The clip range of 0.2 and the mean over tokens come from verl, on which the
    authors' code builds; the length is our choice.

    weight  weight of the advantage among turns in the same state, at least 0; 0 leaves the group's
            advantage alone
    gamma   discount of later rewards per turn, in [0, 1]; smaller credits a turn more for what
            directly follows it
    scale   whether both advantages are divided by their standard deviation
    """
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, group, (States(weight, gamma, scale),), loss)


@rests_on("paper")
@sampling_settings()
def text_turns(
    *, length: int = 4096, group: int = 8, clip: float = 0.2, kl: float = 0.0
) -> Algorithm:
    """Each turn is compared with the same turn of the other samples that reach it: the groups of
    AT-GRPO, arXiv:2510.11062, for one agent. A turn that no other sample of the prompt reaches is
    not trained. Needs `model.environment`.

    A turn's value is the outcome plus the environment's reward for the turn.

    Differences: the paper samples a group's turns from one history; here trajectories are
    independent. The numbers are our choice."""
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, group, (Turns(), GROUP), loss)


@rests_on("paper")
@sampling_settings()
def text_process(
    *, length: int = 1024, group: int = 64, gamma: float = 1.0, outcome: bool = False,
    soft_min: float | None = None, clip: float = 0.2, kl: float = 0.04,
) -> Algorithm:  # fmt: skip
    """GRPO with process supervision, arXiv:2402.03300 (4.1.3): each step's reward is standardised
    among all steps of the group, and a token's advantage is the sum over its own and later steps.
    Needs `model.steps` with `intermediate_rewards`, or `model.environment` with rewards of turns.

    Sums of step rewards invite many steps: watch `text/steps`. The std divides by n - 1.

    gamma     discount of later steps' rewards per step, in [0, 1]; 1 counts all of them fully; no
              effect with `soft_min`
    outcome   adds the completion's score to the reward of its last step
    soft_min  temperature, above 0, of PURE's min-form credit, arXiv:2504.15275, in place of the
              sum: rewards weighted by softmax(-reward / soft_min) over the steps (0.1 there), no
              std and no discount; smaller counts only the worst step
    """
    loss = Surrogate(clip, clip, anchors=anchors(kl), denominator="rows")
    process = GroupReturns(gamma, outcome)
    credit = process if soft_min is None else MinReturns(soft_min, outcome)
    return texts(length, group, (credit,), loss)
