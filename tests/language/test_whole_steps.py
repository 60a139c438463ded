"""Whole optimizer steps of a tiny language model beside plain torch: passes over a batch, dual
clip, the REC family, filters. Nothing of ours is below `theirs` but tokens, scores and shares."""

import copy
import math

import pytest
import torch

from flowrl.iteration.minibatches import shares_of
from flowrl.session.progress import Progress
from tests.support import runs, text_runs
from tests.support.iterations import collect, update

LR, GROUP = 0.01, 6


def centred(r):
    return r - r.mean(1, keepdim=True)


def clipped(ratio, a, dual=math.inf):
    gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return -torch.where(a < 0, torch.maximum(gain, dual * a), gain)


def reinforce(kept, pull=0.0):
    def loss(ratio, a):
        r = ratio.detach()
        return torch.where(kept(r, a), -a * ratio.log(), 0.0) + pull * ratio.log() ** 2

    return loss


def one_side(r, a):
    return ((a >= 0) & (r <= 1.02)) | ((a <= 0) & (r >= 0.98))


def ring(r, a):
    back = ((a >= 0) & (r <= 0.9)) | ((a <= 0) & (r >= 1.1))
    return ((r >= 0.98) & (r <= 1.02)) | back


def everything(r, a):
    return torch.ones_like(a, dtype=torch.bool)


def soft(r):
    return r - 0.5 * ((r / 0.5).exp().mean(1, keepdim=True)).log()


def filtered(worst):
    """The best of each group beside the worst, or beside the first other one."""

    def credit(r):
        a, kept = centred(r), torch.zeros_like(r, dtype=torch.bool)
        for row, own in enumerate(r.tolist()):
            best = own.index(max(own))
            others = [i for i in range(GROUP) if i != best]
            kept[row, best] = kept[
                row, min(others, key=own.__getitem__) if worst else others[0]
            ] = 1
        return torch.where(kept, a, math.nan)

    return credit


MEAN = {"name": "standardize", "scale": None}
NARROW = {"low": 0.02, "high": 0.02}
REC = {"name": "text_rec"}
CASES = {
    "epochs": ({"name": "text", "advantage": MEAN}, centred, clipped),
    "dual": (
        {"name": "text", "advantage": MEAN, "loss": {"dual": 1.25}},
        centred,
        lambda ratio, a: clipped(ratio, a, 1.25),
    ),
    "one side": (REC | NARROW, centred, reinforce(one_side)),
    "ring": (
        REC | {"loss": {"keep": "ring", **NARROW, "far_low": 0.1, "far_high": 0.1}},
        centred,
        reinforce(ring),
    ),
    "opmd": (REC | {"keep": "all", "pull": 0.7}, centred, reinforce(everything, 0.7)),
    "asymre": (
        REC | {"keep": "all", "shift": -0.1},
        lambda r: centred(r) + 0.1,
        reinforce(everything),
    ),
    "soft": (
        REC | {"keep": "all", "advantage": {"name": "group_baseline", "soft": 0.5}},
        soft,
        reinforce(everything),
    ),
    "best and random": (
        {"name": "text", "advantage": [MEAN, "best_and"]},
        filtered(False),
        clipped,
    ),
    "best and worst": (
        {"name": "text", "advantage": [MEAN, {"name": "best_and", "other": "worst"}]},
        filtered(True),
        clipped,
    ),
}  # fmt: skip


def keys(rows):
    return [(p, *ids) for p, ids in zip(rows.prompt.tolist(), rows.ids.tolist(), strict=True)]


def theirs(model, shares, contexts, credit, loss, epochs):
    """Steps of AdamW on the mean over the tokens of each share."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-4)

    def log_probabilities(rows):
        each = []
        for prompt, ids, length in zip(rows.prompt, rows.ids, rows.lengths, strict=True):
            context = contexts[int(prompt)]
            text = torch.tensor([[*context, *ids[:length].tolist()]])
            logp = model(input_ids=text).logits[0].float().log_softmax(-1)
            places = torch.arange(len(context), text.shape[1])
            each.append(logp[places - 1, text[0, places]])
        return each

    batches = [[chunk.rows() for chunk in share] for share in shares]
    with torch.no_grad():
        before = [[log_probabilities(rows) for rows in share] for share in batches]
    moved = 0.0
    for _ in range(epochs):
        for share, olds in zip(batches, before, strict=True):
            total, tokens = torch.zeros(()).double(), 0
            for rows, old in zip(share, olds, strict=True):
                for key, was, now in zip(keys(rows), old, log_probabilities(rows), strict=True):
                    a = credit[key]
                    if not math.isnan(a):
                        ratio = (now - was).exp()
                        moved = max(moved, float((ratio.detach() - 1).abs().max()))
                        total = total + loss(ratio, torch.full_like(ratio, a)).sum()
                        tokens += len(now)
            optimizer.zero_grad()
            (total / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return moved


@pytest.mark.quick_cases("soft", "one side", "epochs")
@pytest.mark.parametrize("name", CASES)
def test_whole_steps_are_those_of_plain_torch(name, model, tmp_path):
    recipe, credit, loss = CASES[name]
    tree = text_runs.tree(
        model,
        tmp_path,
        {"length": 12, "group": GROUP, **recipe},
        updates=2,
        epochs=3,
        lr=LR,
        seed=4,
    )
    tree["model"]["dtype"] = "float64"
    session = runs.opened(tree, tmp_path)
    experience = collect(session, 0)
    policy = session.learner.policy
    other = copy.deepcopy(policy.model)  # type: ignore[attr-defined]
    contexts = [policy.encode(p) for p in experience.samples.prompts[::GROUP]]  # type: ignore[attr-defined]
    advantages = credit(experience.scores.values.double().view(-1, GROUP)).flatten()
    (rows,) = experience.rows
    known = dict(zip(keys(rows), advantages.tolist(), strict=True))
    assert len(known) == len(advantages), "no two texts of a prompt are equal"
    shares = shares_of(session.learner, experience, 0)
    metrics = update(session.learner, experience, Progress()).metrics
    moved = theirs(other, shares, contexts, known, loss, 3)
    assert moved > 0.25, "later passes are off the policy that sampled"
    # the sampler's log of a softmax and a log-softmax differ in their last digit, which AdamW
    # enlarges where a gradient is almost 0
    for ours, own in zip(policy.model.parameters(), other.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(ours, own, atol=3e-5, rtol=0)
    assert metrics["ratio_max"] - 1 > 0.02
