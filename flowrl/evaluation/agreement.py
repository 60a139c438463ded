"""Agreement of scores with human preferences: pure functions on arrays.

p pairs, n samples, c prompts. For a pair (a, b):

margin  score of a minus score of b, for a judge P(a preferred) - 1/2; NaN if missing
label   human P(a preferred): 1, 0, 1/2 for a tie, or the share of voters
cluster the prompt's number. Pairs of one prompt are not independent, so prompts are resampled

Intervals are percentile bootstraps over prompts (Efron 1979), the quantiles widened for few prompts
as in Hesterberg, arXiv:1411.5279, section 5.3. Of so few prompts that even the range of their means
would be left too often (fewer than 6 at 95 %), Student's interval is taken instead, with the
deviation of the resamples. All rewards are evaluated on the same resamples, so that their
differences have intervals too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

Ties = Literal["half", "excluded", "calibrated"]
Values = Float[np.ndarray, " p"]


class MeanInterval(NamedTuple):
    """A mean with its interval; NaN without values."""

    value: float
    low: float
    high: float
    n: int  # of what was averaged


def preferred(label: Values) -> Float[np.ndarray, " p"]:
    """1 where people preferred a, -1 where they preferred b, 0 for a tie."""
    return np.sign(label - 0.5)


def credits(margin: Values, label: Values, ties: Ties, threshold: float = 0.0) -> Values:
    """Contribution of each pair to the accuracy: 0..1, NaN for pairs that are left out.

    half        1 for the same verdict (two ties too), 1/2 if only one side is a tie. Pick-a-Pic,
                arXiv:2305.01569, section 4. A reward that always ties scores 1/2
    excluded    human ties are left out; a tie of the reward is wrong.
                ImageReward, arXiv:2304.05977; "without ties" of VideoGen-RewardBench
    calibrated  three verdicts: a, b or tie must be right; the reward's verdict is a tie if
                |margin| <= threshold. "With ties" of GenAI-Bench and VideoGen-RewardBench
                (arXiv:2501.13918) after Deutsch et al., arXiv:2305.14324; see `tie_threshold`
    """
    people = preferred(label)
    reward = np.where(np.abs(margin) <= threshold, 0.0, np.sign(margin))
    right = (people == reward).astype(float)
    if ties == "half":
        right = np.where((people == 0) ^ (reward == 0), 0.5, right)
    elif ties == "excluded":
        right = np.where(people == 0, np.nan, right)
    return np.where(np.isnan(margin), np.nan, right)


def tie_threshold(margin: Values, label: Values) -> float:
    """The threshold >= 0 up to which |margin| counts as a tie, chosen to maximise the number of
    right verdicts.

    Exact, over every threshold that changes a verdict; among equal ones the smallest. It is chosen
    on the same pairs that it is used on, as in the papers, so the accuracy is slightly too high.
    """
    scored = ~np.isnan(margin)
    size, people = np.abs(margin[scored]), preferred(label[scored])
    if not len(size):
        return 0.0
    order = np.argsort(size, kind="stable")
    size, people, sign = size[order], people[order], np.sign(margin[scored][order])
    tied = np.cumsum(people == 0)
    lost = np.cumsum((people == sign) & (people != 0))
    last = np.append(size[1:] != size[:-1], True)  # a threshold takes all pairs of one size
    candidates = np.append(0.0, size[last])
    none = size == 0  # at threshold 0 exactly the equal scores are ties
    first = (people[none] == 0).sum() - ((people == sign) & (people != 0))[none].sum()
    gain = np.append(first, (tied - lost)[last])
    return float(candidates[int(np.argmax(gain))])


@dataclass(frozen=True)
class Resamples:
    """Count of each of the c prompts in each resample, and the confidence level."""

    weights: Float[np.ndarray, "draws c"]
    level: float

    @classmethod
    def draw(cls, clusters: int, draws: int, level: float, seed: int) -> "Resamples":
        rng = np.random.default_rng([seed, clusters])
        even = np.full(clusters, 1 / clusters)
        return cls(rng.multinomial(clusters, even, size=draws).astype(np.float32), level)

    def means(self, values: Values, cluster: Int[np.ndarray, " p"]) -> Float[np.ndarray, " draws"]:
        """Mean of the non-NaN values in each resample."""
        scored = ~np.isnan(values)
        c = self.weights.shape[1]
        sums = np.bincount(cluster[scored], values[scored], minlength=c)
        counts = np.bincount(cluster[scored], minlength=c)
        counted = self.weights @ counts
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(counted > 0, self.weights @ sums / counted, np.nan)

    def interval(self, means: Float[np.ndarray, " draws"]) -> tuple[float, float]:
        from scipy import stats

        means = means[~np.isnan(means)]
        c = self.weights.shape[1]
        if not len(means) or c < 2:
            return float("nan"), float("nan")
        wide = float(stats.t.ppf((1 + self.level) / 2, c - 1)) * (c / (c - 1)) ** 0.5
        if 0.5 ** (c - 1) > 1 - self.level:  # how often all c means are on one side of the middle
            middle, reach = float(means.mean()), wide * float(means.std())
            return middle - reach, middle + reach
        tail = float(stats.norm.cdf(-wide))
        low, high = np.quantile(means, [tail, 1 - tail])
        return float(low), float(high)

    def estimate(self, values: Values, cluster: Int[np.ndarray, " p"]) -> MeanInterval:
        scored = ~np.isnan(values)
        if not scored.any():
            return MeanInterval(float("nan"), float("nan"), float("nan"), 0)
        low, high = self.interval(self.means(values, cluster))
        return MeanInterval(float(values[scored].mean()), low, high, int(scored.sum()))

    def within(
        self, values: Values, cluster: Int[np.ndarray, " p"], least: float, most: float
    ) -> MeanInterval:
        """`estimate` for values in least..most. If all of them are equal, the bootstrap has no
        spread, and the ends are exact bounds for that many independent prompts: with this
        confidence at least a share r of all prompts has the value, and the others are anywhere."""
        mean = self.estimate(values, cluster)
        scored = ~np.isnan(values)
        if mean.n and np.ptp(values[scored]) == 0:
            reach = ((1 - self.level) / 2) ** (1 / len(np.unique(cluster[scored])))
            low, high = (reach * mean.value + (1 - reach) * end for end in (least, most))
            return MeanInterval(mean.value, low, high, mean.n)
        return MeanInterval(mean.value, max(mean.low, least), min(mean.high, most), mean.n)

    def share(self, values: Values, cluster: Int[np.ndarray, " p"]) -> MeanInterval:
        """`within` for values in 0..1."""
        return self.within(values, cluster, 0.0, 1.0)


def rank_correlations(
    score: Float[np.ndarray, " n"],
    rank: Float[np.ndarray, " n"],
    groups: Sequence[Int[np.ndarray, " _"]],
) -> tuple[Float[np.ndarray, " g"], Float[np.ndarray, " g"]]:
    """Kendall's tau-b and Spearman's rho between each group's scores and its human ranking.

    rank 1 is best. 0 if the reward gives a whole group the same score, since it has no order. NaN
    if people give the group a single rank, or if fewer than two samples are scored.
    """
    from scipy import stats

    tau, rho = np.full(len(groups), np.nan), np.full(len(groups), np.nan)
    for g, rows in enumerate(groups):
        rows = rows[~np.isnan(score[rows])]
        if len(rows) < 2 or np.ptp(rank[rows]) == 0:
            continue
        if np.ptp(score[rows]) == 0:
            tau[g] = rho[g] = 0.0
            continue
        tau[g] = stats.kendalltau(score[rows], -rank[rows])[0]
        rho[g] = stats.spearmanr(score[rows], -rank[rows])[0]
    return tau, rho


class Calibration(NamedTuple):
    """Calibration of probabilities p that a is preferred, against labels in 0..1."""

    brier: float  # mean (p - label)^2: 0 is best, a constant 1/2 has 1/4
    ece: float  # expected calibration error: mean |said - seen| over bins, by their counts
    said: tuple[float, ...]  # mean p of each bin that is not empty
    seen: tuple[float, ...]  # mean label there
    n: tuple[int, ...]


def calibration(p: Values, label: Values, bins: int = 10) -> Calibration:
    """Calibration with each pair in both orders (p and 1 - p), so that the order has no effect."""
    judged = ~np.isnan(p)
    p, label = np.append(p[judged], 1 - p[judged]), np.append(label[judged], 1 - label[judged])
    if not len(p):
        return Calibration(float("nan"), float("nan"), (), (), ())
    at = np.minimum((p * bins).astype(int), bins - 1)
    count = np.bincount(at, minlength=bins)
    full = count > 0
    said = np.bincount(at, p, bins)[full] / count[full]
    means = np.bincount(at, label, bins)[full] / count[full]
    ece = float(np.abs(said - means) @ count[full] / len(p))
    brier = float(np.square(p - label).mean())
    return Calibration(brier, ece, tuple(said), tuple(means), tuple(count[full].tolist()))


def fitted_scale(margin: Values, label: Values) -> float:
    """The s of P(a preferred) = 1 / (1 + exp(-margin / s)), by maximum likelihood (Bradley-Terry).

    Small if small margins are decisive; infinite if the margins are uninformative or reversed.
    """
    from scipy import optimize

    judged = ~np.isnan(margin)
    margin, label = margin[judged], label[judged]
    scale = np.abs(margin).mean() if len(margin) else 0.0
    if scale == 0 or np.sum(margin * (label - 0.5)) <= 0:
        return float("inf")

    def loss(log_s: float) -> float:
        x = margin / scale / np.exp(log_s)
        return float(np.mean(np.logaddexp(0, x) - label * x))

    best = optimize.minimize_scalar(loss, bounds=(-7.0, 7.0), method="bounded")
    return float(scale * np.exp(best.x))


class OrderAgreement(NamedTuple):
    """Agreement of a judge's verdicts on the same pairs in both orders."""

    toward_first: float  # mean P(the first shown is preferred) - 1/2
    consistent: float  # share of pairs with the same winner (or tie) in both orders
    to_first: float  # share where the first shown won both times
    to_second: float
    n: int


def position(p_ab: Values, p_ba: Values) -> OrderAgreement:
    """Position bias. p_ab: P(a) with a shown first; p_ba: P(b) with b shown first."""
    in_both = ~np.isnan(p_ab) & ~np.isnan(p_ba)
    ab, ba = p_ab[in_both], p_ba[in_both]
    if not len(ab):
        return OrderAgreement(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    first, second = (ab > 0.5) & (ba > 0.5), (ab < 0.5) & (ba < 0.5)
    same = np.sign(ab - 0.5) == np.sign(0.5 - ba)
    lean = float((ab.mean() + ba.mean()) / 2 - 0.5)
    return OrderAgreement(
        lean, float(same.mean()), float(first.mean()), float(second.mean()), len(ab)
    )


def agreement(margins: Sequence[Values]) -> Float[np.ndarray, "r r"]:
    """Share of pairs with the same winner, among pairs where both have a winner; NaN without such
    pairs."""
    decided: list[Bool[np.ndarray, " p"]] = [~np.isnan(m) & (m != 0) for m in margins]
    agreed = np.full((len(margins), len(margins)), np.nan)
    for i, first in enumerate(margins):
        for j, second in enumerate(margins):
            in_both = decided[i] & decided[j]
            if in_both.any():
                agreed[i, j] = (np.sign(first[in_both]) == np.sign(second[in_both])).mean()
    return agreed
