"""Formulas of docs/recipes.md, which are plain text there, as HTML for the site: letters in
italics, Greek ones as such, indices and powers where they belong, without a script or a network.
"""

import html
import re

_TOKEN = re.compile(
    r"[A-Za-z]+'s\b|sum(?= of)|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*'*"
    r"|\d+(?:\.\d+)?(?:e-?\d+)?|(?<=\^)-\w+|<-|->|>=|<=|!=|[_^]\{|\s+|."
)
_GREEK = (  # names of letters, which HTML has too
    "alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "kappa", "lambda", "mu", "pi",
    "rho", "sigma", "tau", "phi", "omega",
)  # fmt: skip
_LETTERS = {**{name: f"&{name};" for name in _GREEK}, "eps": "&epsilon;"}
_WORDS = {"sqrt": "&radic;", "sum": "&sum;"}
_SIGNS = {
    "<-": "&larr;", "->": "&rarr;", ">=": "&ge;", "<=": "&le;", "!=": "&ne;", "-": "&minus;",
    "*": "&middot;", "|": "&#124;", "[": "&#91;", "]": "&#93;", "_": "&#95;",
}  # fmt: skip
_ENDS = {"(": ")", "{": "}"}


def is_formula(text: str) -> bool:
    """Whether code in a table's cell is a formula: it computes, and sets no argument."""
    computes = re.search(r"[+*/^]|<-| = | - ", text) is not None
    return computes and not re.fullmatch(r"[\w./-]+", text)


def typeset(text: str) -> str:
    """A formula as HTML, in one element. Its characters mean nothing to Markdown."""
    return f'<span class="formula">{_typeset(text.replace(chr(92) + "|", "|"))}</span>'


def _typeset(text: str) -> str:
    tokens = _TOKEN.findall(text)
    parts: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        if token in ("_{", "^{"):
            inner, i = _group(tokens, i, "{")
            parts.append(_raised("sub" if token == "_{" else "sup", _typeset(inner)))
        elif token == "^" and i < len(tokens):
            if tokens[i] == "(":
                inner, i = _group(tokens, i + 1, "(")
            else:
                inner, i = tokens[i], i + 1
            minus = "&minus;" if len(inner) > 1 and inner[0] == "-" else ""
            parts.append(_raised("sup", minus + _typeset(inner.removeprefix("-"))))
        elif token.endswith("'s") or (token == "sum" and tokens[i : i + 2] == [" ", "of"]):
            parts.append(token.replace("'", "&rsquo;"))
        elif token[0].isalpha():
            parts.append(_name(token))
        else:
            parts.append(_SIGNS.get(token, html.escape(token)))
    return "".join(parts)


def _group(tokens: list[str], start: int, opening: str) -> tuple[str, int]:
    """The text up to the bracket that ends a group, and the place behind it."""
    depth, i = 1, start
    while i < len(tokens):
        depth += (tokens[i][-1] == opening) - (tokens[i] == _ENDS[opening])
        i += 1
        if depth == 0:
            return "".join(tokens[start : i - 1]), i
    return "".join(tokens[start:]), i


def _raised(place: str, inner: str) -> str:
    return f"<{place}>{inner}</{place}>"


def _name(token: str) -> str:
    """A variable or a word, with its indices; `hat` stands above it."""
    plain = token.rstrip("'")
    base, *indices = plain.split("_")
    is_letter = len(base) == 1 or base in _LETTERS or re.fullmatch(r"[A-Za-z]\d", base) is not None
    shown = _LETTERS.get(base) or _WORDS.get(base, base)
    if re.fullmatch(r"[A-Za-z]\d", base):
        shown, indices = base[0], [base[1], *indices]
    if "hat" in indices:
        shown += "&#770;"
        indices = [index for index in indices if index != "hat"]
    below = ", ".join(_LETTERS.get(index, index) for index in indices)
    primes = "&prime;" * (len(token) - len(plain))
    return (
        (f"<i>{shown}</i>" if is_letter else shown)
        + primes
        + (_raised("sub", below) if below else "")
    )
