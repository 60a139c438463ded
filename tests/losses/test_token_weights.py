"""Factors on the policy term: stale rows, dull tokens, and another engine's samples."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.likelihoods.rows import Evaluation
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.token_ratios import bounded, mismatch
from flowrl.losses.base import Anchor
from flowrl.losses.ratio import Surrogate
from flowrl.losses.weights import HighEntropy, Mismatch, OffPolicyMask
from tests.losses.test_token_losses import rows, says


def test_off_policy_masks_bad_samples_only():
    made, given = rows(), says()
    drift = torch.tensor([[0.3], [-0.3], [0.3], [0.0]], dtype=torch.float64)
    logp = given["old"].logp - drift
    sign = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]], dtype=torch.float64)
    made = replace(made, advantage=sign.expand_as(made.advantage))
    kept, _ = OffPolicyMask(0.2)({**given, "new": Evaluation(logp, None)}, made)
    assert kept[:, 0].tolist() == [0, 1, 1, 1], "far and bad; towards it; far but good"
    made = replace(made, sampled=given["old"].logp - 0.2)  # another engine's say counts instead
    kept, _ = OffPolicyMask(0.2)({**given, "new": Evaluation(logp, None)}, made)
    assert kept[:, 0].tolist() == [1, 1, 1, 1]


def test_high_entropy_keeps_the_most_uncertain_share():
    made, given = rows(), says()
    entropy = given["new"].out
    kept, _ = HighEntropy(share=1 / 3)(given, made)
    top = entropy[made.mask].sort(descending=True).values[:3]
    assert torch.equal(kept.bool(), (entropy >= top[-1]) & made.mask)
    kept, _ = HighEntropy(floor=0.5)(given, made)
    assert torch.equal(kept.bool(), (entropy >= 0.5) & made.mask)
    none = replace(made, mask=torch.zeros_like(made.mask))
    assert HighEntropy(share=0.5)(given, none)[0].eq(0).all()


def test_another_engines_mismatch_weighs_the_policy_term_only():
    made, given = rows(), says()
    engine = given["old"].logp - 0.3
    engine[0, 1] = float("nan")  # it did not score this token
    made = replace(made, sampled=engine)
    token = mismatch(given["old"].logp, engine, made.mask, "token")
    assert token[0].tolist() == pytest.approx([math.exp(0.3), 1.0, *[math.exp(0.3)] * 2])
    row = mismatch(given["old"].logp, engine, made.mask, "sequence")
    assert row[:, 0].tolist() == pytest.approx([math.exp(0.9), math.exp(0.6), math.exp(0.9), 1.0])
    assert bounded(row, "truncate", 0.0, 2.0)[:, 0].tolist() == pytest.approx(
        [2, math.exp(0.6), 2, 1]
    )
    assert bounded(row, "mask", 0.0, 2.0)[:, 0].tolist() == pytest.approx([0, math.exp(0.6), 0, 1])
    anchors = (Anchor(0.3),)
    plain = Surrogate(0.2, 0.2, anchors=anchors)(Token(), given, made)
    weighed = Surrogate(
        0.2, 0.2, anchors=anchors, weights=(Mismatch("sequence", "truncate", 2.0),)
    )(Token(), given, made)
    kl = 0.3 * weighed.metrics["kl"]
    factor = torch.tensor([2.0, math.exp(0.6), 2.0, 1.0], dtype=torch.float64)[:, None]
    want = (plain.value - kl) * factor + kl
    torch.testing.assert_close(weighed.value[made.mask], want[made.mask])
    assert weighed.metrics["mismatch"][0].tolist() == pytest.approx([0.3, 0, 0.3, 0.3])
    same = replace(made, sampled=None)
    free = Surrogate(0.2, 0.2, weights=(Mismatch(),))(Token(), given, same)
    assert free.metrics["mismatch_weight"][same.mask].eq(1).all()


@pytest.mark.parametrize(("mode", "said"), [("truncate", "truncated"), ("mask", "masked")])
def test_the_share_beyond_a_bound_has_the_name_of_what_happens_to_it(mode, said):
    made, given = rows(), says()
    engine = given["old"].logp - torch.tensor([[0.9], [0.1], [-0.9], [0.1]], dtype=torch.float64)
    weight = Mismatch("token", mode, high=2.0, low=0.5)
    factor, metrics = weight(given, replace(made, sampled=engine))
    seen = factor[made.mask].numpy()
    effective = np.square(seen.sum()) / (len(seen) * np.square(seen).sum())  # 1 if all are alike
    assert effective < 0.99
    assert metrics["mismatch_effective"].unique().item() == pytest.approx(effective)
    outside = torch.tensor([True, False, True, False])[:, None] & made.mask
    for name in ("truncated", "masked"):
        expected = outside if name == said else torch.zeros_like(outside)
        assert torch.equal(metrics[f"mismatch_{name}"].bool() & made.mask, expected)
