"""Accuracy by dimension, for rewards that ask several questions about a sample."""

from collections.abc import Mapping

from rewards.judging.tally import AnswerCount, Tallies, by_primary, primary


def dimension_lines(now: Tallies, base: Tallies | None = None) -> list[str]:
    """A line per primary dimension, and per dimension inside it, with the base model's accuracy.

    If the benchmark's score is the mean of its primary dimensions, it comes first.
    """
    lines: list[str] = []
    for label, tallies in now.items():
        for index, (tally, counts) in enumerate(tallies):
            before = base[label][index][1] if base is not None else {}
            lines += _lines(label, counts, before, tally.overall)
    return lines


def _lines(
    label: str, now: Mapping[str, AnswerCount], base: Mapping[str, AnswerCount], overall: bool
) -> list[str]:
    if not now:
        return []
    above, before = by_primary(now), by_primary(base)
    lines = [f"{label} by dimension:"]
    if overall:
        text = f"{label}: {_mean(above):.4f} (mean of {len(above)} primary dimensions)"
        lines = [text + (f"; base {_mean(before):.4f}" if before else "")]
    for name, count in above.items():
        lines.append(f"  {name}: {_accuracy(count, before.get(name))}")
        inner = sorted(dimension for dimension in now if primary(dimension) == name)
        if inner != [name]:
            lines += [
                f"    {dimension}: {_accuracy(now[dimension], base.get(dimension))}"
                for dimension in inner
            ]
    return lines


def _mean(counts: Mapping[str, AnswerCount]) -> float:
    return sum(count.right / count.asked for count in counts.values()) / len(counts)


def _accuracy(count: AnswerCount, base: AnswerCount | None) -> str:
    text = f"{count.right / count.asked:.4f} of {count.asked} answers"
    return text if base is None else f"{text}; base {base.right / base.asked:.4f}"
