"""Compare requested and recognised texts: normalisation, quotations, edit distance."""

import re
import unicodedata

_QUOTED = re.compile('"([^"]*)"|“([^”]*)”')


def normalise(text: str) -> str:
    """Lower-case the text, remove whitespace, and apply Unicode compatibility normalisation
    (NFKC).

    "Ｈello \\n World" and "helloworld" are the same.
    """
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


def quoted(prompt: str) -> list[str]:
    """Texts between double quotes, straight or curly, in order; empty ones are left out."""
    texts = (straight or curly for straight, curly in _QUOTED.findall(prompt))
    return [text for text in texts if normalise(text)]


def edit_distance(a: str, b: str) -> int:
    """Minimum number of insertions, deletions and substitutions of one character that turn a into
    b."""
    return _last_row(a, b, list(range(len(b) + 1)))[-1]


def distance_within(text: str, whole: str) -> int:
    """Edit distance of `text` from its nearest substring of `whole`; at most len(text)."""
    return min(_last_row(text, whole, [0] * (len(whole) + 1)))


def _last_row(a: str, b: str, first: list[int]) -> list[int]:
    """Distances of a from the prefixes of b; `first` is the cost of skipping each prefix of b."""
    row = first
    for i, x in enumerate(a, start=1):
        above, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row


def step_ends(text: str, separator: str) -> list[int]:
    """Ends of a text's steps, each behind its separator; the last one is the end of the text.

    Separators that follow each other, with nothing but whitespace between, end one step, and one
    at the text's start ends none. An empty text has one empty step.
    """
    breaks = re.finditer(f"(?:{re.escape(separator)}\\s*)+", text)
    ends = [match.end() for match in breaks if text[: match.start()].strip()]
    return [end for end in ends if end < len(text)] + [len(text)]
