"""The answer of votes: which side people prefer, how sure that is, and what rewards say of the same
pairs. Also the table of votes, in the layout `plain` of `flowrl evaluate-rewards`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from flowrl.bounded_files import bounded_lines, json_object
from flowrl.errors import UserError
from flowrl.evaluation.agreement import MeanInterval, Resamples
from flowrl.evaluation.labelling_tools import EXPORTS, label_studio_config
from flowrl.json_text import json_text
from flowrl.prompts.files import EVENTS, VOTES_TABLE
from flowrl.votes.log import MOST_EVENTS, GivenVote, VoteLog
from flowrl.votes.plan import PlannedSample, VotePlan, sample_text, way_back
from flowrl.whole_file import write_whole

ANSWER_FILE = "answer.json"
LEVEL, DRAWS = 0.95, 2000


class PairVote(NamedTuple):
    """A rater's vote on a pair.

    label    1 for a, 0 for b, 1/2 for equal and for both bad
    again    the label of the pair's second showing; None without one
    """

    rater: str
    pair: int
    label: float
    both_bad: bool
    seconds: float
    a_left: bool
    again: float | None


def label_of(vote: GivenVote, a_left: bool) -> float | None:
    """P(a preferred) of a vote; None for a skip."""
    if vote.verdict is None:
        return None
    if vote.verdict in ("equal", "both_bad"):
        return 0.5
    return float((vote.verdict == "left") == a_left)


def pair_votes(log: VoteLog) -> list[PairVote]:
    """One vote per rater and pair: the first showing's, or the second's if the first was skipped.
    Pairs that were only skipped are left out."""
    votes = []
    for rater, of_rater in log.raters.items():
        said: dict[int, list[tuple[GivenVote, bool, float]]] = {}
        for turn, vote in zip(log.plan.turns[rater], of_rater.given, strict=False):
            label = label_of(vote, turn.a_left)
            if label is not None:
                said.setdefault(turn.pair, []).append((vote, turn.a_left, label))
        for pair, ((vote, a_left, label), *more) in said.items():
            again = more[0][2] if more else None
            bad = vote.verdict == "both_bad"
            votes.append(
                PairVote(
                    rater=rater,
                    pair=pair,
                    label=label,
                    both_bad=bad,
                    seconds=vote.seconds,
                    a_left=a_left,
                    again=again,
                )
            )
    return votes


def krippendorff(
    values: Float[np.ndarray, "u m"], weight: Float[np.ndarray, " u"] | None = None
) -> float:
    """Krippendorff's alpha of m raters on u units with the interval metric; NaN marks a missing
    value, and units with fewer than two values do not count.

    1 is agreement, 0 what chance gives (Krippendorff 2011, Computing Krippendorff's
    Alpha-Reliability). `weight` counts each unit so often. NaN without a spread of values.
    """
    is_voted = ~np.isnan(values)
    count = is_voted.sum(1)
    several = count >= 2
    weight = (np.ones(len(values)) if weight is None else weight)[several]
    values, is_voted, count = np.nan_to_num(values)[several], is_voted[several], count[several]
    if not len(values):
        return float("nan")
    share = weight[:, None] * is_voted
    inside = 2 * (count * (values**2).sum(1) - values.sum(1) ** 2)  # over ordered pairs of values
    total = float(share.sum())
    mean_square = float((share * values**2).sum())
    between = 2 * (total * mean_square - float((share * values).sum()) ** 2)
    if between <= 0 or total < 2:
        return float("nan")
    observed = float((weight * inside / (count - 1)).sum()) / total
    return 1 - observed / (between / (total * (total - 1)))


def alpha_of(votes: Sequence[PairVote], plan: VotePlan) -> tuple[MeanInterval, int] | None:
    """Alpha of several raters on the pairs that at least two voted on, with an interval over
    prompts, and the number of these pairs; None without such pairs.

    Votes are 1 for a, -1 for b and 0 for a tie. Which sample is a is arbitrary, so each pair counts
    both ways.
    """
    raters = sorted({vote.rater for vote in votes})
    rows: dict[int, Float[np.ndarray, " m"]] = {}
    for vote in votes:
        labels = rows.setdefault(vote.pair, np.full(len(raters), np.nan))
        labels[raters.index(vote.rater)] = 2 * vote.label - 1
    rows = {pair: labels for pair, labels in rows.items() if (~np.isnan(labels)).sum() >= 2}
    if not rows:
        return None
    values = np.array([*rows.values(), *(-labels for labels in rows.values())])
    cluster = _numbers([plan.prompt_of(pair) for pair in rows])
    resamples = Resamples.draw(int(cluster.max()) + 1, DRAWS, LEVEL, 0)
    drawn = resamples.weights[:, np.tile(cluster, 2)].astype(float)
    spread = np.array([krippendorff(values, weight) for weight in drawn])
    low, high = resamples.interval(spread)
    return MeanInterval(krippendorff(values), max(low, -1.0), min(high, 1.0), len(rows)), len(rows)


def _numbers(texts: Sequence[str]) -> Int[np.ndarray, " n"]:
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return np.array([number[text] for text in texts], dtype=int)


@dataclass(frozen=True)
class VoteAnswer:
    """The result of votes.

    preferred    share of the first side, ties half; None for a plan without sides
    consistency  share of repeated pairs with the same verdict, of all raters
    alpha        Krippendorff's, if several raters voted on the same pairs
    rewards      by name: share of the first side among the same pairs by the run's recorded
                 scores, and the share of pairs where the reward agrees with people (ties half)
    early        whether the answer was read before all votes were in
    """

    pairs: int
    prompts: int
    ties: int
    both_bad: int
    skipped: int
    preferred: MeanInterval | None
    consistency: MeanInterval
    alpha: MeanInterval | None
    rewards: Mapping[str, tuple[MeanInterval, MeanInterval]]
    early: bool
    sentences: tuple[str, ...]


def answer_of(log: VoteLog) -> VoteAnswer:
    """The answer of the votes so far."""
    plan, votes = log.plan, pair_votes(log)
    early = not log.finished
    cluster = _numbers([plan.prompt_of(vote.pair) for vote in votes])
    label = np.array([vote.label for vote in votes])
    prompts = int(cluster.max()) + 1 if len(votes) else 0
    resamples = Resamples.draw(max(prompts, 1), DRAWS, LEVEL, 0)
    repeats = [
        float("nan") if vote.again is None else float(vote.again == vote.label) for vote in votes
    ]
    alpha = alpha_of(votes, plan) if len(plan.turns) > 1 else None
    answer = VoteAnswer(
        pairs=len(votes),
        prompts=prompts,
        ties=sum(vote.label == 0.5 for vote in votes),
        both_bad=sum(vote.both_bad for vote in votes),
        skipped=sum(
            vote.verdict is None for of_rater in log.raters.values() for vote in of_rater.given
        ),
        preferred=resamples.share(label, cluster) if plan.sides else None,
        consistency=resamples.share(np.array(repeats), cluster),
        alpha=None if alpha is None else alpha[0],
        rewards=_rewards(plan, votes, cluster, resamples) if len(votes) else {},
        early=early,
        sentences=(),
    )
    return VoteAnswer(**{**vars(answer), "sentences": tuple(_sentences(answer, plan))})


def _rewards(
    plan: VotePlan, votes: Sequence[PairVote], cluster: Int[np.ndarray, " p"], resamples: Resamples
) -> dict[str, tuple[MeanInterval, MeanInterval]]:
    label = np.array([vote.label for vote in votes])
    names = list(dict.fromkeys(name for sample in plan.samples for name in sample.scores))
    shares = {}
    for name in names:
        a, b = (
            np.array([_score(plan, plan.pairs[vote.pair][side], name) for vote in votes])
            for side in (0, 1)
        )
        won = np.where(np.isnan(a - b), np.nan, (np.sign(a - b) + 1) / 2)
        right = 1 - np.abs(won - label)
        shares[name] = resamples.share(won, cluster), resamples.share(right, cluster)
    return shares


def _score(plan: VotePlan, row: int, name: str) -> float:
    score = plan.samples[row].scores.get(name)
    return float("nan") if score is None else score


def _percent(x: float) -> str:
    return f"{100 * x:.0f}" if x == x else "-"


def _interval(e: MeanInterval) -> str:
    if e.low != e.low:
        return "no interval, since it needs two prompts"
    return f"95 % interval {_percent(e.low)} to {_percent(e.high)}"


def count_of(n: int, unit: str) -> str:
    """`1 vote`, `2 votes`."""
    return f"{n} {unit}" if n == 1 else f"{n} {unit}s"


def _sentences(answer: VoteAnswer, plan: VotePlan) -> list[str]:
    early = "; looked at early" if answer.early else ""
    consistency = "no repeat of a pair"
    if answer.consistency.n:
        c = answer.consistency
        consistency = (
            f"own consistency {c.value:.2f}, {count_of(c.n, 'repeat')}, 95 % interval {c.low:.2f} "
            f"to {c.high:.2f}"
            if c.low < c.high  # a resample of few prompts may have no spread
            else f"own consistency {c.value:.2f}, {count_of(c.n, 'repeat')}"
        )
    if not answer.pairs:
        return [f"no vote so far: {count_of(answer.skipped, 'pair')} skipped{early}"]
    size = f"{count_of(answer.pairs, 'pair')} of {count_of(answer.prompts, 'prompt')}"
    lines = []
    if answer.preferred is not None:
        first = plan.sides[0]
        name = "the trained weights" if plan.kind == "run" else first
        lines.append(
            f"people prefer {name} in {_percent(answer.preferred.value)} % of {size} "
            f"({_interval(answer.preferred)}, prompts resampled; ties half; {consistency}{early})"
        )
    else:
        lines.append(f"{size} voted on ({count_of(answer.ties, 'tie')}; {consistency}{early})")
    lines += _best_of_rewards(answer.consistency)
    if answer.alpha is not None and answer.alpha.value == answer.alpha.value:
        e = answer.alpha
        interval = f", 95 % interval {e.low:.2f} to {e.high:.2f}" if e.low == e.low else ""
        lines.append(
            f"raters agree with Krippendorff's alpha {e.value:.2f} on "
            f"{count_of(e.n, 'shared pair')}{interval} (1: always, 0: as by chance)"
        )
    for name, (side, right) in answer.rewards.items():
        text = f"{name} agrees with people on {_percent(right.value)} % ({_interval(right)})"
        if answer.preferred is not None and side.n:
            text = f"{name} prefers {plan.sides[0]} in {_percent(side.value)} % of them and {text}"
            text = text.replace(f"and {name} ", "and ", 1)
        lines.append(text if right.n else f"{name} scored none of these samples")
    notes = [
        count_of(answer.both_bad, "pair") + " called both bad" if answer.both_bad else "",
        count_of(answer.skipped, "showing") + " skipped" if answer.skipped else "",
    ]
    if any(notes):
        lines.append(", ".join(filter(None, notes)))
    return lines


def _best_of_rewards(consistency: MeanInterval) -> list[str]:
    """A sentence on the accuracy that a reward can have on single votes, if there are repeats."""
    c = consistency.value
    if not consistency.n or c <= 0.5:
        return []
    if not consistency.low > 0.5:  # NaN for a single prompt
        return [
            f"{count_of(consistency.n, 'repeat')} cannot tell how often a reward can agree with "
            "single votes: that needs more votes, of more prompts"
        ]
    least, most = _percent(c), _percent((1 + (2 * c - 1) ** 0.5) / 2)
    size = f"about {most}" if least == most else f"between {least} and {most}"
    return [
        f"a reward's accuracy on single votes is at best {size} %, by the raters' own consistency"
    ]


def table_rows(folder: Path, log: VoteLog) -> list[dict[str, Any]]:
    """Lines of votes.jsonl: one per rater and pair, in the layout `plain`. The columns beside the
    layout's: both_bad, rater, seconds, side (where a was shown), seed, source, and `again`, the
    label of a second showing, which is no vote of its own."""
    plan, rows = log.plan, []
    for vote in pair_votes(log):
        a, b = (plan.samples[row] for row in plan.pairs[vote.pair])
        rows.append(
            {
                "prompt": a.prompt,
                **_samples_of(folder, a, b),
                "label": vote.label,
                "both_bad": vote.both_bad,
                "rater": vote.rater,
                "seconds": vote.seconds,
                "side": "left" if vote.a_left else "right",
                "seed": plan.seed,
                "source": plan.source,
                "a_source": a.origin,
                "b_source": b.origin,
                "again": vote.again,
            }
        )
    return rows


def _samples_of(folder: Path, a: PlannedSample, b: PlannedSample) -> dict[str, str]:
    """The columns of a pair's samples: files, or texts as they are; and the source of two edits."""
    if a.kind == "text":
        texts = [sample_text(folder, sample.file) for sample in (a, b)]
        return {"a_text": texts[0], "b_text": texts[1]}
    files = {"a": a.file, "b": b.file}
    return files | ({"source_image": a.source} if a.source else {})


def write_results(folder: Path, log: VoteLog) -> VoteAnswer:
    """Write votes.jsonl and answer.json from the log; return the answer. UserError for a log that
    has lost votes."""
    check_whole_log(folder, log)
    answer = answer_of(log)
    write_whole(folder / VOTES_TABLE, votes_text(folder, log))
    write_whole(folder / ANSWER_FILE, json_text(_plain(vars(answer)), indent=1) + "\n")
    return answer


def votes_text(folder: Path, log: VoteLog) -> str:
    """The content of votes.jsonl."""
    rows = table_rows(folder, log)
    return "".join(json_text(row, ensure_ascii=False) + "\n" for row in rows)


def check_whole_log(folder: Path, log: VoteLog) -> None:
    """UserError for a log that has never shown pairs that votes.jsonl has votes on: lines of it are
    gone, and the table would be written again without them. A vote that was taken back has been
    shown."""
    if not (folder / VOTES_TABLE).is_file():
        return
    shown: dict[str, set[str]] = {}
    for rater, votes in log.raters.items():
        turns = log.plan.turns[rater]
        pairs = {log.plan.pairs[turns[turn].pair] for turn in votes.shown.values()}
        shown[rater] = {
            _pair_key(_samples_of(folder, *(log.plan.samples[row] for row in pair)))
            for pair in pairs
        }
    rows = filter(None, map(json_object, bounded_lines(folder / VOTES_TABLE, MOST_EVENTS)))
    lost = sum(
        str(row.get("rater")) in shown and _pair_key(row) not in shown[str(row.get("rater"))]
        for row in rows
    )
    if lost:
        raise UserError(
            f"{folder / EVENTS} has lost {count_of(lost, 'vote')} that {VOTES_TABLE} has: "
            f"{way_back(folder)}"
        )


def _pair_key(row: Mapping[str, Any]) -> str:
    return json_text([row.get(name) for name in ("a", "b", "a_text", "b_text")])


class ExportedVotes(NamedTuple):
    """A file for a labelling tool. `interface` is what Label Studio needs beside it; empty for the
    others."""

    file: Path
    interface: str


def export_votes(folder: Path, kind: str) -> ExportedVotes:
    """Write votes.jsonl again for a labelling tool, or as `chosen`. UserError without a vote."""
    log = VoteLog.read(folder, VotePlan.read(folder))
    answer = write_results(folder, log)
    if not answer.pairs:
        raise UserError(f"vote: {folder}: {answer.sentences[0]}")
    name, convert = EXPORTS[kind]
    voted_rows = table_rows(folder, log)
    texts = [json_text(row, ensure_ascii=False) for row in convert(voted_rows)]
    whole = "".join(f"{text}\n" for text in texts)
    write_whole(folder / name, whole if name.endswith("l") else f"[{', '.join(texts)}]\n")
    interface = label_studio_config(voted_rows[0]) if kind == "label-studio" else ""
    return ExportedVotes(folder / name, interface)


def testing_notes(answer: VoteAnswer) -> tuple[str, ...]:
    """Sentences to hold a reward's accuracy on the same votes against: the raters' own consistency,
    and what the run had recorded of these samples."""
    c, notes = answer.consistency, list[str]()
    if c.n:
        interval = f", 95 % interval {c.low:.2f} to {c.high:.2f}" if c.low < c.high else ""
        notes.append(
            f"the raters' own consistency is {c.value:.2f} ({count_of(c.n, 'repeat')}{interval})"
        )
    for name, (_, right) in answer.rewards.items():
        if right.n:
            notes.append(
                f"{name}, as the run recorded it, agrees with people on {_percent(right.value)} % "
                f"of the votes ({_interval(right)}; ties half)"
            )
    return tuple(notes)


def _plain(value: Any) -> Any:
    if isinstance(value, MeanInterval):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value
