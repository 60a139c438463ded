"""Settings that make no credit: one table of the room, with a row for each sentence."""

import math

from flowrl.credit.advantages import Clip, GroupBaseline, Rescale, Standardize
from flowrl.credit.augmented import Augmented
from flowrl.credit.comparisons import Exponential, PruneWidth, TwoLevel
from flowrl.credit.novelty import Novelty
from flowrl.credit.process import GroupReturns, MinReturns
from flowrl.credit.prompt_weights import PromptWeight
from flowrl.credit.proxies import GateShare, ProxyGate
from flowrl.credit.selection import DropFlat, MaxVariance
from flowrl.credit.steps import EvenDepths, EvenGradients
from flowrl.credit.success import BestGap, BetaNormalize, MaxRL, PassAtK
from flowrl.credit.trackers import PromptValues, StartValues
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import Discount, GreedyBaseline, Penalize, States, WhitenTokens
from flowrl.credit.values import LikelyPaths
from tests.support.refusals import constructor_refusals, refusal_of

REFUSED = [
    (lambda: GroupBaseline(soft=0.0), "temperature must be above 0"),
    (lambda: GroupBaseline(shift=math.inf), "shift must be a finite number, not inf"),
    (lambda: Standardize(correction=-1), "correction must be at least 0"),
    (lambda: Standardize(eps=-1e-4), "eps must be at least 0"),
    (lambda: Standardize(trim=1.0), r"trim must be in \[0, 1\), not 1"),
    (lambda: Standardize(blend=-0.5), "blend must be at least 0"),
    (lambda: Clip(0.0), "every advantage would be 0"),
    (lambda: Rescale(0.0), "every advantage would be 0 or infinite"),
    (lambda: Augmented(low=-0.1), "low and high must be at least 0"),
    (lambda: Novelty(weight=1.5), "weight must be from 0 to 1"),
    (lambda: PromptWeight(""), "name of a column of the prompt file"),
    (lambda: ProxyGate(()), "name one in auxiliary"),
    (lambda: ProxyGate(("one",), 1.0), "share must be between 0 and 1, not 1"),
    (lambda: MaxVariance(1), "one sample has no variance"),
    (lambda: EvenGradients(share=0.0), "share of the steps must be in"),
    (lambda: PassAtK(0), "must be at least 1, not 0"),
    (lambda: PassAtK(2, eps=-1.0), "PassAtK's eps must be at least 0"),
    (lambda: MaxRL(floor=-0.1), "floor must be at least 0"),
    (lambda: MaxRL(eps=-0.1), "MaxRL's eps must be at least 0"),
    (lambda: BestGap(eps=-0.1), "BestGap's eps must be at least 0"),
    (lambda: BetaNormalize(most=0.0), "most must be above 0"),
    (lambda: BetaNormalize(correction=-1), "correction must be at least 0"),
    (lambda: TwoLevel(siblings=-1.0), "siblings must be at least 0"),
    (lambda: TwoLevel(group=-1.0), "group must be at least 0"),
    (lambda: Exponential(rate=-1.0), "rate must be at least 0"),
    (lambda: PruneWidth("branch", fraction=0.0), r"fraction must be in \(0, 1\]"),
    (lambda: GroupReturns(gamma=1.5), r"gamma must be in \[0, 1\], not 1\.5"),
    (lambda: GroupReturns(eps=-1.0), "GroupReturns's eps must be at least 0"),
    (lambda: MinReturns(temperature=0.0), "temperature must be above 0"),
    (lambda: GateShare(("one",), 1.0), r"GateShare's share must be in \(0, 1\)"),
    (lambda: DropFlat(-0.1), "least must be at least 0"),
    (lambda: EvenDepths(math.nan), "power must be a finite number"),
    (lambda: GlobalLocal(power=math.inf), "power must be a finite number"),
    (lambda: GlobalLocal(eps=-1.0), "GlobalLocal's eps must be at least 0"),
    (lambda: LikelyPaths(-1.0), "beta must be at least 0"),
    (lambda: PromptValues(keep=1.0), "keep must be in"),
    (lambda: PromptValues(prior=math.nan), "prior must be a finite number"),
    (lambda: StartValues(samples=0), "samples must be at least 1"),
    (lambda: StartValues(soft=0.0), "soft above 0"),
    (lambda: Penalize(0.0), "leave the penalty out"),
    (lambda: WhitenTokens(eps=-1.0), "WhitenTokens's eps must be at least 0"),
    (lambda: GreedyBaseline(1), "samples must be at least 2"),
    (lambda: Discount(gamma=-1.0), r"gamma must be in \[0, 1\], not -1\.0"),
    (lambda: States(weight=-1.0), "weight must be at least 0"),
    (lambda: States(gamma=2.0), r"States's gamma must be in \[0, 1\]"),
    (lambda: States(eps=-1.0), "States's eps must be at least 0"),
]


def test_settings_that_make_no_credit_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_of(make, sentence) for make, sentence in REFUSED}
    assert constructor_refusals("flowrl/credit").keys() <= reached
