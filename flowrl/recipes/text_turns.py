"""Recipes whose credit tells the turns of a text apart: for runs with `model.environment`.

`flowrl/recipes/text.py` says what all recipes of language models share. Rewards are of whole texts,
so a turn's return is the outcome, discounted by the turns that follow where a recipe says so.
"""

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, Standardize, Transform
from flowrl.credit.turns import Discount, States, Turns, WhitenTurns
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.text import anchors
from samplers.completions import Completions


def text_gigpo(
    *, length: int = 4096, group: int = 8, weight: float = 1.0, gamma: float = 0.95,
    scale: bool = False, clip: float = 0.2, kl: float = 0.01, temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """GiGPO, arXiv:2505.10978, eqs. 3 to 8: the group's advantage plus `weight` times the one among
    all turns of a prompt that were taken in the same state, whose returns are discounted by 0.95 a
    turn. 8 completions a prompt, KL 0.01 to the start (k3).

    States are what the environment names, or its reply. `scale` divides both parts by their std;
    the published code has both forms, and its default is without.

    Differences: a trajectory counts once in its group's mean, as in the paper, whose code counts it
    once a turn; states are the same or not, never similar; no penalty of invalid actions (a reward
    may have one). A clip range of 0.2 and the mean over tokens are those of verl, on which that
    code builds; the length is ours.
    """
    return _turned(
        (States(weight, gamma, scale),), Completions(group, temperature, top_p), length, clip, kl
    )


def text_turns(
    *, length: int = 4096, group: int = 8, clip: float = 0.2, kl: float = 0.0,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """A turn is compared with the same turn of the samples that have it: the groups of AT-GRPO,
    arXiv:2510.11062, for one agent. A turn that no other sample of the prompt has teaches nothing.

    Differences: there a group's turns are drawn from one history, several at a time, and have
    rewards of their own; here trajectories are drawn apart, and all turns have the outcome. The
    numbers are ours.
    """
    rules = (Turns(), Standardize("group", correction=1))
    return _turned(rules, Completions(group, temperature, top_p), length, clip, kl)


def text_rebn(
    *, length: int = 4096, group: int = 8, gamma: float = 0.9, clip: float = 0.2, kl: float = 0.0,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """REINFORCE with return batch normalisation (GEM, arXiv:2510.01051): returns of turns,
    discounted by `gamma`, less their mean over all turns of the batch, over their std. No groups:
    `group` completions of a prompt are only drawn together. 0.9 is what GEM's own example takes.

    Differences: the outcome is the last turn's reward, and no other turn has one. A clipped ratio
    (with `train.updates: 1` it is REINFORCE). The other numbers are ours.
    """
    rules = (Discount(gamma), WhitenTurns())
    return _turned(rules, Completions(group, temperature, top_p), length, clip, kl)


def _turned(
    rules: tuple[Transform, ...], plan: Completions, length: int, clip: float, kl: float
) -> Algorithm:
    return Algorithm(
        steps=length,
        plan=plan,
        advantage=Estimator(rules),
        likelihood=Token(),
        loss=Surrogate(clip, clip, anchors=anchors(kl), denominator="tokens"),
    )
