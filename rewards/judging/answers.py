"""Readers of a judge's answer: from a chat completion to a score or a preference in 0..1.

The forms are our own and those of the UnifiedReward family (arXiv:2503.05236, 2505.03318). Readers
raise `Unparsable` for an answer without a verdict; they never guess.
"""

import json
import math
import re
from collections.abc import Sequence

from rewards.judging.chat import Completion
from rewards.serving.requests import Unparsable

LEAST_MASS = 0.5  # of the probability that must lie on the requested answers

_RANGE = r"\s*\d+\s*(?:-|\u2013|to)\s*\d+\s*"
_GAP = r"[^\w\[\](){}+\-]{0,8}"  # colons, stars, quotes, blanks
_SCORE = re.compile(
    r"(?:\b(alignment|coherence|style|physics)\s+)?(?<![a-z])score"
    rf"{_GAP}(?:[(\[]{_RANGE}[)\]])?{_GAP}"  # the published range, as in "(1-5)", is no score
    r"(?P<bracket>\[\s*)?(-?\d++(?:\.\d++)?+)(?(bracket)\s*\]|)"
    rf"(?!\s*(?:-|\u2013|to)\s*\d)(?![\w%]|\.\d)(?:\s*(?:/|out of)\s*(\d+))?",
    re.IGNORECASE,
)
_BETTER = re.compile(r"\b(?:image|video|text) ([12]) is (?:the )?better\b")
_ENDS = re.compile(
    r"\b(?:image|video|text) [12] is (?:the )?better"
    r"(?: overall| one| than (?:edited )?(?:image|video|text) [12])?$"
)
_TIE = re.compile(
    r"(?:(?:so|thus|hence|overall|therefore),? )?(?:it is |it's )?(?:a )?(?:tie|draw)"
    r"|(?:are )?equal(?:ly good)?"
    r"|(?:.*\W)?(?:both|the two)(?: edited)?(?: images| videos| texts)?(?: are)? equal(?:ly good)?"
)
_DOUBT = re.compile(r"\b(?:\w*not|nor|neither|if|unless|whether|equal\w*)\b|n't\b")
_BOTH = re.compile(
    r"(?:image|video|text) 1\s*:\s*(-?\d++(?:\.\d++)?+)(?![\w%/+=(]|\.\d)\s*"
    r"(?:image|video|text) 2\s*:\s*(-?\d++(?:\.\d++)?+)(?![\w%/+=(]|\.\d)"
)


def score_in(answer: Completion) -> float:
    """Read the last `Score: N` or `Final Score: N` in 1..5, as a number in 0..1.

    An answer with axes alone (`Alignment Score (1-5): 3.1`, UnifiedReward 2.0) counts as their
    mean, with the last number of each. UnifiedReward's form for videos, which lists a dynamic
    degree, has a final score in 1..10.
    """
    top, last = _axes(answer.text)
    scores = [last[""]] if "" in last else list(last.values())
    if not scores or any(math.isnan(score) for score in scores):
        raise Unparsable(f"no score from 1 to {top}")
    return (sum(scores) / len(scores) - 1) / (top - 1)


def axis_in(answer: Completion, axis: str) -> float:
    """Read the last `Alignment Score (1-5): N` (or another axis), as a number in 0..1."""
    top, last = _axes(answer.text)
    if math.isnan(last.get(axis, math.nan)):
        raise Unparsable(f"no {axis} score from 1 to {top}")
    return (last[axis] - 1) / (top - 1)


def _axes(text: str) -> tuple[int, dict[str, float]]:
    """The top of the range, and the last number of each axis ("" for none); NaN if outside it."""
    top = 10 if re.search(r"dynamic degree\s*:", text, re.IGNORECASE) else 5
    last: dict[str, float] = {}
    for match in _SCORE.finditer(text):
        axis, _, number, out_of = match.groups()
        value = float(number)
        if not 1 <= value <= top or (out_of is not None and int(out_of) != top):
            value = math.nan
        last[(axis or "").lower()] = value
    return top, last


def expected_in(answer: Completion) -> float:
    """Mean of the digits 1..5 under the model's own probabilities, as a number in 0..1."""
    mass = probabilities(answer, "12345")
    if mass is None:
        raise Unparsable("no log-probabilities of the digits 1 to 5")
    return sum(i * p for i, p in enumerate(mass)) / 4


def yes_in(answer: Completion) -> float:
    """P(yes) from log-probabilities; without them, 1 or 0 from the word itself."""
    mass = probabilities(answer, ("yes", "no"))
    if mass is not None:
        return mass[0]
    word = re.match(r"\W*(yes|no)\b", answer.text, re.IGNORECASE)
    if word is None:
        raise Unparsable("neither yes nor no")
    return float(word[1].lower() == "yes")


def which_in(answer: Completion) -> float:
    """P(the first is better) from the log-probabilities of 1 and 2."""
    mass = probabilities(answer, "12")
    if mass is None:
        raise Unparsable("no log-probabilities of 1 and 2")
    return mass[0]


def verdict_in(answer: Completion) -> float:
    """P(the first is better): 1 or 0 from a verdict, 1/2 for a tie stated in words, as in
    Pref-GRPO.

    The verdict is the text of the first `<answer>` (UnifiedReward-Think, arXiv:2505.03318). Without
    a tag it is `winner` of a JSON object (Flex), the last sentence (`Image 1 is better.`), or a
    number for each: shares that sum to 1 are used directly (mean over axes), otherwise the larger
    number wins. An answer without any of these, or with both verdicts, is unparsable; Pref-GRPO's
    code counts those as half a win.
    """
    text = answer.text
    if re.search(r"</?answer>", text, re.IGNORECASE):
        tag = re.search(r"<answer>((?:(?!<answer>).)*)</answer>", text, re.IGNORECASE | re.DOTALL)
        verdict = None if tag is None else _sentence_verdict(tag[1])
    elif (winner := _json_winner(text)) is not None:
        verdict = _sentence_verdict(winner)
    else:
        sentences = re.split(r"(?<=[.!?])\s+|\n+", text.strip())
        verdict = _sentence_verdict(sentences[-1], ends=True)
        verdict = _larger_number(text) if verdict is None else verdict
    if verdict is None:
        raise Unparsable("no verdict")
    return verdict


def _sentence_verdict(sentence: str, ends: bool = False) -> float | None:
    """1, 0 or 1/2 if the sentence names exactly one of the three, otherwise None.

    ends: the sentence must end with the verdict.
    """
    plain = " ".join(sentence.lower().replace("*", "").split()).strip(" .!")
    better = set(_BETTER.findall(plain))
    if bare := re.fullmatch(r"(?:(?:image|video|text) )?([12])", plain):
        better = {bare[1]}
    elif ends and better and not _ENDS.search(plain):
        return None
    if len(better) == 1 and not _DOUBT.search(plain):
        return float(better == {"1"})
    doubt = _DOUBT.search(plain.replace("equal", ""))
    return 0.5 if not better and not doubt and _TIE.fullmatch(plain) else None


def _json_winner(text: str) -> str | None:
    """`winner` of a JSON object, alone or in a fence; None if there is no such object."""
    start, end = text.find("{"), text.rfind("}")
    try:
        parsed = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        return None
    winner = parsed.get("winner") if isinstance(parsed, dict) else None
    return winner if isinstance(winner, str) else None


def _larger_number(text: str) -> float | None:
    """P(first) from `Image 1: x` and `Image 2: y`, on one axis or on several."""
    pairs = [(float(a), float(b)) for a, b in _BOTH.findall(" ".join(text.lower().split()))]
    if not pairs or len(re.findall(r"(?:image|video|text) [12]\s*:", text.lower())) != 2 * len(
        pairs
    ):
        return None
    if all(min(pair) >= 0 and abs(sum(pair) - 1) < 0.02 for pair in pairs):
        return sum(a / (a + b) for a, b in pairs) / len(pairs)
    if len(pairs) > 1:
        return None
    ((a, b),) = pairs
    return 0.5 if a == b else float(a > b)


def questions_in(answer: Completion) -> list[str]:
    """Lines that end with a question mark, without their numbers."""
    lines = [re.sub(r"^[\s\-*\d.)]+", "", line).strip() for line in answer.text.splitlines()]
    questions = [line for line in lines if line.endswith("?")]
    if not questions:
        raise Unparsable("no questions")
    return questions


def probabilities(answer: Completion, options: Sequence[str]) -> list[float] | None:
    """Probabilities of the options at the last token that is one of them, normalised to sum to 1.

    None if the server returned no log-probabilities, no token is an option, or less than
    LEAST_MASS lies on the options. Tokens that differ in case and blanks are one option.
    """
    logprobs = answer.choices[0].logprobs
    positions = (logprobs.content if logprobs is not None else None) or []
    for position in reversed(positions):
        if position.token.strip().lower() not in options:
            continue
        mass = dict.fromkeys(options, 0.0)
        for token in position.top_logprobs or [position]:
            word = token.token.strip().lower()
            if word in mass:
                mass[word] += math.exp(min(token.logprob, 0.0))
        total = sum(mass.values())
        return [mass[o] / total for o in options] if total >= LEAST_MASS else None
    return None
