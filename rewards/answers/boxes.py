r"""The mathematical answer in a text: the last box, else GSM8K's mark, the last formula or number;
and the forms in which data sets write right answers.
"""

import re
from collections.abc import Iterator
from typing import Any

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
    r"|(?<![\\$])\$(?![\s$])((?:\\.|[^$\\\n])*?(?:\\.|[^$\\\s]))\$(?![\d$])",
    re.DOTALL,
)
_DIGITS = r"\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+"
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = "|".join(_SCALES)
# a mixed number (3 1/2), a power of ten (4.5e3, 2 x 10^5), a fraction, a percentage, 12 million
_NUMBER = re.compile(
    rf"(?<![\w.])[-+\u2212]?\$?(?:\d+\s+\d+\s*/\s*\d+"
    rf"|(?:{_DIGITS})(?:[eE][-+]?\d+|\s?[\u00d7*]\s?10(?:\^|\*\*)\{{?[-+\u2212]?\d+\}}?"
    rf"|(?:\^|\*\*)\{{?[-+\u2212]?\d+\}}?|\s*/\s*\d+|\s?\\?%|\s(?:{_SCALE})\b)?)(?!\w)|(?:{_DIGITS})"
)


def boxes(text: str) -> Iterator[str]:
    r"""The contents of all \boxed{...} and \fbox{...} in order, with balanced braces; also of
    \boxed 7, up to the next space or dollar. Empty and unclosed ones are left out."""
    for match in _BOX.finditer(text):
        rest = text[match.end() :]
        if rest.startswith("{"):
            end = _closing(rest)
            content = rest[1:end] if end else ""
        else:
            content = re.split(r"[\s$\\{}]", rest, maxsplit=1)[0] if match[0][-1:].isspace() else ""
        if content.strip():
            yield content.strip()


def _closing(text: str) -> int | None:
    """The place of the brace that closes the first one."""
    depth, place = 0, 0
    while place < len(text):
        if text[place] == "\\":
            place += 1  # an escaped brace is a character
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
        place += 1
    return None


def last_box(text: str) -> str | None:
    contents = list(boxes(text))
    return contents[-1] if contents else None


def last_answer(text: str, boxed: bool) -> str | None:
    """The answer of a completion as TeX; `boxed`: in a box only. None if there is none."""
    box = last_box(text)
    if box is not None or boxed:
        return box
    if tags := _TAG.findall(text):
        return _in_tag(tags[-1])
    if marked := _MARKED.findall(text):
        return marked[-1].strip()
    formulas = [next(filter(None, match.groups())) for match in _FORMULA.finditer(text)]
    if formulas:
        return formulas[-1].strip()
    numbers = [match[0] for match in _NUMBER.finditer(text)]
    return numbers[-1].strip() if numbers else None


# GSM8K's last line, #### 72; a heading of Markdown has words behind its signs
_MARKED = re.compile(
    r"^####[ \t]*\$?([-+\u2212]?\$?\d[\d,./]*(?:\s?\\?%)?)\$?[ \t]*$", re.MULTILINE
)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")


def _in_tag(content: str) -> str | None:
    """The answer in `<answer>...</answer>`: its last formula, the last number among words, or all
    of it. None if it is empty."""
    formulas = [next(filter(None, match.groups())) for match in _FORMULA.finditer(content)]
    if formulas:
        return formulas[-1].strip()
    numbers = [match[0] for match in _NUMBER.finditer(content)]
    if numbers and _WORD.search(content):
        return numbers[-1].strip()
    return content.strip() or None


def answer_text(value: Any) -> str | None:
    """The text of a cell that holds a right answer, or several that all belong to it
    (OlympiadBench's `final_answer`); None for an empty cell."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or None
    return None if value is None else str(value)


def right_answer(text: str) -> str:
    """A right answer as TeX, from the forms of data sets: a solution with a box, `<answer>` tags, a
    text that ends with `#### 72`, formulas with commas between them, words with one formula, or
    bare. Of several formulas among words none alone is the answer: all of the text is."""
    box = last_box(text)
    if box is not None:
        return box
    if tags := _TAG.findall(text):
        text = tags[-1]
    last = text.rpartition("####")[2].strip()
    formulas = [next(filter(None, match.groups())).strip() for match in _FORMULA.finditer(last)]
    between = _FORMULA.sub("", last)
    if len(formulas) == 1 and not re.search(r"\d", between):
        return formulas[0]
    if formulas and not between.strip(" ,;\n"):
        return ", ".join(formulas)
    return _FORMULA.sub(lambda match: next(filter(None, match.groups())), last)


DASHES: dict[int, str] = dict.fromkeys(
    (0x2212, 0x2013), "-"
)  # the minus sign and the dash of printed texts
# Characters of printed mathematics and the TeX that they stand for.
PRINTED = {
    "°": r"^\circ ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",  # noqa: RUF001
    "∕": "/", "⁄": "/", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",  # noqa: RUF001
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ",  # noqa: RUF001
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "…": r"\ldots ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}",
}  # fmt: skip
_PRINTED = str.maketrans(
    PRINTED | {chr(sign + 0xFEE0): chr(sign) for sign in range(0x21, 0x7F)}  # of full width
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "₀₁₂₃₄₅₆₇₈₉₊₋"
_PLACED = str.maketrans(_RAISED + _LOWERED, "0123456789+-" * 2)
_RAISED_DIGITS, _LOWERED_DIGITS = re.compile(f"[{_RAISED}]+"), re.compile(f"[{_LOWERED}]+")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-zA-Z]))")
_UPRIGHT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}|\{\\rm\s+([ei])\s*\}")
_SPACING = re.compile(r"(?<!\\)\\[,!;: ]|\\q?quad\b|~|\\(?:left|right|displaystyle)(?![a-zA-Z])")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?)[eE]([+-]?\d+)(?!\w)")
_MIXED = re.compile(r"(?<![\d.,/^_{(])([-+]?\d+)\s+(\d+)\s*/\s*(\d+)(?![\d./])")
_SCALED = re.compile(
    rf"(?<![\w.,])(\d+(?:,\d{{3}})*(?:\.\d+)?)\s*(\\text\s*\{{)?\s*({_SCALE})\b", re.IGNORECASE
)
_WORDS_AFTER = re.compile(
    r"([-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\d*\\frac\{\d+\}\{\d+\}))((?:\s+[A-Za-z]{4,})+)"
)
_BARE_POINT = re.compile(r"(?<=\d)\.(?=\s*/)")
_ARRAY = re.compile(
    r"(?:\\left\s*)?[\[(]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*(?:\\right\s*)?[\])]"
    r"|\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}",
    re.DOTALL,
)
_BASED = re.compile(r"([0-9A-Z]+)_\{?(\d{1,2})\}?")
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\overline|\\bar|\\dot)\s*(?:\{\s*(\d+)\s*\}|(\d))(?![\d.])"
)


def simplified(answer: str) -> str:
    r"""TeX that means the same and has fewer forms: without dollar signs of money, spacing and
    commas between thousands; 0.\overline{3} is a fraction, 4.5e3 a product, an array in brackets a
    matrix, \mathrm{e} a number, and 90°, √2, x² and ½ are their TeX."""
    answer = _ARRAY.sub(_matrix, _as_tex(answer))
    text = answer.replace(r"\$", "").replace(r"\text{\$}", "").strip().strip("$")
    text = text.replace("{,}", ",").replace("**", "^").translate(DASHES)
    text = re.sub(r"(?<=\d),\\!(?=\d{3})", ",", text)
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:textbf|textit|mathrm|mathbf|mbox)(?=\s*\{)", r"\\text", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", text)
    text = re.sub(r"\\varnothing(?![a-zA-Z])", r"\\emptyset", text)
    text = _REPEATING.sub(_fraction, text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _SCALED.sub(_scaled, text)
    if (words := _WORDS_AFTER.fullmatch(text.strip())) is not None:
        text = rf"{words[1]}\text{{{words[2]}}}"  # a unit, not a product of letters
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", _BARE_POINT.sub("", text))
    text = text.replace("{bmatrix}", "{pmatrix}")
    text = re.sub(r"\\mid(?![a-zA-Z])", "|", text)
    text = " ".join(text.split()).rstrip(".").strip()
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def _as_tex(answer: str) -> str:
    """Characters of printed mathematics as TeX."""
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", answer)
    text = _RAISED_DIGITS.sub(lambda match: f"^{{{match[0].translate(_PLACED)}}}", text)
    text = _LOWERED_DIGITS.sub(lambda match: f"_{{{match[0].translate(_PLACED)}}}", text)
    text = _UPRIGHT.sub(lambda match: match[1] or match[2], text)
    return text.translate(_PRINTED)


def _matrix(match: re.Match[str]) -> str:
    return rf"\begin{{pmatrix}}{match[1] or match[2]}\end{{pmatrix}}"


def other_base(answer: str, right: str) -> bool:
    """Whether both name a base, as in 25_8, and differ: parsers read the digits alone."""
    matches = [_BASED.fullmatch(simplified(one).replace(" ", "")) for one in (answer, right)]
    return all(matches) and len({(match[1], int(match[2])) for match in matches if match}) > 1


def _scaled(match: re.Match[str]) -> str:
    number, power = match[1].replace(",", ""), _SCALES[match[3].lower()]
    return rf"{number} \times 10^{{{power}}} {match[2] or ''}"


# Units that answers name, by their forms. A number with one of them is no answer with another.
_UNITS = {
    form: unit
    for unit, forms in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mi": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "lb": "lb lbs pound pounds",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "l": "l liter liters litre litres",
        "dollar": "dollar dollars",
        "cent": "cent cents",
        "degree": "degree degrees",
        "radian": "rad radian radians",
    }.items()
    for form in forms.split()
}
_UNIT = re.compile(r"[-+]?[\d.,]+\s*(?:\\text\s*\{)?\s*([A-Za-z]+)\s*\}?(?:\s*\^\s*\{?\d\}?)?")


def other_unit(answer: str, right: str) -> bool:
    """Whether both are numbers with a unit, and the units differ: parsers drop units."""
    units = [_unit(one) for one in (answer, right)]
    return None not in units and units[0] != units[1]


def _unit(answer: str) -> str | None:
    """The unit of a number; None without one."""
    if r"\$" in answer:
        return "dollar"
    match = _UNIT.fullmatch(simplified(answer))
    return None if match is None else _UNITS.get(match[1].lower())


def _fraction(match: re.Match[str]) -> str:
    whole, before, cycle = match[1] or "0", match[2], match[3] or match[4]
    below = (10 ** len(cycle) - 1) * 10 ** len(before)
    above = int(whole + before + cycle) - int(whole + before)
    return rf"\frac{{{above}}}{{{below}}}"


def same_text(answer: str, right: str) -> bool:
    """Whether two answers are equal but for case, spaces, \\text and what `simplified` leaves."""
    return _bare(answer) == _bare(right)


_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"\(?([A-J])(?:\)|[:.]\s|[:.]$)")


def same_choice(answer: str, right: str) -> bool:
    """Whether the right answer is the letter of a choice, and the answer names it before the words
    of that choice, as in E: a blue whale."""
    texts = [re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", simplified(one)) for one in (answer, right)]
    chosen, choice = _CHOSEN.match(texts[0]), _CHOICE.fullmatch(texts[1])
    return chosen is not None and choice is not None and chosen[1] == choice[1]


def has_content(answer: str) -> bool:
    """Whether there is anything that could be right: a letter, a digit or a symbol of TeX."""
    return any(sign.isalnum() for sign in _BOX.sub("", _bare(answer)))


def _bare(answer: str) -> str:
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", simplified(answer))
    return "".join(text.split()).rstrip(".").casefold()
