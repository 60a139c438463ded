"""The page of `flowrl evaluate-rewards`: one file without scripts or external files."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from flowrl.evaluation.agreement import MeanInterval
from flowrl.evaluation.charts import dots, html_table, matrix, reliability, section, table_number
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.preferences import Preferences
from flowrl.evaluation.report_samples import edit_strip, wrong_examples
from flowrl.evaluation.reward_report import ReportTree, RewardResult, percent

TIE_RULES = {
    "half": "ties count half (Pick-a-Pic)",
    "excluded": "people's ties left out (ImageReward, HPDv2)",
    "calibrated": "three verdicts, tie threshold fitted (GenAI-Bench, VideoGen-RewardBench)",
    "one_order": "judged in one order only",
}
NOTES = (
    (
        "Accuracy",
        "Share of pairs whose winner the reward names as people do. Ties count half; or pairs that "
        "people tree equal are left out and a reward's own ties are wrong; or three verdicts are "
        "asked for, and the reward says tie up to a threshold that is fitted on these very pairs.",
    ),
    (
        "Intervals",
        "Bootstrap over prompts, not pairs: pairs of one prompt are not independent. All rewards "
        "use the same resamples, so differences between them have intervals of their own.",
    ),
    (
        "Rank correlation",
        "Kendall's tau-b and Spearman's rho of each ordered group, then their mean. A group that "
        "a reward gives one score counts 0.",
    ),
    (
        "Calibration",
        "Brier is the mean squared distance of P(a preferred) from the label of people: 0 is best, "
        "0.25 is always one half. ECE is the mean distance between predicted and observed shares "
        "over ten bins. A reward has no probabilities; one fitted number scales its margins first.",
    ),
    (
        "Position bias",
        "A judge gets each pair twice, each sample first once. Lean is the mean preference for the "
        "first shown, less one half. Accuracies of judges average both orders by default.",
    ),
    (
        "Robustness",
        "Scores of edited samples less those of the samples as they are, in units of the standard "
        "deviation of scores within a prompt, as in training. Below it: the share of correctly "
        "ranked pairs whose loser wins once it alone is edited.",
    ),
)


def report_page(
    tree: ReportTree,
    outcomes: Sequence[RewardResult],
    preferences: Preferences,
    gallery: Gallery,
    examples: int,
    seed: int,
) -> str:
    data = tree["dataset"]
    style = (Path(__file__).parent / "report.css").read_text()
    parts = [
        f"<h1>Which reward to trust: {escape(data['name'])}</h1>",
        f'<p class="pale">{escape(_summary(data))}</p>',
        '<ul class="findings">',
        *(
            f"<li>{escape(sentence).replace(' %', '&nbsp;%')}</li>"
            for sentence in tree["sentences"]
        ),
        "</ul>",
        _accuracy(tree),
        _categories(tree),
        _ranks(tree),
        _agreement(tree),
        _robustness(tree),
        edit_strip(outcomes, preferences, gallery, seed),
        _calibration(tree),
        _position(tree),
        _costs(tree),
        *(wrong_examples(a, preferences, gallery, examples) for a in outcomes),
        _broken(data["broken"]),
        _notes(),
    ]
    title = f"Rewards on {escape(data['name'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _summary(data: ReportTree) -> str:
    text = f"{data['pairs']} pairs of {data['samples']} samples for {data['prompts']} prompts, "
    text += f"{data['ties']} of them ties; layout {data['layout']}."
    return text + (f" {data['unlabelled']} rows without a label." if data["unlabelled"] else "")


def _accuracy(tree: ReportTree) -> str:
    rewards, ties = tree["rewards"], tree["ties"]
    order = sorted(rewards, key=lambda n: -_low(rewards[n]["accuracy"][ties].value))
    rows = [(name, rewards[name]["accuracy"][ties]) for name in order]
    kinds = [k for k in TIE_RULES if any(k in r["accuracy"] for r in rewards.values())]
    cells = [
        [
            escape(name),
            *(_estimate(rewards[name]["accuracy"].get(kind)) for kind in kinds),
            str(rewards[name]["tied_pairs"]),
            str(rewards[name]["unscored_pairs"]),
        ]
        for name in order
    ]
    level = percent(tree["level"], 0)
    return section(
        "Accuracy",
        f"Percent of pairs, {TIE_RULES[ties]}, with {level} intervals over prompts. The dashed "
        "line is guessing.",
        dots(rows)
        + "<h3>With other treatments of ties</h3>"
        + html_table(["", *(k.replace("_", " ") for k in kinds), "tied", "no verdict"], cells)
        + _differences(tree),
    )


def _low(x: float) -> float:
    return x if x == x else -1.0


def _estimate(e: MeanInterval | None, digits: int = 1, scale: float = 100.0) -> str:
    if e is None:
        return "&ndash;"
    span = f"{table_number(e.low, digits, scale)} &ndash; {table_number(e.high, digits, scale)}"
    return f"{table_number(e.value, digits, scale)}<small>{span}</small>"


def _differences(tree: ReportTree) -> str:
    if not tree["differences"]:
        return ""
    rows = [
        [
            f"{escape(d['first'])} &minus; {escape(d['second'])}",
            _estimate(MeanInterval(d["value"], d["low"], d["high"], d["n"])),
            "settled" if d["low"] > 0 or d["high"] < 0 else "not settled",
        ]
        for d in tree["differences"]
    ]
    return "<h3>Differences on the same pairs, in points</h3>" + html_table(
        ["", "points", ""], rows
    )


def _categories(tree: ReportTree) -> str:
    names = list(tree["dataset"]["categories"])
    if not names:
        return ""
    counts = tree["dataset"]["categories"]
    rows = [
        [escape(r), *(_estimate(v["categories"][c]) for c in names)]
        for r, v in tree["rewards"].items()
    ]
    head = ["", *(f"{c} ({counts[c]})" for c in names)]
    return f"<h2>By category</h2>{html_table(head, rows)}"


def _ranks(tree: ReportTree) -> str:
    ranked = {n: r["rank"] for n, r in tree["rewards"].items() if r.get("rank")}
    if not ranked:
        return ""
    rows = [
        [escape(n), _estimate(r["kendall"], 2, 1.0), _estimate(r["spearman"], 2, 1.0)]
        for n, r in ranked.items()
    ]
    groups = next(iter(ranked.values()))["groups"]
    note = f"Mean over {groups} ordered groups; 1 is the order of people."
    return section("Rank correlation", note, html_table(["", "Kendall", "Spearman"], rows))


def _agreement(tree: ReportTree) -> str:
    names, share = tree["agreement"]["names"], tree["agreement"]["share"]
    note = "Percent of pairs with the same winner, where both name one."
    return section("Who agrees with whom", note, matrix(names, share))


def _robustness(tree: ReportTree) -> str:
    held = {n: r["robustness"] for n, r in tree["rewards"].items() if r.get("robustness")}
    if not held:
        return ""
    rows = []
    for name, edits in held.items():
        cells = [escape(name)]
        for r in edits.values():
            shift, over = r["shift"], r["overtakes"]
            bad = (shift.low > 0 and shift.value >= 0.1) or (over.n and over.low > 0.05)
            text = f"{shift.value:+.2f}" if shift.value == shift.value else "&ndash;"
            cells.append(
                f"<td{' class=bad' if bad else ''}>{text}<small>{table_number(over.value, 0)} % win"
                "</small></td>"
            )
        rows.append(cells)
    note = (
        "Shift of the score in spreads within a prompt, and how many losers win once they alone "
        "are edited. Red: a policy is paid for this edit."
    )
    return section("What fools it", note, html_table(["", *next(iter(held.values()))], rows))


def _calibration(tree: ReportTree) -> str:
    plots = []
    for name, reward in tree["rewards"].items():
        c = reward["calibration"]
        if not c["n"]:
            continue
        how = "as it is" if c["scale"] is None else f"margins over {c['scale']:.3g}"
        how = "its margins are uninformative" if c["scale"] == float("inf") else how
        plots.append(
            f"<figure>{reliability(c['said'], c['seen'], c['n'])}<figcaption>"
            f"<b>{escape(name)}</b>, {how}<br>Brier {c['brier']:.3f}, ECE {c['ece']:.3f}"
            "</figcaption></figure>"
        )
    note = "Predicted P(preferred) across, observed share up; the dashed line is perfect."
    return section("Calibration", note, f'<div class="plots">{"".join(plots)}</div>')


def _position(tree: ReportTree) -> str:
    rows = []
    for name, reward in tree["rewards"].items():
        if "position" in reward:
            p = reward["position"]
            lean = f"{100 * p['toward_first']:+.1f}"
            shares = (p["consistent"], p["to_first"], p["to_second"])
            rows.append([escape(name), lean, *(table_number(x) for x in shares), str(p["n"])])
    head = ["", "lean to first", "same winner", "always first", "always second", "pairs"]
    return f"<h2>Position bias of judges, percent</h2>{html_table(head, rows)}" if rows else ""


def _costs(tree: ReportTree) -> str:
    rows = []
    for name, reward in tree["rewards"].items():
        c = reward["cost"]
        memory = "&ndash;" if c["megabytes"] is None else f"{c['megabytes']:.1f}"
        rows.append(
            [escape(name), f"{1000 * c['seconds']:.3g}", memory, f"{c['load_seconds']:.1f}"]
        )
    head = ["", "ms per sample or verdict", "MB per sample, at most", "s to load"]
    return f"<h2>Cost</h2>{html_table(head, rows)}"


def _broken(broken: dict[str, str]) -> str:
    if not broken:
        return ""
    lines = "".join(f"<li>{escape(why)}</li>" for why in list(broken.values())[:50])
    return f"<h2>{len(broken)} samples could not be read</h2><ul>{lines}</ul>"


def _notes() -> str:
    terms = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in NOTES)
    return f"<details><summary>How the numbers are made</summary><dl>{terms}</dl></details>"
