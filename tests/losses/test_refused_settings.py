"""Settings that make no loss: one table of the room, with a row for each sentence."""

import math

from flowrl.contrib.fdfo import Quadratic
from flowrl.contrib.text_gppo import GPPO
from flowrl.losses.averages import Decay, Refresh
from flowrl.losses.base import Anchor
from flowrl.losses.distillation import Distillation
from flowrl.losses.divergence import TrustRegion
from flowrl.losses.off_policy import REC, AdvantageRegression
from flowrl.losses.preference import CentredReward, GroupPreference, Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT
from flowrl.losses.reward import RewardGradient
from flowrl.losses.token import CISPO, GMPO, SAPO
from flowrl.losses.weights import HighEntropy, Mismatch, OffPolicyMask
from tests.support.refusals import constructor_refusals, refusal_of

REFUSED = [
    (lambda: Decay(flat=-1), "flat must be at least 0, not -1"),
    (lambda: Decay(start=1.5), "start and most must be in"),
    (lambda: Refresh(0), "not 0 and None"),
    (lambda: Refresh(5, 0.0), r"not 5 and 0\.0"),
    (lambda: Anchor(0.0), "leave the anchor out"),
    (lambda: Surrogate(0.2, 0.2, denominator=0), "constant length"),
    (lambda: Surrogate(0.2, 0.2, entropy=-0.1), "at least 0"),
    (
        lambda: Surrogate(0.2, 0.2, weights=(HighEntropy(share=0.5), HighEntropy(share=0.2))),
        "only once: remove the other selections",
    ),
    (lambda: Surrogate(0.0, 0.2), "clip range"),
    (lambda: Surrogate(1.2, 0.2), "clip range"),
    (lambda: GPPO(low=1.5), "low must be"),
    (lambda: Surrogate(0.2, 0.2, dual=1.1), "dual clip"),
    (lambda: CISPO(high=0.5, low=0.6), "0 <= low < high"),
    (lambda: SAPO(0.0), "above 0"),
    (lambda: GMPO(low=0.0), "above 0"),
    (lambda: TrustRegion(most=0.0), "above 0"),
    (lambda: Quadratic(bound=0.0), "above 0"),
    (lambda: REC(temperature=0.0), r"temperature 0\.0 must be above 0"),
    (lambda: REC(temperature=-1.0), r"temperature -1\.0 must be above 0"),
    (lambda: REC(pull=-0.1), r"its pull -0\.1 at least 0"),
    (lambda: REC(low=0.0), "0 < low <= far_low <= 1"),
    (lambda: REC(low=0.7), "0 < low <= far_low <= 1"),
    (lambda: REC(far_low=1.1), "far_low <= 1"),
    (lambda: REC(high=0.0), "0 < high <= far_high"),
    (lambda: REC(high=2.1), "0 < high <= far_high"),
    (lambda: AdvantageRegression(beta=0.0), "beta must be above 0"),
    (lambda: Preference(0.0), "beta must be above 0"),
    (lambda: NFT(beta=0.0), "beta and advantage_max above 0"),
    (lambda: GroupPreference(4, beta=0.0), "above 0"),
    (lambda: GroupPreference(4, clip_at=0.0), "clip_at must be above 0"),
    (lambda: GroupPreference(4, clip_kl=True), "set both"),
    (lambda: GroupPreference(4, advantage_max=0.0), "advantage_max must be above 0"),
    (lambda: GroupPreference(0), "GroupPreference's group must be at least 1, not 0"),
    (lambda: GroupPreference(4, kl=-1.0), r"GroupPreference's kl must be at least 0, not -1\.0"),
    (lambda: CentredReward(0), "CentredReward's group must be at least 1"),
    (lambda: CentredReward(4, beta=0.0), "CentredReward's beta must be above 0"),
    (lambda: CentredReward(4, advantage_max=-1.0), "advantage_max must be above 0"),
    (lambda: CentredReward(4, temperature=-1.0), "temperature must be at least 0"),
    (lambda: CentredReward(4, kl=-1.0), "at least 0"),
    (lambda: RewardGradient(scale=0.0), "scale of a reward loss must be above 0"),
    (lambda: RewardGradient(bound=math.nan), "bound must be a finite number, not nan"),
    (lambda: Distillation(weight=0.0), "Distillation's weight must be above 0"),
    (lambda: HighEntropy(), "a share or a floor"),
    (lambda: HighEntropy(floor=-0.1), "HighEntropy's floor must be at least 0"),
    (lambda: HighEntropy(share=1.5), "share must be"),
    (lambda: Mismatch(high=0.9), "low < 1 < high"),
    (lambda: OffPolicyMask(0.0), "above 0"),
]


def test_settings_that_make_no_loss_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_of(make, sentence) for make, sentence in REFUSED}
    assert constructor_refusals("flowrl/losses").keys() <= reached
