"""Samples on the page: the same prompts and noise over the run, and the best and worst ones."""

from collections.abc import Sequence
from html import escape

from flowrl.pages.html import count, given_images, media, number, page_section, scores_text, signed
from flowrl.pages.records import EvaluationRecord, SampleRecord

MOST_SHOWN_BYTES = 8_000_000  # of all samples over the run; fewer evaluations are shown beyond
MOST_SHOWN = 25  # evaluations
NOUNS = {"image": "image", "video": "video", "text": "text"}


def shown_evaluations(
    every: Sequence[EvaluationRecord], best: int | None, most_bytes: int = MOST_SHOWN_BYTES
) -> list[EvaluationRecord]:
    """The first, the best and the last evaluation, and as many between as fit, evenly spread."""
    some = [each for each in every if each.same]
    if not some:
        return []
    size = max(sum(len(sample.media) for sample in each.same) for each in some)
    room = min(len(some), MOST_SHOWN, max(2, most_bytes // max(1, size)))
    places = {round(i * (len(some) - 1) / max(1, room - 1)) for i in range(room)}
    places |= {i for i, each in enumerate(some) if each.iteration == best}
    return [some[i] for i in sorted(places)]


def slider_part(every: Sequence[EvaluationRecord], best: int | None) -> str:
    """The same prompts and noise from the base to the last evaluation, with a slider."""
    shown = shown_evaluations(every, best)
    if not shown:
        return ""
    kind, iterations = shown[0].kind, [each.iteration for each in shown]
    some = len([each for each in every if each.same])
    left = "" if len(shown) == some else f" {len(shown)} of {some} evaluations are shown."
    note = (
        f"The same held-out prompts and the same noise at each evaluation: the base model beside "
        f"the iteration that the slider shows. The number is {escape(shown[0].key)}.{left}"
    )
    rows = "".join(_row(shown, place) for place in _places(shown))
    body = f'{_control(iterations, best, kind)}<div class="rows {kind}">{rows}</div>'
    return page_section(
        "samples", "Samples over the run", note, f'<div class="slider">{body}</div>'
    )


def _control(iterations: Sequence[int], best: int | None, kind: str) -> str:
    last = len(iterations) - 1
    names = [("base" if i == 0 else f"iteration {i}") for i in iterations]
    names = [f"{n} (best)" if i == best else n for n, i in zip(names, iterations, strict=True)]
    options = "".join(f'<option value="{k}">{escape(n)}</option>' for k, n in enumerate(names))
    videos = '<button type="button" class="motion">Pause videos</button>' if kind == "video" else ""
    return (
        '<div class="control"><label for="when">Iteration</label>'
        f'<input id="when" type="range" min="0" max="{last}" value="{last}" step="1" '
        f'list="evaluations" aria-valuetext="{escape(names[-1], quote=True)}">'
        f'<datalist id="evaluations">{options}</datalist><output for="when">{escape(names[-1])}'
        f'</output><label class="all"><input type="checkbox" id="every"> all side by side</label>'
        f"{videos}</div>"
    )


def _places(shown: Sequence[EvaluationRecord]) -> list[int]:
    """Samples that all shown evaluations have; a resumed run may evaluate others."""
    common = set.intersection(*({s.place for s in each.same} for each in shown))
    return sorted(common)


def _row(shown: Sequence[EvaluationRecord], place: int) -> str:
    samples = [next(s for s in each.same if s.place == place) for each in shown]
    base = samples[0].scores.get(shown[0].key)
    figures = "".join(
        _figure(k, each, sample, base)
        for k, (each, sample) in enumerate(zip(shown, samples, strict=True))
    )
    given = " with-given" if samples[0].given else ""
    return (
        f'<article class="row{given}"><h3 class="prompt" dir="auto">{escape(samples[0].prompt)}'
        '</h3><div class="strip" tabindex="0" role="group" aria-label="Samples of this prompt">'
        f"{given_images(samples[0])}{figures}</div></article>"
    )


def _figure(place: int, each: EvaluationRecord, sample: SampleRecord, base: float | None) -> str:
    title = "base" if each.iteration == 0 else f"iteration {each.iteration}"
    about = f"{NOUNS[each.kind].capitalize()} of {'the base' if not place else title}"
    return (
        f'<figure data-place="{place}" data-name="{title}">{media(sample, about)}'
        f"<figcaption><span>{title}</span>{_score(sample.scores.get(each.key), base, place)}"
        "</figcaption></figure>"
    )


def _score(score: float | None, base: float | None, place: int) -> str:
    """The score, and an arrow with the change, so that colour is not the only sign."""
    if score is None:
        return "<b>unscored</b>"
    if not place or base is None or score == base:
        return f"<b>{number(score)}</b>"
    up = score > base
    arrow = "\N{BLACK UP-POINTING TRIANGLE}" if up else "\N{BLACK DOWN-POINTING TRIANGLE}"
    change = f'<i class="{"up" if up else "down"}">{arrow} {signed(score - base)}</i>'
    return f"<b>{number(score)} {change}</b>"


def extremes_part(every: Sequence[EvaluationRecord]) -> str:
    """The best and the worst samples of the last evaluation, with all their scores."""
    some = [each for each in every if each.best]
    if not some:
        return ""
    last = some[-1]
    when = "of the base model" if last.iteration == 0 else f"after iteration {last.iteration}"
    total = count(len(last.scores[last.key]), "sample")
    body = "".join(
        f'<h3>{title}</h3><div class="tiles {last.kind}">{"".join(map(_tile, samples))}</div>'
        for title, samples in (("Best", last.best), ("Worst", last.worst))
    )
    note = (
        f"Highest and lowest {escape(last.key)} among {total} of the evaluation {when}. A reward "
        "that is being hacked shows here first: look at the best ones."
    )
    return page_section("extremes", "Best and worst samples", note, body)


def _tile(sample: SampleRecord) -> str:
    shown = media(sample, "Sample")
    if sample.given:
        shown = f'<div class="beside">{given_images(sample)}<figure>{shown}</figure></div>'
    return (
        f'<figure class="tile">{shown}<figcaption><b>{scores_text(sample)}</b>'
        f'<span class="prompt" dir="auto">{escape(sample.prompt)}</span></figcaption></figure>'
    )
