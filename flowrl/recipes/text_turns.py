"""Recipes of language models with credit for single turns, or for steps of a completion.

The common rules and settings of `flowrl/recipes/text.py` hold here too.
"""

from flowrl.algorithm import Algorithm
from flowrl.credit.process import GroupReturns, Information, MinReturns
from flowrl.credit.turns import Discount, States, Turns, WhitenTurns
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import GROUP, sampling_settings, texts


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
    authors' code builds; the length is our choice."""
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, group, (States(weight, gamma, scale),), loss)


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
    are our choice."""
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, group, (Discount(gamma), WhitenTurns()), loss)


@sampling_settings()
def text_process(
    *, length: int = 1024, group: int = 64, gamma: float = 1.0, outcome: bool = False,
    soft_min: float | None = None, clip: float = 0.2, kl: float = 0.04,
) -> Algorithm:  # fmt: skip
    """GRPO with process supervision, arXiv:2402.03300 (4.1.3): each step's reward is standardised
    among all steps of the group, and a token's advantage is the sum over its own and later steps.
    Needs `model.steps` with `intermediate_rewards`, or `model.environment` with rewards of turns.

    outcome   adds the completion's score to the reward of its last step
    gamma     discounts later steps
    soft_min  PURE's min-form credit, arXiv:2504.15275, instead: rewards weighted by
              softmax(-reward / soft_min) over the steps (0.1 there), no std and no discount

    Sums of step rewards invite many steps: watch `text/steps`. The std divides by n - 1."""
    loss = Surrogate(clip, clip, anchors=anchors(kl), denominator="rows")
    process = GroupReturns(gamma, outcome)
    credit = process if soft_min is None else MinReturns(soft_min, outcome)
    return texts(length, group, (credit,), loss)


@sampling_settings()
def text_igpo(
    *, length: int = 4096, group: int = 8, answer: str = "answer", before: str = "",
    gamma: float = 1.0, clip: float = 0.2, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """IGPO, arXiv:2510.14967: a turn is rewarded by what it adds to the policy's own probability
    of the right answer, the last one by the outcome. All these rewards of a group are standardised
    together, and a turn's advantage is their discounted sum from it on. Needs `model.environment`,
    or `model.steps`.

    answer  column of the prompt file with the right answer
    before  text between the transcript and that answer

    A probability is the geometric mean over the answer's tokens, at temperature 1. The numbers are
    ours."""
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    credit = GroupReturns(gamma, True, Information(answer, before))
    return texts(length, group, (credit,), loss)
