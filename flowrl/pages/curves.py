"""The curves of a run: which metrics share a chart, and which charts share a heading."""

from collections.abc import Iterator, Sequence
from html import escape

from flowrl.pages.html import page_section
from flowrl.pages.line_chart import Chart, Curve, chart_figure
from flowrl.pages.run_folder import RunFolder

NORMAL = 1.96  # standard errors of a 95 % interval
PHASES = ("encode", "sample", "decode", "score", "ref", "update")
STATISTIC_NAMES = {
    "image/brightness": ("Brightness", "0 to 1"),
    "image/saturation": ("Saturation", "0 to 1"),
    "image/edges": ("Share of pixels on edges", "0 to 1"),
    "image/entropy": ("Entropy of colours", "bits"),
    "image/diversity": ("Diversity within a prompt", "distance per pixel"),
    "text/length": ("Length", "tokens"),
    "text/stopped": ("Texts that end by themselves", "share"),
    "text/empty": ("Empty texts", "share"),
    "text/distinct": ("Texts of a prompt that differ", "share of pairs"),
    "text/surprise": ("Surprise of a token", "nats"),
    "text/turns": ("Turns", "turns"),
}
POLICY_NAMES = {
    "kl": ("KL divergence from the start", ""),
    "kl_sample": ("KL of a text, subtracted from its reward", "nats"),
    "entropy": ("Entropy of a token", "nats"),
    "grad_norm": ("Norm of the gradient", ""),
    "loss": ("Loss", ""),
    "policy_loss": ("Policy term of the loss", ""),
    "moved": ("Distance from the sampling policy", ""),
    "margin": ("Margin of the better sample", ""),
    "won": ("Pairs with a positive margin", "share"),
    "logp": ("Log-likelihood of samples", ""),
    "lr": ("Learning rate", ""),
}
_CLIPPED = {"clipped_low": "below", "clipped_high": "above", "clipped_dual": "dual"}


def curve_parts(run: RunFolder) -> str:
    """All curves of the run, under their headings; what has no place is in a fold at the end."""
    used: set[str] = set()
    groups: list[tuple[str, str, list[Chart]]] = [
        ("Held-out rewards", _HELD_OUT, list(_held_out(run, used))),
        ("Rewards of training samples", _REWARDS, list(_rewards(run, used))),
        ("Policy", _POLICY, list(_policy(run, used))),
        ("Diversity and statistics", _STATISTICS, list(_statistics(run, used))),
        ("Seconds", _SECONDS, list(_seconds(run, used))),
    ]
    body = [_group(title, note, charts) for title, note, charts in groups if charts]
    rest = [_single(run, name, name, "") for name in run.names if name not in used]
    if rest:
        figures = "".join(chart_figure(chart) for chart in rest)
        body.append(
            f"<details><summary>{len(rest)} other metrics</summary>"
            f'<div class="charts">{figures}</div></details>'
        )
    return page_section("curves", "Curves", _CURVES, "".join(body)) if body else ""


_CURVES = (
    "One value per iteration; 0 is the base model. Point at a chart, or focus it and use the "
    "arrow keys, to read its values."
)
_HELD_OUT = (
    "Prompts and rewards that training never sees, always from the same noise. The band is the "
    "95 % interval of the difference from the base, sample by sample."
)
_REWARDS = "Means over the samples that the policy learns from."
_POLICY = "The size of the updates, and the distance from the base."
_STATISTICS = (
    "Solid: training samples. Dashed with dots: held-out samples. A diversity below 0.6 of its "
    "start is a collapse."
)
_SECONDS = "Wall time of each iteration by phase, without evaluations and checkpoints."


def _group(title: str, note: str, charts: Sequence[Chart]) -> str:
    figures = "".join(chart_figure(chart) for chart in charts)
    return f'<h3>{escape(title)}</h3><p class="note">{note}</p><div class="charts">{figures}</div>'


def _single(run: RunFolder, name: str, title: str, unit: str) -> Chart:
    code = name if title != name else ""
    return Chart(title, [Curve(name, run.column(name))], code, unit)


def held_out_line(run: RunFolder, name: str, label: str) -> Curve:
    """A held-out score with the interval of its difference from the base around it."""
    points, errors = run.column(f"held_out/{name}"), dict(run.column(f"held_out_gain_error/{name}"))
    spans = [(y, NORMAL * errors.get(x, 0.0)) for x, y in points]
    return Curve(label, points, [(y - half, y + half) for y, half in spans], marks=True)


def _held_out(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    for name in run.judges:
        line = held_out_line(run, name, name)
        used.update(f"held_out{kind}/{name}" for kind in ("", "_std", "_gain_error"))
        if line.points:
            yield Chart(name, [line], f"held_out/{name}", base=line.points[0][1])
    sets = [name for name in run.names if name.startswith("data_set/")]
    used.update(sets)
    yield from (_single(run, name, name.removeprefix("data_set/"), "") for name in sets)


def _rewards(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    names = [name for name in run.names if name.startswith("reward/")]
    every = (
        [("reward", "Weighted sum of the rewards", "reward_std")] if "reward" in run.names else []
    )
    every += [(n, n.removeprefix("reward/"), n.replace("reward/", "reward_std/", 1)) for n in names]
    for name, title, spread in every:
        used |= {name, spread}
        yield Chart(title, [Curve("mean", run.column(name))], name)
    spreads = [Curve(title, run.column(spread)) for _, title, spread in every]
    if spreads:
        yield Chart("Spread over samples", spreads, "reward_std", "standard deviation")
    if "flat_groups" in run.names:
        used.add("flat_groups")
        yield _single(run, "flat_groups", "Groups without a spread", "share")


def _policy(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    clipped = [name for name in _CLIPPED if name in run.names]
    used.update(clipped)
    first = [name for name in ("kl", "kl_sample") if name in run.names]
    first += [name for name in run.names if name.startswith("kl_") and name not in first]
    order = [*first, *(name for name in POLICY_NAMES if name in run.names and name not in first)]
    for place, name in enumerate(order):
        if place == len(first) and clipped:
            lines = [Curve(_CLIPPED[each], run.column(each)) for each in clipped]
            yield Chart("Clipped shares", lines, "clipped_low, clipped_high", "share")
        if place == len(first) and "ratio" in run.names:
            yield from _ratio(run, used)
        title, unit = POLICY_NAMES.get(name, (f"KL from the average {name[3:]}", ""))
        used.add(name)
        yield _single(run, name, title, unit)


def _ratio(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    names = [name for name in ("ratio", "ratio_min", "ratio_max") if name in run.names]
    used.update(names)
    words = {"ratio": "mean", "ratio_min": "lowest", "ratio_max": "highest"}
    lines = [Curve(words[name], run.column(name)) for name in names]
    yield Chart("Ratio of new to old policy", lines, "ratio")


def _statistics(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    own = [n.removeprefix("held_out/") for n in run.names if n.startswith(("held_out/", "image/"))]
    own += [name for name in run.names if name.startswith("text/")]
    names = [n for n in dict.fromkeys(own) if n.startswith(("image/", "text/"))]
    # the diversity comes first: it is the one to look at
    for name in sorted(names, key=lambda n: n not in ("image/diversity", "text/distinct")):
        held_out = Curve("held-out samples", run.column(f"held_out/{name}"), marks=True, colour=1)
        training = Curve("training samples", run.column(name))
        used |= {name, f"held_out/{name}", f"held_out_std/{name}", f"held_out_gain_error/{name}"}
        title, unit = STATISTIC_NAMES.get(name, (name, ""))
        yield Chart(title, [line for line in (training, held_out) if line.points], name, unit)


def _seconds(run: RunFolder, used: set[str]) -> Iterator[Chart]:
    phases = [phase for phase in PHASES if f"seconds/{phase}" in run.names]
    used.update(f"seconds/{phase}" for phase in phases)
    lines = [Curve(phase, run.column(f"seconds/{phase}")) for phase in phases]
    if lines:
        yield Chart("Seconds by phase", lines, "seconds/PHASE", "s", stacked=True)
    for name, title in (("seconds", "Seconds of an iteration"), ("seconds/cpu", "CPU seconds")):
        if name in run.names:
            used.add(name)
            yield _single(run, name, title, "s")
