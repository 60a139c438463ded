"""The results of a reward evaluation, as one tree of numbers (the JSON) and as sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from flowrl.evaluation.agreement import (
    MeanInterval,
    OrderAgreement,
    Resamples,
    Ties,
    Values,
    agreement,
    calibration,
    credits,
    fitted_scale,
    position,
    rank_correlations,
    tie_threshold,
)
from flowrl.evaluation.measure import Cost
from flowrl.evaluation.perturb import ScoredPairs, robustness, spread
from flowrl.evaluation.preferences import Preferences

TIE_MODES: tuple[Ties, ...] = ("half", "excluded", "calibrated")
HEADLINE: Mapping[str, Ties] = {  # the others: excluded
    "pickapic": "half",
    "plain": "half",
    "plain_texts": "half",
    "argilla": "half",  # votes again
    "label_studio": "half",
    "editreward_bench": "calibrated",
    "editreward_files": "calibrated",
    "editreward_data": "calibrated",
}

ReportTree = dict[str, Any]


@dataclass
class RewardResult:
    """Verdicts of one reward or judge on a data set."""

    name: str
    margin: Values  # [p] score of a minus score of b; of a judge P(a) - 1/2, over both orders
    cost: Cost
    load_seconds: float
    score: Float[np.ndarray, " n"] | None = None  # of a pointwise reward
    orders: tuple[Values, Values] | None = None  # of a judge: P(a), a first; P(b), b first
    changed: dict[str, Float[np.ndarray, " n"]] = field(default_factory=dict)  # by edit
    seen: Bool[np.ndarray, " p"] | None = None  # pairs of prompts that it was fitted to

    @property
    def tested(self) -> Values:
        """Margins that test it: NaN where it was fitted to votes on the pair's prompt."""
        return self.margin if self.seen is None else np.where(self.seen, np.nan, self.margin)


def headline(preferences: Preferences, ties: Ties | None) -> Ties:
    """Treatment of ties: the user's choice, or that of the data set's paper."""
    return ties or HEADLINE.get(preferences.layout, "excluded")


def results(
    preferences: Preferences, outcomes: Sequence[RewardResult], resamples: Resamples, ties: Ties
) -> ReportTree:
    """All results, for the page and the JSON."""
    of_people = preferences.label - 0.5
    names = ["people", *(a.name for a in outcomes)]
    share = agreement([of_people, *(a.margin for a in outcomes)])
    share[0] = share[:, 0] = agreement([of_people, *(a.tested for a in outcomes)])[0]
    return {
        "dataset": _dataset(preferences),
        "level": resamples.level,
        "ties": ties,
        "rewards": {a.name: _reward(preferences, a, resamples, ties) for a in outcomes},
        "differences": _differences(preferences, outcomes, resamples, ties),
        "agreement": {
            "names": names,
            "share": share.tolist(),
        },
    }


def _dataset(p: Preferences) -> ReportTree:
    categories = sorted(set(p.category) - {""})
    return {
        "name": p.name,
        "layout": p.layout,
        "prompts": p.clusters,
        "samples": len(p.items),
        "pairs": len(p.a),
        "ties": int((p.label == 0.5).sum()),
        "unlabelled": p.unlabelled,
        "ranked": p.rank is not None,
        "categories": {c: p.category.count(c) for c in categories},
    }


def _reward(p: Preferences, a: RewardResult, resamples: Resamples, ties: Ties) -> ReportTree:
    threshold = tie_threshold(a.tested, p.label)
    tree: ReportTree = {
        "kind": "judge" if a.orders is not None else "reward",
        "unscored_pairs": int(np.isnan(a.margin).sum()),
        "tied_pairs": int((a.margin == 0).sum()),
        "tie_threshold": threshold,
        "accuracy": {
            kind: resamples.share(
                credits(a.tested, p.label, kind, threshold if kind == "calibrated" else 0.0),
                p.cluster,
            )
            for kind in TIE_MODES
        },
        "categories": _categories(p, a, resamples, ties),
        "cost": {**a.cost._asdict(), "load_seconds": a.load_seconds},
        "calibration": _calibration(p, a),
    }
    if a.score is not None:
        group = np.array([item.group for item in p.items])
        scored = a.score[~np.isnan(a.score)]
        tree["score"] = {
            "mean": float(scored.mean()) if len(scored) else math.nan,
            "spread": spread(a.score, group),
            "low": float(scored.min()) if len(scored) else math.nan,
            "high": float(scored.max()) if len(scored) else math.nan,
            "unscored": int(np.isnan(a.score).sum()),
        }
        tree["rank"] = _ranks(p, a, resamples)
        pairs = ScoredPairs.of(p.a, p.b, p.label, p.cluster)
        moved = robustness(a.score, a.changed, pairs, tree["score"]["spread"], resamples)
        tree["robustness"] = {name: r._asdict() for name, r in moved.items()}
    if a.seen is not None:
        credit = credits(a.margin, p.label, ties, threshold if ties == "calibrated" else 0.0)
        tree["seen"] = {
            "pairs": int(a.seen.sum()),
            "accuracy": resamples.share(np.where(a.seen, credit, np.nan), p.cluster),
        }
    if a.orders is not None:
        tree["position"] = position(*a.orders)._asdict()
        single = credits(a.orders[0] - 0.5, p.label, ties)
        tree["accuracy"]["one_order"] = resamples.share(single, p.cluster)
    return tree


def _categories(p: Preferences, a: RewardResult, resamples: Resamples, ties: Ties) -> ReportTree:
    threshold = tie_threshold(a.tested, p.label) if ties == "calibrated" else 0.0
    credit = credits(a.tested, p.label, ties, threshold)
    of = np.array(p.category)
    names = sorted(set(p.category) - {""})
    return {c: resamples.share(np.where(of == c, credit, np.nan), p.cluster) for c in names}


def _calibration(p: Preferences, a: RewardResult) -> ReportTree:
    """Calibration of a judge, or of a reward's margins after scaling by a fitted number."""
    scale = fitted_scale(a.tested, p.label) if a.orders is None else None
    with np.errstate(over="ignore"):
        probability = a.tested + 0.5 if scale is None else 1 / (1 + np.exp(-a.tested / scale))
    return {**calibration(probability, p.label)._asdict(), "scale": scale}


def _ranks(p: Preferences, a: RewardResult, resamples: Resamples) -> ReportTree | None:
    if p.rank is None or a.score is None:
        return None
    score, groups = a.score.copy(), p.groups
    if a.seen is not None:
        score[[*p.a[a.seen], *p.b[a.seen]]] = np.nan
    number = {item.prompt: c for item, c in _prompts(p)}
    cluster = np.array([number[p.items[rows[0]].prompt] for rows in groups])
    tau, rho = rank_correlations(score, p.rank, groups)
    return {
        "kendall": resamples.within(tau, cluster, -1.0, 1.0),
        "spearman": resamples.within(rho, cluster, -1.0, 1.0),
        "groups": len(groups),
        "sizes": sorted({len(rows) for rows in groups}),
    }


def _prompts(p: Preferences) -> list[tuple[Any, int]]:
    return [(p.items[row], int(c)) for row, c in zip(p.a, p.cluster, strict=True)]


def _differences(
    p: Preferences, outcomes: Sequence[RewardResult], resamples: Resamples, ties: Ties
) -> list[ReportTree]:
    """Accuracy of the first minus the second, on the same pairs and the same resamples."""
    credit = {
        a.name: credits(
            a.tested,
            p.label,
            ties,
            tie_threshold(a.tested, p.label) if ties == "calibrated" else 0.0,
        )
        for a in outcomes
    }
    ordered = sorted(credit, key=lambda name: -_mean(credit[name]))
    return [
        {
            "first": first,
            "second": second,
            **resamples.within(credit[first] - credit[second], p.cluster, -1.0, 1.0)._asdict(),
        }
        for i, first in enumerate(ordered)
        for second in ordered[i + 1 :]
    ]


def _mean(values: Values) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if len(scored) else -1.0


def percent(x: float, digits: int = 1) -> str:
    return f"{100 * x:.{digits}f} %"


def between(e: MeanInterval) -> str:
    return f"{100 * e.low:.1f} to {100 * e.high:.1f}"


def sentences(tree: ReportTree) -> list[str]:
    """Findings in sentences, the most important first."""
    rewards: Mapping[str, ReportTree] = tree["rewards"]
    best = sorted(rewards, key=lambda n: -_or(rewards[n]["accuracy"][tree["ties"]].value, -1.0))
    lines = [*_accuracies(tree, best)]
    for name in best:
        lines += _fooled(name, rewards[name])
        lines += _judged(name, rewards[name])
        lines += _fitted_here(name, rewards[name], tree)
        missing = rewards[name]["unscored_pairs"]
        if missing:
            lines.append(f"{name} has no verdict on {missing} of {tree['dataset']['pairs']} pairs.")
    lines += _alike(tree)
    return lines


def _or(x: float, other: float) -> float:
    return other if math.isnan(x) else x


def _accuracies(tree: ReportTree, best: Sequence[str]) -> list[str]:
    level, ties, lines = percent(tree["level"], 0), tree["ties"], []
    for i, name in enumerate(best):
        e: MeanInterval = tree["rewards"][name]["accuracy"][ties]
        seen = tree["rewards"][name].get("seen", {}).get("pairs", 0)
        if not e.n:
            if seen < tree["dataset"]["pairs"]:
                of_others = " of the other pairs" if seen else ""
                lines.append(f"{name} scored nothing{of_others}: it has no accuracy.")
            continue
        of = f"{e.n} pairs of prompts that it was not fitted to" if seen else "pairs"
        text = f"{name} agrees with people on {percent(e.value)} of the {of}"
        text += f" ({level} interval {between(e)})." if i == 0 else f" ({between(e)})."
        if e.low <= 0.5 <= e.high:
            text += " That cannot be distinguished from guessing."
        elif e.high < 0.5:
            text += " It prefers the samples that people reject: check its sign."
        lines.append(text)
    for d in tree["differences"]:
        if best[:2] == [d["first"], d["second"]] and tree["rewards"][best[0]]["accuracy"][ties].n:
            lines.insert(1, _difference(d, tree))
    return lines


def _difference(d: ReportTree, tree: ReportTree) -> str:
    """A sentence on the accuracies of the best two, which are compared on the pairs that test
    both."""
    sides = [tree["rewards"][d[side]] for side in ("first", "second")]
    fitted = any(reward.get("seen", {}).get("pairs") for reward in sides)
    unseen = f"the {d['n']} pairs of prompts that neither was fitted to"
    same = unseen if fitted else "the same pairs"
    if not d["n"]:
        return f"No pair tests both it and {d['second']}, so they cannot be compared."
    if d["low"] > 0:
        return f"It is significantly better than {d['second']} on {same}."
    if d["high"] < 0:
        return f"On {same}, {d['second']} is significantly better."
    on_these = f" on {same}" if fitted else ""
    return f"Its difference from {d['second']} is not significant{on_these}."


def _fooled(name: str, reward: ReportTree) -> list[str]:
    """Edits that raise a reward without improving the sample, the strongest first."""
    tried = reward.get("robustness", {})
    order = sorted(tried, key=lambda edit: -_or(tried[edit]["shift"].value, 0.0))
    raised, overtaken = [], []
    for edit in order:
        shift, overtakes = tried[edit]["shift"], tried[edit]["overtakes"]
        winners = percent(overtakes.value, 0)
        if shift.low > 0 and shift.value >= 0.1:
            raised.append(f"{edit} by {shift.value:.2f} ({winners})")
        elif overtakes.n and overtakes.low > 0.05:
            overtaken.append(f"{edit} ({winners})")
    lines = []
    if raised:
        lines.append(
            f"Edits raise {name}, in units of its spread within a prompt (in brackets: losers that "
            f"then win): {', '.join(raised)}."
        )
    if overtaken:
        lines.append(
            f"Edits make losers win that {name} had ranked correctly, though they do not raise its "
            f"scores on average: {', '.join(overtaken)}."
        )
    if tried and not lines:
        lines.append(f"None of the edits fools {name}: {', '.join(tried)}.")
    return lines


def _judged(name: str, reward: ReportTree) -> list[str]:
    if "position" not in reward:
        return []
    p = OrderAgreement(**reward["position"])
    lines = []
    if p.n and (abs(p.toward_first) > 0.02 or p.consistent < 0.9):
        side = "first" if p.toward_first > 0 else "second"
        lines.append(
            f"{name} favours the {side} position by {percent(abs(p.toward_first))} and keeps its "
            f"winner in {percent(p.consistent, 0)} of the pairs when the samples are swapped."
        )
    if reward["calibration"]["ece"] > 0.1:
        lines.append(
            f"{name}'s probabilities are off by {percent(reward['calibration']['ece'], 0)} on "
            "average: do not interpret them as probabilities."
        )
    return lines


def _fitted_here(name: str, reward: ReportTree, tree: ReportTree) -> list[str]:
    """Say what is left out because a reward was fitted to votes on the same prompts."""
    seen, pairs = reward.get("seen", {"pairs": 0}), tree["dataset"]["pairs"]
    if not seen["pairs"]:
        return []
    share = f" ({percent(seen['accuracy'].value)})" if seen["accuracy"].n else ""
    fitted = f"{name} was fitted to votes on the prompts of"
    if seen["pairs"] == pairs:
        return [
            f"{fitted} all {pairs} pairs, where its agreement{share} is no test: it has no "
            "accuracy here. Compare on pairs of other prompts."
        ]
    return [
        f"{fitted} {seen['pairs']} of the {pairs} pairs: these are left out of its accuracy, since "
        f"its agreement there{share} is no test."
    ]


def _alike(tree: ReportTree) -> list[str]:
    """Pairs of rewards that nearly always agree, although both decide most pairs."""
    names, agreed = tree["agreement"]["names"], tree["agreement"]["share"]
    open_ = [r["tied_pairs"] + r["unscored_pairs"] for r in tree["rewards"].values()]
    most = 0.1 * tree["dataset"]["pairs"]
    return [
        f"{names[i]} and {names[j]} name the same winner in {percent(agreed[i][j], 0)} of the "
        "pairs that both decide: the second one adds little."
        for i in range(1, len(names))
        for j in range(i + 1, len(names))
        if agreed[i][j] > 0.97 and max(open_[i - 1], open_[j - 1]) < most
    ]
