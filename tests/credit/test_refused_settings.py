"""Settings that make no credit: one table of the room, with a row for each sentence."""

from flowrl.credit.advantages import Clip, GroupBaseline, Rescale
from flowrl.credit.augmented import Augmented
from flowrl.credit.novelty import Novelty
from flowrl.credit.prompt_weights import PromptWeight
from flowrl.credit.proxies import ProxyGate
from flowrl.credit.selection import MaxVariance
from flowrl.credit.steps import EvenGradients
from flowrl.credit.success import PassAtK
from flowrl.credit.trackers import PromptValues, StartValues
from flowrl.credit.turns import Penalize
from tests.support.refusals import constructor_refusals, refusal_of

REFUSED = [
    (lambda: GroupBaseline(soft=0.0), "temperature must be above 0"),
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
    (lambda: PromptValues(keep=1.0), "keep must be in"),
    (lambda: StartValues(samples=0), "samples must be at least 1"),
    (lambda: StartValues(soft=0.0), "soft above 0"),
    (lambda: Penalize(0.0), "leave the penalty out"),
]


def test_settings_that_make_no_credit_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_of(make, sentence) for make, sentence in REFUSED}
    assert constructor_refusals("flowrl/credit").keys() <= reached
