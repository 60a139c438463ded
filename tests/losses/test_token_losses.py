"""Losses on tokens, each by an independent formula, and what its gradient does."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.contrib.text_gppo import GPPO
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, TokenRows, take
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.token_ratios import divergence, log_ratio
from flowrl.losses.base import Anchor, Counts, RatioLoss, reduced
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import CISPO, GMPO, SAPO, VESPO, Reinforce

LENGTHS = (4, 2, 3, 0)


def rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, **changes: object) -> TokenRows:
    rng = torch.Generator().manual_seed(seed)
    b, t = len(lengths), max(lengths)
    count = torch.tensor(lengths)
    made = TokenRows(
        torch.arange(b), torch.randn(b, t, generator=rng, dtype=torch.float64),
        torch.arange(t) < count[:, None], None, torch.zeros(b, t, dtype=torch.long), count, 1.0,
        None,
    )  # fmt: skip
    return replace(made, **changes)


def says(lengths: tuple[int, ...] = LENGTHS, apart: float = 0.4) -> dict[str, Evaluation]:
    """Evaluations of three policies; what stands at padding is large, and must not be read."""
    rng = torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths))
    old = -torch.rand(shape, generator=rng, dtype=torch.float64) - 0.2
    new, ref = (
        old + apart * torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2)
    )
    entropy = torch.rand(shape, generator=rng, dtype=torch.float64)
    padding = ~(torch.arange(shape[1]) < torch.tensor(lengths)[:, None])
    old[padding], new[padding], ref[padding], entropy[padding] = -900.0, 900.0, 0.0, 50.0
    new.requires_grad_()
    return {
        "new": Evaluation(new, entropy),
        "old": Evaluation(old, None),
        "ref": Evaluation(ref, None),
    }


def loss_of(loss: RatioLoss, made: TokenRows, given: dict, level: str = "token") -> Tensor:
    entries = loss(Token(ratio=level), given, made)
    return reduced(entries, made.mask, Counts.of([made.mask]))


def by_hand(entry, made: TokenRows, given: dict, kind: str = "tokens") -> float:
    """Loop over tokens: `entry(r, A, log p, row)` in plain floats, averaged as `kind` says."""
    new, old = (given[role].logp.detach().numpy() for role in ("new", "old"))
    per_row = []
    for i, n in enumerate(made.lengths.tolist()):
        a = made.advantage[i].numpy()
        r = np.exp(new[i, :n] - old[i, :n])
        per_row.append([entry(r[j], a[j], new[i, j], r) for j in range(n)])
    kept = [row for row in per_row if row]
    if kind == "rows":
        return float(np.mean([np.mean(row) for row in kept]))
    total = sum(map(sum, kept))
    if kind == "tokens":
        return total / sum(map(len, kept))
    return total / (len(kept) * (1 if kind == "sequences" else kind))


def ppo(low: float, high: float):
    return lambda r, a, logp, row: -min(r * a, np.clip(r, 1 - low, 1 + high) * a)


@pytest.mark.parametrize("kind", ["tokens", "rows", "sequences", 7])
def test_every_average_of_the_surrogate(kind):
    made, given = rows(), says()
    got = loss_of(Surrogate(0.2, 0.3, denominator=kind), made, given)
    assert got.item() == pytest.approx(by_hand(ppo(0.2, 0.3), made, given, kind))


FORMULAS = {
    "cispo": (
        CISPO(high=1.2, low=0.9),
        lambda r, a, logp, row: -np.clip(r, 0.9, 1.2) * a * logp,
        "tokens",
    ),
    "sapo": (
        SAPO(1.0, 1.05),
        lambda r, a, logp, row: (
            -a * 4 / (t := 1.0 if a > 0 else 1.05) / (1 + math.exp(-t * (r - 1)))
        ),
        "rows",
    ),
    "gmpo": (
        GMPO(0.1, 0.2),
        lambda r, a, logp, row: (
            -a
            * math.exp(
                np.mean([min(x, 0.2) if a > 0 else max(x, -0.1) for x in np.log(row)])
            )
        ),
        "rows",
    ),
    "reinforce": (Reinforce(), lambda r, a, logp, row: -a * logp, "tokens"),
    "gppo": (GPPO(0.2, 0.3), ppo(0.2, 0.3), "tokens"),
    "vespo": (
        VESPO(),
        lambda r, a, logp, row: (
            -a * logp * np.prod(row) ** (2 if a >= 0 else 3)
            * math.exp((3 if a >= 0 else 2) * (1 - np.prod(row)))
        ),
        "tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_by_their_formulas(name):
    loss, entry, kind = FORMULAS[name]
    made, given = rows(), says()
    if name == "gmpo":  # a row is one action, with one advantage
        made = replace(made, advantage=made.advantage[:, :1].expand_as(made.mask))
    got = loss_of(loss, made, given)
    assert got.item() == pytest.approx(by_hand(entry, made, given, kind))
    (grad,) = torch.autograd.grad(got, given["new"].logp)
    assert grad[~made.mask].eq(0).all() and grad.isfinite().all(), "padding has no say"


RATIOS = [CISPO(), SAPO(), VESPO(), GMPO(), GPPO(), Reinforce(), Surrogate(0.2, 0.2)]


@pytest.mark.parametrize("loss", RATIOS, ids=lambda loss: type(loss).__name__)
def test_the_first_gradient_is_reinforces(loss):
    """Where new and old agree, every loss moves along -A grad log p; GMPO with the mean of A."""
    made, given = rows(), says(apart=0.0)
    if isinstance(loss, GMPO):
        made = replace(made, advantage=made.advantage[:, :1].expand_as(made.mask))
    (grad,) = torch.autograd.grad(loss_of(loss, made, given), given["new"].logp)
    counts = made.mask.sum(1, keepdim=True)
    share = 1 / made.mask.sum() if loss.denominator == "tokens" else 1 / (3 * counts.clamp(min=1))
    torch.testing.assert_close(grad, -made.advantage * made.mask * share)


def test_gppo_keeps_a_bounded_gradient_where_the_surrogate_has_none():
    made = rows((2, 2), advantage=torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64))
    logp = torch.tensor([[0.5, 0.01], [-0.5, 0.01]], dtype=torch.float64, requires_grad=True)
    given = {"new": Evaluation(logp, None), "old": Evaluation(torch.zeros_like(logp), None)}

    def grads(loss: RatioLoss) -> Tensor:
        return torch.autograd.grad(loss_of(loss, made, given) * 4, logp)[0]

    hard, soft = grads(Surrogate(0.2, 0.3)), grads(GPPO(0.2, 0.3))
    assert hard[0, 0] == 0 == hard[1, 0]
    assert soft[0, 0].item() == pytest.approx(-1.3) and soft[1, 0].item() == pytest.approx(0.8)
    torch.testing.assert_close(hard[:, 1], soft[:, 1])
    half = grads(GPPO(0.2, 0.3, keep_low=0.0, keep_high=0.5))
    assert half[0, 0].item() == pytest.approx(-0.65) and half[1, 0] == 0


def test_levels_of_a_ratio():
    made, given = rows(), says()
    new, old = given["new"].logp, given["old"].logp
    each = torch.where(made.mask, (new - old).detach(), 0.0)
    mean = each.sum(1, keepdim=True) / made.mask.sum(1, keepdim=True).clamp(min=1)
    want = {
        "token": each,
        "sequence": mean * made.mask,
        "sequence_token": mean * made.mask,
        "product": each.sum(1, keepdim=True) * made.mask,
    }
    for level, value in want.items():
        got = log_ratio(new, old, made.mask, level)
        torch.testing.assert_close(torch.where(made.mask, got, 0.0), value, msg=level)
    first = torch.zeros_like(each)
    first[0, 0] = 1.0
    for level, spread in (("sequence", 1 / 4), ("sequence_token", 0.0), ("product", 1.0)):
        (grad,) = torch.autograd.grad(
            (log_ratio(new, old, made.mask, level) * first).sum(), new, retain_graph=True
        )
        own = spread if level != "sequence_token" else 1.0
        assert grad[0, 0].item() == pytest.approx(own) and grad[0, 1].item() == spread, level


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_estimates_of_a_divergence(estimate):
    """Over a whole vocabulary: means of k1 and k3 are exact; gradients are what the text says."""
    rng = torch.Generator().manual_seed(2)
    logits, other = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), other.log_softmax(0)
    p, q = logp.exp(), ref.exp()
    kl, back = exact_kl(p, q), exact_kl(q, p)
    (forward,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (backward,) = torch.autograd.grad(back, logits, retain_graph=True)
    each = divergence(logp[None], ref[None], estimate)[0]
    mean = (p.detach() * each).sum()
    if estimate != "k2":
        assert mean.item() == pytest.approx(kl.item())
    (grad,) = torch.autograd.grad(mean, logits, retain_graph=True)
    want = {"k1": torch.zeros_like(forward), "k2": forward, "k3": backward}[estimate]
    torch.testing.assert_close(grad, want)
    corrected = (p.detach() * (logp - logp.detach()).exp() * each).sum()
    (grad,) = torch.autograd.grad(corrected, logits)
    if estimate != "k2":
        torch.testing.assert_close(grad, forward)


def test_a_corrected_anchor_is_multiplied_by_the_ratio():
    made, given = rows(), says()
    plain, corrected = (
        Surrogate(0.2, 0.2, anchors=(Anchor(0.5, corrected=c),)) for c in (False, True)
    )
    assert corrected.roles == {"old", "ref"}
    base = Surrogate(0.2, 0.2)(Token(), given, made).value
    kl = plain(Token(), given, made).value - base
    ratio = (given["new"].logp - given["old"].logp).exp()
    got = corrected(Token(), given, made).value - base
    torch.testing.assert_close(got[made.mask], (kl * ratio)[made.mask])


def test_the_entropy_bonus_is_a_mean_over_tokens_whatever_the_denominator():
    made, given = rows(), says()
    entropy = given["new"].out.clone().requires_grad_()
    given["new"] = given["new"]._replace(out=entropy)
    for kind in ("tokens", "rows", 9):
        loss = Surrogate(0.2, 0.2, entropy=0.1, denominator=kind)
        (grad,) = torch.autograd.grad(loss_of(loss, made, given), entropy)
        torch.testing.assert_close(grad, -0.1 * made.mask.double() / made.mask.sum())
    with pytest.raises(UserError, match=r"Token\(entropy=True\)"):
        loss_of(loss, made, {**given, "new": Evaluation(given["new"].logp, None)})


def test_online_dpo_reads_whole_completions():
    made, given = rows((3, 2)), says((3, 2))
    gains = ((given["new"].logp - given["ref"].logp) * made.mask).sum(1)
    entries = Preference(0.1)(Token(paired=True), given, made)
    got = reduced(entries, made.mask, Counts.of([made.mask]))
    want = math.log(1 + math.exp(-0.1 * (gains[0] - gains[1]).item()))
    assert got.item() == pytest.approx(want)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["tokens", "rows", "sequences", 11]))
def test_chunks_do_not_change_a_loss(seed, kind):
    """A step's loss is the sum of its chunks' shares, however its rows are cut."""
    made, given = rows(seed=seed), says()
    loss = Surrogate(0.2, 0.3, denominator=kind, entropy=0.05)
    counts = Counts.of([made.mask])
    whole = reduced(loss(Token(), given, made), made.mask, counts)
    parts = 0.0
    for i in range(len(made.mask)):
        one = take(made, torch.tensor([i]))
        own = {
            role: Evaluation(*(None if p is None else p[i : i + 1] for p in said))
            for role, said in given.items()
        }
        parts = parts + reduced(loss(Token(), own, one), one.mask, counts)
    assert parts.item() == pytest.approx(whole.item(), abs=1e-12)
