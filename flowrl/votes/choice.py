"""The pairs of samples that a run asks about: at random, or those whose votes say most.

k candidate pairs, d features. The next vote on a pair has three outcomes whose probabilities depend
on the difference m of its scores, about which the posterior is normal. Its mutual information with
the weights w is H(E p(m)) - E H(p(m)), since the vote depends on w by m alone (Houlsby et al.
2011, arXiv:1112.5745, equation 2). Both expectations are quadratures over m.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rewards.fitted.davidson import VoteModel

NODES = 32  # of the Gauss-Hermite quadrature
RANDOM_SHARE = 0.25  # of the votes, where the others are uncertain
MOST_CANDIDATES = 20_000  # pairs that are compared; more are drawn down to these


def candidate_pairs(groups: Sequence[int]) -> Int[np.ndarray, "k 2"]:
    """All pairs of samples of the same group."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    pairs = [
        (a, b)
        for of_prompt in rows.values()
        for i, a in enumerate(of_prompt)
        for b in of_prompt[i + 1 :]
    ]
    return np.array(pairs, dtype=int).reshape(-1, 2)


def vote_information(
    mean: Float[np.ndarray, " k"], deviation: Float[np.ndarray, " k"], log_nu: float
) -> Float[np.ndarray, " k"]:
    """Mutual information, in nats, of a vote and the weights, for differences of scores with this
    mean and posterior standard deviation."""
    node, weight = np.polynomial.hermite_e.hermegauss(NODES)
    weight = weight / weight.sum()
    margin = mean[:, None] + deviation[:, None] * node
    three = np.stack([margin / 2, -margin / 2, np.full_like(margin, log_nu)], 2)
    log_p = three - np.logaddexp.reduce(three, axis=2, keepdims=True)
    p = np.exp(log_p)
    inside = -(p * np.where(p > 0, log_p, 0)).sum(2) @ weight
    mixed = np.einsum("kqv,q->kv", p, weight)
    outside = -(mixed * np.log(np.maximum(mixed, np.finfo(float).tiny))).sum(1)
    return np.maximum(outside - inside, 0.0)


def most_uncertain(
    model: VoteModel, x: Float[np.ndarray, "k d"], count: int
) -> tuple[list[int], list[float]]:
    """Greedily choose pairs by `vote_information`; after each choice the posterior's covariance is
    that after a vote with the expected information about m. `x` are differences of scaled features.
    Returns the places of the pairs, and their information."""
    mean = x @ model.weight
    variance = model.deviation(x) ** 2
    chosen, informations, updates = list[int](), list[float](), list[np.ndarray]()
    for _ in range(min(count, len(x))):
        gain = vote_information(mean, np.sqrt(variance), model.log_nu)
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        informations.append(float(gain[best]))
        direction = _covariance_with(model, x[best])
        for update in updates:
            direction = direction - update * (update @ x[best])
        fisher = _fisher(mean[best], model.log_nu)
        scale = fisher / (1 + fisher * variance[best])
        updates.append(direction * scale**0.5)
        variance = np.maximum(variance - (x @ updates[-1]) ** 2, 0.0)
    return chosen, informations


def _covariance_with(model: VoteModel, x: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """The posterior's covariance times x."""
    inside = x @ model.basis
    within = model.basis @ (model.spread @ (model.spread.T @ inside))
    return within + (x - model.basis @ inside) / model.ridge


def _fisher(margin: float, log_nu: float) -> float:
    """Fisher information of a vote about m."""
    three = np.array([margin / 2, -margin / 2, log_nu])
    p = np.exp(three - np.logaddexp.reduce(three))
    return float((p[0] + p[1] - (p[0] - p[1]) ** 2) / 4)


def random_pairs(groups: Sequence[int], count: int, seed: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs at random: of different groups as far as there are enough of them, and sides at
    random."""
    rng = np.random.default_rng([*seed])
    pairs = candidate_pairs(groups)
    drawn = rng.permutation(len(pairs))
    seen: dict[int, int] = {}
    turn = []
    for index in drawn.tolist():
        group = groups[pairs[index][0]]
        seen[group] = seen.get(group, -1) + 1
        turn.append((seen[group], len(turn), index))
    chosen = [index for _, _, index in sorted(turn)[:count]]
    flips = rng.random(len(chosen)) < 0.5
    return [
        (int(b), int(a)) if flip else (int(a), int(b))
        for (a, b), flip in zip(pairs[chosen], flips, strict=True)
    ]


def uncertain_pairs(
    model: VoteModel,
    scaled: Float[np.ndarray, "n d"],
    groups: Sequence[int],
    count: int,
    seed: Sequence[int],
) -> tuple[list[tuple[int, int]], list[bool]]:
    """Pairs of which a quarter (at least one) is at random, which come first, and the others are
    the most uncertain. Returns them, and whether each is random."""
    at_random = random_pairs(groups, max(1, round(RANDOM_SHARE * count)), seed)
    chosen = {frozenset(pair) for pair in at_random}
    pairs = candidate_pairs(groups)
    pairs = pairs[[frozenset(pair) not in chosen for pair in pairs.tolist()]]
    if len(pairs) > MOST_CANDIDATES:
        drawn = np.random.default_rng([*seed, 1]).choice(len(pairs), MOST_CANDIDATES, replace=False)
        pairs = pairs[np.sort(drawn)]
    x = scaled[pairs[:, 0]] - scaled[pairs[:, 1]]
    places, _ = most_uncertain(model, x, count - len(at_random))
    more = [(int(a), int(b)) for a, b in pairs[places]]
    return [*at_random, *more], [True] * len(at_random) + [False] * len(more)
