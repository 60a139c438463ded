"""Samples on the page of `flowrl evaluate-rewards`: edits side by side, and the worst verdicts."""

from collections.abc import Sequence
from html import escape

import numpy as np

from flowrl.evaluation.agreement import preferred
from flowrl.evaluation.charts import html_image, section
from flowrl.evaluation.measure import Gallery
from flowrl.evaluation.perturb import EDITS, change
from flowrl.evaluation.preferences import Preferences
from flowrl.evaluation.reward_report import RewardResult


def edit_strip(
    outcomes: Sequence[RewardResult], p: Preferences, gallery: Gallery, seed: int
) -> str:
    """One sample as it is and after every edit, with the scores of all rewards."""
    scored = [a for a in outcomes if a.score is not None and a.changed]
    if not scored:
        return ""
    known = np.all([~np.isnan(c) for a in scored for c in a.changed.values()], 0)
    if not known.any():
        return ""
    row = int(np.flatnonzero(known)[0])
    figures = []
    for edit in ("as it is", *EDITS):
        how = change(EDITS[edit], seed) if edit in EDITS else None
        media = gallery.samples([row], how).media[0]
        values = [
            f"{escape(a.name)} {(a.changed[edit] if edit in EDITS else a.score)[row]:.3g}"  # type: ignore[index]
            for a in scored
        ]
        figures.append(
            f"<figure>{html_image(media, edit)}<figcaption><b>{edit}</b><br>"
            f"{'<br>'.join(values)}</figcaption></figure>"
        )
    prompt = escape(p.items[row].prompt)
    return f'<h3>One sample: {prompt}</h3><div class="strip">{"".join(figures)}</div>'


def wrong_examples(a: RewardResult, p: Preferences, gallery: Gallery, most: int) -> str:
    """The pairs where the reward was surest of a verdict that people reject."""
    wrong = np.flatnonzero(np.nan_to_num(a.margin) * preferred(p.label) < 0)
    order = wrong[np.argsort(-np.abs(a.margin[wrong]), kind="stable")][:most]
    cards = []
    for i in order:
        samples = gallery.samples([int(p.a[i]), int(p.b[i])])
        figures = []
        for side, row in enumerate((p.a[i], p.b[i])):
            people = (p.label[i] > 0.5) == (side == 0)
            who = '<b class="people">people</b>' if people else f'<b class="wrong">{_short(a)}</b>'
            score = a.score[row] if a.score is not None else 0.5 + a.margin[i] * (1 - 2 * side)
            image = html_image(samples.media[side], p.items[row].prompt)
            figures.append(f"<figure>{image}<figcaption>{score:.3g} {who}</figcaption></figure>")
        prompt = escape(p.items[p.a[i]].prompt[:200])
        cards.append(f'<div class="pair"><p>{prompt}</p><div>{"".join(figures)}</div></div>')
    if not cards:
        return ""
    title = f"Where {escape(a.name)} and people differ most"
    note = f"{len(wrong)} pairs in all; the surest are shown."
    return section(title, note, f'<div class="pairs">{"".join(cards)}</div>')


def _short(a: RewardResult) -> str:
    return escape(a.name if len(a.name) <= 18 else "the reward")
