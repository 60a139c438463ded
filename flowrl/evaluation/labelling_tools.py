"""Votes as files of labelling tools, and such files as preferences.

argilla       a list of records, as `dataset.records.to_json` of argilla 2 writes and
              `dataset.records.from_json` reads: fields (prompt, a, b), responses by question
label_studio  a list of tasks, as Label Studio exports and imports as JSON: data (prompt, a, b),
              annotations with the results of a `Pairwise` tag, whose left is a, and of `Choices`
              for pairs without a winner

Of edits, source_image beside a and b is the image that was edited.

Of several answers on a pair the label is their mean. The layouts were read in argilla's code
(records/_resource.py at 0991739b) and in Label Studio's page on its task format.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.errors import UserError
from flowrl.evaluation.preference_rows import (
    Answer,
    JudgedRow,
    PreferenceLayout,
    PreferenceRow,
    edited_source,
)
from flowrl.evaluation.sources import MEDIA_SUFFIXES, SOUNDS

OTHER_SIDE = {"left": "right", "right": "left"}
ARGILLA_QUESTION = "preference"  # of an argilla data set
PAIRWISE, NO_WINNER = "winner", "no_winner"  # names of the tags of Label Studio
WINNERS = {1.0: "a", 0.0: "b", 0.5: "equal"}
LABELS = {"a": 1.0, "b": 0.0, "equal": 0.5, "both_bad": 0.5, "left": 1.0, "right": 0.0, "tie": 0.5}


def label_studio_config(row: Mapping[str, Any]) -> str:
    """The labelling interface for tasks like this line of votes.jsonl: tags of its kind of samples,
    and the source of an edit between them."""
    tag = "Image"  # also of an animated PNG, which a browser plays in it
    if "a_text" in row:
        tag = "Text"
    elif Path(row["a"]).suffix.lower() in SOUNDS:
        tag = "Audio"
    source = ['  <Image name="source" value="$source_image"/>'] if row.get("source_image") else []
    lines = [
        "<View>",
        '  <Header value="$prompt"/>',
        f'  <Pairwise name="{PAIRWISE}" toName="a,b"/>',
        f'  <{tag} name="a" value="$a"/>',
        *source,
        f'  <{tag} name="b" value="$b"/>',
        f'  <Choices name="{NO_WINNER}" toName="a"><Choice value="equal"/>'
        '<Choice value="both_bad"/></Choices>',
        "</View>",
    ]
    return "\n".join(lines)


def argilla_records(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of argilla from the lines of votes.jsonl."""
    return [
        {
            "id": str(number),
            "fields": _samples(row),
            "metadata": {
                "rater": row["rater"], "seconds": row["seconds"], "side": row["side"],
                "kind": _kind(row),
            },
            "suggestions": {},
            "responses": {
                ARGILLA_QUESTION: [{"value": _winner(row), "user_id": _user(row["rater"])}]
            },
            "vectors": {},
            "_server_id": None,
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip


def label_studio_tasks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tasks of Label Studio from the lines of votes.jsonl."""
    tasks = []
    for number, row in enumerate(rows, 1):
        winner = _winner(row)
        if winner in ("a", "b"):
            value = {"selected": "left" if winner == "a" else "right"}
            result = {"from_name": PAIRWISE, "to_name": "a,b", "type": "pairwise", "value": value}
        else:
            value = {"choices": [winner]}
            result = {"from_name": NO_WINNER, "to_name": "a", "type": "choices", "value": value}
        annotation = {"result": [result], "was_cancelled": False, "lead_time": row["seconds"]}
        meta = {"rater": row["rater"], "side": row["side"]}
        data = {**_samples(row), "kind": _kind(row)}
        tasks.append({"id": number, "data": data, "annotations": [annotation], "meta": meta})
    return tasks


def chosen_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the layouts `chosen` and `texts`, without pairs that have no winner."""
    rows_chosen = []
    for row in rows:
        if row["label"] == 0.5:
            continue
        samples = _samples(row)
        better, worse = ("a", "b") if row["label"] > 0.5 else ("b", "a")
        chosen = {"prompt": row["prompt"], "chosen": samples[better], "rejected": samples[worse]}
        if "source_image" in samples:
            chosen["source_image"] = samples["source_image"]
        chosen["side"] = row["side"] if better == "a" else OTHER_SIDE[row["side"]]
        if "a_text" in row:  # as messages, so that a text of one word is no file's name
            for name in ("chosen", "rejected"):
                chosen[name] = [{"role": "assistant", "content": chosen[name]}]
        rows_chosen.append(chosen)
    return rows_chosen


def _samples(row: Mapping[str, Any]) -> dict[str, str]:
    sides = {side: row[f"{side}_text"] if f"{side}_text" in row else row[side] for side in "ab"}
    source = {"source_image": row["source_image"]} if row.get("source_image") else {}
    return {"prompt": row["prompt"], **sides, **source}


def _kind(row: Mapping[str, Any]) -> str:
    return "text" if "a_text" in row else "file"


def _winner(row: Mapping[str, Any]) -> str:
    return "both_bad" if row["both_bad"] else WINNERS[row["label"]]


def _user(rater: str) -> str:
    """A pseudonym as the id of a user, which argilla wants to be a UUID."""
    number = int(rater.rpartition("-")[2])
    return f"00000000-0000-4000-8000-{number:012d}"


def _argilla(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow | None:
    fields, responses = row["fields"], row["responses"]
    if not isinstance(fields, Mapping) or not isinstance(responses, Mapping):
        raise UserError(f"{place}: fields and responses must be mappings, as argilla writes them")
    answers = responses.get(ARGILLA_QUESTION) or []
    labels = [_label(answer.get("value"), f"{place}, {ARGILLA_QUESTION}") for answer in answers]
    metadata = row.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    kind = metadata.get("kind")
    if kind not in ("text", "file"):  # of a data set that flowrl has not written
        kind = "text" if _is_text(fields) else "file"
    return _judged(fields, labels, place, kind, metadata)


def _label_studio(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow | None:
    data, labels = row["data"], list[float]()
    for annotation in row["annotations"] or []:
        if annotation.get("was_cancelled"):
            continue
        for result in annotation.get("result", ()):
            value = result.get("value", {})
            said = value.get("selected") or next(iter(value.get("choices", ())), None)
            if result.get("type") in ("pairwise", "choices") and said is not None:
                labels.append(_label(said, place))
    meta = row.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    return _judged(data, labels, place, data.get("kind", "file"), meta)


def _judged(
    fields: Mapping[str, Any],
    labels: Sequence[float],
    place: str,
    kind: str,
    about: Mapping[str, Any],
) -> JudgedRow | None:
    """A row of the mean of its answers. `about` may say on which side a was shown, which a fit
    takes out."""
    missing = [name for name in ("prompt", "a", "b") if not isinstance(fields.get(name), str)]
    if missing:
        raise UserError(
            f"{place}: there is no {missing[0]}: name the prompt `prompt` and the two samples `a` "
            "and `b`, each a text"
        )
    if not labels:
        return None
    media = [Answer(fields[side]) if kind == "text" else fields[side] for side in "ab"]
    side = {"side": about["side"]} if about.get("side") in OTHER_SIDE else {}
    return JudgedRow(fields["prompt"], media, fmean(labels), more=edited_source(fields) | side)


def _is_text(fields: Mapping[str, Any]) -> bool:
    """Whether a and b are texts rather than names of files, or of pieces of images."""
    names = [str(fields.get(side, "")).partition("#")[0].lower() for side in "ab"]
    return not all(name.endswith(tuple(MEDIA_SUFFIXES)) for name in names)


def _label(value: Any, place: str) -> float:
    if not isinstance(value, str) or value.lower() not in LABELS:
        raise UserError(f"{place}: the answer {value!r:.50} is none of {', '.join(LABELS)}")
    return LABELS[value.lower()]


TOOL_LAYOUTS = {
    "argilla": PreferenceLayout(("fields", "responses"), _argilla),
    "label_studio": PreferenceLayout(("data", "annotations"), _label_studio),
}
EXPORTS = {
    "argilla": ("votes.argilla.json", argilla_records),
    "label-studio": ("votes.label_studio.json", label_studio_tasks),
    "chosen": ("votes.chosen.jsonl", chosen_rows),
}
